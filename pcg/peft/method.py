"""The bypass network of a PEFT method at one module, and what it meets where it is used.

    Y = f_B(X) + f_A(X)                                                            (FlexLLM §4.1)

The compiler gives it a `Place` in a graph, for its operators, and a finetuning job gives a recipe
the `Shards` of an adapter, for what training does outside the program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from pcg.ir.types import Shapes

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, int]
"""(out, in) of a linear module."""


class Place(Protocol):
    """A node of the base's graph, at which a bypass network attaches.

    Attributes:
        site: the module's path with `{layer}` for the layer's index.
        inputs: the node's inputs by now.
        shape: (out, in) of the weight of a linear node.
        serving: True if the graph serves; tensors that can be made of an adapter once are then
            parameters.
    """

    @property
    def site(self) -> str: ...
    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def serving(self) -> bool: ...

    def features(self, value: str) -> tuple[int, ...]:
        """The shape of a value but for its tokens."""

    def largest(self, kind: type[Bypass]) -> Shape:
        """The largest out and the largest in of the model's modules with a bypass of this kind."""

    def module_input(self, names: Sequence[str]) -> str | None:
        """The input of a module of one of these names beside the node's, already in the graph."""

    def add(self, op: str, suffix: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator, named after the node."""

    def adapter(self, kind: str, *shape: int | None) -> str:
        """Add a parameter of the module's; None in its shape is a rank that is left open."""

    def shared(self, name: str, source: str, *shape: int | None) -> str:
        """Add a parameter that is not of one module; None is a number of virtual tokens."""

    def dropped(self, *, keeps_dtype: bool = False) -> str:
        """The node's input, with the recipe's dropout in training.

        It is dropped in the adapters' dtype, as peft does; with `keeps_dtype` in the base's, as
        the base multiplies it, too.
        """

    def set_input(self, index: int, value: str) -> None:
        """Let the node read something else."""


@dataclass(frozen=True)
class Bypass(ABC):
    """The network of a method at one module, of one adapter or of all that meet there."""

    behind_bias: ClassVar[bool] = False
    """True if its operators stand behind the bias that an adapter may have of its own."""

    @property
    def virtual_tokens(self) -> int:
        """The number of virtual tokens that it stands for; 0 for most methods."""
        return 0

    @property
    def kind(self) -> object:
        """The key of bypasses that are one network in a graph, if they are at one site."""
        return type(self)

    @abstractmethod
    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """The shapes of what is trained at a module [out, in]."""

    @abstractmethod
    def union(self, other: Self) -> Self:
        """The one network of two adapters, as large as the larger needs."""

    def served(self) -> Bypass:
        """The network as serving has it, where adapters of any size meet."""
        return self

    def read(self, at: Place) -> None:  # noqa: B027  most methods change nothing there
        """Change what the node reads."""

    def attach(self, at: Place, y: str) -> str:
        """Add operators behind the node; returns what stands for its output `y`."""
        return y


def low_rank(at: Place, y: str, x: str, a: str, b: str, prefix: str = "") -> str:
    """Y + B (A x)."""
    return at.add("expand_add", f"{prefix}z", y, at.add("shrink", f"{prefix}s", x, a), b)


# ------------------------------------------------------------------------- beside the program


class Shards(Protocol):
    """The shards of an adapter's tensors that this rank of the group trains, by name."""

    tensors: dict[str, Tensor]

    def counts(self, name: str, gathered: int | None = None) -> bool:
        """Return whether this rank counts what several have, where they sum what each has.

        `gathered` is a dim, from 0, along which all have gathered the tensor, if it was parted so.
        """

    def path_of(self, name: str) -> str:
        """The path of a shard's tensor in the adapter."""

    def whole_shape(self, path: str) -> tuple[int, ...]:
        """The shape of an adapter's tensor."""

    def ranges(self, name: str) -> Sequence[tuple[int, int]]:
        """The range of a shard in each dim of the whole."""

    def sharded_dim(self, name: str) -> int | None:
        """The dim that each rank has a part of; None where all have the same."""

    def summed(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The sums of the ranks' tensors, in one exchange; the same bits on all of them."""

    def gathered(self, values: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """The parted shards of every rank, by name, in one exchange."""

    def joined(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by path, joined of each rank's values for its shards by name."""

    def cut(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The shards of this rank, by name, of whole tensors by path; some may be missing."""


class TrainingBeside(Protocol):
    """The part of a job on an adapter that is outside the program."""

    def regularize(self) -> float:
        """Add the gradient of another loss, whose value is returned, to those summed over ranks."""

    def after_step(self, step: int) -> None:
        """Change the adapter after the optimizer's step, from 1, whose gradients are there."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state of whole tensors, for a checkpoint; all ranks ask for it."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with the state of a checkpoint."""

    def finished(self, adapter: Any) -> Any:
        """The adapter that the job leaves."""
