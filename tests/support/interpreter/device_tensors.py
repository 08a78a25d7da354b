"""Tensors on "cuda" that the CPU computes, and what a device would refuse of them.

A tensor is a wrapper of one on the CPU; operators run on what is wrapped, and Triton's kernels in
the interpreter. Each one's reads and writes are noted, by stream (`streams.py`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from tests.support.interpreter.streams import DEVICE, GRAIN, ORDER, DeviceError, Memory

MEMORY = Memory()
_PINNED: dict[int, Any] = {}

aten: Any = torch.ops.aten
_GIVES_NUMBERS = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
}
"""Operators whose result the host has to know."""
_PRODUCTS = {aten.addmm, aten.baddbmm, aten.bmm, aten.mm}
"""Operators whose library has a workspace, which they write and read."""
_INDEXED = {aten.index, aten.index_add_, aten.index_copy_, aten.index_put_, aten.index_select}
_NO_WORK = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
_Builder = interpreter.InterpreterBuilder


class DeviceTensor(Tensor):
    """A tensor that says it is on a GPU.

    Attributes:
        host: the tensor of the CPU that it stands for.
    """

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        made.host = host
        return made

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.host})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        MEMORY.of(self.host).kept_for.add(stream.number)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})


class DeviceMode(TorchDispatchMode):
    """Operators that make tensors from no tensor."""

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})


# -------------------------------------------------------------------------------------- operators


def _run(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator where its tensors are."""
    if operator is aten._to_copy.default:
        return _to_copy(args[0], **kwargs)
    if operator is aten.copy_.default:
        return _copy(*args, **kwargs)
    if operator in (aten.pin_memory.default, aten._pin_memory.default):
        return _pinned(args[0])
    if operator is aten.is_pinned.default:
        return _is_pinned(args[0])
    if kwargs.get("pin_memory"):
        return _pinned(operator(*args, **{**kwargs, "pin_memory": False}))
    leaves = tree_leaves((args, kwargs))
    ours = [x for x in leaves if isinstance(x, DeviceTensor)]
    makes_ours, device = bool(ours), kwargs.get("device")
    if device is not None:
        makes_ours = torch.device(device).type == "cuda"
        if makes_ours:
            ORDER.check_device(f"what {operator} makes", device)
    if makes_ours and device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if not ours and not makes_ours:
        return operator(*args, **kwargs)
    for x in leaves if ours else ():
        if isinstance(x, Tensor) and not isinstance(x, DeviceTensor) and x.dim():
            raise DeviceError(f"{operator} is given tensors on {DEVICE} and on {x.device}")
    if operator in _GIVES_NUMBERS or _is_masked(operator, args):
        ORDER.wait(str(operator), ORDER.current.clock)
    found = operator(*tree_map(_host, args), **tree_map(_host, kwargs))
    if torch.Tag.inplace_view in operator.tags:
        with no_dispatch():
            operator(*args, **kwargs)
    result = tree_map(functools.partial(_wrapped, ours), found) if makes_ours else found
    _note(operator, args, kwargs, found)
    return result


def _wrapped(given: Sequence[DeviceTensor], x: Any) -> Any:
    """The result of an operator as a tensor of the device's: itself where it was given."""
    if not isinstance(x, Tensor):
        return x
    for one in given:
        if one.host is x:
            return one
    bases = [one for one in given if _storage(one) == _storage(x)]
    # A view is of inference as its base is, and not as the mode is.
    of_inference = bases[0].is_inference() if bases else torch.is_inference_mode_enabled()
    with torch.inference_mode(of_inference):
        return on_device(x)


def on_device(host: Tensor) -> DeviceTensor:
    """Return a tensor that stands for one of the CPU."""
    MEMORY.add(host)
    return DeviceTensor(host)


def _host(x: Any) -> Any:
    return x.host if isinstance(x, DeviceTensor) else x


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_masked(operator: Any, args: Any) -> bool:
    """Return whether an operator indexes with booleans, whose number the host has to know."""
    if operator.overloadpacket not in (aten.index, aten.index_put_):
        return False
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1])


# ------------------------------------------------------------------------------------- workspaces

Workspaces: TypeAlias = dict[tuple[int, int], DeviceTensor]
"""Memory that products write, by thread and stream: the library's handle is a thread's."""
_WORKSPACES: Workspaces = {}
_OF_GRAPH = threading.local()


def _workspace() -> DeviceTensor:
    """Return the workspace of a product that runs now: in a graph, that of the capture."""
    found: Workspaces = getattr(_OF_GRAPH, "workspaces", _WORKSPACES)
    key = threading.get_ident(), ORDER.current.number
    if found is not _WORKSPACES:
        return next(iter(found.values()))
    if key not in found:
        found[key] = on_device(torch.zeros(1))
    return found[key]


def workspaces() -> Workspaces:
    """Return the workspaces of products on the current stream."""
    key = threading.get_ident(), ORDER.current.number
    return {key: _WORKSPACES[key]} if key in _WORKSPACES else {}


def clear_workspaces() -> None:
    """The stand-in of `torch._C._cuda_clearCublasWorkspaces`."""
    _WORKSPACES.clear()


@contextmanager
def using(of_graph: Workspaces) -> Iterator[None]:
    """Have products of a graph use the workspaces that they were captured with."""
    _OF_GRAPH.workspaces = of_graph
    try:
        yield
    finally:
        del _OF_GRAPH.workspaces


# ----------------------------------------------------------------------------------------- copies


def _to_copy(x: Tensor, **kwargs: Any) -> Tensor:
    device = torch.device(kwargs.pop("device", None) or x.device)
    non_blocking = kwargs.pop("non_blocking", False)
    kwargs.pop("pin_memory", None)
    host = aten._to_copy.default(_host(x), **kwargs)
    if device.type == "cuda":
        ORDER.check_device("a copy", device)
    to = on_device(host) if device.type == "cuda" else host
    _sent(to, x, non_blocking)
    return to


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    aten.copy_.default(_host(to), _host(source))
    _sent(to, source, non_blocking)
    return to


def _sent(to: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Note that a tensor was copied, and who waits for that."""
    _touch("a copy", [_Access(x.host, is_written) for x, is_written in ((source, False), (to, True))
                      if isinstance(x, DeviceTensor)])  # fmt: skip
    if isinstance(to, DeviceTensor) == isinstance(source, DeviceTensor):
        return
    if isinstance(source, DeviceTensor) and non_blocking:
        if not _is_pinned(to):
            raise DeviceError("a copy to the host that it does not wait for may not be there yet")
        ORDER.receive(to)
    elif non_blocking and _is_pinned(source):
        ORDER.send(source)
    else:
        ORDER.wait("a copy between host and device", ORDER.current.clock)


def _pinned(x: Tensor) -> Tensor:
    ORDER.check_device("the context that pins memory")
    pinned = x.clone()
    storage = pinned.untyped_storage()
    start = storage.data_ptr()
    _PINNED[start] = weakref.finalize(storage, _PINNED.pop, start, None)
    return pinned


def _is_pinned(x: Tensor) -> bool:
    return not isinstance(x, DeviceTensor) and (not x.numel() or _storage(x) in _PINNED)


# --------------------------------------------------------------------------------------- accesses


class _Access:
    """The part of a tensor that an operator reads or writes: all, or what an index chooses."""

    def __init__(self, x: Tensor, is_written: bool, chosen: Any = None) -> None:
        self.x, self.is_written, self.chosen = x, is_written, chosen

    def grains(self, start: int) -> Any:
        """The grains of the part, counted from an address."""
        first, size = self.x.data_ptr() - start, self.x.element_size()
        if self.chosen is None and self.x.is_contiguous():
            return slice(first // GRAIN, (first + self.x.nbytes - 1) // GRAIN + 1)
        place = torch.zeros((), dtype=torch.int64)
        for length, stride in zip(self.x.shape, self.x.stride(), strict=True):
            place = place[..., None] + torch.arange(length) * stride
        if self.chosen is not None:
            place = place[self.chosen]
        return np.unique((first + size * place.numpy()) // GRAIN)


def _touch(name: str, accesses: Sequence[_Access]) -> None:
    stream, now = ORDER.tick(name)
    for access in accesses if ORDER.is_watched else ():
        block = MEMORY.of(access.x) if access.x.numel() else None
        grains = access.grains(block.start) if block else np.empty(0)
        if block and (isinstance(grains, slice) or grains.size):
            block.touch(grains, stream, now, access.is_written)


def _note(operator: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
    """Note what an operator read and wrote."""
    accesses, writes = [], False
    for place, argument in enumerate(operator._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        chosen = None
        if place == 0 and operator.overloadpacket in _INDEXED:
            chosen = _chosen(operator, args)
        for x in tree_leaves(value):
            if isinstance(x, DeviceTensor):
                accesses.append(_Access(x.host, is_written, chosen))
                writes |= is_written
    given = {_storage(access.x) for access in accesses}
    if accesses and operator.overloadpacket in _PRODUCTS:
        accesses.append(_Access(_workspace().host, True))
    made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    fresh = [x for x in made if _storage(x) not in given]
    is_view = made and not fresh and not writes
    if operator not in _NO_WORK and not is_view:
        on_device = [x for x in fresh if MEMORY.at(x.data_ptr()) is not None]
        _touch(str(operator), [*accesses, *(_Access(x, True) for x in on_device)])


def _chosen(operator: Any, args: Any) -> Any:
    """The index of its first tensor that an operator reads or writes."""
    if operator.overloadpacket in (aten.index, aten.index_put_):
        return tuple(slice(None) if x is None else _host(x) for x in args[1])
    return (*(slice(None),) * (args[1] % args[0].dim()), _host(args[2]))


# --------------------------------------------------------------------------------------- launches


def launch(run: Callable[..., Any], grid: Any, args: Any, kwargs: Any) -> Any:
    """Launch a kernel of Triton's.

    Raises:
        DeviceError: it was given the host's memory, or reads or writes it.
    """
    name = grid.fn.__name__
    ORDER.check_device(f"the launch of {name}")
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, Tensor) and not isinstance(x, DeviceTensor):
            raise DeviceError(f"{name}: a pointer to memory of {x.device}")
    args, kwargs = tree_map(_host, (args, kwargs))
    loaded: list[Any] = []
    stored: list[Any] = []
    # Tokens of no one are computed from whatever lies in their memory, in silence on a device.
    with _watched(loaded, stored), torch._C._DisableTorchDispatch(), np.errstate(all="ignore"):
        found = run(grid, *args, **kwargs)
    stream, now = ORDER.tick(name)
    for addresses, is_written in ((loaded, False), (stored, True)):
        every = np.unique(np.concatenate(addresses)) if addresses else np.empty(0, np.uint64)
        while every.size:
            block = MEMORY.at(int(every[0]))
            if block is None:
                raise DeviceError(f"{name} {'writes' if is_written else 'reads'} host memory")
            own, every = np.split(every, [np.searchsorted(every, block.start + block.size)])
            grains = np.unique((own.astype(np.int64) - block.start) // GRAIN)
            block.touch(grains, stream, now, is_written)
    return found


@contextmanager
def _watched(loaded: list[Any], stored: list[Any]) -> Iterator[None]:
    """Note the addresses that a kernel loads and stores."""
    load, store = _Builder.create_masked_load, _Builder.create_masked_store

    def note(found: list[Any], pointers: Any, mask: Any) -> None:
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        chosen = np.broadcast_to(mask.data, shape)
        found.append(np.unique(np.broadcast_to(pointers.data, shape)[chosen]))

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        note(loaded, pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(stored, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        patch.object(_Builder, "create_masked_load", watched_load),
        patch.object(_Builder, "create_masked_store", watched_store),
    ):
        yield
