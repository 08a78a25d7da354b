"""One rule for each ATen operator that exported models use: how it reads in the operator table.

A rule gets the importer and the FX node, adds flat nodes, and returns what the node's value was
imported as. What has no rule is carried as a generic pointwise operator where PyTorch tags it
pointwise.

The file is long because it is a table: one short rule after the other, by kind, and their names.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.fx import Node

from pcg.trace.importer import Imported, Importer

Rule = Callable[[Importer, Node], Any]


# ---------------------------------------------------------------------------- elementwise


def pointwise(importer: Importer, node: Node) -> Imported:
    """An operator outside the table that PyTorch itself tags pointwise."""
    target = node.target
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise not in tags:
        raise importer.refusal(
            node, "it is not in the operator table, and PyTorch does not tag it pointwise"
        )
    tensors = [a for a in node.args if isinstance(a, Node)]
    if node.kwargs or len(tensors) != 1:
        raise importer.refusal(node, "a generic pointwise operator takes one tensor and constants")
    x = importer.tensor(tensors[0])
    arguments = ", ".join("{0}" if a is tensors[0] else repr(a) for a in node.args)
    name = importer.add(
        "pointwise",
        x.name,
        target=str(target),
        arguments=arguments,
        dtype=importer.dtype(node.meta["val"]),
    )
    return Imported(name, x.tags, x.shape)


def unary(op: str, **names: int) -> Rule:
    """A rule for f(x, constants): `names` gives the position of each attribute's argument."""

    def rule(importer: Importer, node: Node) -> Imported:
        x = importer.tensor(node.args[0])
        attributes = {key: node.args[i] for key, i in names.items() if len(node.args) > i}
        attributes = {key: value for key, value in attributes.items() if value is not None}
        return Imported(importer.add(op, x.name, **attributes), x.tags, x.shape)

    return rule


def _pow(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    return Imported(importer.add("pow", x.name, exponent=float(node.args[1])), x.tags, x.shape)  # type: ignore[arg-type]


def _gelu(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    approximate = node.kwargs.get("approximate", "none")
    return Imported(importer.add("gelu", x.name, approximate=approximate), x.tags, x.shape)


def _identity(importer: Importer, node: Node) -> Imported:
    return importer.tensor(node.args[0])


def _dropout(importer: Importer, node: Node) -> Imported:
    if len(node.args) > 2 and node.args[2] and node.args[1]:
        raise importer.refusal(node, "active dropout in the base model")
    return importer.tensor(node.args[0])


def _cast(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    return Imported(importer.cast(x.name, importer.dtype(node.meta["val"])), x.tags, x.shape)


def binary(op: str, reverse: bool = False) -> Rule:
    """A rule for x ∘ y with broadcasting, where y may be a number."""

    def rule(importer: Importer, node: Node) -> Imported:
        left, right = (importer.value(a) for a in node.args[:2])
        if reverse:
            left, right = right, left
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            raise importer.refusal(node, "alpha is not 1")
        left, right = (_as_number(importer, x) for x in (left, right))
        if not isinstance(right, Imported):
            return Imported(importer.add(op, left.name, scalar=right), left.tags, left.shape)
        if not isinstance(left, Imported):
            attributes = {"scalar": left}
            if op in ("sub", "div"):
                attributes["reversed"] = True
            return Imported(importer.add(op, right.name, **attributes), right.tags, right.shape)
        return broadcasted(importer, node, op, left, right)

    return rule


def _as_number(importer: Importer, x: Any) -> Any:
    """A constant of no dims as a Python number."""
    if isinstance(x, Imported) and x.tags == "":
        data = importer.data(x)
        if data is not None:
            return data.item()
    return x


def broadcasted(
    importer: Importer, node: Node, op: str, left: Imported, right: Imported
) -> Imported:
    """x ∘ y, each reshaped so that flat broadcasting is what the trace meant."""
    rank = max(len(left.tags), len(right.tags))
    pads = [" " * (rank - len(x.tags)) + x.tags for x in (left, right)]
    tags = ""
    for pair in zip(*pads, strict=True):
        tags += (
            "t"
            if "t" in pair
            else "d"
            if "d" in pair and "b" not in pair
            else "b"
            if "b" in pair
            else "d"
        )
    shape = tuple(
        None if tag == "t" else max(_size(left, i - rank), _size(right, i - rank))
        for i, tag in enumerate(tags)
    )
    tags = "".join(
        "d" if tag == "b" and size != 1 else tag for tag, size in zip(tags, shape, strict=True)
    )
    if tags.count("t") > 1:
        raise importer.refusal(node, "it pairs tokens with tokens")
    names = []
    for x in (left, right):
        features = [_size(x, i - rank) for i, tag in enumerate(tags) if tag == "d"]
        if "t" not in x.tags:
            while len(features) > 1 and features[0] == 1:
                features.pop(0)
        names.append(importer.reshape(x.name, tuple(features)))
    return Imported(importer.add(op, *names), tags, shape)


def _size(x: Imported, dim: int) -> int:
    """Size of a dim counted from the end; 1 for a missing dim and for tokens."""
    if -dim > len(x.shape):
        return 1
    return x.shape[dim] or 1


# ---------------------------------------------------------------------------- dims


def _reshape(importer: Importer, node: Node) -> Imported:
    """view, reshape, flatten, unflatten: feature dims regroup on either side of the token dim."""
    x = importer.tensor(node.args[0])
    shape = importer.shape(node)
    return regroup(importer, node, x, shape)


def regroup(importer: Importer, node: Node, x: Imported, shape: tuple[int | None, ...]) -> Imported:
    """The value viewed as another shape, in which the token dim stays a dim of its own."""
    if "t" not in x.tags:
        tags = "d" * len(shape)
        return Imported(importer.reshape(x.name, shape), tags, shape)  # type: ignore[arg-type]
    if None not in shape:
        raise importer.refusal(node, "the token dim disappears")
    old, new = x.shape.index(None), shape.index(None)
    before = prod(s for s in x.shape[:old] if s)
    if before != prod(s for s in shape[:new] if s):
        raise importer.refusal(
            node, f"a view from {list(x.shape)} to {list(shape)} cuts across tokens"
        )
    leads = ["d"] * new
    if (before == 1 and new) or (new > 1 and shape[0] == 1):
        leads[0] = "b"
    tags = "".join(leads) + "t" + "d" * (len(shape) - new - 1)
    result = Imported(x.name, tags, shape)
    return Imported(importer.reshape(x.name, result.features()), tags, shape)


def _permuted(importer: Importer, x: Imported, order: list[int]) -> Imported:
    tags = "".join(x.tags[i] for i in order)
    shape = tuple(x.shape[i] for i in order)
    kept = [i for i in range(len(x.tags)) if x.tags[i] == "d"]
    moved = [i for i in order if x.tags[i] == "d"]
    name = x.name
    if kept != moved:
        lead = 1 if "t" in x.tags else 0
        dims = (0,) * lead + tuple(kept.index(i) + lead for i in moved)
        name = importer.add("permute", name, dims=dims)
    return Imported(name, tags, shape)


def _transpose(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    order = list(range(len(x.tags)))
    a, b = (node.args[1], node.args[2]) if len(node.args) > 2 else (0, 1)
    if len(order) > 1:
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return _permuted(importer, x, order)


def _reverse(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    return _permuted(importer, x, list(reversed(range(len(x.tags)))))


def _permute(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    dims: Any = node.args[1]
    return _permuted(importer, x, [dim % len(x.tags) for dim in dims])


def _unsqueeze(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    dim = int(node.args[1]) % (len(x.tags) + 1)  # type: ignore[arg-type]
    tag = "b" if dim == 0 and x.tags[:1] == "t" else "d"
    tags = x.tags[:dim] + tag + x.tags[dim:]
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    result = Imported(x.name, tags, shape)
    return Imported(importer.reshape(x.name, result.features()), tags, shape)


def _squeeze(importer: Importer, node: Node) -> Imported:
    return _reshape(importer, node)


def _slice(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    arguments: list[Any] = [*node.args[1:], *(0, 0, None, 1)[len(node.args) - 1 :]]
    dim, start, stop, step = arguments
    dim = int(dim or 0)
    size = x.shape[dim]
    if (
        start in (0, None)
        and step == 1
        and (stop is None or (isinstance(stop, int) and stop >= 2**62))
    ):
        return x
    if size is None or x.tags[dim] != "d":
        raise importer.refusal(node, "it takes some of the tokens")
    start, stop, step = slice(start, stop, step).indices(size)
    return sliced(importer, x, dim, start, stop, step)


def sliced(
    importer: Importer,
    x: Imported,
    dim: int,
    start: int,
    stop: int,
    step: int = 1,
    copied: bool = False,
) -> Imported:
    """Entries start to stop of a feature dim; of none, an empty value without a name."""
    if (start, stop, step) == (0, x.shape[dim], 1):
        return x
    if start >= stop:
        return Imported("", x.tags, (*x.shape[:dim], 0, *x.shape[dim + 1 :]))
    attributes = {"dim": x.feature_dim(dim), "start": start, "stop": stop}
    if step != 1:
        attributes["step"] = step
    if copied:
        attributes["copied"] = True
    shape = list(x.shape)
    shape[dim] = len(range(start, stop, step))
    return Imported(importer.add("slice", x.name, **attributes), x.tags, tuple(shape))


def _select(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    dim, index = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    dim %= len(x.tags)
    if x.tags[dim] == "b":
        return Imported(
            x.name, x.tags[:dim] + x.tags[dim + 1 :], x.shape[:dim] + x.shape[dim + 1 :]
        )
    index %= x.shape[dim]  # type: ignore[operator]
    part = sliced(importer, x, dim, index, index + 1)
    tags, shape = part.tags[:dim] + part.tags[dim + 1 :], part.shape[:dim] + part.shape[dim + 1 :]
    result = Imported(part.name, tags, shape)
    return Imported(importer.reshape(part.name, result.features()), tags, shape)


def _split(importer: Importer, node: Node) -> list[Imported]:
    x = importer.tensor(node.args[0])
    dim = int(node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0))  # type: ignore[arg-type]
    parts, start = [], 0
    for value in node.meta["val"]:
        size = int(value.shape[dim])
        parts.append(sliced(importer, x, dim % len(x.tags), start, start + size))
        start += size
    return parts


def _concat(importer: Importer, node: Node) -> Imported:
    parts = [importer.tensor(part) for part in node.args[0]]  # type: ignore[union-attr]
    parts = [part for part in parts if part.name]  # without empty slices
    dim = int(node.args[1] if len(node.args) > 1 else 0)  # type: ignore[arg-type]
    first = parts[0]
    if any(part.tags != first.tags for part in parts) or first.tags[dim] != "d":
        raise importer.refusal(node, "it joins along tokens, or different layouts")
    name = importer.add("concat", *(part.name for part in parts), dim=first.feature_dim(dim))
    return Imported(name, first.tags, importer.shape(node))


def _stack(importer: Importer, node: Node) -> Imported:
    parts = [importer.tensor(part) for part in node.args[0]]  # type: ignore[union-attr]
    first = parts[0]
    dim = int(node.args[1] if len(node.args) > 1 else 0) % (len(first.tags) + 1)  # type: ignore[arg-type]
    tags = first.tags[:dim] + "d" + first.tags[dim:]
    single = Imported("", tags, (*first.shape[:dim], 1, *first.shape[dim:]))
    names = [importer.reshape(part.name, single.features()) for part in parts]
    name = importer.add("concat", *names, dim=single.feature_dim(dim))
    return Imported(name, tags, importer.shape(node))


def _expand(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    shape = importer.shape(node)
    added = len(shape) - len(x.shape)
    tags = "d" * added + x.tags
    if added and "t" in x.tags:
        raise importer.refusal(node, "it adds dims before tokens")
    result = Imported(x.name, tags, shape)
    name = x.name
    if added:
        name = importer.reshape(name, (1,) * added + x.features())
    if importer.builder.types[name].features != result.features():
        lead = (-1,) * ("t" in tags)
        name = importer.add("expand", name, shape=lead + result.features())
    return Imported(name, tags, shape)


def _repeat(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    repeats = node.args[1]
    if len(repeats) != len(x.shape):  # type: ignore[arg-type]
        raise importer.refusal(node, "it adds dims")
    if any(r != 1 and s != 1 for r, s in zip(repeats, x.shape, strict=True)):  # type: ignore[arg-type]
        raise importer.refusal(node, "it tiles a dim of more than one entry")
    return _expand(importer, node)


def _repeat_interleave(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    repeats = int(node.args[1])  # type: ignore[arg-type]
    dim = int(node.args[2] if len(node.args) > 2 else node.kwargs["dim"])  # type: ignore[arg-type]
    name = importer.add("repeat_interleave", x.name, repeats=repeats, dim=x.feature_dim(dim))
    return Imported(name, x.tags, importer.shape(node))


def reduction(op: str) -> Rule:
    """The rule of an operator that reduces one feature dim."""

    def rule(importer: Importer, node: Node) -> Imported:
        x = importer.tensor(node.args[0])
        dims = node.args[1]
        keepdim = (
            bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
        )
        if len(dims) != 1 or x.tags[dims[0]] != "d":  # type: ignore[arg-type,index]
            raise importer.refusal(node, "it reduces tokens, or several dims")
        dim = int(dims[0]) % len(x.tags)  # type: ignore[index,arg-type]
        name = importer.add(op, x.name, dim=x.feature_dim(dim), keepdim=keepdim)
        tags = x.tags if keepdim else x.tags[:dim] + x.tags[dim + 1 :]
        return Imported(name, tags, importer.shape(node))

    return rule


# ---------------------------------------------------------------------------- indexing


def _embedding(importer: Importer, node: Node) -> Imported:
    table, ids = importer.tensor(node.args[0]), importer.tensor(node.args[1])
    name = importer.add("embedding", table.name, importer.reshape(ids.name, ()))
    return Imported(name, ids.tags + "d", importer.shape(node))


def _gather(importer: Importer, node: Node) -> Imported:
    """Rows of a table by position, written as a gather of positions repeated along the row."""
    table, index = importer.tensor(node.args[0]), importer.tensor(node.args[2])
    producers = {value.name: n for n in importer.builder.nodes for value in n.outputs}
    name = index.name
    while name in producers and producers[name].op in ("expand", "reshape"):
        name = producers[name].inputs[0]
    if node.args[1] != 1 or importer.builder.types[name].features or "t" in table.tags:
        raise importer.refusal(node, "it is not a look-up of rows by token")
    rows = importer.reshape(table.name, table.features()[-2:])
    return Imported(importer.add("embedding", rows, name), index.tags, index.shape)


def _index(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    chosen = [(dim, i) for dim, i in enumerate(node.args[1]) if i is not None]  # type: ignore[arg-type]
    if len(chosen) == 1:
        dim, index = chosen[0][0], importer.tensor(chosen[0][1])
        data = importer.data(index)
        if data is not None and data.numel() == 1 and data.dim() == 1:
            position = int(data.item()) % (x.shape[dim] or 1)
            return sliced(importer, x, dim, position, position + 1, copied=True)
        if "t" not in x.tags and "t" in index.tags and dim == 0 and len(x.tags) == 2:
            ids = importer.reshape(index.name, ())
            return Imported(
                importer.add("embedding", x.name, ids), index.tags + "d", importer.shape(node)
            )
    raise importer.refusal(
        node, "only one entry of a feature dim, or rows of a table, can be indexed"
    )


# ---------------------------------------------------------------------------- products


def _linear(importer: Importer, node: Node) -> Imported:
    inputs = [importer.tensor(a) for a in node.args if a is not None]
    return product(importer, node, inputs[0], *(x.name for x in inputs[1:]))


def product(importer: Importer, node: Node, x: Imported, *weights: str) -> Imported:
    """x Wᵀ (+ b) with the weight [out, in]."""
    if x.tags[-1:] != "d" or x.tags.count("d") != 1:
        flat = x.features()
        raise importer.refusal(node, f"its input has feature dims {list(flat)}, not one")
    return Imported(importer.add("linear", x.name, *weights), x.tags, importer.shape(node))


def _addmm(importer: Importer, node: Node) -> Imported:
    bias, x, weight = (importer.tensor(a) for a in node.args[:3])
    return product(importer, node, x, _out_in(importer, node, weight), bias.name)


def _out_in(importer: Importer, node: Node, weight: Imported) -> str:
    """A [in, out] operand as an [out, in] weight: the parameter itself, marked transposed."""
    producer = next((n for n in importer.builder.nodes if n.name == weight.name), None)
    if producer is not None and producer.op == "permute" and producer.attribute("dims") == (1, 0):
        return producer.inputs[0]
    parameter = importer.builder.parameters.get(weight.name)
    if parameter is None or parameter.role != "frozen":
        raise importer.refusal(node, "it multiplies activations with activations")
    return importer.transpose_parameter(parameter)


def _matmul(importer: Importer, node: Node) -> Imported:
    left, right = (importer.tensor(a) for a in node.args[:2])
    if "t" in left.tags and len(right.tags) == 2 and "t" not in right.tags:
        return product(importer, node, left, _out_in(importer, node, right))
    if len(left.tags) >= 2 and left.shape[-1] == 1 and right.shape[-2] == 1:
        return broadcasted(importer, node, "mul", left, right)
    raise importer.refusal(node, "it multiplies activations with activations")


def _layer_norm(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    if len(node.args[1]) != 1:  # type: ignore[arg-type]
        raise importer.refusal(node, "it normalises several dims")
    weight, bias = (node.args[i] if len(node.args) > i else None for i in (2, 3))
    names = [importer.tensor(p).name for p in (weight, bias) if p is not None]
    eps = float(node.args[4]) if len(node.args) > 4 else 1e-5  # type: ignore[arg-type]
    attributes = {"eps": eps, "weight": weight is not None, "bias": bias is not None}
    return Imported(importer.add("layer_norm", x.name, *names, **attributes), x.tags, x.shape)


def _softmax(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    dim = int(node.args[1])  # type: ignore[arg-type]
    if x.tags[dim] != "d":
        raise importer.refusal(node, "a softmax over tokens that is no attention pcg can raise")
    name = importer.cast(x.name, importer.dtype(node.meta["val"]))
    return Imported(importer.add("softmax", name, dim=x.feature_dim(dim)), x.tags, x.shape)


def _topk(importer: Importer, node: Node) -> list[Imported]:
    x = importer.tensor(node.args[0])
    k = int(node.args[1])  # type: ignore[arg-type]
    names = importer.add_many("topk", x.name, k=k)
    return [Imported(name, x.tags, (*x.shape[:-1], k)) for name in names]


# ---------------------------------------------------------------------------- export's markers


def _attention(importer: Importer, node: Node) -> Imported:
    q, k, v = (importer.tensor(a) for a in node.args[:3])
    sinks, scale, window, softcap = node.args[3:7]
    for x in (q, k, v):
        if x.tags != "bdtd":
            raise importer.refusal(
                node, f"its inputs are laid out {x.tags}, not batch, heads, tokens, dim"
            )
    inputs = [q.name, k.name, v.name]
    attributes: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if sinks is not None:
        inputs.append(importer.tensor(sinks).name)
        attributes["sinks"] = True
    out = importer.add_many("attention", *inputs, **attributes)[0]
    return Imported(out, "btdd", importer.shape(node))


def _take(importer: Importer, node: Node) -> Imported:
    x = importer.tensor(node.args[0])
    dim, index = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    if x.tags[dim] != "d":
        raise importer.refusal(node, "it takes some of the tokens")
    return sliced(importer, x, dim, index, index + 1, copied=True)


def _experts(importer: Importer, node: Node) -> Imported:
    inputs = [importer.tensor(a) for a in node.args]
    x = inputs[0]
    return Imported(importer.add("experts", *(i.name for i in inputs)), x.tags, x.shape)


RULES: dict[str, Rule] = {
    "aten._softmax": _softmax,
    "aten._to_copy": _cast,
    "aten._unsafe_view": _reshape,
    "aten.add": binary("add"),
    "aten.add_": binary("add"),
    "aten.addmm": _addmm,
    "aten.alias": _identity,
    "aten.bmm": _matmul,
    "aten.broadcast_to": _expand,
    "aten.cat": _concat,
    "aten.chunk": _split,
    "aten.clamp": unary("clamp", min=1, max=2),
    "aten.clone": _identity,
    "aten.contiguous": _identity,
    "aten.cos": unary("cos"),
    "aten.detach": _identity,
    "aten.detach_": _identity,
    "aten.div": binary("div"),
    "aten.div_": binary("div"),
    "aten.dropout": _dropout,
    "aten.embedding": _embedding,
    "aten.exp": unary("exp"),
    "aten.expand": _expand,
    "aten.flatten": _reshape,
    "aten.gather": _gather,
    "aten.gelu": _gelu,
    "aten.index": _index,
    "aten.layer_norm": _layer_norm,
    "aten.lift_fresh_copy": _identity,
    "aten.linear": _linear,
    "aten.matmul": _matmul,
    "aten.mean": reduction("mean"),
    "aten.mm": _matmul,
    "aten.mul": binary("mul"),
    "aten.mul_": binary("mul"),
    "aten.neg": unary("neg"),
    "aten.numpy_T": _reverse,
    "aten.permute": _permute,
    "aten.pow": _pow,
    "aten.relu": unary("relu"),
    "aten.repeat": _repeat,
    "aten.repeat_interleave": _repeat_interleave,
    "aten.reshape": _reshape,
    "aten.rsqrt": unary("rsqrt"),
    "aten.rsub": binary("sub", reverse=True),
    "aten.select": _select,
    "aten.sigmoid": unary("sigmoid"),
    "aten.silu": unary("silu"),
    "aten.sin": unary("sin"),
    "aten.slice": _slice,
    "aten.softmax": _softmax,
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.sqrt": unary("sqrt"),
    "aten.squeeze": _squeeze,
    "aten.stack": _stack,
    "aten.sub": binary("sub"),
    "aten.sum": reduction("sum"),
    "aten.t": _transpose,
    "aten.tanh": unary("tanh"),
    "aten.to": _cast,
    "aten.topk": _topk,
    "aten.transpose": _transpose,
    "aten.type_as": _cast,
    "aten.unflatten": _reshape,
    "aten.unsqueeze": _unsqueeze,
    "aten.view": _reshape,
    "pcg.attention": _attention,
    "pcg.experts": _experts,
    "pcg.take": _take,
}
