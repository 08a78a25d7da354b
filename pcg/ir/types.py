"""Tensor types: a dtype, and dims with a symbolic size and a parallel state (FlexLLM §5.1).

A dim prints as its size, then its state and degree unless it is whole:

    4096      `-`  non-parallel: every rank holds the whole dim
    4096|4    `|`  partitioned over 4 ranks
    4096=4    `=`  replicated on 4 ranks
    4096+4    `+`  pre-reduce: 4 ranks hold partial sums of the whole dim
    128~4     `~`  routed: each of 4 ranks holds the part of its experts

and a tensor as `bf16[T, 4096|4]`. A size that is a sum is in parentheses: `(T + 4)` is four more
than T, `T+4` a pre-reduce dim. `T` is the number of tokens of the step, over all requests and jobs:
activations are token-flat, so `T` is always their first dim, or `ceiling(T/4)` if each of 4 ranks
holds a part of the tokens. The dtype of a frozen matrix, or of those of experts, may be a weight
format (`pcg.formats`), as in `nf4[4096, 4096]`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TypeAlias

import sympy

from pcg.errors import TypeCheckError
from pcg.formats.registry import FORMATS

TOKENS = sympy.Symbol("T", integer=True, positive=True)
CONTEXT = sympy.Symbol("S", integer=True, positive=True)
"""Maximum number of tokens that a token attends to: the length of its sequence."""
RANK = sympy.Symbol("r", integer=True, positive=True)
"""A symbolic adapter rank, for programs in which adapters of any rank meet."""

Size: TypeAlias = int | sympy.Expr


@lru_cache(maxsize=64)
def part_of_tokens(degree: int) -> sympy.Expr:
    """Return the rows of a step's tokens on each of `degree` ranks; the last may be padding."""
    return sympy.ceiling(TOKENS / degree)


def counts_tokens(size: Size) -> bool:
    """Return whether a size is the step's tokens, or a rank's part of them."""
    if isinstance(size, int):
        return False
    return size == TOKENS or (
        isinstance(size, sympy.ceiling) and (TOKENS / size.args[0]).is_Integer is True
    )


DTYPE_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "u8": 1, "bool": 1}
TORCH_NAMES = {
    "f64": "float64",
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "i64": "int64",
    "i32": "int32",
    "u8": "uint8",
    "bool": "bool",
}


def is_format(dtype: str) -> bool:
    """Return whether the dtype of a frozen matrix is a weight format, as `nf4`."""
    return dtype in FORMATS


_FLOATS = ("f16", "bf16", "f32", "f64")
_RANKS = {"bool": 0, "u8": 1, "i32": 2, "i64": 3, "f16": 4, "bf16": 4, "f32": 5, "f64": 6}


def tokens_at(size: Size, tokens: Size) -> Size:
    """Return a size that counts tokens, with T replaced by a number or a formula."""
    return tokens if size == TOKENS else sympy.sympify(size).subs(TOKENS, tokens)


def parts_of_tokens(size: Size) -> int:
    """Return the number of ranks that share the tokens of a size; 1 for T itself."""
    return 1 if size == TOKENS else int(TOKENS / sympy.sympify(size).args[0])


class State(enum.Enum):
    """The parallel state of a dim."""

    WHOLE = "-"
    PARTITIONED = "|"
    REPLICATED = "="
    PRE_REDUCE = "+"
    ROUTED = "~"

    __hash__ = object.__hash__  # members are unique; hashing by name takes searches twice as long


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of a tensor: its global size, and its layout over the ranks."""

    size: Size
    state: State = State.WHOLE
    degree: int = 1

    def __post_init__(self) -> None:
        if (self.state is State.WHOLE) != (self.degree == 1):
            raise TypeCheckError(
                f"dim {self.size} in state {self.state.value!r} has degree {self.degree}; a whole "
                "dim has degree 1, every other state a degree of at least 2"
            )

    def __str__(self) -> str:
        is_atom = isinstance(self.size, int) or self.size.is_Atom or self.size.is_Function
        if isinstance(self.size, sympy.Add) or (self.degree != 1 and not is_atom):
            size = f"({self.size})"
        else:
            size = f"{self.size}"
        return size if self.degree == 1 else f"{size}{self.state.value}{self.degree}"


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor: dtype and dims. Sizes and hash are cached for searches."""

    dtype: str
    dims: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES and not is_format(self.dtype):
            known = ", ".join((*DTYPE_BYTES, *FORMATS))
            raise TypeCheckError(f"unknown dtype {self.dtype!r}; known: {known}")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[TensorType], tuple[str, tuple[Dim, ...]]]:
        return TensorType, (self.dtype, self.dims)  # omits the cached values of this process

    @cached_property
    def _hash(self) -> int:
        return hash((self.dtype, self.dims))

    @cached_property
    def shape(self) -> tuple[Size, ...]:
        return tuple(dim.size for dim in self.dims)

    @cached_property
    def is_token_wise(self) -> bool:
        return bool(self.dims) and counts_tokens(self.dims[0].size)

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS

    @property
    def is_sized(self) -> bool:
        """True unless a feature is symbolic, as adapters' ranks are in serving."""
        sizes = self.shape[1:] if self.is_token_wise else self.shape
        return all(isinstance(size, int) or size.is_number for size in sizes)

    @cached_property
    def features(self) -> tuple[int, ...]:
        """The sizes after the token dim; every size of a tensor without a token dim."""
        sizes = self.shape[1:] if self.is_token_wise else self.shape
        return tuple(int(size) for size in sizes)

    @property
    def reshape_sizes(self) -> tuple[int, ...]:
        """The sizes as an operator's attribute, -1 for the token dim."""
        return (-1,) * self.is_token_wise + self.features

    @property
    def elements(self) -> sympy.Expr:
        return sympy.Mul(*self.shape) if self.dims else sympy.Integer(1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row; all bytes of a tensor without a token dim."""
        if is_format(self.dtype):
            *experts, rows, columns = self.features
            return prod(experts) * FORMATS[self.dtype].size_bytes(rows, columns)
        return prod(self.features) * DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> sympy.Expr:
        if is_format(self.dtype):
            return sympy.Integer(self.row_bytes)
        return self.elements * DTYPE_BYTES[self.dtype]

    def with_dtype(self, dtype: str) -> TensorType:
        return replace(self, dtype=dtype)

    def with_shape(self, shape: tuple[Size, ...]) -> TensorType:
        return tensor(self.dtype, *shape)

    def with_features(self, *features: int) -> TensorType:
        """Replace the sizes after the token dim (all sizes of a tensor without a token dim)."""
        return self.with_shape((self.shape[0], *features) if self.is_token_wise else features)


@lru_cache(maxsize=4096)
def tensor(dtype: str, *shape: Size) -> TensorType:
    """Return a tensor type with whole dims: `tensor("bf16", TOKENS, 4096)`."""
    return TensorType(dtype, tuple(Dim(size) for size in shape))


def promote(left: str, right: str) -> str:
    """Return the dtype of an elementwise result of two tensors, as torch.promote_types."""
    if {left, right} == {"f16", "bf16"}:
        return "f32"
    return max(left, right, key=_RANKS.__getitem__)


def result_dtype(left: TensorType, right: TensorType) -> str:
    """Return the dtype of an elementwise result of two tensors, as torch.result_type.

    As `promote`, but a tensor without dims yields to a tensor with dims, unless it is the only
    float or the other is a bool.
    """
    if bool(left.dims) != bool(right.dims):
        whole, scalar = (left, right) if left.dims else (right, left)
        if _category(whole.dtype) >= _category(scalar.dtype):
            return whole.dtype
    return promote(left.dtype, right.dtype)


def _category(dtype: str) -> int:
    return 2 if dtype in _FLOATS else int(dtype != "bool")


def broadcast(left: tuple[Size, ...], right: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return the shape of an elementwise result; TypeCheckError if sizes differ, none being 1."""
    length = max(len(left), len(right))
    padded = [(1,) * (length - len(shape)) + shape for shape in (left, right)]
    sizes: list[Size] = []
    for a, b in zip(*padded, strict=True):
        if a != b and a != 1 and b != 1:
            raise TypeCheckError(f"shapes {list(left)} and {list(right)} do not broadcast")
        sizes.append(b if a == 1 else a)
    return tuple(sizes)
