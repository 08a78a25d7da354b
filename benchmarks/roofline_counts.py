"""The launches of a step on a GPU, each with the bytes and FLOPs that it cannot do without.

    bytes    read and written by a launch, each element once, whatever the order of work
    FLOPs    2 for a multiplication and its sum, of products alone

A launch's arguments say both: sizes of tensors for operators of PyTorch and for the kernels that
the emitter writes for groups, and for template kernels the contents of their lists (which token has
which adapter, of which rank; which keys a sequence sees). A kernel with a formula of neither kind
is an error, so that none is counted wrongly in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from gpu_bench import Work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


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
    """

    kernel: str
    work: Work
    programs: int = 0
    warps: int = 0
    registers: int = 0
    shared_bytes: int = 0
    load_bytes: int = 0
    beside: Launch | None = None

    @property
    def count(self) -> int:
        """Launches: itself, and those beside it."""
        return 1 + (self.beside.count if self.beside else 0)

    @property
    def whole_work(self) -> Work:
        """The work of all of them."""
        return self.work + self.beside.whole_work if self.beside else self.work


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


# --------------------------------------------------------------------------------------- kernels

Arguments: TypeAlias = Mapping[str, Any]


def _numbers(x: Tensor) -> np.ndarray:
    """A list's contents, wherever it lies."""
    found: np.ndarray = getattr(x, "host", x).numpy()
    return found


@dataclass(frozen=True)
class _Segmented:
    """What a kernel of segmented adapters goes over, by its tables.

    Attributes:
        parts: slice, slot and places of every tile or segment that has a matrix there.
    """

    arguments: Arguments
    parts: Sequence[tuple[int, int, int]]
    ranks: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, arguments: Arguments, items: str) -> _Segmented:
        ranks, columns = (_numbers(arguments[name]) for name in ("ranks", "columns"))
        list_ = _numbers(arguments[items]).tolist()
        if items == "by_token":
            own = [(slot, 1) for slot, *_ in list_ if slot >= 0]
        else:  # of each block of ranks, the first one has them all
            own = [(item[0], item[2]) for item in list_ if item[2] and not item[6]]
        parts = [
            (j, slot, count) for j in range(len(ranks)) for slot, count in own if ranks[j, slot]
        ]
        return cls(arguments, parts, ranks, columns)

    @property
    def matrices(self) -> set[tuple[int, int]]:
        return {(j, slot) for j, slot, _ in self.parts}

    @property
    def flops(self) -> int:
        return sum(
            2 * count * int(self.ranks[j, slot] * self.columns[j, 1])
            for j, slot, count in self.parts
        )

    @property
    def row_elements(self) -> int:
        """Elements of the matrices, each once."""
        return sum(int(self.ranks[j, slot] * self.columns[j, 1]) for j, slot in self.matrices)

    @property
    def s_bytes(self) -> int:
        """A part of s: fp32, of each place the ranks up to the next multiple of 16."""
        padded = -(-self.ranks // 16) * 16
        return 4 * sum(count * int(padded[j, slot]) for j, slot, count in self.parts)

    def token_elements(self, tensors: int = 1) -> int:
        """Elements of the tokens in the slices' columns, those of several slices once.

        Of more `tensors` than one each slice has its own.
        """
        spans: dict[tuple[int, ...], dict[int, int]] = {}
        for j, slot in self.matrices:
            span = (*self.columns[j].tolist(), *([j] if tensors > 1 else []))
            own = sum(count for k, other, count in self.parts if (k, other) == (j, slot))
            spans.setdefault(span, {})[slot] = own
        return sum(size * sum(of_slot.values()) for (_, size, *_), of_slot in spans.items())

    def list_bytes(self, items: str) -> int:
        """The tables that are read: items, order, first elements of rows, ranks and columns."""
        places = sum(count for j, _, count in self.parts if j == 0)
        rows = sum(int(self.ranks[matrix]) for matrix in self.matrices)
        scales = 4 * len(self.matrices) if self.arguments["HAS_SCALES"] else 0
        lists = _numbers(self.arguments[items]).nbytes + self.columns.nbytes
        order = 4 * places if "order" in self.arguments else 0
        return lists + order + 8 * rows + 4 * len(self.matrices) + scales


def size_of(x: Tensor) -> int:
    """The bytes of an element."""
    return int(x.element_size())


def deferred_work(lora: Any) -> Work:
    """The work of a group's kernel to add LoRA that was left to it."""
    if lora.pointers is None:
        return Work(0)
    ranks = _numbers(lora.up.ranks)[lora.number]
    slots = [slot for slot, *_ in _numbers(lora.by_token).tolist() if slot >= 0 and ranks[slot]]
    columns = lora.up.sizes[lora.number]
    places, rows = (int(sum(ranks[slot] for slot in of)) for of in (slots, set(slots)))
    read = rows * (columns * size_of(lora.up.memory) + 8) + 4 * places * len(lora.s)
    return Work(read + lora.by_token.nbytes + 4 * len(set(slots)), 2 * places * columns)


def _shrink(a: Arguments) -> Work:
    found = _Segmented.of(a, "tiles")
    tokens = found.token_elements(a.get("INPUTS", 1))
    read = tokens * size_of(a["x"]) + found.row_elements * size_of(a["memory"])
    written = a["s"].shape[0] * found.s_bytes
    return Work(read + written + found.list_bytes("tiles"), found.flops)


def _expand(a: Arguments) -> Work:
    items = "tiles" if "tiles" in a else "by_token"
    found = _Segmented.of(a, items)
    tokens = found.token_elements(a.get("OUTPUTS", 1))
    moved = tokens * (size_of(a["y"]) + size_of(a["z"]))
    read = found.row_elements * size_of(a["memory"]) + a["PARTS"] * found.s_bytes
    return Work(moved + read + found.list_bytes(items), found.flops)


def _outer(a: Arguments) -> Work:
    found = _Segmented.of(a, "segments")
    tokens = found.token_elements(a.get("INPUTS", 1))
    read = tokens * size_of(a["x"]) + found.s_bytes
    return Work(read + 4 * found.row_elements + found.list_bytes("segments"), found.flops)


@dataclass(frozen=True)
class _Attended:
    """The parts of a batch that a kernel of attention goes over.

    Attributes:
        tokens: their tokens; `keys` the keys that they see, each part's once; `pairs` the pairs of
            a token and a key that it sees.
    """

    tokens: int
    keys: int
    pairs: int
    list_bytes: int

    @classmethod
    def of(cls, a: Arguments, items: str) -> _Attended:
        every, parts = _numbers(a[items]), _numbers(a["parts"])
        # An empty item has no rows, keys or splits.
        numbers = sorted(set(every[every[:, 2] > 0][:, 0].tolist()))
        tokens = keys = pairs = pages = 0
        reach = a["REACH"]
        for _, length, context, _ in parts[numbers].tolist():
            tokens += length
            places = np.arange(context, context + length)
            if reach < 0:  # chunks
                first = places // -reach * -reach
            else:
                first = np.maximum(places + 1 - reach, 0) if reach else 0 * places
            pairs += int((places + 1 - first).sum())
            whole = context + length - int(first[0])
            keys += whole
            pages += -(-whole // a["PAGE"]) if "PAGE" in a else 0
        return cls(tokens, keys, pairs, every.nbytes + 16 * len(numbers) + 4 * pages)


def _kv_size(a: Arguments) -> int:
    """Bytes of a key and a value of all heads."""
    return (a["H"] // a["G"]) * (a["D"] + a["DV"]) * size_of(a["keys"])


def _attend_tiles(a: Arguments) -> Work:
    seen, h, size = _Attended.of(a, "tiles"), a["H"], size_of(a["q"])
    moved = seen.tokens * h * ((a["D"] + a["DV"]) * size + (4 if a["LSE"] else 0))
    return Work(
        moved + seen.keys * _kv_size(a) + seen.list_bytes,
        2 * seen.pairs * h * (a["D"] + a["DV"]),
    )


def _attend_splits(a: Arguments) -> Work:
    seen, h = _Attended.of(a, "splits"), a["H"]
    counts = _numbers(a["splits"])[:, 2]
    whole, splits = int((counts == 1).sum()), int((counts > 1).sum())
    moved = seen.tokens * h * a["D"] * size_of(a["q"]) + 4 * splits * h * (a["DV"] + 2)
    moved += whole * h * (a["DV"] * size_of(a["out"]) + (4 if a["LSE"] else 0))
    return Work(
        moved + seen.keys * _kv_size(a) + seen.list_bytes,
        2 * seen.pairs * h * (a["D"] + a["DV"]),
    )


def _reduce_splits(a: Arguments) -> Work:
    decodes = _numbers(a["decodes"])
    several = decodes[decodes[:, 2] > 1]
    tokens, splits = len(several), int(several[:, 2].sum())
    read = 4 * splits * a["H"] * (a["DV"] + 2)
    written = tokens * a["H"] * (a["DV"] * size_of(a["out"]) + (4 if a["LSE"] else 0))
    return Work(read + written + decodes.nbytes + 16 * tokens)


def _query_gradients(a: Arguments) -> Work:
    seen, h, size = _Attended.of(a, "tiles"), a["H"], size_of(a["q"])
    moved = seen.tokens * h * ((2 * a["D"] + a["DV"]) * size + 8)
    # Scores and dq, and the product with values.
    flops = 2 * seen.pairs * h * (2 * a["D"] + a["DV"])
    return Work(moved + seen.keys * _kv_size(a) + seen.list_bytes, flops)


def _key_gradients(a: Arguments) -> Work:
    seen, h, size = _Attended.of(a, "key_blocks"), a["H"], size_of(a["q"])
    heads = h // a["G"]
    read = seen.tokens * h * ((a["D"] + a["DV"]) * size + 8) + seen.keys * _kv_size(a)
    written = seen.tokens * heads * (a["D"] + a["DV"]) * size
    if a["PAGED"]:  # the pass's sums, read and written in fp32
        written += 2 * 4 * seen.keys * heads * (a["D"] + a["DV"])
    flops = 4 * seen.pairs * h * (a["D"] + a["DV"])
    return Work(read + written + seen.list_bytes, flops)


def _delta_rows(a: Arguments) -> Work:
    return Work(a["count"] * (2 * a["DV"] * size_of(a["dout"]) + 4))


def _loss_rows(a: Arguments) -> Work:
    tokens = len(a["loss"])
    moved = 2 if a["TRAINS"] else 1
    return Work(tokens * (moved * a["V"] * size_of(a["z"]) + 8 + 4 * moved))


def _greedy_rows(a: Arguments) -> Work:
    return Work(len(a["tokens"]) * (a["V"] * size_of(a["logits"]) + 8))


FORMULAS: Mapping[str, Callable[[Arguments], Work]] = {
    "shrink_kernel": _shrink,
    "expand_kernel": _expand,
    "expand_tokens_kernel": _expand,
    "outer_kernel": _outer,
    "attend_tiles": _attend_tiles,
    "attend_splits": _attend_splits,
    "reduce_splits": _reduce_splits,
    "query_gradients": _query_gradients,
    "key_gradients": _key_gradients,
    "delta_rows": _delta_rows,
    "loss_rows": _loss_rows,
    "greedy_rows": _greedy_rows,
}
"""The work of each template kernel, by its arguments."""


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
