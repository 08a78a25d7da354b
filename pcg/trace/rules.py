"""Import rules of the operators in exported models, by name without an overload.

A rule adds the operator's nodes to the flat graph and returns the value of the exported node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from math import prod

import torch
from torch.fx import Node

from pcg.ir.graph import Value
from pcg.ir.program.program import IN_OUT, STACKED
from pcg.trace import elementwise_rules as elementwise
from pcg.trace.complex_rules import polar, view_as_complex
from pcg.trace.elementwise_rules import Rule, binary, broadcast, unary
from pcg.trace.flat_graph import (
    FlatGraph,
    FlatValue,
    Unwritten,
    argument,
    dtype_of,
    refusal,
    traced_shape,
)

# -------------------------------------------------------------------------------------- shape rules


def reshape(flat: FlatGraph, node: Node) -> FlatValue:
    """Regroup feature dims on either side of the token dim: view, reshape, flatten, squeeze."""
    x, shape = flat.tensor(node.args[0]), traced_shape(node)
    if "t" not in x.tags:
        return flat.reshaped(x.name, "d" * len(shape), shape)
    if None not in shape:
        raise refusal(node, "the token dim disappears")
    old, new = x.shape.index(None), shape.index(None)
    before = prod(s for s in x.shape[:old] if s)
    of_input = node.args[0].meta["val"].shape[old]  # type: ignore[union-attr]
    rows = x.rows * node.meta["val"].shape[new].node.expr / of_input.node.expr
    is_regrouped = rows != x.rows  # rows behind a token become its features, or back
    is_cut = before != prod(s for s in shape[:new] if s) or not rows.is_Integer
    if is_cut or (is_regrouped and before > 1):
        raise refusal(node, f"a view from {list(x.shape)} to {list(shape)} cuts across tokens")
    leads = ["d"] * new
    if (before == 1 and new) or (new > 1 and shape[0] == 1):
        leads[0] = "b"
    tags = "".join(leads) + "t" + "d" * (len(shape) - new - 1)
    return flat.reshaped(x.name, tags, shape, int(rows))


def _permuted(flat: FlatGraph, x: FlatValue, order: list[int]) -> FlatValue:
    tags = "".join(x.tags[i] for i in order)
    shape = tuple(x.shape[i] for i in order)
    features = [i for i in range(len(x.tags)) if x.tags[i] == "d"]
    moved = [i for i in order if x.tags[i] == "d"]
    name = x.name
    if features != moved:
        lead = 1 if "t" in x.tags else 0
        dims = (0,) * lead + tuple(features.index(i) + lead for i in moved)
        name = flat.add("permute", name, dims=dims)
    return FlatValue(name, tags, shape)


def transpose(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    order = list(range(len(x.tags)))
    a, b = argument(node, 1, 0), argument(node, 2, 1)
    if len(order) > 1:
        order[a], order[b] = order[b], order[a]
    return _permuted(flat, x, order)


def reverse(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    return _permuted(flat, x, list(reversed(range(len(x.tags)))))


def permute(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    return _permuted(flat, x, [dim % len(x.tags) for dim in argument(node, 1)])


def unsqueeze(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    dim = argument(node, 1) % (len(x.tags) + 1)
    tag = "b" if dim == 0 and x.tags[:1] == "t" else "d"
    tags = x.tags[:dim] + tag + x.tags[dim:]
    return flat.reshaped(x.name, tags, (*x.shape[:dim], 1, *x.shape[dim:]))


def expand(flat: FlatGraph, node: Node) -> FlatValue:
    return _expanded(flat, node, flat.tensor(node.args[0]))


def copy(flat: FlatGraph, node: Node) -> FlatValue:
    """Cast and broadcast a source to its destination."""
    x, source = flat.tensor(node.args[0], is_new=True), flat.tensor(node.args[1])
    if not x.name and not isinstance(x, Unwritten):  # an empty slice
        return x
    if ("t" in x.tags) != ("t" in source.tags):
        raise refusal(node, "it writes the same for all tokens")
    source = _expanded(flat, node, source)
    return source.named(flat.cast(source.name, dtype_of(node.meta["val"])))


def _expanded(flat: FlatGraph, node: Node, x: FlatValue) -> FlatValue:
    shape = traced_shape(node)
    if "t" not in x.tags:  # along tokens, broadcasting operators repeat it
        shape = tuple(1 if size is None else size for size in shape)
    added = len(shape) - len(x.shape)
    if added == 1 and x.tags[:1] == "t" and shape[0] == 1:
        return replace(x, tags=f"b{x.tags}", shape=(1, *x.shape))
    tags = "d" * added + x.tags
    if added and "t" in x.tags:
        raise refusal(node, "it adds dims before tokens")
    name = flat.reshape(x.name, (1,) * added + x.features) if added else x.name
    features = FlatValue(name, tags, shape).features
    if flat.builder.types[name].features != features:
        name = flat.add("expand", name, shape=(-1,) * ("t" in tags) + features)
    return FlatValue(name, tags, shape)


def broadcast_tensors(flat: FlatGraph, node: Node) -> list[FlatValue]:
    parts = [flat.tensor(part) for part in argument(node, 0)]
    if any(part.shape != parts[0].shape for part in parts):
        raise refusal(node, "its tensors have different shapes")
    return parts


def repeat(flat: FlatGraph, node: Node) -> FlatValue:
    x, repeats = flat.tensor(node.args[0]), argument(node, 1)
    added = len(repeats) - len(x.shape)
    if added and x.rows == 1 and all(r == 1 for r in repeats[added:]):
        lies = FlatValue("", "d" * added + x.tags, traced_shape(node))
        name = flat.reshape(x.name, (1,) * added + x.features)
        return lies.named(flat.add("expand", name, shape=(-1,) * ("t" in x.tags) + lies.features))
    if added:
        raise refusal(node, "it adds dims")
    tiled = [i for i, (r, s) in enumerate(zip(repeats, x.shape, strict=True)) if r != 1 and s != 1]
    if tiled:
        (dim, *others) = tiled
        if others or x.tags[dim] != "d" or any(r != 1 for r in repeats[:dim] + repeats[dim + 1 :]):
            raise refusal(node, "it tiles tokens, or several dims")
        name = flat.add("concat", *(x.name,) * int(repeats[dim]), dim=x.feature_dim(dim))
        return FlatValue(name, x.tags, traced_shape(node))
    return expand(flat, node)


def repeat_interleave(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    dim = x.feature_dim(int(argument(node, 2, name="dim")))
    name = flat.add("repeat_interleave", x.name, repeats=int(argument(node, 1)), dim=dim)
    return FlatValue(name, x.tags, traced_shape(node))


def concat(flat: FlatGraph, node: Node) -> FlatValue:
    parts = [flat.tensor(part) for part in argument(node, 0)]
    parts = [part for part in parts if part.name]  # without empty slices
    dim = int(argument(node, 1, 0))
    first = parts[0]
    if any(part.tags != first.tags for part in parts) or first.tags[dim] != "d":
        raise refusal(node, "it joins along tokens, or different layouts")
    name = flat.add("concat", *(part.name for part in parts), dim=first.feature_dim(dim))
    return FlatValue(name, first.tags, traced_shape(node))


def stack(flat: FlatGraph, node: Node) -> FlatValue:
    parts = [flat.tensor(part) for part in argument(node, 0)]
    first = parts[0]
    dim = int(argument(node, 1, 0)) % (len(first.tags) + 1)
    tags = first.tags[:dim] + "d" + first.tags[dim:]
    single = FlatValue("", tags, (*first.shape[:dim], 1, *first.shape[dim:]))
    names = [flat.reshape(part.name, single.features) for part in parts]
    name = flat.add("concat", *names, dim=single.feature_dim(dim))
    return FlatValue(name, tags, traced_shape(node))


# ---------------------------------------------------------------------------------------- entries


def slice_(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0], is_new=True)
    dim = int(argument(node, 1) or 0)
    start, stop, step = argument(node, 2, 0), argument(node, 3), argument(node, 4, 1)
    size = x.shape[dim]
    is_end = stop is None or (isinstance(stop, int) and stop >= 2**62)
    if size is None and isinstance(start, Node):  # x[-T:] of T tokens
        tokens = node.args[0].meta["val"].shape[dim]  # type: ignore[union-attr]
        start = 0 if start.meta["val"].node.expr == -tokens.node.expr else start
    if start in (0, None) and step == 1 and is_end:
        return x
    if isinstance(stop, Node) and start in (0, None) and traced_shape(node)[dim] is None:
        return _of_positions(flat, node, x)
    if size is None or x.tags[dim] != "d":
        raise refusal(node, "it takes some of the tokens")
    if isinstance(x, Unwritten):
        return replace(x, shape=traced_shape(node))
    return _sliced(flat, x, dim, *slice(start, stop, step).indices(size))


def _of_positions(flat: FlatGraph, node: Node, x: FlatValue) -> FlatValue:
    """Return table[:T] of T tokens: the entries at their positions."""
    if flat.data(x) is None or any(size not in (None, 1) for size in traced_shape(node)):
        raise refusal(node, "it is not a table of a number for each position")
    column = flat.reshape(x.name, (prod(x.features), 1))
    name = flat.reshape(flat.add("embedding", column, "position_ids"), ())
    tags = "".join("t" if size is None else "d" for size in traced_shape(node))
    return flat.reshaped(name, tags.replace("dt", "bt"), traced_shape(node))


def _sliced(
    flat: FlatGraph,
    x: FlatValue,
    dim: int,
    start: int,
    stop: int,
    step: int = 1,
) -> FlatValue:
    """Return entries start to stop of a feature dim; an empty value has no name."""
    if (start, stop, step) == (0, x.shape[dim], 1):
        return x
    if start >= stop:
        return FlatValue("", x.tags, (*x.shape[:dim], 0, *x.shape[dim + 1 :]))
    attributes = {"dim": x.feature_dim(dim), "start": start, "stop": stop}
    if step != 1:
        attributes["step"] = step
    shape = list(x.shape)
    shape[dim] = len(range(start, stop, step))
    return replace(x, name=flat.add("slice", x.name, **attributes), shape=tuple(shape))


def slice_scatter(flat: FlatGraph, node: Node) -> FlatValue:
    """Replace entries start, start + step, … of a dim, before stop."""
    x, source = flat.tensor(node.args[0], is_new=True), flat.tensor(node.args[1])
    dim = int(argument(node, 2, 0)) % len(x.tags)
    if x.tags[dim] != "d":
        raise refusal(node, "it writes some of the tokens")
    places = slice(argument(node, 3), argument(node, 4), argument(node, 5, 1))
    start, stop, step = places.indices(x.shape[dim] or 0)
    if isinstance(x, Unwritten):
        return _written(flat, node, x, (start, stop, dim, source.name))
    if step == 1:
        return _placed(flat, x, source.name, dim, start, stop)
    last = len(range(start, stop, step)) - 1
    if last < 0:
        return x
    entries = _sliced(flat, source, dim, last, last + 1).name
    if last > 0:
        # Blocks of an entry that is written and step - 1 that stay, as another dim.
        written = _in_blocks(flat, _sliced(flat, source, dim, 0, last), dim, 1)
        blocks = _in_blocks(flat, _sliced(flat, x, dim, start, start + last * step), dim, step)
        kept = _sliced(flat, blocks, dim + 1, 1, step)
        joined = flat.add("concat", written.name, kept.name, dim=kept.feature_dim(dim + 1))
        shape = (*x.shape[:dim], last * step, *x.shape[dim + 1 :])
        body = flat.reshaped(joined, x.tags, shape)
        entries = flat.add("concat", body.name, entries, dim=x.feature_dim(dim))
    return _placed(flat, x, entries, dim, start, start + last * step + 1)


def new_empty(flat: FlatGraph, node: Node) -> FlatValue:
    shape = traced_shape(node)
    if None not in shape:
        raise refusal(node, "it makes a tensor without content")
    tags = "".join("t" if size is None else "d" for size in shape)
    return Unwritten("", "b" + tags[1:] if shape[0] == 1 else tags, shape)


def _written(
    flat: FlatGraph, node: Node, x: Unwritten, part: tuple[int, int, int, str]
) -> FlatValue:
    """Return a new tensor with another written part; a plain value as soon as nothing is left."""
    parts = tuple(sorted((*x.parts, part)))
    starts, stops, dims, names = zip(*parts, strict=True)
    if len(set(dims)) > 1 or any(a != b for a, b in zip(starts[1:], stops, strict=False)):
        return replace(x, parts=parts)
    if (starts[0], stops[-1]) != (0, x.shape[dims[0]]):
        return replace(x, parts=parts)
    name = flat.add("concat", *names, dim=x.feature_dim(dims[0]))
    return FlatValue(name, x.tags, x.shape)


def _in_blocks(flat: FlatGraph, x: FlatValue, dim: int, size: int) -> FlatValue:
    """View a feature dim as two, of blocks and their entries."""
    shape = (*x.shape[:dim], (x.shape[dim] or 0) // size, size, *x.shape[dim + 1 :])
    return flat.reshaped(x.name, x.tags[:dim] + "d" + x.tags[dim:], shape)


def select_scatter(flat: FlatGraph, node: Node) -> FlatValue:
    """Replace an entry of a dim."""
    x, source = flat.tensor(node.args[0]), flat.tensor(node.args[1])
    dim, index = int(argument(node, 2)), int(argument(node, 3))
    if x.tags[dim] != "d":
        raise refusal(node, "it writes some of the tokens")
    index %= x.shape[dim] or 1
    entry = FlatValue(
        "", x.tags, tuple(s if i != dim % len(x.tags) else 1 for i, s in enumerate(x.shape))
    )
    name = flat.reshape(source.name, entry.features)
    return _placed(flat, x, name, dim, index, index + 1)


def _placed(
    flat: FlatGraph, x: FlatValue, entries: str, dim: int, start: int, stop: int
) -> FlatValue:
    dim %= len(x.tags)
    before = _sliced(flat, x, dim, 0, start).name
    after = _sliced(flat, x, dim, stop, x.shape[dim] or 0).name
    parts = [name for name in (before, entries, after) if name]
    return x.named(flat.add("concat", *parts, dim=x.feature_dim(dim)) if parts[1:] else entries)


def select(flat: FlatGraph, node: Node) -> FlatValue:
    return _selected(flat, node, int(argument(node, 1)), int(argument(node, 2)))


def unbind(flat: FlatGraph, node: Node) -> list[FlatValue]:
    dim = int(argument(node, 1, 0))
    return [_selected(flat, node, dim, index) for index in range(len(node.meta["val"]))]


def _selected(flat: FlatGraph, node: Node, dim: int, index: int) -> FlatValue:
    x = flat.tensor(node.args[0])
    dim %= len(x.tags)
    tags, shape = x.tags[:dim] + x.tags[dim + 1 :], x.shape[:dim] + x.shape[dim + 1 :]
    if x.tags[dim] == "b":
        return FlatValue(x.name, tags, shape)
    if x.tags[dim] != "d":
        raise refusal(node, "it takes one of the tokens")
    index %= x.shape[dim]  # type: ignore[operator]
    return flat.reshaped(_sliced(flat, x, dim, index, index + 1).name, tags, shape)


def take(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    dim, index = int(argument(node, 1)), int(argument(node, 2))
    if x.tags[dim] != "d":
        raise refusal(node, "it takes some of the tokens")
    return _sliced(flat, x, dim, index, index + 1)


def split(flat: FlatGraph, node: Node) -> list[FlatValue]:
    x = flat.tensor(node.args[0])
    dim = int(argument(node, 2, 0, "dim"))
    parts, start = [], 0
    for value in node.meta["val"]:
        size = int(value.shape[dim])
        parts.append(_sliced(flat, x, dim % len(x.tags), start, start + size))
        start += size
    return parts


def arange(flat: FlatGraph, node: Node) -> FlatValue:
    """Replace 0, 1, … T - 1 by the positions."""
    start, step = (node.args[0], argument(node, 2, 1)) if len(node.args) > 1 else (0, 1)
    ids = next(other for other in node.graph.nodes if other.name == "input_ids")
    (size,), tokens = node.meta["val"].shape, ids.meta["val"].shape[1]
    if (start, step) != (0, 1) or isinstance(size, int) or size.node.expr != tokens.node.expr:
        raise refusal(node, "its range is not that of the tokens")
    return FlatValue(flat.cast("position_ids", dtype_of(node.meta["val"])), "t", (None,))


def filled(flat: FlatGraph, node: Node) -> FlatValue:
    """Import a number for each token; torch.zeros, torch.ones and torch.full."""
    shape = traced_shape(node)
    tags = "".join("t" if size is None else "d" for size in shape)
    if tags.count("t") != 1:
        raise refusal(node, "it fills a tensor with a number, and not for each token")
    tags = "b" + tags[1:] if shape[0] == 1 else tags
    numbers = {"zeros": 0, "ones": 1}
    number = numbers.get(node.target._schema.name.removeprefix("aten::"))  # type: ignore[union-attr]
    number = argument(node, 1) if number is None else number
    name = flat.add("mul", flat.cast("position_ids", dtype_of(node.meta["val"])), scalar=0)
    name = flat.add("add", name, scalar=number) if number else name
    lies = FlatValue("", tags, shape)
    name = flat.reshape(name, (1,) * len(lies.features))
    if lies.features:
        name = flat.add("expand", name, shape=(-1, *lies.features))
    return lies.named(name)


def embedding(flat: FlatGraph, node: Node) -> FlatValue:
    table, ids = flat.tensor(node.args[0]), flat.tensor(node.args[1])
    padding = int(argument(node, 2, -1))
    attributes = {"padding": padding} if padding >= 0 else {}
    name = flat.add("embedding", table.name, flat.reshape(ids.name, ()), **attributes)
    return FlatValue(name, ids.tags + "d", traced_shape(node))


def gather(flat: FlatGraph, node: Node) -> FlatValue:
    """Select entries of the last dim, or rows of a table by position.

    The latter is a gather of positions repeated along rows.
    """
    table, index = flat.tensor(node.args[0]), flat.tensor(node.args[2])
    producers = {value.name: n for n in flat.builder.nodes for value in n.outputs}
    name = index.name
    while name in producers and producers[name].op in ("expand", "reshape"):
        name = producers[name].inputs[0]
    is_last = int(argument(node, 1)) % len(table.tags) == len(table.tags) - 1
    if table.tags == index.tags and "t" in table.tags and is_last and table.tags[-1] == "d":
        return index.named(flat.add("take_along", table.name, index.name))
    if node.args[1] != 1 or flat.builder.types[name].features or "t" in table.tags:
        raise refusal(node, "it is not a look-up of rows by token")
    if table.tags == "dd" and index.tags == "bt":  # entries of a row
        column = flat.reshape(table.name, (table.shape[1] or 0, 1))
        return index.named(flat.reshape(flat.add("embedding", column, name), ()))
    rows = flat.reshape(table.name, table.features[-2:])
    return index.named(flat.add("embedding", rows, name))


def index(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    chosen = [(dim, i) for dim, i in enumerate(argument(node, 1)) if i is not None]
    if len(chosen) == 1:
        dim, by = chosen[0][0], flat.tensor(chosen[0][1])
        data = flat.data(by)
        if data is not None and data.numel() == 1 and data.dim() == 1:
            position = int(data.item()) % (x.shape[dim] or 1)
            return _sliced(flat, x, dim, position, position + 1)
        if "t" not in x.tags and "t" in by.tags and dim == 0 and len(x.tags) <= 2:
            table = flat.reshape(x.name, (x.shape[0] or 0, x.shape[1] or 0 if x.shape[1:] else 1))
            name = flat.add("embedding", table, flat.reshape(by.name, by.features))
            return flat.reshaped(name, by.tags + "d" * len(x.tags[1:]), traced_shape(node))
    raise refusal(node, "only one entry of a feature dim, or rows of a table, can be indexed")


def index_select(flat: FlatGraph, node: Node) -> FlatValue:
    table, ids = flat.tensor(node.args[0]), flat.tensor(node.args[2])
    if table.tags != "dd" or node.args[1] != 0 or "t" not in ids.tags:
        raise refusal(node, "it is not a look-up of rows by token")
    name = flat.add("embedding", table.name, flat.reshape(ids.name, ()))
    return FlatValue(name, ids.tags + "d", traced_shape(node))


# ------------------------------------------------------------------------------------ product rules


def linear(flat: FlatGraph, node: Node) -> FlatValue:
    x, *weights = [flat.tensor(a) for a in node.args if a is not None]
    return _product(flat, node, x, *(weight.name for weight in weights))


def _product(flat: FlatGraph, node: Node, x: FlatValue, *weights: str) -> FlatValue:
    if x.tags[-1:] != "d" or prod(x.features[:-1]) != 1:
        raise refusal(node, f"its input has feature dims {list(x.features)}, not one")
    name = flat.add("linear", flat.reshape(x.name, x.features[-1:]), *weights)
    return flat.reshaped(name, x.tags, traced_shape(node))


def addmm(flat: FlatGraph, node: Node) -> FlatValue:
    bias, x, weight = (flat.tensor(a) for a in node.args[:3])
    return _product(flat, node, x, _out_in(flat, node, weight), bias.name)


def _out_in(flat: FlatGraph, node: Node, weight: FlatValue) -> str:
    """Return an [in, out] operand as an [out, in] weight: the parameter, marked transposed."""
    producer = next((n for n in flat.builder.nodes if n.name == weight.name), None)
    if producer is not None and producer.op == "permute" and producer.attribute("dims") == (1, 0):
        return producer.inputs[0]
    parameter = flat.builder.parameters.get(weight.name)
    if parameter is None or parameter.role != "frozen":
        raise refusal(node, "it multiplies activations with activations")
    *experts, size_in, size_out = parameter.type.shape
    type_ = parameter.type.with_shape((*experts, size_out, size_in))
    value = Value(f"{parameter.name}.T", type_)
    return flat.builder.parameter(replace(parameter, value=value, transposed=True))


_MOST_PRODUCTS = 8
"""Maximum inner size of a product of two matrices of each token, which becomes a sum."""


def matmul(flat: FlatGraph, node: Node) -> FlatValue:
    left, right = (flat.tensor(a) for a in node.args[:2])
    if "t" in left.tags and len(right.tags) == 2 and "t" not in right.tags:
        return _product(flat, node, left, _out_in(flat, node, right))
    if left.tags == "dd" and right.tags == "bdt":  # a weight before [1, in, T]
        name = flat.add("linear", right.name, left.name)
        return FlatValue(name, right.tags, traced_shape(node))
    inner, last = left.shape[-1] or 0, len(right.tags) - 1
    if "t" in left.tags[:-2] and left.tags == right.tags and inner <= _MOST_PRODUCTS:
        terms = [
            broadcast(
                flat,
                node,
                "mul",
                _sliced(flat, left, last, k, k + 1),
                _sliced(flat, right, last - 1, k, k + 1),
            )
            for k in range(inner)
        ]
        return reduce(lambda x, y: broadcast(flat, node, "add", x, y), terms)
    if len(left.tags) >= 2 and inner == 1 and right.shape[-2] == 1:
        return broadcast(flat, node, "mul", left, right)
    raise refusal(node, "it multiplies activations with activations")


def reduction(op: str) -> Rule:
    """Return the rule of an operator that reduces a single feature dim."""

    def rule(flat: FlatGraph, node: Node) -> FlatValue:
        x, dims = flat.tensor(node.args[0]), argument(node, 1)
        keepdim = bool(argument(node, 2, False, "keepdim"))
        if dims is None or len(dims) != 1 or x.tags[dims[0]] != "d":
            raise refusal(node, "it reduces tokens, or several dims")
        dim = int(dims[0]) % len(x.tags)
        name = flat.add(op, x.name, dim=x.feature_dim(dim), keepdim=keepdim)
        tags = x.tags if keepdim else x.tags[:dim] + x.tags[dim + 1 :]
        return replace(x, name=name, tags=tags, shape=traced_shape(node))

    return rule


def weight_norm(flat: FlatGraph, node: Node) -> FlatValue:
    """Import torch.nn.utils' weight_norm: g v / |v|, with a norm for each entry of a dim of v."""
    v, g = (flat.tensor(a) for a in node.args[:2])
    kept = int(argument(node, 2, 0))
    if v.tags != "dd":
        raise refusal(node, f"it normalises a weight of {len(v.tags)} dims, not a matrix")
    dtype = flat.builder.types[v.name].dtype
    wide = "f64" if dtype == "f64" else "f32"
    wide_v, wide_g = (flat.cast(x.name, wide) for x in (v, g))
    total = flat.add("mul", wide_v, wide_v)
    for dim in {0, 1} - {kept}:  # both dims for kept = -1, a norm of all entries
        total = flat.add("sum", total, dim=dim - 2, keepdim=True)
    factor = flat.add("div", wide_g, flat.add("sqrt", total))
    return v.named(flat.cast(flat.add("mul", wide_v, factor), dtype))


def layer_norm(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    if len(argument(node, 1)) != 1:
        raise refusal(node, "it normalises several dims")
    weight, bias = (argument(node, i) for i in (2, 3))
    names = [flat.tensor(p).name for p in (weight, bias) if p is not None]
    eps = float(argument(node, 4, 1e-5))
    attributes = {"eps": eps, "weight": weight is not None, "bias": bias is not None}
    return x.named(flat.add("layer_norm", x.name, *names, **attributes))


def rms_norm(flat: FlatGraph, node: Node) -> FlatValue:
    """Import torch.nn.RMSNorm, which rounds once, after its weight."""
    x = flat.tensor(node.args[0])
    if len(argument(node, 1)) != 1:
        raise refusal(node, "it normalises several dims")
    weight, eps = argument(node, 2), argument(node, 3)
    dtype = flat.builder.types[x.name].dtype
    if eps is None:
        eps = torch.finfo(torch.float64 if dtype == "f64" else torch.float32).eps
    names = [] if weight is None else [flat.tensor(weight).name]
    attributes = {"eps": float(eps), "offset": 0.0, "round_first": dtype == "f32" or not names}
    return x.named(flat.add("rms_norm", x.name, *names, **attributes))


def softmax(flat: FlatGraph, node: Node) -> FlatValue:
    x, dim = flat.tensor(node.args[0]), int(argument(node, 1))
    if x.tags[dim] != "d":
        raise refusal(node, "a softmax over tokens that is no attention pcg can raise")
    name = flat.cast(x.name, dtype_of(node.meta["val"]))
    return x.named(flat.add("softmax", name, dim=x.feature_dim(dim)))


def topk(flat: FlatGraph, node: Node) -> list[FlatValue]:
    x, k = flat.tensor(node.args[0]), int(argument(node, 1))
    names = flat.add_many("topk", x.name, k=k)
    return [FlatValue(name, x.tags, (*x.shape[:-1], k)) for name in names]


def maximum(flat: FlatGraph, node: Node) -> list[FlatValue]:
    """Import the largest entry of the last dim, and its index."""
    x, dim = flat.tensor(node.args[0]), int(argument(node, 1))
    if dim % len(x.tags) != len(x.tags) - 1 or x.tags[-1] != "d":
        raise refusal(node, "it is over other dims than the last")
    names = flat.add_many("topk", x.name, k=1)
    tags = x.tags if argument(node, 2, False) else x.tags[:-1]
    shape = tuple(s if isinstance(s, int) else None for s in node.meta["val"][0].shape)
    return [flat.reshaped(name, tags, shape) for name in names]


def expert_linear(flat: FlatGraph, node: Node) -> FlatValue:
    """Import a product by experts; a bias [E, out] becomes [E, out, 1], with weights' dims."""
    x, indices, weight, *biases = [flat.tensor(a) for a in node.args[:4] if a is not None]
    parameters = flat.builder.parameters
    weight = _of_view(flat, weight)
    if any(p.name not in parameters or "t" in p.tags for p in (weight, *biases)):
        raise refusal(node, "its weights are not parameters of its own")
    name = _out_in(flat, node, weight) if node.args[4] else weight.name
    for bias in biases:
        if len(flat.builder.types[bias.name].shape) == 2:
            flat.builder.see(bias.name, *bias.shape, 1)  # type: ignore[arg-type]
    name = flat.add("expert_linear", x.name, indices.name, name, *(b.name for b in biases))
    return FlatValue(name, "tdd", traced_shape(node))


def _of_view(flat: FlatGraph, weight: FlatValue) -> FlatValue:
    """Return the parameter of a view [E, n, m] of a weight [E n, m] or [E, m, n], in that shape."""
    producer = next((n for n in flat.builder.nodes if n.name == weight.name), None)
    parameter = flat.builder.parameters.get(producer.inputs[0]) if producer else None
    if producer is None or parameter is None:
        return weight
    swaps = producer.op == "permute" and producer.attribute("dims") == (0, 2, 1)
    if not swaps and producer.op != "reshape":
        return weight
    name = parameter.name + (IN_OUT if swaps else STACKED)
    value = Value(name, parameter.type.with_shape(weight.features))
    return weight.named(flat.builder.parameter(replace(parameter, value=value, transposed=swaps)))


# -------------------------------------------------------------------------------- recurrence rules


def short_convolution(flat: FlatGraph, node: Node) -> FlatValue:
    x, *weights = [flat.tensor(a) for a in node.args if a is not None]
    if x.tags != "bdt":
        raise refusal(node, f"it convolves dims {x.tags}, not [1, channels, tokens]")
    return x.named(flat.add("short_convolution", x.name, *(w.name for w in weights), state=0))


def recurrence(flat: FlatGraph, node: Node) -> FlatValue:
    inputs = [flat.tensor(a) for a in node.args if a is not None]
    if any(x.tags[:2] != "bt" for x in inputs):
        raise refusal(node, "its tokens are not the second dim")
    return inputs[2].named(flat.add("recurrence", *(x.name for x in inputs), state=0))


# -------------------------------------------------------------------------------------------- table


_UNARY = ("cos", "exp", "neg", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh")
_BINARY = ("add", "div", "mul", "sub")
_IDENTITIES = ("alias", "clone", "contiguous", "lift_fresh_copy")
_RESHAPES = (
    "_unsafe_view", "flatten", "reshape", "reshape_as", "squeeze", "unflatten", "view", "view_as",
)  # fmt: skip

_ATEN: Mapping[str, Rule] = {
    **{name: unary(name) for name in _UNARY},
    **{name: binary(name) for name in _BINARY},
    **dict.fromkeys(_IDENTITIES, elementwise.identity),
    **dict.fromkeys(_RESHAPES, reshape),
    **dict.fromkeys(("_to_copy", "to", "type_as"), elementwise.cast),
    **dict.fromkeys(("_softmax", "softmax"), softmax),
    **dict.fromkeys(("bmm", "matmul", "mm"), matmul),
    **dict.fromkeys(("broadcast_to", "expand", "expand_as"), expand),
    **dict.fromkeys(("cat", "concat", "concatenate"), concat),
    **dict.fromkeys(("full", "ones", "zeros"), filled),
    **dict.fromkeys(("chunk", "split", "split_with_sizes"), split),
    **dict.fromkeys(("t", "transpose"), transpose),
    "_weight_norm": weight_norm,
    "addmm": addmm,
    "arange": arange,
    "broadcast_tensors": broadcast_tensors,
    "clamp": unary("clamp", min=1, max=2),
    "copy": copy,
    "detach": elementwise.detach,
    "dropout": elementwise.dropout,
    "embedding": embedding,
    "gather": gather,
    "gelu": elementwise.gelu,
    "index": index,
    "index_select": index_select,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "linear": linear,
    "max": maximum,
    "multiply": binary("mul"),
    "mean": reduction("mean"),
    "new_empty": new_empty,
    "numpy_T": reverse,
    "permute": permute,
    "polar": polar,
    "pow": elementwise.power,
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    "rsub": binary("sub", reverse=True),
    "select": select,
    "select_scatter": select_scatter,
    "slice": slice_,
    "slice_scatter": slice_scatter,
    "stack": stack,
    "sum": reduction("sum"),
    "topk": topk,
    "unbind": unbind,
    "unsqueeze": unsqueeze,
    "view_as_complex": view_as_complex,
}
RULES: Mapping[str, Rule] = {
    **{f"aten.{name}": rule for name, rule in _ATEN.items()},
    "pcg.expert_linear": expert_linear,
    "pcg.recurrence": recurrence,
    "pcg.short_convolution": short_convolution,
    "pcg.take": take,
}
