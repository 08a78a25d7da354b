"""Recordings of a function's kernels on a CPU, which replay without the function's Python code.

A small model's decode step spends a third of its time in Python. A recording lists the native calls
and the operators of PyTorch that a function runs, with the tensors that they read and write. A
replay runs them again on the same memory, as a CUDA graph does: it reads the inputs that lie there
by then.

    native calls     in a single call of the library, up to the next operator
    a + b, a * b     native calls, too, where the numbers lie side by side
    elementwise      PyTorch's operator, which writes into the recorded output
    others           PyTorch's operator, whose output is copied into the recorded output

All memory of the function is kept. Python code that reads numbers of a tensor, and PyTorch's
operators with outputs of varying shapes, raise a NotRecordedError. Operators that PyTorch composes
of others are recorded as those, as they can hide one that reads numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pcg.kernels.torch.host_kernels import DTYPES, add_or_multiply, replay_calls
from pcg.native_library import NativeFunction, NotRecordedError, hearing

_COMPOSED = torch.DispatchKey.CompositeImplicitAutograd
_ADD, _MULTIPLY = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
_INDEX = torch.ops.aten.index.Tensor
_REPEAT = torch.ops.aten.repeat_interleave.Tensor
_VARYING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_EMPTY = (
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided,
)  # fmt: skip


class TooLargeError(NotRecordedError):
    """A function needs more memory than a recording may keep."""


class HostRecording(TorchDispatchMode):
    """The kernels of a function.

    Attributes:
        size_bytes: bytes of the function's memory.
    """

    def __init__(self, run: Callable[[], Tensor], most_bytes: int) -> None:
        """Run a function and record it; `result` is its result, which replays write again.

        Raises:
            TooLargeError: the function's memory exceeds `most_bytes`.
            NotRecordedError: a replay would not repeat what the function does.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.size_bytes, self._most_bytes = 0, most_bytes
        self._kept: list[object] = []
        self._calls: list[int] = []
        self._steps: list[Callable[[], object]] = []
        with hearing(self._hear), self:
            self.result = run()
        self._end_calls()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # importing Dynamo takes a second

    def replay(self) -> None:
        """Run the kernels again."""
        for step in self._steps:
            step()

    def _hear(self, function: NativeFunction, call: array[int], keeps: object) -> None:
        self._calls += function.address, call.buffer_info()[0]
        self._kept.append((call, keeps))

    def _end_calls(self) -> None:
        if self._calls:
            self._steps.append(partial(replay_calls, array("q", self._calls)))
            self._calls = []

    def _add(self, step: Callable[[], object]) -> None:
        self._end_calls()
        self._steps.append(step)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSED):
            with self:
                return func._op_dk(_COMPOSED, *args, **(kwargs or {}))
        inputs = list(_tensors((args, kwargs)))
        self._kept += inputs
        if not _VARYING.isdisjoint(func.tags) and not _is_of_one_size(func, inputs, kwargs):
            raise NotRecordedError(f"the host reads the result of {func}")
        if func in (_ADD, _MULTIPLY) and not kwargs and _are_alike(*args):
            y = self._keep_new(torch.empty_like(args[0]))
            add_or_multiply(args[0], args[1], y, func is _MULTIPLY)
            return y
        known = {_memory(x) for x in inputs if not x.is_mkldnn}
        result = func(*args, **(kwargs or {}))
        new = [x for x in _tensors(result) if _memory(x) not in known]
        for x in new:
            self._keep_new(x)
        if func._schema.is_mutable:
            self._add(partial(func, *args, **(kwargs or {})))
        elif new and func.overloadpacket not in _EMPTY:
            self._add(_again(func, args, kwargs or {}, result))
        return result

    def _keep_new(self, x: Tensor) -> Tensor:
        self._kept.append(x)
        self.size_bytes += x.untyped_storage().nbytes()
        if self.size_bytes > self._most_bytes:
            raise TooLargeError
        return x


def _is_of_one_size(func: Any, inputs: list[Tensor], kwargs: Any) -> bool:
    """Return whether an operator's outputs have the same shapes for all numbers in its inputs."""
    if func is _INDEX:
        return not any(x.dtype is torch.bool for x in inputs[1:])
    return func is _REPEAT and (kwargs or {}).get("output_size") is not None


def _are_alike(a: Any, b: Any) -> bool:
    """Return whether the native kernel adds and multiplies two values."""
    are_tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    if not are_tensors or a.shape != b.shape or a.dtype not in DTYPES:
        return False
    return a.dtype is b.dtype and a.is_contiguous() and b.is_contiguous()


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _again(func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> Callable[[], object]:
    """Return a function that runs an operator again, into its result."""
    packet, kind = func.overloadpacket, func._overloadname
    overloads = packet.overloads()
    # A kind "out" beside "Tensor_out" takes a number instead of the tensor.
    out = "Tensor_out" if kind == "Tensor" and "Tensor_out" in overloads else "out"
    if torch.Tag.pointwise in func.tags and kind in ("default", "Tensor") and out in overloads:
        return partial(getattr(packet, out), *args, **kwargs, out=result)

    def run() -> None:
        again = func(*args, **kwargs)
        for x, y in zip(_tensors(result), _tensors(again), strict=True):
            x.copy_(y)

    return run
