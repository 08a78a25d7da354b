"""Rules of operators that regroup, add, repeat or cut dims, or take rows of a table."""

from __future__ import annotations

from math import prod

from torch.fx import Node

from pcg.trace.flat_graph import (
    FlatGraph,
    FlatValue,
    argument,
    dtype_of,
    refusal,
    traced_shape,
)


def reshape(flat: FlatGraph, node: Node) -> FlatValue:
    """view, reshape, flatten, squeeze: feature dims regroup on either side of the token dim."""
    x, shape = flat.tensor(node.args[0]), traced_shape(node)
    if "t" not in x.tags:
        return flat.reshaped(x.name, "d" * len(shape), shape)
    if None not in shape:
        raise refusal(node, "the token dim disappears")
    old, new = x.shape.index(None), shape.index(None)
    before = prod(s for s in x.shape[:old] if s)
    if before != prod(s for s in shape[:new] if s):
        raise refusal(node, f"a view from {list(x.shape)} to {list(shape)} cuts across tokens")
    leads = ["d"] * new
    if (before == 1 and new) or (new > 1 and shape[0] == 1):
        leads[0] = "b"
    tags = "".join(leads) + "t" + "d" * (len(shape) - new - 1)
    return flat.reshaped(x.name, tags, shape)


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
    """The rule of a source with the dtype and the shape of what it is written to."""
    x, source = flat.tensor(node.args[0]), flat.tensor(node.args[1])
    if ("t" in x.tags) != ("t" in source.tags):
        raise refusal(node, "it writes the same for all tokens")
    source = _expanded(flat, node, source)
    return source.named(flat.cast(source.name, flat.builder.types[x.name].dtype))


def _expanded(flat: FlatGraph, node: Node, x: FlatValue) -> FlatValue:
    shape = traced_shape(node)
    if "t" not in x.tags:  # along tokens, operators with broadcasting repeat it
        shape = tuple(1 if size is None else size for size in shape)
    added = len(shape) - len(x.shape)
    tags = "d" * added + x.tags
    if added and "t" in x.tags:
        raise refusal(node, "it adds dims before tokens")
    name = flat.reshape(x.name, (1,) * added + x.features) if added else x.name
    features = FlatValue(name, tags, shape).features
    if flat.builder.types[name].features != features:
        name = flat.add("expand", name, shape=(-1,) * ("t" in tags) + features)
    return FlatValue(name, tags, shape)


def repeat(flat: FlatGraph, node: Node) -> FlatValue:
    x, repeats = flat.tensor(node.args[0]), argument(node, 1)
    if len(repeats) != len(x.shape):
        raise refusal(node, "it adds dims")
    if any(r != 1 and s != 1 for r, s in zip(repeats, x.shape, strict=True)):
        raise refusal(node, "it tiles a dim of more than one entry")
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
    x = flat.tensor(node.args[0])
    dim = int(argument(node, 1) or 0)
    start, stop, step = argument(node, 2, 0), argument(node, 3), argument(node, 4, 1)
    size = x.shape[dim]
    is_end = stop is None or (isinstance(stop, int) and stop >= 2**62)
    if start in (0, None) and step == 1 and is_end:
        return x
    if size is None or x.tags[dim] != "d":
        raise refusal(node, "it takes some of the tokens")
    return _sliced(flat, x, dim, *slice(start, stop, step).indices(size))


def _sliced(
    flat: FlatGraph,
    x: FlatValue,
    dim: int,
    start: int,
    stop: int,
    step: int = 1,
) -> FlatValue:
    """Entries start to stop of a feature dim; of none, an empty value without a name."""
    if (start, stop, step) == (0, x.shape[dim], 1):
        return x
    if start >= stop:
        return FlatValue("", x.tags, (*x.shape[:dim], 0, *x.shape[dim + 1 :]))
    attributes = {"dim": x.feature_dim(dim), "start": start, "stop": stop}
    if step != 1:
        attributes["step"] = step
    shape = list(x.shape)
    shape[dim] = len(range(start, stop, step))
    return FlatValue(flat.add("slice", x.name, **attributes), x.tags, tuple(shape))


def slice_scatter(flat: FlatGraph, node: Node) -> FlatValue:
    """The rule of x with other entries from start to stop of a dim."""
    x, source = flat.tensor(node.args[0]), flat.tensor(node.args[1])
    dim, start, stop = argument(node, 2, 0), argument(node, 3), argument(node, 4)
    if x.tags[dim] != "d" or argument(node, 5, 1) != 1:
        raise refusal(node, "it writes some of the tokens, or every second entry")
    return _placed(flat, x, source.name, dim, *slice(start, stop).indices(x.shape[dim] or 0)[:2])


def select_scatter(flat: FlatGraph, node: Node) -> FlatValue:
    """The rule of x with another entry of a dim."""
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
    x = flat.tensor(node.args[0])
    dim, index = int(argument(node, 1)), int(argument(node, 2))
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
    """The rule of 0, 1, … T - 1, which are the positions."""
    start, step = (node.args[0], argument(node, 2, 1)) if len(node.args) > 1 else (0, 1)
    ids = next(other for other in node.graph.nodes if other.name == "input_ids")
    (size,), tokens = node.meta["val"].shape, ids.meta["val"].shape[1]
    if (start, step) != (0, 1) or isinstance(size, int) or size.node.expr != tokens.node.expr:
        raise refusal(node, "its range is not that of the tokens")
    return FlatValue(flat.cast("position_ids", dtype_of(node.meta["val"])), "t", (None,))


def embedding(flat: FlatGraph, node: Node) -> FlatValue:
    table, ids = flat.tensor(node.args[0]), flat.tensor(node.args[1])
    name = flat.add("embedding", table.name, flat.reshape(ids.name, ()))
    return FlatValue(name, ids.tags + "d", traced_shape(node))


def gather(flat: FlatGraph, node: Node) -> FlatValue:
    """Rows of a table by position, written as a gather of positions repeated along the row."""
    table, index = flat.tensor(node.args[0]), flat.tensor(node.args[2])
    producers = {value.name: n for n in flat.builder.nodes for value in n.outputs}
    name = index.name
    while name in producers and producers[name].op in ("expand", "reshape"):
        name = producers[name].inputs[0]
    if node.args[1] != 1 or flat.builder.types[name].features or "t" in table.tags:
        raise refusal(node, "it is not a look-up of rows by token")
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
        if "t" not in x.tags and "t" in by.tags and dim == 0 and len(x.tags) == 2:
            name = flat.add("embedding", x.name, flat.reshape(by.name, ()))
            return FlatValue(name, by.tags + "d", traced_shape(node))
    raise refusal(node, "only one entry of a feature dim, or rows of a table, can be indexed")
