"""Prompt tuning and P-tuning: virtual tokens with trained embeddings before a sequence.

    x = [p_0 … p_{n-1}, E[t_0], E[t_1], …],   p: [n, hidden]

They take positions 0 to n-1, before the sequence's tokens. Prompt tuning trains p itself (Lester et
al. 2021); P-tuning (Liu et al. 2021) trains an encoder that computes p; a saved adapter only has p.

    prompt_embeddings      [tokens, hidden]

Source: `PromptEmbedding`, `PromptEncoder` and `get_peft_model_state_dict` of peft 0.21.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.errors import AdapterError, UnsupportedError
from pcg.ir.module_paths import WHOLE_MODEL
from pcg.ir.shapes import Shapes
from pcg.peft.method import Bypass, Place, Shape
from pcg.peft.prompt_encoder import KEY, LSTM, MLP, PromptEncoder
from pcg.peft.recipe import COMMON, Names, OtherField, Recipe, note, refused, saved_as
from pcg.peft.weights import SUMMAND, Around, Draw, ModuleWeights, ParameterKind

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VirtualTokens(Bypass):
    """At most `tokens` virtual tokens before a sequence; None for serving."""

    tokens: int | None

    @property
    def virtual_tokens(self) -> int:
        return self.tokens or 0

    def union(self, other: Self) -> Self:
        return replace(self, tokens=max(self.tokens or 0, other.tokens or 0))

    def served(self) -> Self:
        return replace(self, tokens=None)


@dataclass(frozen=True, kw_only=True)
class VirtualTokensRecipe(Recipe):
    """A configuration of virtual tokens; no module is adapted.

    Attributes:
        num_virtual_tokens: tokens before each sequence.
        num_transformer_submodules: submodules that have them; 1, as a causal LM has no encoder.
    """

    other_fields: ClassVar[Mapping[str, OtherField]] = {
        **COMMON,
        "modules_to_save": refused("whole modules trained beside the prompt"),
        # peft replaces null by the base's sizes.
        "num_attention_heads": note(),
        "num_layers": note(),
        "token_dim": note(),
    }

    num_virtual_tokens: int | None = saved_as("tokens", None)
    num_transformer_submodules: int = saved_as("submodules", 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ints(1, "num_virtual_tokens")
        if self.num_transformer_submodules != 1:
            raise AdapterError(
                f"num_transformer_submodules={self.num_transformer_submodules!r}; a causal LM has 1"
            )

    @property
    def prompt_tokens(self) -> int:
        return self.num_virtual_tokens or 0

    def trained_shapes(
        self, bypasses: Mapping[str, Bypass], shapes: Mapping[str, tuple[int, int]]
    ) -> Shapes:
        if self.encoder is None:
            return super().trained_shapes(bypasses, shapes)
        return tuple(self.encoder.shapes([shapes[path] for path in bypasses]).values())


@dataclass(frozen=True)
class PromptBypass(VirtualTokens):
    """A prompt's embeddings in the rows of virtual tokens, after the token embedding.

    x = virtual_tokens(embedding(ids), p)
    """

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        assert self.tokens is not None
        return ((self.tokens, in_),)

    def __str__(self) -> str:
        return f"a prompt of {self.tokens} virtual tokens"

    def attach(self, at: Place, y: str) -> str:
        prompt = at.shared(KEY, KEY, self.tokens, *at.features(y))
        return at.add("virtual_tokens", "prompted", y, prompt)


@dataclass(frozen=True, eq=False)
class PromptWeights(ModuleWeights):
    """The prompt of a model: embeddings [tokens, hidden]."""

    whole_keys: ClassVar[tuple[str, ...]] = (KEY,)
    kinds: ClassVar[Mapping[str, ParameterKind]] = {KEY: SUMMAND}

    embeddings: Tensor

    @classmethod
    def fresh(
        cls, recipe: PromptTuningConfig, bypass: Bypass, shape: Shape, draw: Draw, around: Around
    ) -> Self:
        if recipe.prompt_tuning_init != "RANDOM":
            raise UnsupportedError(
                f"prompt_tuning_init={recipe.prompt_tuning_init!r}: pcg begins a prompt with "
                'random numbers; use "RANDOM", or let peft make and save one, and load that'
            )
        return cls(draw.normal(recipe.prompt_tokens, shape[1]))

    @classmethod
    def read_whole(cls, parts: Mapping[str, Tensor], recipe: PromptRecipe) -> Mapping[str, Self]:
        (embeddings,) = parts.values()
        if embeddings.ndim != 2 or len(embeddings) != recipe.prompt_tokens:
            raise AdapterError(
                f"{KEY} is {list(embeddings.shape)}, and its configuration gives it "
                f"[{recipe.prompt_tokens}, hidden]; the two files are not of one save"
            )
        return {WHOLE_MODEL: cls(embeddings)}

    @classmethod
    def stored_whole(cls, weights: Mapping[str, Self]) -> Mapping[str, Tensor]:
        return {KEY: weights[WHOLE_MODEL].embeddings}

    @property
    def bypass(self) -> PromptBypass:
        return PromptBypass(len(self.embeddings))

    @property
    def module_shape(self) -> tuple[None, int]:
        return None, self.embeddings.shape[1]


@dataclass(frozen=True, kw_only=True)
class PromptRecipe(VirtualTokensRecipe):
    """A configuration of a prompt."""

    weights: ClassVar[type[ModuleWeights]] = PromptWeights

    @property
    def learns_first_token(self) -> bool:
        return True

    def bypass_at(self, path: str) -> PromptBypass:
        return PromptBypass(self.num_virtual_tokens)

    def bypasses(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> dict[str, Bypass]:
        return {WHOLE_MODEL: self.bypass_at(WHOLE_MODEL)}


@dataclass(frozen=True, kw_only=True)
class PromptTuningConfig(PromptRecipe):
    """A prompt tuning configuration, with peft's fields and defaults.

    Attributes:
        prompt_tuning_init: initialisation of a fresh prompt: RANDOM, normal; of a saved adapter
            also SAMPLE_VOCAB and TEXT, embeddings of tokens.
    """

    method: ClassVar[str] = "prompt tuning"
    peft_type: ClassVar[str] = "PROMPT_TUNING"
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"prompt": {"num_virtual_tokens": 20}}
    other_fields: ClassVar[Mapping[str, OtherField]] = {
        **VirtualTokensRecipe.other_fields,
        "prompt_tuning_init_text": note(),
        "tokenizer_kwargs": note(),
        "tokenizer_name_or_path": note(),
    }

    prompt_tuning_init: str = saved_as("init", "RANDOM")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("prompt_tuning_init", ("RANDOM", "SAMPLE_VOCAB", "TEXT"))


@dataclass(frozen=True, kw_only=True)
class PromptEncoderConfig(PromptRecipe):
    """A P-tuning configuration, with peft's fields and defaults.

    Attributes:
        encoder_reparameterization_type: the network that computes the prompt: MLP or LSTM.
        encoder_hidden_size: features within the network; None is the size of an embedding.
        encoder_num_layers: layers of an LSTM.
        encoder_dropout: dropout between the layers of an LSTM; not for an MLP.
    """

    method: ClassVar[str] = "P-tuning"
    peft_type: ClassVar[str] = "P_TUNING"
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"p-tuning": {"num_virtual_tokens": 20}}

    encoder_reparameterization_type: str = saved_as("kind", MLP)
    encoder_hidden_size: int | None = saved_as("hidden", None)
    encoder_num_layers: int = saved_as("layers", 2)
    encoder_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("encoder_reparameterization_type", (MLP, LSTM))
        self._check_ints(1, "encoder_hidden_size", optional=True)
        self._check_ints(1, "encoder_num_layers")
        self._check_probabilities("encoder_dropout")

    @property
    def encoder(self) -> PromptEncoder:
        tokens, hidden = self.prompt_tokens, self.encoder_hidden_size
        if self.encoder_reparameterization_type == MLP:  # it has three layers and no dropout
            return PromptEncoder(MLP, tokens, hidden)
        return PromptEncoder(LSTM, tokens, hidden, self.encoder_num_layers, self.encoder_dropout)
