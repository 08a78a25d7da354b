"""A prefix recipe: keys and values of virtual tokens, trained in every layer (Li and Liang 2021).

    out = softmax(scale · q [p_k, k]ᵀ) [p_v, v],   p_k: [n, keys], p_v: [n, values] of each layer

They take positions 0 to n-1, and are not turned by rotary embedding.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from pcg.errors import AdapterError
from pcg.ir.module_paths import layer_path
from pcg.ir.target_recipe import TargetRecipe


@dataclass(frozen=True, slots=True)
class PrefixSite:
    """The prefix of a layer."""

    tokens: int

    def trained_elements(self, out: int, in_: int) -> int:
        """Numbers that are trained in a layer with so many features of values and of keys."""
        return self.tokens * (out + in_)

    def __str__(self) -> str:
        return f"a prefix of {self.tokens} virtual tokens"


@dataclass(frozen=True)
class PrefixRecipe(TargetRecipe[PrefixSite]):
    """The compiler's view of a prefix's configuration; no module is adapted.

    Attributes:
        tokens: virtual tokens.
        submodules: of the transformer that have a prefix: 1, as pcg has no encoder-decoders.
        layers: of the base; None until that is known.
        init: None, a fresh prefix is normal; "zero".
    """

    method: ClassVar[str] = "prefix tuning"
    peft_type: ClassVar[str] = "PREFIX_TUNING"

    tokens: int | None = None
    submodules: int = 1
    layers: int | None = None
    init: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.tokens) is not int or self.tokens < 1:
            raise AdapterError(f"num_virtual_tokens={self.tokens!r}; use an int of at least 1")
        if self.submodules != 1:
            raise AdapterError(f"num_transformer_submodules={self.submodules!r}; a causal LM has 1")
        if self.layers is not None and (type(self.layers) is not int or self.layers < 1):
            raise AdapterError(f"num_layers={self.layers!r}; use the base's, or null")
        if self.init not in (None, "zero"):
            raise AdapterError(f'init_weights={self.init!r}; use null or "zero"')

    @property
    def prompt_tokens(self) -> int:
        return self.tokens or 0

    def site_of_target(self, path: str) -> PrefixSite:
        return PrefixSite(self.prompt_tokens)

    def site(
        self, path: str, *, output_layer: str | None = None, model_type: str | None = None
    ) -> PrefixSite | None:
        return None

    def sites(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
        others: Collection[str] = (),
    ) -> dict[str, PrefixSite]:
        count = _layers(paths)
        if self.layers not in (None, count):
            raise AdapterError(f"num_layers={self.layers}, and the base has {count} layers")
        return {layer_path(layer): self.site_of_target("") for layer in range(count)}

    def resolved(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
    ) -> Self:
        return dataclasses.replace(self, layers=_layers(paths))


def _layers(paths: Iterable[str]) -> int:
    """Layers of a model with linear modules of these paths; the first number is the layer's."""
    found = (re.match(r".*?\.(\d+)\.", path) for path in paths)
    return max((int(match[1]) + 1 for match in found if match), default=0)
