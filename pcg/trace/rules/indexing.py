"""Rules of operators that take some entries of a dim, or rows of a table."""

from __future__ import annotations

from torch.fx import Node

from pcg.trace.flat_graph import FlatGraph, FlatValue, argument, refusal, traced_shape


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


def select(flat: FlatGraph, node: Node) -> FlatValue:
    x = flat.tensor(node.args[0])
    dim, index = int(argument(node, 1)), int(argument(node, 2))
    dim %= len(x.tags)
    tags, shape = x.tags[:dim] + x.tags[dim + 1 :], x.shape[:dim] + x.shape[dim + 1 :]
    if x.tags[dim] == "b":
        return FlatValue(x.name, tags, shape)
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
