"""Products by the base's weights, which an emitted function requests from its caller.

Such a function is a generator: it yields a `Product`, and continues when that was run. So functions
that run in the same step, such as one that serves a batch and the window of a finetuning job, run
their common products once, over the tokens of all of them: the base executor of Symbiosis, in one
process. Experts are not among them: a function runs its own.

A weight may be in another process, or quantized. An emitted function is then given a tensor of the
weight's shape and dtype on the device `meta`, which has no memory. It carries a `StandIn` that runs
the products, so that reading the tensor otherwise is an error, never a wrong number. Pieces of a
layer's graph run in the other process, too.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.errors import SplitError
from pcg.formats.native import Matrices, of_floats
from pcg.kernels.batch import ProgramBatch


class StandIn(ABC):
    """A weight W [out, in], or several side by side, of which no float tensor exists here."""

    @abstractmethod
    def linear(self, x: Tensor, others: Sequence[Self]) -> Tensor:
        """Return x Wᵀ by this weight and others, side by side: [T, outs], in its own memory."""

    @abstractmethod
    def joined(self, others: Sequence[Self]) -> Self:
        """Return this weight joined with others, [outs, in]."""

    @abstractmethod
    def input_gradient(self, dy: Tensor) -> Tensor:
        """Return dy W, [T, in]."""

    @abstractmethod
    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight's rows by index, [T, in]."""

    @abstractmethod
    def adapted_lengths(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return ||W + scale · B A|| of each output, [out], in A's dtype."""

    @abstractmethod
    def digest(self) -> str:
        """Return a SHA-256 of the weight's values."""


class RemoteWeight(StandIn):
    """A weight that is not in this process.

    A subclass overrides the calls that its holder answers; others raise a SplitError of `refusal`.

    Attributes:
        names: names of the weights in their checkpoint.
    """

    names: tuple[str, ...]

    @property
    def refusal(self) -> str:
        return f"{', '.join(self.names)} does not take this call"

    def linear(self, x: Tensor, others: Sequence[Self]) -> Tensor:
        raise SplitError(self.refusal)

    def joined(self, others: Sequence[Self]) -> Self:
        names = tuple(name for weight in (self, *others) for name in weight.names)
        return dataclasses.replace(self, names=names)  # type: ignore[type-var]

    def input_gradient(self, dy: Tensor) -> Tensor:
        raise SplitError(self.refusal)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        raise SplitError(self.refusal)

    def adapted_lengths(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        raise SplitError(self.refusal)

    def piece(self, text: str, layer: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs of a piece: a graph as text, which runs where the weight is."""
        raise SplitError(self.refusal)

    def digest(self) -> str:
        """Return the SHA-256 of the SHA-256 of all rows."""
        raise SplitError(self.refusal)


def stand_in_tensor(shape: Sequence[int], dtype: torch.dtype, weight: StandIn) -> Tensor:
    """Return a tensor without memory that represents a weight."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
    tensor.stand_in = weight  # type: ignore[attr-defined]
    return tensor


def has_stand_in(tensor: Tensor | None) -> bool:
    """Return whether a tensor represents a weight that is no float tensor here."""
    return tensor is not None and tensor.is_meta


def is_remote(tensor: Tensor | None) -> bool:
    """Return whether a tensor represents a weight of another process."""
    return tensor is not None and tensor.is_meta and isinstance(stand_in_of(tensor), RemoteWeight)


def stand_in_of(tensor: Any) -> StandIn:
    """Return the weight that a tensor represents."""
    weight: StandIn = tensor.stand_in
    return weight


def stand_in_group(tensors: Sequence[Tensor]) -> Tensor:
    """Return a tensor that represents several weights of the same inputs, side by side."""
    first, *others = map(stand_in_of, tensors)
    shape = (sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
    return stand_in_tensor(shape, tensors[0].dtype, first.joined(others))


Result = TypeVar("Result")
ProductRequest: TypeAlias = Generator["Product", None, Result]
"""A running function that requests products, and what it returns."""


@dataclass(slots=True, eq=False)
class Product(ABC):
    """A product that the caller of the requesting function runs.

    Attributes:
        key: layer, name of the first weight, and kind: products with equal keys can be joined.
        is_own: True if all its weights are an adapter's, so that not all functions have it.
    """

    key: tuple[object, ...]
    _x: Tensor | None
    _outputs: Any = field(default=None, init=False)
    _parts: tuple[Sequence[Any], Sequence[int]] | None = field(default=None, init=False)
    is_own: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """Rows of the weight, if the product can run for some of them at a time; 0 otherwise."""
        return 0

    @property
    def part_keys(self) -> Sequence[tuple[object, ...]]:
        """The keys of its `parts`, or its own without parts."""
        return (self.key,)

    def parts(self) -> Sequence[Self]:
        """Return products by a weight each that add up to this product, to run instead of it."""
        return ()

    def add_part(self, part: Self) -> None:
        raise TypeError(f"{type(self).__name__} has no parts")

    @property
    def tokens(self) -> int:
        """Number of tokens that it multiplies, until it has run."""
        return 0 if self._x is None else len(self._x)

    def run_rows(self, start: int, stop: int) -> None:
        """Run it for the weight's rows from `start`, the end of the last call, up to `stop`."""
        raise TypeError(f"{type(self).__name__} does not run for some rows")

    def joined(self, others: Sequence[Self]) -> Self:
        """Return a product of its tokens and others' of its key, to run for some rows at a time."""
        every = (self, *others)
        x, counts = joined_tokens(every)
        whole = dataclasses.replace(self, _x=x)
        whole._parts = every, counts
        return whole

    def hand_out(self) -> None:
        """Give the outputs of all rows to the products that it was joined of."""
        outputs: Tensor = self.take()
        every, counts = self._parts or ((self,), (len(outputs),))
        for product, part in zip(every, outputs.split(counts), strict=True):
            product._outputs = product._of_rows(part)

    def _of_rows(self, outputs: Tensor) -> Any:
        return outputs

    def requested(self) -> ProductRequest[Any]:
        """Ask the caller to run it; return its outputs."""
        yield self
        return self.take()

    @abstractmethod
    def run(self) -> None: ...

    @abstractmethod
    def run_with(self, others: Sequence[Self]) -> None:
        """Run it and others of its key as a joined product."""

    def take(self) -> Any:
        """Return the outputs, and drop them."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def _take_x(self) -> Tensor:
        x, self._x = self._x, None
        assert x is not None
        return x


def fulfilled(result: Result) -> ProductRequest[Result]:
    """Return a request of nothing, with a result that is known already."""
    yield from ()
    return result


def joined_tokens(every: Sequence[Product]) -> tuple[Tensor, list[int]]:
    """Join the first factors of all; return them and the number of tokens of each."""
    parts = [product._take_x() for product in every]
    return torch.cat(parts) if len(parts) > 1 else parts[0], [len(part) for part in parts]


@dataclass(slots=True, eq=False)
class LinearProduct(Product):
    """x Wᵀ (+ b) by some weights.

    Attributes:
        weights: [out, in] each; if the runtime joined them, the first holds all, and others are
            None.
        biases: as many as weights, or empty.
        is_whole: True if the outputs are returned side by side in a single tensor.
    """

    weights: Sequence[Tensor | None]
    biases: Sequence[Tensor | None]
    is_whole: bool

    @property
    def rows(self) -> int:
        weight = self.weights[0]
        is_plain = len(self.weights) == 1 and weight is not None and not weight.is_mkldnn
        is_plain = is_plain and not has_stand_in(weight)
        if not is_plain or self.is_whole or hasattr(weight, "group_sizes"):
            return 0
        return len(weight)  # type: ignore[arg-type]

    def run_rows(self, start: int, stop: int) -> None:
        x, weight, part = self._x, self.weights[0], slice(start, stop)
        assert x is not None
        assert weight is not None
        biases = [None if bias is None else bias[part] for bias in self.biases]
        outputs = linear(x, weight[part], *biases)
        if len(outputs[0]) == len(weight):
            self._outputs = outputs
        else:
            if not start:
                self._outputs = x.new_empty(len(x), len(weight))
            self._outputs[:, part] = outputs
        if stop == len(weight):
            self._x = None

    def _of_rows(self, outputs: Tensor) -> Any:
        return [outputs]

    def run(self) -> None:
        self._outputs = _outputs(self._take_x(), self.weights, self.biases, self.is_whole)

    def run_with(self, others: Sequence[LinearProduct]) -> None:
        every = (self, *others)
        best = next(
            (product for product in every if hasattr(product.weights[0], "group_sizes")), self
        )
        x, counts = joined_tokens(every)
        outputs = linear_group(x, best.weights, best.biases)
        split = [out.split(counts) for out in outputs]
        for i, product in enumerate(every):
            parts = [rows[i] for rows in split]
            # Each has memory of its own, which goes when it needs it no more.
            product._outputs = (
                torch.cat(parts, -1) if product.is_whole else [rows.clone() for rows in parts]
            )


def _outputs(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None], whole: bool
) -> Tensor | Sequence[Tensor]:
    if whole:
        first: Any = weights[0]
        return linear(x, first, first.group_bias)
    return linear_group(x, weights, biases)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ (+ b); the weight is plain, packed by oneDNN, or has a `StandIn`."""
    if weight.is_meta:  # as `has_stand_in` tells, without another call
        y = stand_in_of(weight).linear(x, ())
        return y if bias is None else y.add_(bias)
    if x.shape[0] <= _PAIR and bias is None and not (x.requires_grad or weight.requires_grad):
        matrices = _native(weight)
        if matrices is not None and x.dtype is weight.dtype:
            y = x.new_empty(x.shape[0], matrices.rows)
            if matrices.multiply(x, y):
                return y
    if weight.is_mkldnn or (_is_onednn_faster(x) and x.dtype is torch.float32):
        return _onednn_linear(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


_onednn_linear = torch.ops.mkldnn._linear_pointwise
"""It takes plain weights, too, however they are strided, and holds no copy of them."""


_PAIR = 2
"""The most tokens that the native kernel multiplies by a float weight: it takes 0.7 of the time of
packed weights in bf16, and 0.8 in fp32, on an AMD EPYC for sizes of 512 to 5,632."""


def _native(weight: Tensor) -> Matrices | None:
    """Return a float weight for the native kernel, which is kept with it; None if it reads none."""
    known: tuple[Matrices | None] | None = getattr(weight, "pcg_native", None)
    if known is None:
        plain = getattr(weight, "plain", ()) if weight.is_mkldnn else (weight,)
        known = (of_floats([part.detach() for part in plain]),)  # which do not own themselves
        weight.pcg_native = known  # type: ignore[attr-defined]
    return known[0]


def linear_backward(dy: Tensor, weight: Tensor) -> Tensor:
    """dx = dy W."""
    if weight.is_meta:
        return stand_in_of(weight).input_gradient(dy)
    if _is_onednn_faster(dy):
        return _onednn_linear(dy, weight.t(), None, "none", [], "")  # type: ignore[no-any-return]
    if dy.is_cpu and dy.dtype in (torch.bfloat16, torch.float16):
        # Without native support, the product by a plain weight takes ten times as long.
        return F.linear(dy, weight.t().contiguous())
    return dy @ weight


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of a dtype on this machine's CPU."""
    if dtype is torch.bfloat16:
        return _HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return _HAS_ONEDNN and dtype is torch.float32


_HAS_ONEDNN = torch.backends.mkldnn.is_available()
_FEW_TOKENS = 8
"""From here on oneDNN multiplies by a plain fp32 weight faster than torch's BLAS: on AMD EPYCs in
0.4 to 0.95 of MKL's time, for sizes of 512 to 4,096."""


def _is_onednn_faster(x: Tensor) -> bool:
    if not x.is_cpu or not has_onednn(x.dtype):
        return False
    return x.dtype is torch.bfloat16 or x.shape[0] >= _FEW_TOKENS


def linear_group(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None] = ()
) -> Sequence[Tensor]:
    """Apply linear operators to x; if the first weight holds all, the rest are None."""
    first: Any = weights[0]
    if hasattr(first, "group_sizes"):
        y = linear(x, first, first.group_bias if biases else None)
        return torch.split_with_sizes(y, first.group_sizes, -1) if len(weights) > 1 else (y,)
    padded = biases or [None] * len(weights)
    if len(weights) > 1 and has_stand_in(first):
        y = stand_in_of(first).linear(x, [stand_in_of(weight) for weight in weights[1:]])
        outs = y.split([len(weight) for weight in weights], -1)  # type: ignore[arg-type]
        return [
            out if bias is None else out.add_(bias) for out, bias in zip(outs, padded, strict=True)
        ]
    return [linear(x, w, b) for w, b in zip(weights, padded, strict=True)]  # type: ignore[arg-type]


def product(
    batch: ProgramBatch,
    name: str,
    x: Tensor,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None] = (),
    *,
    whole: bool = False,
) -> ProductRequest[Any]:
    """Request x [T, in] by each of some weights [out, in]; return their outputs, [T, out] each.

    `name` is that of the first weight in its layer; with `whole` the outputs are a single tensor,
    [T, outs], that may be written over. Nothing is requested of a batch whose function runs alone.
    """
    if batch.is_alone:
        return _outputs(x, weights, biases, whole)
    key = (batch.layer, name, len(weights), bool(biases))
    request = LinearProduct(key, x, weights, biases, whole)
    yield request
    outputs, request._outputs = request._outputs, None
    return outputs


@dataclass(slots=True, eq=False)
class PieceCall(Product):
    """A piece on the tokens of a function, or of several that call the same piece.

    Attributes:
        weight: represents a weight of the base that holds the piece's.
        text: the piece, a graph as text.
        inputs: the tensors to send, [T, …] each.
    """

    weight: Tensor = field(kw_only=True)
    text: str = field(kw_only=True)
    layer: int = field(kw_only=True)
    inputs: Sequence[Tensor] = field(kw_only=True)

    def run(self) -> None:
        self._x = None
        inputs, self.inputs = self.inputs, ()
        self._outputs = _base_of(self.weight).piece(self.text, self.layer, inputs)

    def run_with(self, others: Sequence[PieceCall]) -> None:
        every = (self, *others)
        counts = [len(call.inputs[0]) for call in every]
        inputs = [torch.cat(parts) for parts in zip(*(call.inputs for call in every), strict=True)]
        outputs = _base_of(self.weight).piece(self.text, self.layer, inputs)
        by_call = zip(*(output.split(counts) for output in outputs), strict=True)
        for call, rows in zip(every, by_call, strict=True):
            call._x, call.inputs = None, ()
            # Each has memory of its own, which goes when it needs it no more.
            call._outputs = [row.clone() for row in rows]


def requested_piece(
    batch: ProgramBatch, text: str, weight: Tensor, *inputs: Tensor
) -> ProductRequest[Sequence[Tensor]]:
    """Request a piece of a base executor; return its outputs.

    Args:
        text: the piece, a graph as text.
        weight: represents a weight of that base.
        inputs: the piece's inputs, [T, …] each.
    """
    call = PieceCall(
        (batch.layer, text), inputs[0], weight=weight, text=text, layer=batch.layer, inputs=inputs
    )
    return call.requested()


def base_piece(batch: ProgramBatch, text: str, weight: Tensor, *inputs: Tensor) -> Sequence[Tensor]:
    """Call a piece of a base executor; the arguments are those of `requested_piece`."""
    return _base_of(weight).piece(text, batch.layer, inputs)


def _base_of(weight: Tensor) -> RemoteWeight:
    stand_in = stand_in_of(weight)
    assert isinstance(stand_in, RemoteWeight)
    return stand_in
