"""The launches of what runs on a GPU, each with the bytes and FLOPs that it cannot do without.

    bytes    what a launch reads and what it writes, each element once, whatever the order of work
    FLOPs    2 for a multiplication and its sum, of products alone

A launch's arguments say both: sizes of tensors for operators of PyTorch and for the kernels that
the emitter writes for groups, and for template kernels the contents of their lists (which token has
which adapter, of which rank; which keys a sequence sees). A kernel with a formula of neither kind
is an error, so that none is counted wrongly in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from gpu_work import Work
from roofline_formulas import FORMULAS, Arguments, deferred_work, size_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


REPLAY = "replay"
"""The kernel of a launch that stands for a graph's; those of the graph are recorded ones."""


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        kernel: its name, or the operator's.
        work: the bytes and FLOPs that it cannot do without.
        programs: programs of its grid; 0 for an operator, whose kernel is a library's.
        warps: warps of a program.
        registers: registers of a thread; 0 where it was not compiled.
        shared_bytes: shared memory of a program.
        load_bytes: what a thread's loads have under way at most, by its machine code.
        beside: the launch of a branch that runs while this one does.
        recorded: True if a graph launches it, and not the host.
    """

    kernel: str
    work: Work
    programs: int = 0
    warps: int = 0
    registers: int = 0
    shared_bytes: int = 0
    load_bytes: int = 0
    beside: Launch | None = None
    recorded: bool = False

    @property
    def count(self) -> int:
        """Launches: itself, and those beside it."""
        return 1 + (self.beside.count if self.beside else 0)

    @property
    def whole_work(self) -> Work:
        """The work of all of them."""
        return self.work + self.beside.whole_work if self.beside else self.work

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Launch:
        """A launch from what `dataclasses.asdict` made of it."""
        beside = fields["beside"] and cls.of_json(fields["beside"])
        return cls(**{**fields, "work": Work(**fields["work"]), "beside": beside})


class _Notes(list[Launch]):
    """Launches in order; those of a branch are put beside the next one that is on none."""

    def __init__(self, is_on_branch: Callable[[], bool]) -> None:
        super().__init__()
        self._is_on_branch = is_on_branch
        self._branch: Launch | None = None

    def append(self, launch: Launch) -> None:
        launch = replace(launch, beside=self._branch)
        self._branch = launch if self._is_on_branch() else None
        if self._branch is None:
            super().append(launch)


# --------------------------------------------------------------------------------------- operators

PRODUCTS = {aten.addmm, aten.bmm, aten.linear, aten.mm}
_ROWS = {aten.embedding, aten.gather, aten.index, aten.index_select}
"""Operators that read as much of their source as they make."""
_COPIES = {aten._to_copy, aten.to}
_UNREAD = {aten.copy_, aten.fill_, aten.zero_}
"""Operators that change their first argument without reading it."""
_NO_WORK = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.is_pinned,
    aten.pin_memory,
    aten._pin_memory,
    aten.record_stream,
}


def _distinct(x: Tensor) -> int:
    """Elements of a tensor, those that are repeated once."""
    return prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


def operator_work(operator: Any, args: Any, kwargs: Mapping[str, Any], found: Any) -> Work | None:
    """The work of an operator that ran; None if it launches nothing, as views and memory do."""
    packet = operator.overloadpacket
    if packet in _NO_WORK:
        return None
    read: dict[int, Tensor] = {}
    written: dict[int, Tensor] = {}
    for place, argument in enumerate(operator._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        changes = argument.alias_info is not None and argument.alias_info.is_write
        for x in tree_leaves(value):
            if isinstance(x, Tensor):
                if changes:
                    written[x.data_ptr()] = x
                if not (changes and (packet in _UNREAD or argument.is_out)):
                    read[x.data_ptr()] = x
    given = {x.untyped_storage().data_ptr() for x in (*read.values(), *written.values())}
    made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    if packet in _COPIES and made[0].device != args[0].device:
        return Work(made[0].nbytes)  # between host and device
    fresh = [x for x in made if x.untyped_storage().data_ptr() not in given]
    if made and not fresh and not written:
        return None
    outputs = (*written.values(), *fresh)
    moved = sum(_distinct(x) * size_of(x) for x in (*read.values(), *outputs))
    if packet in _ROWS:
        source = args[0]
        moved -= (_distinct(source) - fresh[0].numel()) * size_of(source)
    flops = 0
    if packet in PRODUCTS:
        left = args[0] if packet is aten.linear else args[-2]
        flops = 2 * left.numel() * outputs[0].shape[-1]
    return Work(moved, flops)


class _Operators(TorchDispatchMode):
    """Notes the operators that launch something on a device."""

    def __init__(self, notes: list[Launch], device: type[Tensor], computes: bool) -> None:
        super().__init__()
        self._notes, self._device, self._computes = notes, device, computes

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self._run(operator, args, kwargs)
        leaves = tree_leaves((args, kwargs, found))
        if any(isinstance(x, self._device) for x in leaves):
            work = operator_work(operator, args, kwargs, found)
            if work is not None:
                self._notes.append(Launch(str(operator.overloadpacket), work))
        return found

    def _run(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._computes:
            return operator(*args, **kwargs)
        # Products take long, and kernels fill no memory; what the host reads has to be numbers.
        packet = operator.overloadpacket
        if packet in PRODUCTS and isinstance(args[0], self._device):
            if "out" in kwargs:
                return kwargs["out"]
            is_linear = packet is aten.linear
            left, right = args[:2] if is_linear else args[-2:]
            return left.new_zeros((*left.shape[:-1], right.shape[0 if is_linear else -1]))
        found = operator(*args, **kwargs)
        if packet in _NO_WORK and isinstance(found, self._device):
            return found.zero_() if found.numel() <= 2**23 else found
        return found


# ---------------------------------------------------------------------------------------- counting


@contextmanager
def counted(
    device: type[Tensor], computes: bool = True, is_on_branch: Callable[[], bool] = lambda: False
) -> Iterator[list[Launch]]:
    """Note the launches of what runs within.

    Args:
        device: the class of tensors on the device.
        computes: False if kernels are compiled and not run; products are zeros then.
        is_on_branch: whether what is launched now is on a branch of a graph that is recorded.
    Raises:
        KeyError: a kernel that is counted by no formula; the message names it.
    """
    from pcg.kernels.triton.fused import Fused

    notes = _Notes(is_on_branch)
    of_group: list[Work] = []
    unknown: set[str] = set()
    launch = Fused._launch

    def grouped(self: Any, inputs: Any, made: Any, slots: Any, tokens: int, programs: Any) -> None:
        written, skipped = 0, set()
        for output, x in zip(self._outputs, made, strict=True):
            if output.stand_in is None or not isinstance(x, Tensor):
                written += tokens * prod(output.features) * output.dtype.itemsize
            else:  # it stands for an input, which is not moved
                skipped.add(output.stand_in)
        read = [x for number, x in enumerate(inputs) if number not in skipped]
        lora = [deferred_work(x) for x in read if not isinstance(x, Tensor)]
        moved = written + sum(_distinct(x) * size_of(x) for x in read if isinstance(x, Tensor))
        of_group.append(sum(lora, Work(moved + (0 if slots is None else 8 * tokens))))
        launch(self, inputs, made, slots, tokens, programs)
        of_group.clear()

    def work_of(name: str, arguments: Arguments) -> Work:
        if of_group:
            return of_group[-1]
        if name not in FORMULAS:
            unknown.add(name)
            return Work(0)
        return FORMULAS[name](arguments)

    operators = _Operators(notes, device, computes)
    with patch.object(Fused, "_launch", grouped), _launches(notes, work_of), operators:
        yield notes
    if unknown:  # not before, as an engine keeps errors of a step to its requests
        names = ", ".join(sorted(unknown))
        raise KeyError(f"no formula counts the work of {names}; add one to FORMULAS")


@contextmanager
def _launches(notes: list[Launch], work_of: Callable[[str, Arguments], Work]) -> Iterator[None]:
    """Note launches of kernels, in the interpreter and as they are compiled."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    run, interpret = JITFunction.run, interpreter.GridExecutor.__call__

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        work = work_of(self.__name__, dict(zip(self.arg_names, args, strict=False)) | kwargs)
        meta = kernel.metadata
        notes.append(Launch(self.__name__, work, prod(grid), meta.num_warps, *_usage(kernel)))
        return kernel

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        notes.append(
            Launch(self.fn.__name__, work_of(self.fn.__name__, arguments), prod(self.grid))
        )
        with torch._C._DisableTorchDispatch():
            return interpret(self, *args, **kwargs)

    with (
        patch.object(JITFunction, "run", compiled),
        patch.object(interpreter.GridExecutor, "__call__", interpreted),
    ):
        yield


_USAGE: dict[int, tuple[Any, tuple[int, int, int]]] = {}
"""Registers, shared memory and bytes that loads have under way by the kernel, which is kept so that
its id stays its own."""


def _usage(kernel: Any) -> tuple[int, int, int]:
    from tests.support.interpreter.gpu_code import code_of

    if id(kernel) not in _USAGE:
        architecture = kernel.metadata.target.arch
        code = code_of(kernel.metadata.name, kernel, architecture)
        _USAGE[id(kernel)] = kernel, (code.registers, code.shared_bytes, code.load_bytes)
    return _USAGE[id(kernel)][1]
