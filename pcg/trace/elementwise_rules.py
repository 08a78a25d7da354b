"""Rules of operators on elements, with broadcasting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from operator import add
from typing import Any

import torch
from torch.fx import Node

from pcg.trace.flat_graph import (
    FlatGraph,
    FlatValue,
    argument,
    dtype_of,
    refusal,
    traced_shape,
)

Rule = Callable[[FlatGraph, Node], Any]


_UNTAGGED = (
    "fill",
    "floor_divide",
    "log_sigmoid",
    "masked_fill",
    "ones_like",
    "where",
    "zeros_like",
)
"""Pointwise operators that PyTorch does not tag in all their overloads."""
_ROWWISE = (
    "amax", "amin", "argmax", "argmin", "cumprod", "cumsum", "flip", "glu", "linalg_vector_norm",
    "_log_softmax", "log_softmax", "logsumexp", "prod", "roll", "scatter", "std", "var",
)  # fmt: skip
"""Operators over the dims in their argument `dim` or `dims`."""


def carried(flat: FlatGraph, node: Node) -> FlatValue:
    """Carry an operator outside the table if a token's result depends only on that token."""
    target = node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
    name = name.removeprefix("aten::").removesuffix("_")
    operands = [*node.args, *node.kwargs.values()]
    tensors = [a for a in operands if isinstance(flat.value(a), FlatValue)]
    if set(node.all_input_nodes) != set(tensors) or not 1 <= len(tensors) <= 3:
        raise refusal(
            node,
            "it is not in the operator table, and only operators of 1 to 3 tensors are carried",
        )
    values = [flat.tensor(a) for a in tensors]
    if name in _ROWWISE and all(x.tags == values[0].tags for x in values[1:]):
        return _rowwise(flat, node, values)
    if torch.Tag.pointwise not in getattr(target, "tags", ()) and name not in _UNTAGGED:
        raise refusal(
            node, "it is not in the operator table, and PyTorch does not tag it pointwise"
        )
    names, lies = aligned(flat, node, *values)
    # A tensor without dims does not widen the others' dtype.
    names = [name if x.tags else x.name for name, x in zip(names, values, strict=True)]
    places = itertools.count()
    sources = [f"{{{next(places)}}}" if a in tensors else _literal(a) for a in operands]
    keys = [*("" for _ in node.args), *(f"{key}=" for key in node.kwargs)]
    arguments = ", ".join(map(add, keys, sources))
    return lies.named(_carry(flat, node, "pointwise", names, arguments))


def _rowwise(flat: FlatGraph, node: Node, tensors: Sequence[FlatValue]) -> FlatValue:
    x, schema = tensors[0], node.target._schema  # type: ignore[union-attr]
    place, key, default = next(
        ((i, a.name, a.default_value) for i, a in enumerate(schema.arguments) if "dim" in a.name),
        (0, "", None),
    )
    dims_value = argument(node, place, default, key) if key else None
    dims: list[Any] = list(dims_value) if isinstance(dims_value, list | tuple) else [dims_value]
    if not dims or any(dim is None or x.tags[dim] != "d" for dim in dims):
        raise refusal(node, "it runs over all dims, or over tokens")
    flat_dims = [x.feature_dim(dim) for dim in dims]
    written = repr(flat_dims if isinstance(dims_value, list | tuple) else flat_dims[0])
    numbers = itertools.count()
    sources = [f"{{{next(numbers)}}}" if isinstance(a, Node) else _literal(a) for a in node.args]
    if len(node.args) > place:
        sources[place] = written
    by_name = {name: _literal(value) for name, value in node.kwargs.items()}
    if len(node.args) <= place:
        by_name[key] = written
    sources += [f"{name}={value}" for name, value in by_name.items()]
    shape, reduced = traced_shape(node), {dim % len(x.tags) for dim in dims}
    tags = x.tags
    if len(shape) < len(tags):
        tags = "".join(tag for i, tag in enumerate(tags) if i not in reduced)
    lies = FlatValue("", tags, shape)
    arguments = ", ".join(sources)
    return lies.named(
        _carry(
            flat,
            node,
            "rowwise",
            [tensor.name for tensor in tensors],
            arguments,
            reads=x.features,
            features=lies.features,
        )
    )


def _carry(
    flat: FlatGraph, node: Node, op: str, inputs: Sequence[str], arguments: str, **attributes: Any
) -> str:
    attributes |= {"target": _out_of_place(node), "dtype": dtype_of(node.meta["val"])}
    return flat.add(op, *inputs, arguments=arguments, **attributes)


def _literal(value: Any) -> str:
    is_written = isinstance(value, float) and not math.isfinite(value)
    return f"float('{value}')" if is_written else repr(value)


def _out_of_place(node: Node) -> str:
    """Return the operator's name; for an in-place operator, that of its out-of-place variant."""
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
    """Return a rule for f(x, constants): `places` has the index of each attribute's argument."""

    def rule(flat: FlatGraph, node: Node) -> FlatValue:
        if len(node.all_input_nodes) > 1:
            return carried(flat, node)
        x = flat.tensor(node.args[0])
        attributes = {key: argument(node, place) for key, place in places.items()}
        attributes = {key: value for key, value in attributes.items() if value is not None}
        return x.named(flat.add(op, x.name, **attributes))

    return rule


def power(flat: FlatGraph, node: Node) -> FlatValue:
    if not isinstance(node.args[1], int | float):
        return carried(flat, node)
    x = flat.tensor(node.args[0])
    return x.named(flat.add("pow", x.name, exponent=float(argument(node, 1))))


def gelu(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    return x.named(flat.add("gelu", x.name, approximate=node.kwargs.get("approximate", "none")))


def identity(flat: FlatGraph, node: Node) -> FlatValue:
    return flat.tensor(node.args[0])


def detach(flat: FlatGraph, node: Node) -> FlatValue:
    return detached(flat, flat.tensor(node.args[0]))


def detached(flat: FlatGraph, x: FlatValue) -> FlatValue:
    return x.named(flat.add("detach", x.name)) if flat.carries_gradient(x.name) else x


def dropout(flat: FlatGraph, node: Node) -> FlatValue:
    if argument(node, 2) and node.args[1]:
        raise refusal(node, "active dropout in the base model")
    return flat.tensor(node.args[0])


def cast(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    return x.named(flat.cast(x.name, dtype_of(node.meta["val"])))


def binary(op: str, reverse: bool = False) -> Rule:
    """Return a rule for x ∘ y with broadcasting; y may be a number."""

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
    data = flat.data(x) if isinstance(x, FlatValue) and x.tags == "" else None
    return x if data is None else data.item()


def broadcast(flat: FlatGraph, node: Node, op: str, left: FlatValue, right: FlatValue) -> FlatValue:
    """Add x ∘ y with broadcasting."""
    names, lies = aligned(flat, node, left, right)
    return lies.named(flat.add(op, *names))


def aligned(flat: FlatGraph, node: Node, *values: FlatValue) -> tuple[list[str], FlatValue]:
    """Reshape values so that flat broadcasting equals the traced; the result has no name."""
    rank = max(len(x.tags) for x in values)
    pads = [" " * (rank - len(x.tags)) + x.tags for x in values]
    tags = "".join(
        next((tag for tag in "tb" if tag in dims), "d") for dims in zip(*pads, strict=True)
    )
    shape = tuple(
        None if tag == "t" else max(_size(x, i - rank) for x in values)
        for i, tag in enumerate(tags)
    )
    tags = "".join(
        "d" if tag == "b" and size != 1 else tag for tag, size in zip(tags, shape, strict=True)
    )
    rows = {x.rows for x in values if "t" in x.tags} or {1}
    if tags.count("t") > 1 or len(rows) > 1:
        raise refusal(node, "it pairs tokens with tokens")
    lies = FlatValue("", tags, shape, rows.pop())
    names = []
    for x in values:
        features = [_size(x, i - rank) for i, tag in enumerate(tags) if tag == "d"]
        if "t" in x.tags and x.rows > 1:
            features.insert(0, x.rows)
        if "t" not in x.tags:
            while len(features) > 1 and features[0] == 1:
                features.pop(0)
        names.append(flat.reshape(x.name, tuple(features)))
    return names, lies


def _size(x: FlatValue, dim: int) -> int:
    """Return the size of a dim counted from the end; 1 for a missing dim and for tokens."""
    if -dim > len(x.shape):
        return 1
    return x.shape[dim] or 1
