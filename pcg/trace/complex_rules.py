"""Rules of complex numbers, which rotate queries and keys in some models, as pairs of real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from pcg.trace.elementwise_rules import broadcast
from pcg.trace.flat_graph import FlatGraph, FlatValue, refusal, traced_shape


@dataclass(frozen=True)
class ComplexValue:
    """A complex tensor: its real and its imaginary part."""

    real: FlatValue
    imaginary: FlatValue


def polar(flat: FlatGraph, node: Node) -> ComplexValue:
    length, angle = (flat.tensor(a) for a in node.args[:2])
    parts = (angle.named(flat.add(op, angle.name)) for op in ("cos", "sin"))
    return ComplexValue(*(broadcast(flat, node, "mul", length, part) for part in parts))


def view_as_complex(flat: FlatGraph, node: Node) -> ComplexValue:
    x = flat.tensor(node.args[0])
    if x.tags[-1] != "d":
        raise refusal(node, "its real and imaginary parts are not a feature dim")
    sliced = (flat.add("slice", x.name, dim=-1, start=i, stop=i + 1) for i in range(2))
    return ComplexValue(*(flat.reshaped(n, x.tags[:-1], traced_shape(node)) for n in sliced))


def view_as_real(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.value(node.args[0])
    names = (flat.reshape(part.name, (*part.features, 1)) for part in (x.real, x.imaginary))
    return FlatValue(flat.add("concat", *names, dim=-1), x.real.tags + "d", traced_shape(node))


def multiply(flat: FlatGraph, node: Node) -> ComplexValue:
    """(a + bi)(c + di) = (ac - bd) + (ad + bc)i; a factor may be real."""
    x, y = (flat.value(a) for a in node.args[:2])
    if not isinstance(x, ComplexValue):
        x, y = y, x
    parts = x.real, x.imaginary

    def times(a: FlatValue, b: Any) -> FlatValue:
        if isinstance(b, FlatValue):
            return broadcast(flat, node, "mul", a, b)
        return a.named(flat.add("mul", a.name, scalar=float(b)))

    if not isinstance(y, ComplexValue):
        return ComplexValue(*(times(part, y) for part in parts))
    (a, b), c, d = parts, y.real, y.imaginary
    real = broadcast(flat, node, "sub", times(a, c), times(b, d))
    return ComplexValue(real, broadcast(flat, node, "add", times(a, d), times(b, c)))


def by_parts(rule: Callable[[FlatGraph, Node], Any], flat: FlatGraph, node: Node) -> ComplexValue:
    """Apply the rule of a view to both parts."""
    x = node.args[0]
    assert isinstance(x, Node)
    whole = flat.values[x]
    results = []
    for part in (whole.real, whole.imaginary):
        flat.values[x] = part
        results.append(rule(flat, node))
    flat.values[x] = whole
    return ComplexValue(*results)


VIEWS = ("expand", "reshape", "select", "slice", "squeeze", "transpose", "unsqueeze", "view")
CASTS = ("_to_copy", "alias", "clone", "contiguous", "detach", "to")
"""Operators that keep a complex tensor as it is: no model rounds it."""
COMPLEX_RULES: Mapping[str, Callable[[FlatGraph, Node], Any]] = {
    "aten.mul": multiply,
    "aten.view_as_real": view_as_real,
    **{f"aten.{name}": lambda flat, node: flat.value(node.args[0]) for name in CASTS},
}
"""Rules of operators on complex tensors, besides views."""
