"""Recipes that name no modules: the method alone says what it attaches, and where."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pcg.errors import AdapterError
from pcg.ir.shapes import Shapes
from pcg.peft.targets import SiteT, TargetRecipe


@dataclass(frozen=True)
class UntargetedRecipe(TargetRecipe[SiteT]):
    """A recipe that adapts no module for its name."""

    @abstractmethod
    def places(self, paths: Sequence[str]) -> Sequence[str]:
        """What the method adapts.

        Args:
            paths: of all linear modules of the model.
        Raises:
            AdapterError: the recipe is for another base.
        """

    def site(
        self, path: str, *, output_layer: str | None = None, model_type: str | None = None
    ) -> SiteT | None:
        return None

    def sites(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
        others: Collection[str] = (),
    ) -> dict[str, SiteT]:
        return {place: self.site_of_target(place) for place in self.places(paths)}

    def resolved(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
    ) -> Self:
        return self


@dataclass(frozen=True)
class VirtualTokensRecipe(UntargetedRecipe[SiteT]):
    """A recipe of virtual tokens, which come before each sequence.

    Attributes:
        tokens: virtual tokens.
        submodules: of the transformer that have them: 1, as pcg has no encoder-decoders.
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

    def trained_shapes(
        self, sites: Mapping[str, SiteT], shapes: Mapping[str, tuple[int, int]]
    ) -> Shapes:
        if self.encoder is None:
            return super().trained_shapes(sites, shapes)
        return tuple(self.encoder.shapes([shapes[path] for path in sites]).values())
