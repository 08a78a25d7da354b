"""Stacks: the weights of all slots at one attribute of a layer, padded to the largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from pcg.ir.graph import Graph, Parameter
from pcg.ir.program import python_name
from pcg.parallel.ranks import Ranks
from pcg.runtime.adapter_segments import JoinedLora, SegmentedWeight, Segments
from pcg.runtime.adapters import Adapter
from pcg.runtime.pieces import open_dims, parted_dim, piece_of_stack
from pcg.runtime.served_weights import ServedWeights


@dataclass(frozen=True)
class Sites:
    """What a graph reads of adapters.

    Attributes:
        joined: for each lora_linear operator, the attribute that holds all of it, and for each of
            its outputs A, B and the output's size.
        single: attribute of every other adapter parameter.
    """

    joined: tuple[tuple[str, tuple[_Lora, ...]], ...]
    single: tuple[tuple[str, Parameter], ...]

    @classmethod
    def of(cls, graph: Graph) -> Sites:
        parameters = graph.parameters_by_name
        joined, names = [], set[str]()
        for node in graph.nodes:
            if node.op == "lora_linear":
                count = len(node.outputs)
                read = node.inputs[-2 * count :]
                names.update(read)
                modules = tuple(
                    (parameters[a], parameters[b], value.type.features[0])
                    for a, b, value in zip(read[:count], read[count:], node.outputs, strict=True)
                )
                joined.append((python_name(read[0]), modules))
        single = tuple(
            (python_name(p.name), p)
            for p in graph.parameters
            if p.role == "adapter" and p.name not in names
        )
        return cls(tuple(joined), single)

    def stacks(
        self, adapters: Sequence[Adapter | None], layer: int, cutter: Cutter
    ) -> dict[str, Stack]:
        """What a layer's attributes are, but for the segments."""
        stacks: dict[str, Stack] = {}
        for name, parameter in self.single:
            stacks[name] = _SingleStack(adapters, parameter, layer, cutter)
        for name, modules in self.joined:
            stacks[name] = _JoinedStack(adapters, modules, layer, cutter)
        return stacks


_Lora: TypeAlias = tuple[Parameter, Parameter, int]
"""A and B of a module, and its outputs."""


@dataclass(frozen=True)
class Cutter:
    """Stacks adapters' weights, and cuts what this rank holds out of the stacks."""

    weights: ServedWeights
    device: torch.device
    ranks: Ranks

    def stack(
        self,
        adapters: Sequence[Adapter | None],
        parameter: Parameter,
        layer: int,
        least: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor | None, list[bool]]:
        """[adapters, …], and which adapters have one; None where none has.

        Args:
            adapters: in order; None for a slot that nobody has.
            parameter: of the program.
            layer: of the model.
            least: rows and columns of the whole weights, at least.
        """
        path = parameter.source.format(layer=layer)
        parts = [None if one is None else self.weights.part(one, path) for one in adapters]
        present = [part is not None for part in parts]
        multiples = [1, 1]
        for dim in open_dims(parameter):
            multiples[dim] = self.ranks.size
        stack = _padded(parts, _absent(parameter.source), multiples, least)
        if stack is None:
            return None, present
        piece = piece_of_stack(stack, parameter, self.ranks)
        # A piece by itself, so that the stack of whole weights goes.
        return (piece.contiguous() if piece is not stack else stack).to(self.device), present

    def whole_of(self, stack: Tensor | None, parameter: Parameter) -> tuple[int, int]:
        """Rows and columns of whole weights, of dims that are as large as adapters have them.

        Args:
            stack: of pieces; None where there is none yet.
            parameter: whose pieces they are.
        """
        least = [0, 0]
        if stack is not None:
            for dim in open_dims(parameter):
                is_parted = dim == parted_dim(parameter)
                least[dim] = stack.shape[dim] * (self.ranks.size if is_parted else 1)
        return least[0], least[1]


class Stack(Protocol):
    """The weights of all slots at one attribute of a layer."""

    def put(self, slot: int, adapter: Adapter, layer: int, cutter: Cutter) -> bool:
        """Write an adapter's into a slot; False where there is no room for it."""

    def bound(self, slots: slice, segments: Segments) -> object:
        """What the program reads; None where no adapter has any."""


class _SingleStack:
    """Of one parameter."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        parameter: Parameter,
        layer: int,
        cutter: Cutter,
    ) -> None:
        self._parameter = parameter
        self._stack, self._present = cutter.stack(adapters, parameter, layer)
        self._turned = parameter.source.endswith((".lora_A", "_adapter_down"))

    def put(self, slot: int, adapter: Adapter, layer: int, cutter: Cutter) -> bool:
        least = cutter.whole_of(self._stack, self._parameter)
        part, (is_there,) = cutter.stack([adapter], self._parameter, layer, least)
        fits = _write(self._stack, slot, part, _absent(self._parameter.source))
        if fits:
            self._present[slot] = is_there
        return fits

    def bound(self, slots: slice, segments: Segments) -> SegmentedWeight | None:
        if self._stack is None or not any(self._present[slots]):
            return None
        weight = self._stack[slots]
        weight = weight.transpose(1, 2) if self._turned else weight
        return SegmentedWeight(weight, segments, tuple(self._present[slots]))


JOINED_BYTES = 2**20
"""Up to about here a joined B, zeros included, is read whole from the cache; beyond, its parts."""


class _JoinedStack:
    """The LoRA of several modules of one input: A one below the other, B joined or each its own."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        modules: Sequence[_Lora],
        layer: int,
        cutter: Cutter,
    ) -> None:
        self._modules = modules
        parts = [
            (cutter.stack(adapters, a, layer), cutter.stack(adapters, b, layer))
            for a, b, _ in modules
        ]
        self._present = [
            any(found[slot] for (_, found), _ in parts) for slot in range(len(adapters))
        ]
        there = [a for (a, _), _ in parts if a is not None]
        self._a: Tensor | None = None
        if not there:
            return
        count, _, in_ = there[0].shape
        a = [there[0].new_zeros(count, 0, in_) if x is None else x for (x, _), _ in parts]
        b = [
            there[0].new_zeros(count, 0, out) if x is None else x
            for (_, (x, _)), (_, _, out) in zip(parts, modules, strict=True)
        ]
        self._ranks = [part.shape[1] for part in a]
        self._outs = [out for _, _, out in modules]
        self._a = torch.cat(a, 1)
        size = count * sum(self._ranks) * sum(self._outs) * b[0].element_size()
        self._is_joined = len(modules) == 1 or size <= JOINED_BYTES
        if self._is_joined:
            whole = b[0].new_zeros(count, sum(self._ranks), sum(self._outs))
            for view, part in zip(self._blocks(whole), b, strict=True):
                view.copy_(part)
            self._b = [whole]
        else:
            self._b = b

    def _blocks(self, whole: Tensor) -> list[Tensor]:
        """Each module's rows and columns of the joined B."""
        blocks = []
        row = column = 0
        for rank, out in zip(self._ranks, self._outs, strict=True):
            blocks.append(whole[:, row : row + rank, column : column + out])
            row, column = row + rank, column + out
        return blocks

    def put(self, slot: int, adapter: Adapter, layer: int, cutter: Cutter) -> bool:
        is_there = False
        a = None if self._a is None else self._a.split(self._ranks, 1)
        b = [] if a is None else self._blocks(self._b[0]) if self._is_joined else self._b
        for index, (of_a, of_b, _) in enumerate(self._modules):
            own_a = None if a is None else a[index]
            own_b = None if a is None else b[index]
            for stack, parameter in ((own_a, of_a), (own_b, of_b)):
                least = cutter.whole_of(stack, parameter)
                part, (has,) = cutter.stack([adapter], parameter, layer, least)
                is_there |= has
                if not _write(stack, slot, part, 0.0):
                    return False
        self._present[slot] = is_there
        return True

    def bound(self, slots: slice, segments: Segments) -> JoinedLora | None:
        if self._a is None or not any(self._present[slots]):
            return None
        b = [part[slots] for part in self._b]
        joined, rest = (b[0], ()) if self._is_joined else (None, tuple(b))
        return JoinedLora(self._a[slots].transpose(1, 2), rest, joined, self._ranks, segments)


def _write(stack: Tensor | None, slot: int, part: Tensor | None, absent: float) -> bool:
    """Write an adapter's part, or what stands for none, into a slot; False: there is no room."""
    if stack is None:
        return part is None
    if part is None:
        stack[slot].fill_(absent)
        return True
    if part.shape[1:] != stack.shape[1:]:
        return False
    stack[slot].copy_(part[0])
    return True


SCALES = ("ia3_l", "ia3_l_in", "lora_factor")
"""Vectors that a program multiplies by; without an adapter's own, by one."""


def _absent(source: str) -> float:
    """What stands for the weight of an adapter without one, and changes nothing."""
    return 1.0 if source.endswith(SCALES) else 0.0


def _padded(
    parts: Sequence[Tensor | None],
    absent: float,
    multiples: Sequence[int],
    least: Sequence[int],
) -> Tensor | None:
    """The parts stacked, `absent` for missing rows, columns, parts; None where all are missing.

    There are multiples of these numbers of rows and columns, and at least so many.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    rows, columns = (
        -(-max(least[i], *(part.shape[i] for part in present)) // multiple) * multiple
        for i, multiple in enumerate(multiples)
    )
    stack = present[0].new_full((len(parts), rows, columns), absent)
    for i, part in enumerate(parts):
        if part is not None:
            stack[i, : part.shape[0], : part.shape[1]] = part
    return stack
