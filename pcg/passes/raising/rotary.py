"""Rules that raise rotary embedding: half or interleaved, on a part of the head."""

from __future__ import annotations

from typing import cast

from pcg.ir.graph import Node
from pcg.ir.types import TOKENS
from pcg.passes.raising.rewriter import NewName, Rewriter, orders


def rope(rewriter: Rewriter, node: Node) -> NewName | None:
    """X · cos + rotate(x) · sin over the whole of x."""
    if node.op != "add" or len(node.output.type.dims) != 3:
        return None
    for plain, turned in orders(node):
        for rotated, sin in orders(rewriter.producer(turned, "mul")):
            found = _rotation(rewriter, rotated)
            if found is None:
                continue
            style, x = found
            for same, cos in orders(rewriter.producer(plain, "mul")):
                if same != x or not _keeps_dtype(rewriter, node, x):
                    continue
                tables = [_table(rewriter, table) for table in (cos, sin)]
                size = int(node.output.type.shape[-1])
                return rewriter.add("rope", x, *tables, style=style, rotary_dim=size)
    return None


def _keeps_dtype(rewriter: Rewriter, node: Node, x: str) -> bool:
    """Return whether a node has the dtype of x, or is rounded to it by all that read it."""
    dtype = rewriter.graph.types[x].dtype
    readers = rewriter.graph.consumers.get(node.name, ())
    return node.output.type.dtype == dtype or (
        node.name not in rewriter.graph.outputs
        and all(reader.op == "cast" and reader.get("dtype") == dtype for reader in readers)
    )


def _rotation(rewriter: Rewriter, name: str) -> tuple[str, str] | None:
    """Style and x, where the value is rotate(x)."""
    pairs = rewriter.producer(name, "reshape")
    joined = rewriter.producer(pairs.inputs[0] if pairs else name, "concat")
    if joined is None:
        return None
    size = int(rewriter.graph.types[name].shape[-1])
    if pairs:
        parts = [rewriter.through(part, "reshape") for part in joined.inputs]
        style, turned = "interleaved", [(True, 1, size, 2), (False, 0, size, 2)]
    else:
        parts = [*joined.inputs]
        style, turned = "half", [(True, size // 2, size, 1), (False, 0, size // 2, 1)]
    slices = [_slice_of(rewriter, part) for part in parts]
    sources = {found[0] for found in slices if found}
    if len(sources) == 1 and [found and found[1:] for found in slices] == turned:
        return style, sources.pop()
    return None


def _slice_of(rewriter: Rewriter, name: str) -> tuple[str, bool, int, int, int] | None:
    """(x, negated, start, stop, step), where the value is ± x[..., start:stop:step]."""
    negative = rewriter.producer(name, "neg")
    node = rewriter.producer(negative.inputs[0] if negative else name, "slice")
    if node is None or node.get("dim") != -1:
        return None
    start, stop = (cast("int", node.attribute(key)) for key in ("start", "stop"))
    step = cast("int", node.get("step", 1))
    return node.inputs[0], negative is not None, start, stop, step


def _table(rewriter: Rewriter, name: str) -> str:
    """A [T, 1, n] table of cosines as [T, n]."""
    view = rewriter.producer(name, "reshape")
    shape = rewriter.graph.types[name].shape
    if view and rewriter.graph.types[view.inputs[0]].shape == (TOKENS, shape[-1]):
        return view.inputs[0]
    return rewriter.add("reshape", name, shape=(-1, int(shape[-1])))


def partial_rope(rewriter: Rewriter, node: Node) -> NewName | None:
    """The first dims of each head turned, the rest as they are."""
    if node.op != "concat" or len(node.inputs) != 2 or node.get("dim") != -1:
        return None
    rope = rewriter.producer(node.inputs[0], "rope")
    rest = _slice_of(rewriter, node.inputs[1])
    first = rope and _slice_of(rewriter, rope.inputs[0])
    if not (rope and rest and first) or rest[0] != first[0]:
        return None
    n, size = int(rope.output.type.shape[-1]), int(node.output.type.shape[-1])
    if first[1:] != (False, 0, n, 1) or rest[1:] != (False, n, size, 1):
        return None
    return rewriter.add(
        "rope", first[0], *rope.inputs[1:], scope=node.scope, **dict(rope.attributes)
    )
