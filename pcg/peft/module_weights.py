"""What an adapter of any method holds for one module of the base.

A method's weights know five things: how they stand in a file, what they are when fresh, which base
module they fit, what a training program reads of them, and what serving multiplies by.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

Shape = tuple[int, int]
"""(out, in) of a linear module."""


@dataclass(frozen=True)
class Around:
    """What a module's weights may need beside themselves.

    Attributes:
        base: gives the base's own weight of the module, [out, in].
        shared: the adapter's tensors that all its modules share, by name.
        shape: of the base's own weight, which need not be got for that.
    """

    base: Callable[[], Tensor]
    shared: Mapping[str, Tensor]
    shape: Shape


@dataclass(frozen=True)
class AdapterWeight:
    """One adapter's weight for all tokens, as a training program reads it.

    Attributes:
        weight: A [r, in], B [out, r], or a vector.
        scale: of the product with it.
        segments: none; see `adapter_segments.SegmentedWeight`.
    """

    weight: Tensor
    scale: float = 1.0
    segments: None = None


@dataclass(frozen=True, eq=False)
class ModuleWeights(ABC):
    """The weights of one module; every field that is a tensor is trained."""

    suffixes: ClassVar[tuple[str, ...]]
    """What follows the module's path in the keys of a file."""
    shared_names: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that all modules of an adapter share."""
    whole_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of a file that name no module, where the method stores its weights so."""

    @classmethod
    @abstractmethod
    def fresh(
        cls, recipe: Any, site: Any, shape: Shape, generator: torch.Generator, around: Around
    ) -> Self:
        """As peft initialises them, in float32.

        Args:
            recipe: of the method.
            site: what the recipe does at the module.
            shape: (out, in) of the module.
            generator: of what is random.
            around: the base's weight, and what is shared.
        """

    @classmethod
    def fresh_shared(cls, recipe: Any, shapes: Iterable[Shape]) -> Mapping[str, Tensor]:
        """What all modules of a fresh adapter share, which is not trained.

        Args:
            recipe: of the method.
            shapes: (out, in) of the adapted modules.
        """
        return {}

    @classmethod
    def shared_is_stored(cls, recipe: Any) -> bool:
        """Whether what is shared stands in the adapter's file; else it is made anew."""
        return False

    @classmethod
    @abstractmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: Any) -> Self:
        """Of what a file has for the module.

        Args:
            path: of the module.
            parts: tensors by suffix; at least one.
            recipe: of the configuration beside it.
        Raises:
            AdapterError: a part is missing, has a shape that none can have, or is not the recipe's.
        """

    @classmethod
    def read_whole(cls, parts: Mapping[str, Tensor], recipe: Any) -> Mapping[str, Self]:
        """The weights, by path, of what a file has under `whole_keys`.

        Args:
            parts: tensors by key; at least one.
            recipe: of the configuration beside it.
        Raises:
            AdapterError: a tensor has a shape that none can have, or is not the recipe's.
        """
        return {}

    @classmethod
    def stored_whole(cls, weights: Mapping[str, Self]) -> Mapping[str, Tensor]:
        """What a file has under `whole_keys` of an adapter's weights, which are by path."""
        return {}

    @property
    @abstractmethod
    def site(self) -> Any:
        """What the method does at the module, to be compared with the recipe's."""

    @property
    @abstractmethod
    def stored(self) -> Mapping[str, Tensor]:
        """The tensors by suffix, as peft stores them."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, AdapterWeight]:
        """What a training program reads, by the last component of a parameter's source."""

    @property
    @abstractmethod
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        """What serving programs read, likewise: matrices, scaled, a vector as [1, n]."""

    @property
    def rank(self) -> int:
        """Of what serving multiplies by; 0 where that is not LoRA's."""
        return 0

    @property
    def inner_size(self) -> int:
        """Between the matrices that serving multiplies by; 0 without such."""
        return self.rank

    @property
    def out_features(self) -> int | None:
        """Of the module, where the weights tell."""
        return None

    @abstractmethod
    def misfit(self, shape: Shape) -> str:
        """The weights' shapes in words where they do not fit a module (out, in); else empty."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in order."""
        return tuple(value for _, value in self._tensors())

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The weights with every tensor changed."""
        return dataclasses.replace(self, **{name: change(value) for name, value in self._tensors()})

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]


class BiasesAlone(ModuleWeights):
    """Of a method that trains biases of the base and has nothing of its own; there is none."""

    suffixes: ClassVar[tuple[str, ...]] = ()
