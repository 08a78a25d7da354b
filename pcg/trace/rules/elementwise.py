"""Rules of operators on elements, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from pcg.trace.flat_graph import FlatGraph, FlatValue, argument, dtype_of, refusal

Rule = Callable[[FlatGraph, Node], Any]


def pointwise(flat: FlatGraph, node: Node) -> FlatValue:
    """Carry an operator outside the table that PyTorch itself tags pointwise."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        raise refusal(
            node, "it is not in the operator table, and PyTorch does not tag it pointwise"
        )
    tensors = [a for a in node.args if isinstance(a, Node)]
    if node.kwargs or len(tensors) != 1:
        raise refusal(node, "a generic pointwise operator takes one tensor and constants")
    x = flat.tensor(tensors[0])
    arguments = ", ".join("{0}" if a is tensors[0] else repr(a) for a in node.args)
    dtype = dtype_of(node.meta["val"])
    target = _out_of_place(node)
    return x.named(flat.add("pointwise", x.name, target=target, arguments=arguments, dtype=dtype))


def _out_of_place(node: Node) -> str:
    """The operator's name; of one that writes its operand, the one that gives a new tensor."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_"):
        return str(target)
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if target._overloadname not in getattr(packet, "overloads", list)():
        raise refusal(node, "it writes in place, and PyTorch has no such operator that does not")
    return f"aten.{name.removesuffix('_')}.{target._overloadname}"


def unary(op: str, **places: int) -> Rule:
    """A rule for f(x, constants): `places` has the place of each attribute's argument."""

    def rule(flat: FlatGraph, node: Node) -> FlatValue:
        x = flat.tensor(node.args[0])
        attributes = {key: argument(node, place) for key, place in places.items()}
        attributes = {key: value for key, value in attributes.items() if value is not None}
        return x.named(flat.add(op, x.name, **attributes))

    return rule


def power(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    return x.named(flat.add("pow", x.name, exponent=float(argument(node, 1))))


def gelu(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    return x.named(flat.add("gelu", x.name, approximate=node.kwargs.get("approximate", "none")))


def identity(flat: FlatGraph, node: Node) -> FlatValue:
    return flat.tensor(node.args[0])


def detach(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    if flat.carries_gradient(x.name):
        raise refusal(node, "it cuts the gradient, which pcg's programs would not")
    return x


def dropout(flat: FlatGraph, node: Node) -> FlatValue:
    if argument(node, 2) and node.args[1]:
        raise refusal(node, "active dropout in the base model")
    return flat.tensor(node.args[0])


def cast(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    return x.named(flat.cast(x.name, dtype_of(node.meta["val"])))


def binary(op: str, reverse: bool = False) -> Rule:
    """A rule for x ∘ y with broadcasting, where y may be a number."""

    def rule(flat: FlatGraph, node: Node) -> FlatValue:
        left, right = (_as_number(flat, flat.value(a)) for a in node.args[:2])
        if left is None or right is None:
            raise refusal(node, "a number in it changes with the number of tokens")
        if reverse:
            left, right = right, left
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            raise refusal(node, "alpha is not 1")
        if not isinstance(right, FlatValue):
            return left.named(flat.add(op, left.name, scalar=right))  # type: ignore[no-any-return]
        if not isinstance(left, FlatValue):
            attributes = {"scalar": left}
            if op in ("sub", "div"):
                attributes["reversed"] = True
            return right.named(flat.add(op, right.name, **attributes))
        return broadcast(flat, node, op, left, right)

    return rule


def _as_number(flat: FlatGraph, x: Any) -> Any:
    """A constant of no dims as a Python number."""
    data = flat.data(x) if isinstance(x, FlatValue) and x.tags == "" else None
    return x if data is None else data.item()


def broadcast(flat: FlatGraph, node: Node, op: str, left: FlatValue, right: FlatValue) -> FlatValue:
    """x ∘ y, each reshaped so that flat broadcasting is what the trace meant."""
    rank = max(len(left.tags), len(right.tags))
    pads = [" " * (rank - len(x.tags)) + x.tags for x in (left, right)]
    tags = "".join(
        next((tag for tag in "tb" if tag in pair), "d") for pair in zip(*pads, strict=True)
    )
    shape = tuple(
        None if tag == "t" else max(_size(left, i - rank), _size(right, i - rank))
        for i, tag in enumerate(tags)
    )
    tags = "".join(
        "d" if tag == "b" and size != 1 else tag for tag, size in zip(tags, shape, strict=True)
    )
    if tags.count("t") > 1:
        raise refusal(node, "it pairs tokens with tokens")
    names = []
    for x in (left, right):
        features = [_size(x, i - rank) for i, tag in enumerate(tags) if tag == "d"]
        if "t" not in x.tags:
            while len(features) > 1 and features[0] == 1:
                features.pop(0)
        names.append(flat.reshape(x.name, tuple(features)))
    return FlatValue(flat.add(op, *names), tags, shape)


def _size(x: FlatValue, dim: int) -> int:
    """Size of a dim counted from the end; 1 for a missing dim and for tokens."""
    if -dim > len(x.shape):
        return 1
    return x.shape[dim] or 1
