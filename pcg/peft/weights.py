"""The weights of a module of an adapter: in a file, fresh, for training and for serving.

torch is imported in the functions that compute, so that recipes are read without it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.errors import AdapterError
from pcg.peft.method import Bypass, Shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ParameterKind:
    """A kind of parameters of all adapters, named by the last component of their source.

    Attributes:
        fill: the value of missing entries, which changes nothing.
        rank_dim: the dim of a trained factor with the size of the rank, or of the bottleneck.
        is_factor: True for a matrix of a low-rank product: A [rank, in], or B [out, rank]; serving
            has its transpose.
        is_costly: True if the serving form needs a pass over the base's weight, once per adapter.
    """

    fill: float = 0.0
    rank_dim: int | None = None
    is_factor: bool = False
    is_costly: bool = False

    @property
    def is_down(self) -> bool:
        """True for A."""
        return self.is_factor and self.rank_dim == 0

    @property
    def is_up(self) -> bool:
        """True for B."""
        return self.is_factor and self.rank_dim == 1


DOWN = ParameterKind(rank_dim=0, is_factor=True)
UP = ParameterKind(rank_dim=1, is_factor=True)
SUMMAND = ParameterKind()
FACTOR = ParameterKind(fill=1.0)


@dataclass(frozen=True)
class Around:
    """The data of the base and the adapter that some weights of a module depend on.

    Attributes:
        base: returns the base's weight of the module, [out, in].
        shared: the adapter's tensors that all its modules share, by name.
        shape: the shape of the base's weight.
    """

    base: Callable[[], Tensor]
    shared: Mapping[str, Tensor]
    shape: Shape


@dataclass(frozen=True)
class AdapterWeight:
    """An adapter's weight for all tokens, as a training program reads it.

    Attributes:
        weight: A [r, in], B [out, r], or a vector.
        scale: the factor on the product with it.
        segments: always None; serving has `SegmentedWeight`s, for tokens of many adapters.
    """

    weight: Tensor
    scale: float = 1.0
    segments: None = None


class Draw:
    """Draws fresh float32 tensors from a generator."""

    def __init__(self, seed: int) -> None:
        import torch

        self._torch: Any = torch
        self._generator = torch.Generator().manual_seed(seed)

    def zeros(self, *shape: int) -> Tensor:
        return self.full(0.0, *shape)

    def full(self, value: float, *shape: int) -> Tensor:
        return self._torch.full(shape, value)  # type: ignore[no-any-return]

    def normal(self, *shape: int) -> Tensor:
        return self._torch.randn(*shape, generator=self._generator)  # type: ignore[no-any-return]

    def uniform(self, bound: float, *shape: int) -> Tensor:
        """Draw numbers in ±bound."""
        return self.zeros(*shape).uniform_(-bound, bound, generator=self._generator)

    def linear(self, *shape: int) -> Tensor:
        """Draw a matrix as nn.Linear starts: uniform in ±1/√columns."""
        return self.uniform(shape[-1] ** -0.5, *shape)


@dataclass(frozen=True, eq=False)
class ModuleWeights(ABC):
    """The weights of a module; every field that is a tensor is trained."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of keys in a file, after the module's path."""
    shared_names: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that all modules of an adapter share."""
    whole_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of a file that name no module, for methods that store their weights in this way."""
    kinds: ClassVar[Mapping[str, ParameterKind]] = {}
    """The kinds of `parameters` and of `served` that this method defines first."""

    @classmethod
    @abstractmethod
    def fresh(cls, recipe: Any, bypass: Any, shape: Shape, draw: Draw, around: Around) -> Self:
        """Return fresh weights, as peft initialises them, in float32.

        Args:
            recipe: the method's recipe.
            bypass: the recipe's network at the module.
            shape: (out, in) of the module.
            draw: the source of random tensors.
            around: the base's weight, and shared tensors.
        Raises:
            UnsupportedError: an initialisation that needs the base's weights or data.
        """

    @classmethod
    def fresh_shared(cls, recipe: Any, shapes: Iterable[Shape]) -> Mapping[str, Tensor]:
        """Return the untrained tensors that modules, of these (out, in), share."""
        return {}

    @classmethod
    def shared_is_stored(cls, recipe: Any) -> bool:
        """Return whether shared tensors are saved in the adapter's file."""
        return False

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: Any) -> Self:
        """Return the weights of the module at `path`, from a file's tensors by suffix.

        Raises:
            AdapterError: a part is missing, has an impossible shape, or is not the recipe's.
        """
        tensors = partners(path, parts, cls.suffixes)
        return cls.of(recipe.bypass_at(path), *tensors).checked(path, recipe)

    @classmethod
    def of(cls, bypass: Any, *tensors: Tensor) -> Self:
        """Return the weights of tensors in the order of `suffixes`."""
        return cls(*tensors)

    def checked(self, path: str, recipe: Any) -> Self:
        """Return these weights; AdapterError if they do not match each other or the recipe."""
        present, bypass = self.bypass, recipe.bypass_at(path)
        expected = present.trained_shapes(*(size or 0 for size in self.module_shape))
        if tuple(tuple(tensor.shape) for tensor in self.tensors) != expected:
            shapes = ", ".join(str(list(shape)) for shape in expected)
            raise AdapterError(f"{path} has {self.shapes}; expected {shapes}")
        if present != bypass:
            patterns = recipe.rank_pattern if hasattr(recipe, "alpha_pattern") else ()
            order = ", or rank_pattern was in another order (peft sorts keys)"
            raise AdapterError(
                f"{path} has {present}, and its configuration gives it {bypass}; the two files are "
                f"not of one save{order * (len(patterns) > 1)}"
            )
        return self

    @classmethod
    def read_whole(cls, parts: Mapping[str, Tensor], recipe: Any) -> Mapping[str, Self]:
        """Return the weights, by path, from a file's tensors under the non-empty `whole_keys`.

        Raises:
            AdapterError: a tensor has an impossible shape, or is not the recipe's.
        """
        return {}

    @classmethod
    def stored_whole(cls, weights: Mapping[str, Self]) -> Mapping[str, Tensor]:
        """Return the tensors of a file under `whole_keys`, of weights by path."""
        return {}

    @property
    @abstractmethod
    def bypass(self) -> Bypass:
        """The bypass network of these weights, to be compared with the recipe's."""

    @property
    def stored(self) -> Mapping[str, Tensor]:
        """The tensors by suffix, as peft stores them."""
        return dict(zip(self.suffixes, self.tensors, strict=not self.whole_keys))

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        """The weights that a training program reads, by kind."""
        pairs = zip(self.kinds, self.tensors, strict=True)
        return {kind: AdapterWeight(tensor) for kind, tensor in pairs}

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        """Functions that return a serving program's weights, by kind.

        By default, vectors are [1, n] and B is transposed, both with the scale of `parameters`.
        """
        return {
            kind: partial(_served, weight, is_up=self.kinds[kind].is_up)
            for kind, weight in self.parameters.items()
        }

    @property
    def can_merge(self) -> bool:
        """True if a weight of the base can hold the change of these weights."""
        return self.rank > 0

    def merged(self, weight: Tensor, around: Around) -> Tensor:
        """Return the base's weight [out, in], or [experts, out, in], with these weights in it."""
        down, up = (make(around) for make in self.served.values())
        return weight + up.t() @ down

    def merged_bias(self, bias: Tensor) -> Tensor:
        """Return the base's bias [out] with these weights in it."""
        return bias

    @property
    def rank(self) -> int:
        """The rank of LoRA in serving; 0 without LoRA."""
        return 0

    @property
    def inner_size(self) -> int:
        """The size between the matrices of serving; 0 without matrices."""
        return self.rank

    @property
    @abstractmethod
    def module_shape(self) -> tuple[int | None, int | None]:
        """(out, in) of the module, None if unknown."""

    @property
    def shapes(self) -> str:
        return f"tensors {', '.join(str(list(tensor.shape)) for tensor in self.tensors)}"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(value for _, value in self._tensors())

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return dataclasses.replace(self, **{name: change(value) for name, value in self._tensors()})

    def _tensors(self) -> list[tuple[str, Tensor]]:
        import torch

        pairs = vars(self).items()
        return [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]


@dataclass(frozen=True, eq=False)
class LowRankWeights(ModuleWeights):
    """Weights with matrices A [rank, in] and B [out, rank], and the scale of their product."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def module_shape(self) -> Shape:
        return len(self.b), self.a.shape[-1]


def _served(trained: AdapterWeight, around: Around, is_up: bool) -> Tensor:
    if trained.weight.ndim == 1:
        return (trained.weight * trained.scale).unsqueeze(0)
    return trained.weight.t() * trained.scale if is_up else trained.weight


def partners(path: str, parts: Mapping[str, Tensor], suffixes: Sequence[str]) -> list[Tensor]:
    """Return the tensors of a module; AdapterError if a tensor is missing, or a number."""
    for suffix in suffixes:
        if suffix not in parts:
            raise AdapterError(f"no {path}.{suffix}, the partner of another tensor there")
        if not parts[suffix].ndim:
            raise AdapterError(f"{path}.{suffix} is a number; expected a tensor with dims")
    return [parts[suffix] for suffix in suffixes]
