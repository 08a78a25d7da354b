"""Corrections of bfloat16 in Triton's interpreter (triton 3.6 to 3.9).

There values of bf16 are raw bits: arithmetic and products run on the bits, and casts truncate. Here
they go through fp32, and are rounded to the nearest, ties to even, as on a device.

Triton 3.6 also makes indices of arrays of one element, which numpy 2.5 refuses. And a launch
changes `triton.language` for as long as it runs, so that those of other threads have to wait; it
looks for what to change among all members, a fifth of the time of small launches, here once.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_Builder, _Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
_NAN = np.uint16(0x7FFF)


@functools.cache
def install() -> None:
    """Change the interpreter of this process, once."""
    convert = interpreter._convert_float

    def converted(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return (x.astype(np.uint32) << 16).view(np.float32)
        if source == tl.float32 and target == tl.bfloat16:
            return _rounded(x)
        return convert(x, source, target, mode)

    interpreter._convert_float = converted

    def wide(handle: Any) -> Any:
        if not _is_bf16(handle):
            return handle
        return _Handle(converted(handle.data, tl.bfloat16, tl.float32, None), tl.float32)

    def narrow(handle: Any) -> Any:
        if handle.data.dtype != np.float32:
            return handle
        return _Handle(converted(handle.data, tl.float32, tl.bfloat16, None), tl.bfloat16)

    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(_Builder, name, _through_fp32(getattr(_Builder, name), wide, narrow))

    dot, cast = _Builder.create_dot, _Builder.cast_impl
    _Builder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    _Builder.cast_impl = lambda self, x, target: cast(
        self, x if target.scalar in (tl.bfloat16, tl.float32) else wide(x), target
    )

    reduce = interpreter.ReduceScanOpInterface.apply

    def reduced(self: Any, inputs: Any) -> Any:
        every = inputs if isinstance(inputs, tuple) else (inputs,)
        if any(_is_bf16(one.handle) for one in every):
            raise TypeError("a reduction of bf16: cast to fp32 first, as it adds up wrongly")
        return reduce(self, inputs)

    interpreter.ReduceScanOpInterface.apply = reduced

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched

    interpreter._patch_builtin = _patch_builtin
    launch, lock = interpreter.GridExecutor.__call__, threading.RLock()

    def one_at_a_time(self: Any, *arguments: Any, **named: Any) -> Any:
        with lock:
            return launch(self, *arguments, **named)

    interpreter.GridExecutor.__call__ = one_at_a_time


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):  # not so within the launch of a caller
            interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    """The names to change; first asked of a package before anything has changed it."""
    members = inspect.getmembers(package)
    return tuple(name for name, member in members if tl.core.is_builtin(member))


def _through_fp32(
    function: Callable[..., Any], wide: Callable[[Any], Any], narrow: Callable[[Any], Any]
) -> Callable[..., Any]:
    def run(self: Any, *arguments: Any) -> Any:
        if any(map(_is_bf16, arguments)):
            return narrow(function(self, *map(wide, arguments)))
        return function(self, *arguments)

    return run


def _is_bf16(handle: Any) -> bool:
    if not isinstance(handle, _Handle) or isinstance(handle.dtype, tl.pointer_type):
        return False
    return bool(handle.dtype.scalar == tl.bfloat16)


def _rounded(x: Any) -> Any:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), _NAN, rounded)
