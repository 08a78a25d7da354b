"""The rule of each operator that exported models use, by its name without an overload."""

from __future__ import annotations

from collections.abc import Mapping

from pcg.trace import elementwise_rules as elementwise
from pcg.trace import product_rules as products
from pcg.trace import shape_rules as shapes
from pcg.trace.elementwise_rules import Rule, binary, unary
from pcg.trace.product_rules import reduction

_UNARY = ("cos", "exp", "neg", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh")
_BINARY = ("add", "div", "mul", "sub")
_IDENTITIES = ("alias", "clone", "contiguous", "lift_fresh_copy")
_RESHAPES = ("_unsafe_view", "flatten", "reshape", "squeeze", "unflatten", "view")

_ATEN: Mapping[str, Rule] = {
    **{name: unary(name) for name in _UNARY},
    **{name: binary(name) for name in _BINARY},
    **dict.fromkeys(_IDENTITIES, elementwise.identity),
    **dict.fromkeys(_RESHAPES, shapes.reshape),
    **dict.fromkeys(("_to_copy", "to", "type_as"), elementwise.cast),
    **dict.fromkeys(("_softmax", "softmax"), products.softmax),
    **dict.fromkeys(("bmm", "matmul", "mm"), products.matmul),
    **dict.fromkeys(("broadcast_to", "expand", "expand_as"), shapes.expand),
    **dict.fromkeys(("chunk", "split", "split_with_sizes"), shapes.split),
    **dict.fromkeys(("t", "transpose"), shapes.transpose),
    "_weight_norm": products.weight_norm,
    "addmm": products.addmm,
    "arange": shapes.arange,
    "cat": shapes.concat,
    "clamp": unary("clamp", min=1, max=2),
    "copy": shapes.copy,
    "detach": elementwise.detach,
    "dropout": elementwise.dropout,
    "embedding": shapes.embedding,
    "gather": shapes.gather,
    "gelu": elementwise.gelu,
    "index": shapes.index,
    "layer_norm": products.layer_norm,
    "rms_norm": products.rms_norm,
    "linear": products.linear,
    "mean": reduction("mean"),
    "numpy_T": shapes.reverse,
    "permute": shapes.permute,
    "pow": elementwise.power,
    "repeat": shapes.repeat,
    "repeat_interleave": shapes.repeat_interleave,
    "rsub": binary("sub", reverse=True),
    "select": shapes.select,
    "select_scatter": shapes.select_scatter,
    "slice": shapes.slice_,
    "slice_scatter": shapes.slice_scatter,
    "stack": shapes.stack,
    "sum": reduction("sum"),
    "topk": products.topk,
    "unsqueeze": shapes.unsqueeze,
}
RULES: Mapping[str, Rule] = {
    **{f"aten.{name}": rule for name, rule in _ATEN.items()},
    "pcg.experts": products.experts,
    "pcg.take": shapes.take,
}
