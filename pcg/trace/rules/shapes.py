"""Rules of operators that change, add, remove or repeat dims."""

from __future__ import annotations

from math import prod

from torch.fx import Node

from pcg.trace.flat_graph import FlatGraph, FlatValue, argument, refusal, traced_shape


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
    x, shape = flat.tensor(node.args[0]), traced_shape(node)
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
