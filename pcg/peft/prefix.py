"""A prefix recipe: keys and values of virtual tokens, trained in every layer (Li and Liang 2021).

    out = softmax(scale · q [p_k, k]ᵀ) [p_v, v],   p_k: [n, keys], p_v: [n, values] of each layer

They take positions 0 to n-1, and are not turned by rotary embedding. With a
projection, what is trained is a network that makes all of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from pcg.errors import AdapterError
from pcg.ir.module_paths import layer_path
from pcg.ir.shapes import Shapes
from pcg.peft.untargeted import VirtualTokensRecipe
from pcg.peft.virtual_token_encoder import PREFIX, PromptEncoder


@dataclass(frozen=True, slots=True)
class PrefixSite:
    """The prefix of a layer."""

    tokens: int

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """Of what is trained in a layer with so many features of values and of keys."""
        return (self.tokens, in_), (self.tokens, out)

    def __str__(self) -> str:
        return f"a prefix of {self.tokens} virtual tokens"


@dataclass(frozen=True)
class PrefixRecipe(VirtualTokensRecipe[PrefixSite]):
    """The compiler's view of a prefix's configuration; no module is adapted.

    Attributes:
        layers: of the base; None until that is known.
        init: None, a fresh prefix is normal; "zero".
        projects: a network of two layers makes the prefix, and is what is trained.
        hidden: features within it; None is as many as keys have.
    """

    method: ClassVar[str] = "prefix tuning"
    peft_type: ClassVar[str] = "PREFIX_TUNING"

    layers: int | None = None
    init: str | None = None
    projects: bool = False
    hidden: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and (type(self.layers) is not int or self.layers < 1):
            raise AdapterError(f"num_layers={self.layers!r}; use the base's, or null")
        if self.init not in (None, "zero"):
            raise AdapterError(f'init_weights={self.init!r}; use null or "zero"')
        if not isinstance(self.projects, bool):
            raise AdapterError(f"prefix_projection={self.projects!r}; use true or false")
        PromptEncoder(PREFIX, self.prompt_tokens, self.hidden)

    @property
    def encoder(self) -> PromptEncoder | None:
        if not self.projects:
            return None
        makes_zeros = self.init == "zero"
        return PromptEncoder(PREFIX, self.prompt_tokens, self.hidden, makes_zeros=makes_zeros)

    def site_of_target(self, path: str) -> PrefixSite:
        return PrefixSite(self.prompt_tokens)

    def places(self, paths: Sequence[str]) -> Sequence[str]:
        count = _layers(paths)
        if self.layers not in (None, count):
            raise AdapterError(f"num_layers={self.layers}, and the base has {count} layers")
        return [layer_path(layer) for layer in range(count)]

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
