"""Storages: memory that a value shares with its views.

A value's *layout* is the stride of each of its feature dims in its storage. A reshape is a view
where the layout allows it (torch's computeStride), else a copy, so that expanded heads and slices
of fused projections behave as in eager PyTorch. The token dim is never regrouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import sympy

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.types import CONTEXT, TensorType, tokens_at

SEQUENCES = sympy.Symbol("B", integer=True, positive=True)
"""Sequences of a batch; each has S tokens, `pcg.ir.types.CONTEXT`."""

TOKENS_OF_BATCH = SEQUENCES * CONTEXT


@dataclass(frozen=True)
class Storage:
    """Memory that one or several values share.

    Attributes:
        name: the value that it was allocated for.
        op: the operator that allocated it; "input" or "parameter" for those.
    """

    name: str
    op: str
    type: TensorType

    @property
    def is_parameter(self) -> bool:
        return self.op == "parameter"

    def size_bytes(self, tokens: sympy.Expr) -> sympy.Expr:
        row_bytes = self.type.row_bytes
        if not self.type.is_token_wise:
            return sympy.Integer(row_bytes)
        return row_bytes * tokens_at(self.type.shape[0], tokens)


class Storages:
    """The storage of each value of a graph; `add` takes the graph's nodes in order."""

    def __init__(self, graph: Graph) -> None:
        self._types = dict(graph.types)
        self._storages: dict[str, Storage] = {}
        self._layouts: dict[str, tuple[int, ...]] = {}
        for value in graph.inputs:
            self.make(value.name, "input", value.type)
        for parameter in graph.parameters:
            self.make(parameter.name, "parameter", parameter.type)

    @classmethod
    def of(cls, graph: Graph) -> Storages:
        storages = cls(graph)
        for node in graph.nodes:
            storages.add(node)
        return storages

    def __getitem__(self, name: str) -> Storage:
        return self._storages[name]

    def make(self, name: str, op: str, type_: TensorType) -> Storage:
        self._storages[name] = storage = Storage(name, op, type_)
        self._layouts[name] = _contiguous(type_.features)
        return storage

    def add(self, node: Node) -> None:
        layout = self._view_layout(node) if operator(node.op).is_view else None
        if layout is None:
            for value in node.outputs:
                self.make(value.name, node.op, value.type)
            return
        self._storages[node.name] = self._storages[node.inputs[0]]
        self._layouts[node.name] = layout

    def _view_layout(self, node: Node) -> tuple[int, ...] | None:
        """Return the layout of a view's output; None if it must be a copy."""
        source = self._types[node.inputs[0]]
        old, new = source.features, node.output.type.features
        layout = self._layouts[node.inputs[0]]
        if node.op == "reshape":
            return _regrouped(old, layout, new)
        if node.op == "permute":
            lead = int(source.is_token_wise)
            dims = cast("tuple[int, ...]", node.attribute("dims"))[lead:]
            return tuple(layout[dim - lead] for dim in dims)
        if node.op == "expand":
            pairs = zip(old, new, layout, strict=True)
            return tuple(stride if a == b else 0 for a, b, stride in pairs)
        if node.op == "slice":
            dim = cast("int", node.attribute("dim"))
            step = cast("int", node.get("step", 1))
            last = len(layout) + dim
            return tuple(stride * (step if i == last else 1) for i, stride in enumerate(layout))
        return _contiguous(new)


@lru_cache(maxsize=16384)
def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(sizes)
    for i in reversed(range(len(sizes) - 1)):
        strides[i] = strides[i + 1] * sizes[i + 1]
    return tuple(strides)


def _regrouped(
    old: Sequence[int], layout: Sequence[int], new: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the strides of a tensor viewed with other sizes; None if no strides express the view.

    Source: at::detail::computeStride of ATen/TensorUtils.cpp.
    """
    if not old or not new:
        return (1,) * len(new)
    strides = [1] * len(new)
    target = len(new) - 1
    base, have, want = layout[-1], 1, 1
    for dim in reversed(range(len(old))):
        have *= old[dim]
        if dim == 0 or (old[dim - 1] != 1 and layout[dim - 1] != have * base):
            while target >= 0 and (want < have or new[target] == 1):
                strides[target] = want * base
                want *= new[target]
                target -= 1
            if want != have:
                return None
            if dim > 0:
                base, have, want = layout[dim - 1], 1, 1
    return tuple(strides)
