"""Recipes of prompts: virtual tokens before a sequence, whose embeddings are trained.

    x = [p_0 … p_{n-1}, E[t_0], E[t_1], …],   p: [n, hidden]

They take positions 0 to n-1, and the sequence's own tokens those behind them. Prompt tuning trains
p itself (Lester et al. 2021); P-tuning (Liu et al. 2021) trains an encoder that makes p, of which
a saved adapter has p alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pcg.errors import AdapterError
from pcg.ir.module_paths import WHOLE_MODEL
from pcg.ir.shapes import Shapes
from pcg.peft.untargeted import VirtualTokensRecipe
from pcg.peft.virtual_token_encoder import LSTM, MLP, PromptEncoder

_INITS = ("RANDOM", "SAMPLE_VOCAB", "TEXT")
_ENCODERS = (MLP, LSTM)


@dataclass(frozen=True, slots=True)
class PromptSite:
    """The prompt of a model."""

    tokens: int

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """Of what is trained over a token embedding [out, in]."""
        return ((self.tokens, in_),)

    def __str__(self) -> str:
        return f"a prompt of {self.tokens} virtual tokens"


@dataclass(frozen=True)
class PromptRecipe(VirtualTokensRecipe[PromptSite]):
    """The compiler's view of a prompt's configuration; no module is adapted."""

    @property
    def learns_first_token(self) -> bool:
        return True

    def site_of_target(self, path: str) -> PromptSite:
        return PromptSite(self.prompt_tokens)

    def places(self, paths: Sequence[str]) -> Sequence[str]:
        return (WHOLE_MODEL,)


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
    """P-tuning.

    Attributes:
        kind: of the encoder that makes the prompt: MLP or LSTM.
        hidden: features within it; None is as many as an embedding has.
        layers: of an LSTM.
        encoder_dropout: between the layers of an LSTM; an MLP has none.
    """

    method: ClassVar[str] = "P-tuning"
    peft_type: ClassVar[str] = "P_TUNING"

    kind: str = MLP
    hidden: int | None = None
    layers: int = 2
    encoder_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in _ENCODERS:
            raise AdapterError(
                f"encoder_reparameterization_type={self.kind!r}; use one of {', '.join(_ENCODERS)}"
            )
        PromptEncoder(LSTM, self.prompt_tokens, self.hidden, self.layers, self.encoder_dropout)

    @property
    def encoder(self) -> PromptEncoder:
        if self.kind == MLP:  # which has three layers and no dropout, whatever the fields say
            return PromptEncoder(MLP, self.prompt_tokens, self.hidden)
        return PromptEncoder(
            LSTM, self.prompt_tokens, self.hidden, self.layers, self.encoder_dropout
        )
