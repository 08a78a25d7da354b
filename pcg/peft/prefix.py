"""Prefix tuning: keys and values of virtual tokens, trained in every layer (Li and Liang 2021).

    out = softmax(scale · q [p_k, k]ᵀ) [p_v, v],   p_k: [n, keys], p_v: [n, values] of each layer

They take positions 0 to n-1, without rotary embedding. With a projection, training updates a
network that computes them.

    prompt_embeddings      [tokens, 2 · layers · features]

with the keys, then the values, layer by layer.

Source: `PrefixEncoder` and `PeftModel.get_prompt` of peft 0.21.2.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.errors import AdapterError
from pcg.ir.module_paths import layer_path
from pcg.ir.shapes import Shapes
from pcg.peft.method import Bypass, Place, Shape
from pcg.peft.prompt import VirtualTokens, VirtualTokensRecipe
from pcg.peft.prompt_encoder import KEY, PREFIX, PromptEncoder
from pcg.peft.recipe import Names, OtherField, saved_as
from pcg.peft.weights import SUMMAND, Around, Draw, ModuleWeights, ParameterKind

if TYPE_CHECKING:
    from torch import Tensor


_KINDS = ("prefix_keys", "prefix_values")


@dataclass(frozen=True)
class PrefixBypass(VirtualTokens):
    """A prefix's keys and values in the rows of virtual tokens, which attention reads.

        k = virtual_tokens(k, p_k);  v = virtual_tokens(v, p_v)

    No other token reads the layers' results for virtual tokens.
    """

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """Return the shapes in a layer with `out` features of values and `in_` of keys."""
        assert self.tokens is not None
        return (self.tokens, in_), (self.tokens, out)

    def __str__(self) -> str:
        return f"a prefix of {self.tokens} virtual tokens"

    def read(self, at: Place) -> None:
        for index, kind in enumerate(_KINDS, 1):
            read = at.inputs[index]
            size = prod(at.features(read))
            prefix = at.shared(kind, f"layers.{{layer}}.{kind}", self.tokens, size)
            at.set_input(index, at.add("virtual_tokens", kind, read, prefix))


@dataclass(frozen=True, eq=False)
class PrefixWeights(ModuleWeights):
    """The prefix of a layer: keys and values [tokens, features], heads in a row."""

    whole_keys: ClassVar[tuple[str, ...]] = (KEY,)
    kinds: ClassVar[Mapping[str, ParameterKind]] = dict.fromkeys(_KINDS, SUMMAND)

    keys: Tensor
    values: Tensor

    @classmethod
    def fresh(cls, recipe: Any, bypass: Any, shape: Shape, draw: Draw, around: Around) -> Self:
        out, in_ = shape
        make = draw.zeros if recipe.init_weights == "zero" else draw.normal
        return cls(make(bypass.tokens, in_), make(bypass.tokens, out))

    @classmethod
    def read_whole(
        cls, parts: Mapping[str, Tensor], recipe: PrefixTuningConfig
    ) -> Mapping[str, Self]:
        (whole,) = parts.values()
        tokens, count = recipe.prompt_tokens, recipe.num_layers
        if count is None:
            raise AdapterError("num_layers is null in the configuration; set it to the base's")
        if whole.ndim != 2 or len(whole) != tokens or whole.shape[1] % (2 * count):
            raise AdapterError(
                f"{KEY} is {list(whole.shape)}, and its configuration gives it "
                f"[{tokens}, 2 · {count} · features]; the two files are not of one save"
            )
        chunks = [part.contiguous() for part in whole.chunk(2 * count, -1)]
        return {layer_path(n): cls(*chunks[2 * n : 2 * n + 2]) for n in range(count)}

    @classmethod
    def stored_whole(cls, weights: Mapping[str, Self]) -> Mapping[str, Tensor]:
        import torch

        parts = [weights[layer_path(layer)].tensors for layer in range(len(weights))]
        return {KEY: torch.cat([*chain.from_iterable(parts)], -1)}

    @property
    def bypass(self) -> PrefixBypass:
        return PrefixBypass(len(self.keys))

    @property
    def module_shape(self) -> Shape:
        return self.values.shape[1], self.keys.shape[1]


@dataclass(frozen=True, kw_only=True)
class PrefixTuningConfig(VirtualTokensRecipe):
    """A prefix tuning configuration, with peft's fields and defaults.

    Attributes:
        num_layers: layers of the base; None until known.
        init_weights: None, a fresh prefix is normal; "zero".
        prefix_projection: train a network of two layers that computes the prefix.
        encoder_hidden_size: features within the network; None is the number of a key's features.
    """

    method: ClassVar[str] = "prefix tuning"
    peft_type: ClassVar[str] = "PREFIX_TUNING"
    weights: ClassVar[type[ModuleWeights]] = PrefixWeights
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"prefix": {"num_virtual_tokens": 20}}
    other_fields: ClassVar[Mapping[str, OtherField]] = {
        name: other
        for name, other in VirtualTokensRecipe.other_fields.items()
        if name != "num_layers"
    }

    num_layers: int | None = saved_as("layers", None)
    init_weights: str | None = saved_as("init", None)
    prefix_projection: bool = saved_as("projects", False)
    encoder_hidden_size: int | None = saved_as("hidden", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ints(1, "num_layers", "encoder_hidden_size", optional=True)
        if self.init_weights not in (None, "zero"):
            raise AdapterError(f'init_weights={self.init_weights!r}; use null or "zero"')
        self._check_flags("prefix_projection")

    @property
    def encoder(self) -> PromptEncoder | None:
        if not self.prefix_projection:
            return None
        tokens, hidden = self.prompt_tokens, self.encoder_hidden_size
        return PromptEncoder(PREFIX, tokens, hidden, makes_zeros=self.init_weights == "zero")

    def bypass_at(self, path: str) -> PrefixBypass:
        return PrefixBypass(self.num_virtual_tokens)

    def bypasses(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> dict[str, Bypass]:
        count = _layers(paths)
        if self.num_layers not in (None, count):
            raise AdapterError(f"num_layers={self.num_layers}, and the base has {count} layers")
        return {layer_path(layer): self.bypass_at(layer_path(layer)) for layer in range(count)}

    def resolved(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> Self:
        return dataclasses.replace(self, num_layers=_layers(paths))


def _layers(paths: Names) -> int:
    """Count the layers of linear modules' paths; the first number is the layer's."""
    matches = (re.match(r".*?\.(\d+)\.", path) for path in paths)
    return max((int(match[1]) + 1 for match in matches if match), default=0)
