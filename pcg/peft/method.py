"""The bypass network of a PEFT method at a module, and its interfaces.

    Y = f_B(X) + f_A(X)                                                            (FlexLLM §4.1)

The compiler passes a `Place` in a graph to the network, for its operators. A finetuning job passes
the `Shards` of an adapter to a recipe, for the part of training outside the program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from pcg.ir.shapes import Shapes

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, int]
"""(out, in) of a linear module."""


class Place(Protocol):
    """A node of the base's graph, at which a bypass network attaches.

    Attributes:
        site: the module's path with `{layer}` for the layer's index.
        inputs: the node's current inputs.
        shape: (out, in) of the weight of a linear node; of an embedding (width, vocabulary).
        attributes: the node's.
        serving: True if the graph serves; tensors that can be computed from an adapter once are
            then parameters.
    """

    @property
    def site(self) -> str: ...
    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def attributes(self) -> Mapping[str, Any]: ...
    @property
    def serving(self) -> bool: ...

    def features(self, value: str) -> tuple[int, ...]:
        """Return the shape of a value without its tokens."""

    def largest(self, kind: type[Bypass]) -> Shape:
        """Return the largest out and in of the model's modules with a bypass of this kind."""

    def module_input(self, names: Sequence[str]) -> str | None:
        """Return the input of a neighbouring module with any of these names, or None."""

    def add(self, op: str, suffix: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator, named after the node."""

    def adapter(self, kind: str, *shape: int | None, experts: int = 1) -> str:
        """Add a parameter of the module, or of experts; None in its shape is an open rank."""

    def shared(self, name: str, source: str, *shape: int | None) -> str:
        """Add a parameter of several modules; None is a number of virtual tokens."""

    def dropped(self, *, keeps_dtype: bool = False) -> str:
        """Return the node's input, with the recipe's dropout in training.

        Dropout is in the adapters' dtype, as in peft; with `keeps_dtype` in the base's, for a
        product with the base's weight.
        """

    def set_input(self, index: int, value: str) -> None: ...


@dataclass(frozen=True)
class Bypass(ABC):
    """The network of a method at a module, of an adapter or of all adapters at that module."""

    behind_bias: ClassVar[bool] = False
    """True if its operators follow the bias that an adapter may train."""

    @property
    def virtual_tokens(self) -> int:
        """The number of its virtual tokens; 0 for most methods."""
        return 0

    @property
    def kind(self) -> object:
        """The key of bypasses that share a network in a graph, if they are at the same site."""
        return type(self)

    @abstractmethod
    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """Return the shapes of the trained tensors at a module [out, in]."""

    @abstractmethod
    def union(self, other: Self) -> Self:
        """Return the network of two adapters, with the larger sizes."""

    def served(self) -> Bypass:
        """Return the network for serving, for adapters of any size."""
        return self

    def read(self, at: Place) -> None:  # noqa: B027  most methods change nothing there
        ...

    def attach(self, at: Place, y: str) -> str:
        """Add operators after the node; return the new value for its output `y`."""
        return y


def low_rank(at: Place, y: str, x: str, a: str, b: str, prefix: str = "") -> str:
    """Y + B (A x)."""
    return at.add("expand_add", f"{prefix}z", y, at.add("shrink", f"{prefix}s", x, a), b)


# ------------------------------------------------------------------------- beside the program


class Shards(Protocol):
    """The shards of an adapter's tensors that this rank of the group trains, by name."""

    tensors: dict[str, Tensor]

    def counts(self, name: str, gathered: int | None = None) -> bool:
        """Return whether this rank counts a tensor that several ranks have, if they sum theirs.

        `gathered` is a dim, from 0, along which all ranks have gathered the tensor, if it was split
        along it.
        """

    def path_of(self, name: str) -> str:
        """Return the path of a shard's tensor in the adapter."""

    def whole_shape(self, path: str) -> tuple[int, ...]: ...

    def ranges(self, name: str) -> Sequence[tuple[int, int]]:
        """Return the range of a shard in each dim of the whole."""

    def sharded_dim(self, name: str) -> int | None:
        """Return the dim that is split over ranks; None if all ranks have the same."""

    def summed(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of the ranks' tensors, in an exchange; the same bits on all ranks."""

    def gathered(self, values: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return the split shards of every rank, by name, in a single exchange."""

    def joined(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors by path, joined from each rank's values for its shards by name."""

    def cut(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards, by name, of whole tensors by path; some may be missing."""


class TrainingBeside(Protocol):
    """The part of a job on an adapter that is outside the program."""

    def regularize(self) -> float:
        """Add the gradient of another loss to the gradients summed over ranks; return the loss."""

    def after_step(self, step: int) -> None:
        """Change the adapter after the optimizer's step, from 1; gradients are available."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state of whole tensors, for a checkpoint; all ranks call this."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of a checkpoint."""

    def finished(self, adapter: Any) -> Any:
        """Return the job's final adapter."""
