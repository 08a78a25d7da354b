"""A layer's prefix: the keys and values of virtual tokens.

    prompt_embeddings      [tokens, 2 · layers · features]

with the keys, then the values, of one layer behind the other's.

Source: `PrefixEncoder` and `PeftModel.get_prompt` of peft 0.21.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.ir.module_paths import layer_path
from pcg.peft.module_weights import AdapterWeight, Around, ModuleWeights, Shape
from pcg.peft.prefix import PrefixRecipe, PrefixSite

KEY = "prompt_embeddings"


@dataclass(frozen=True, eq=False)
class PrefixWeights(ModuleWeights):
    """The prefix of one layer.

    Attributes:
        keys: [tokens, features], heads one behind the other.
        values: likewise.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    whole_keys: ClassVar[tuple[str, ...]] = (KEY,)

    keys: Tensor
    values: Tensor

    @classmethod
    def fresh(
        cls,
        recipe: PrefixRecipe,
        site: PrefixSite,
        shape: Shape,
        generator: torch.Generator,
        around: Around,
    ) -> Self:
        out, in_ = shape
        if recipe.init == "zero":
            return cls(torch.zeros(site.tokens, in_), torch.zeros(site.tokens, out))
        keys = torch.randn(site.tokens, in_, generator=generator)
        return cls(keys, torch.randn(site.tokens, out, generator=generator))

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: PrefixRecipe) -> Self:
        (both,) = parts.values()
        keys, values = both.chunk(2, -1)
        return cls(keys.contiguous(), values.contiguous())

    @classmethod
    def read_whole(cls, parts: Mapping[str, Tensor], recipe: PrefixRecipe) -> Mapping[str, Self]:
        (whole,) = parts.values()
        if recipe.layers is None:
            raise AdapterError("num_layers is null in the configuration; set it to the base's")
        is_matrix = whole.ndim == 2 and len(whole) == recipe.prompt_tokens
        if not is_matrix or whole.shape[1] % (2 * recipe.layers):
            raise AdapterError(
                f"{KEY} is {list(whole.shape)}, and its configuration gives it "
                f"[{recipe.prompt_tokens}, 2 · {recipe.layers} · features]; the two files are not "
                "of one save"
            )
        layers = whole.chunk(recipe.layers, -1)
        return {
            layer_path(layer): cls.read(layer_path(layer), {KEY: both}, recipe)
            for layer, both in enumerate(layers)
        }

    @classmethod
    def stored_whole(cls, weights: Mapping[str, Self]) -> Mapping[str, Tensor]:
        parts = [weights[layer_path(layer)].tensors for layer in range(len(weights))]
        return {KEY: torch.cat([tensor for pair in parts for tensor in pair], -1)}

    @property
    def site(self) -> PrefixSite:
        return PrefixSite(len(self.keys))

    @property
    def stored(self) -> Mapping[str, Tensor]:
        return {}

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        return {
            "prefix_keys": AdapterWeight(self.keys),
            "prefix_values": AdapterWeight(self.values),
        }

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        return {
            "prefix_keys": lambda around: self.keys,
            "prefix_values": lambda around: self.values,
        }

    def misfit(self, shape: Shape) -> str:
        sizes = (self.values.shape[1], self.keys.shape[1])
        return "" if sizes == tuple(shape) else f"prefix values and keys {list(sizes)}"
