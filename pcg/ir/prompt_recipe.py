"""Recipes of prompts: virtual tokens before a sequence, whose embeddings are trained.

    x = [p_0 … p_{n-1}, E[t_0], E[t_1], …],   p: [n, hidden]

They take positions 0 to n-1, and the sequence's own tokens those behind them. Prompt tuning trains
p itself (Lester et al. 2021); P-tuning (Liu et al. 2021) trains an encoder that makes p, of which
a saved adapter has p alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from pcg.errors import AdapterError
from pcg.ir.module_paths import WHOLE_MODEL
from pcg.ir.target_recipe import TargetRecipe

_INITS = ("RANDOM", "SAMPLE_VOCAB", "TEXT")
_ENCODERS = ("MLP", "LSTM")


@dataclass(frozen=True, slots=True)
class PromptSite:
    """The prompt of a model."""

    tokens: int

    def trained_elements(self, out: int, in_: int) -> int:
        """Numbers that are trained over a token embedding [out, in]."""
        return self.tokens * in_

    def __str__(self) -> str:
        return f"a prompt of {self.tokens} virtual tokens"


@dataclass(frozen=True)
class PromptRecipe(TargetRecipe[PromptSite]):
    """The compiler's view of a prompt's configuration; no module is adapted.

    Attributes:
        tokens: virtual tokens.
        submodules: of the transformer that have a prompt: 1, as pcg has no encoder-decoders.
    """

    tokens: int | None = None
    submodules: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.tokens) is not int or self.tokens < 1:
            raise AdapterError(f"num_virtual_tokens={self.tokens!r}; use an int of at least 1")
        if self.submodules != 1:
            raise AdapterError(f"num_transformer_submodules={self.submodules!r}; a causal LM has 1")

    @property
    def prompt_tokens(self) -> int:
        return self.tokens or 0

    @property
    def learns_first_token(self) -> bool:
        return True

    def site_of_target(self, path: str) -> PromptSite:
        return PromptSite(self.prompt_tokens)

    def site(
        self, path: str, *, output_layer: str | None = None, model_type: str | None = None
    ) -> PromptSite | None:
        return self.site_of_target(path) if path == WHOLE_MODEL else None

    def sites(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
        others: Collection[str] = (),
    ) -> dict[str, PromptSite]:
        return {WHOLE_MODEL: self.site_of_target(WHOLE_MODEL)}

    def resolved(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
    ) -> Self:
        return self


@dataclass(frozen=True)
class PromptTuningRecipe(PromptRecipe):
    """Prompt tuning.

    Attributes:
        init: what a fresh prompt begins as: RANDOM, normal; SAMPLE_VOCAB and TEXT, embeddings of
            tokens.
    """

    method: ClassVar[str] = "prompt tuning"
    peft_type: ClassVar[str] = "PROMPT_TUNING"

    init: str = "RANDOM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init not in _INITS:
            raise AdapterError(f"prompt_tuning_init={self.init!r}; use one of {', '.join(_INITS)}")


@dataclass(frozen=True)
class PTuningRecipe(PromptRecipe):
    """P-tuning, once it has been trained.

    Attributes:
        encoder: that made the prompt: MLP or LSTM.
    """

    method: ClassVar[str] = "P-tuning"
    peft_type: ClassVar[str] = "P_TUNING"
    untrained: ClassVar[str] = (
        "P-tuning is trained through its encoder, which a saved adapter does not hold, and pcg "
        "serves the prompt that it made; train with peft, or use PROMPT_TUNING"
    )

    encoder: str = "MLP"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder not in _ENCODERS:
            raise AdapterError(
                f"encoder_reparameterization_type={self.encoder!r}; use one of "
                f"{', '.join(_ENCODERS)}"
            )
