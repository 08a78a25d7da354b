"""Rules of matrix products, reductions, norms, attention and experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from pcg.ir.graph import Value
from pcg.trace.elementwise_rules import Rule, broadcast
from pcg.trace.flat_graph import FlatGraph, FlatValue, argument, dtype_of, refusal, traced_shape


def linear(flat: FlatGraph, node: Node) -> FlatValue:
    x, *weights = [flat.tensor(a) for a in node.args if a is not None]
    return _product(flat, node, x, *(weight.name for weight in weights))


def _product(flat: FlatGraph, node: Node, x: FlatValue, *weights: str) -> FlatValue:
    """x Wᵀ (+ b) with the weight [out, in]."""
    if x.tags[-1:] != "d" or x.tags.count("d") != 1:
        raise refusal(node, f"its input has feature dims {list(x.features)}, not one")
    return FlatValue(flat.add("linear", x.name, *weights), x.tags, traced_shape(node))


def addmm(flat: FlatGraph, node: Node) -> FlatValue:
    bias, x, weight = (flat.tensor(a) for a in node.args[:3])
    return _product(flat, node, x, _out_in(flat, node, weight), bias.name)


def _out_in(flat: FlatGraph, node: Node, weight: FlatValue) -> str:
    """A [in, out] operand as an [out, in] weight: the parameter itself, marked transposed."""
    producer = next((n for n in flat.builder.nodes if n.name == weight.name), None)
    if producer is not None and producer.op == "permute" and producer.attribute("dims") == (1, 0):
        return producer.inputs[0]
    parameter = flat.builder.parameters.get(weight.name)
    if parameter is None or parameter.role != "frozen":
        raise refusal(node, "it multiplies activations with activations")
    type_ = parameter.type.with_shape(tuple(reversed(parameter.type.shape)))
    value = Value(f"{parameter.name}.T", type_)
    return flat.builder.parameter(replace(parameter, value=value, transposed=True))


def matmul(flat: FlatGraph, node: Node) -> FlatValue:
    left, right = (flat.tensor(a) for a in node.args[:2])
    if "t" in left.tags and len(right.tags) == 2 and "t" not in right.tags:
        return _product(flat, node, left, _out_in(flat, node, right))
    if len(left.tags) >= 2 and left.shape[-1] == 1 and right.shape[-2] == 1:
        return broadcast(flat, node, "mul", left, right)
    raise refusal(node, "it multiplies activations with activations")


def reduction(op: str) -> Rule:
    """The rule of an operator that reduces one feature dim."""

    def rule(flat: FlatGraph, node: Node) -> FlatValue:
        x, dims = flat.tensor(node.args[0]), argument(node, 1)
        keepdim = bool(argument(node, 2, False, "keepdim"))
        if dims is None or len(dims) != 1 or x.tags[dims[0]] != "d":
            raise refusal(node, "it reduces tokens, or several dims")
        dim = int(dims[0]) % len(x.tags)
        name = flat.add(op, x.name, dim=x.feature_dim(dim), keepdim=keepdim)
        tags = x.tags if keepdim else x.tags[:dim] + x.tags[dim + 1 :]
        return FlatValue(name, tags, traced_shape(node))

    return rule


def weight_norm(flat: FlatGraph, node: Node) -> FlatValue:
    """The rule of torch.nn.utils' weight_norm: g v / |v|, a norm for each entry of a dim of v."""
    v, g = (flat.tensor(a) for a in node.args[:2])
    kept = int(argument(node, 2, 0))
    if v.tags != "dd":
        raise refusal(node, f"it normalises a weight of {len(v.tags)} dims, not a matrix")
    dtype = flat.builder.types[v.name].dtype
    wide = "f64" if dtype == "f64" else "f32"
    wide_v, wide_g = (flat.cast(x.name, wide) for x in (v, g))
    total = flat.add("mul", wide_v, wide_v)
    for dim in {0, 1} - {kept}:  # both dims where kept is -1, one norm of all
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
    """The rule of torch.nn.RMSNorm, which rounds once, after its weight."""
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


def experts(flat: FlatGraph, node: Node) -> FlatValue:
    inputs = [flat.tensor(a) for a in node.args]
    count, *rows, hidden = flat.builder.types[inputs[3].name].features
    if len(rows) > 1:
        raise refusal(node, "its weights are those of another layer's experts")
    # Gate and up are cut alike over ranks, as rows of a dim of their own.
    flat.builder.see(inputs[3].name, count, 2, rows[0] // 2, hidden)
    return inputs[0].named(flat.add("experts", *(x.name for x in inputs)))
