"""Attach bypass networks: Y = f_B(X) + f_A(X) at named sites (FlexLLM §4.1).

A site is a linear operator of the base, named by its module path with `{layer}` for the layer's
index. LoRA adds two products beside it,

    s = shrink(x, A)         [T, r]
    z = expand_add(y, s, B)  [T, out]

and an adapter's own bias, where its recipe trains biases, replaces the base's after the operator
that adds it. In training, A may read dropout(x). The base program is unchanged but for reading z
instead of y.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from pcg.ir.graph import Attribute, Builder, Graph, Node, Parameter, Value
from pcg.ir.program import ModelGraph, site_of
from pcg.ir.types import Size, tensor

RANK = sympy.Symbol("r", integer=True, positive=True)
"""The rank at a site where adapters of several ranks meet."""


@dataclass(frozen=True)
class Bypasses:
    """Where bypass networks attach.

    Attributes:
        ranks: rank of each LoRA site; None where adapters of several ranks meet.
        biases: sources of the base biases that adapters have their own of.
        dtype: of the adapters' parameters.
        dropout: probability that an element of A's input is dropped in training.
    """

    ranks: Mapping[str, int | None] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()
    dtype: str = "f32"
    dropout: float = 0.0

    def __bool__(self) -> bool:
        """Whether anything attaches."""
        return bool(self.ranks or self.biases)

    def for_serving(self) -> Bypasses:
        """The same for adapters of any rank, without what training alone does."""
        return dataclasses.replace(self, ranks=dict.fromkeys(self.ranks), dropout=0.0)


def attach(model: ModelGraph, bypasses: Bypasses) -> ModelGraph:
    """The model with bypass networks at the given sites."""
    return model.map(lambda graph: _attach_graph(graph, bypasses))


def _attach_graph(graph: Graph, bypasses: Bypasses) -> Graph:
    builder = Builder(graph.name)
    for value in graph.inputs:
        builder.input(value.name, value.type)
    for parameter in graph.parameters:
        builder.parameter(parameter)
    names: dict[str, str] = {}
    for node in graph.nodes:
        inputs = tuple(names.get(name, name) for name in node.inputs)
        builder.append(dataclasses.replace(node, inputs=inputs))
        new = _lora(builder, graph, node, inputs, bypasses)
        new = _bias(builder, graph, node, new, bypasses)
        if new != node.name:
            names[node.name] = new
    return builder.build([names.get(name, name) for name in graph.outputs])


def _lora(
    builder: Builder, graph: Graph, node: Node, inputs: tuple[str, ...], bypasses: Bypasses
) -> str:
    site = site_of(graph, node)
    if site is None or site not in bypasses.ranks:
        return node.name
    out, in_ = graph.types[node.inputs[1]].features
    rank: Size = bypasses.ranks[site] or RANK
    stem = node.inputs[1].removesuffix(".weight") if "{layer}" in site else node.scope
    a = _adapter(builder, f"{stem}.lora_A", f"{site}.lora_A", bypasses.dtype, rank, in_)
    b = _adapter(builder, f"{stem}.lora_B", f"{site}.lora_B", bypasses.dtype, out, rank)
    x = _dropped(builder, graph, node, inputs[0], bypasses)
    s = builder.add("shrink", [x, a], name=f"{node.name}_s", scope=node.scope)
    return builder.add("expand_add", [node.name, s, b], name=f"{node.name}_z", scope=node.scope)


def _dropped(builder: Builder, graph: Graph, node: Node, x: str, bypasses: Bypasses) -> str:
    """The bypass network's input; with dropout in the adapters' dtype, as peft drops."""
    if not bypasses.dropout:
        return x
    attributes: dict[str, Attribute] = {"p": bypasses.dropout, "key": graph.nodes.index(node)}
    if builder.types[x].dtype != bypasses.dtype:
        attributes["dtype"] = bypasses.dtype
    return builder.add("dropout", [x], name=f"{node.name}_x", scope=node.scope, **attributes)


def _bias(builder: Builder, graph: Graph, node: Node, value: str, bypasses: Bypasses) -> str:
    if node.op not in ("linear", "layer_norm"):
        return value
    for name in node.inputs[1:]:
        parameter = graph.parameters_by_name.get(name)
        if parameter is not None and parameter.source in bypasses.biases:
            size = parameter.type.features[0]
            own = _adapter(builder, f"{name}.own", parameter.source, bypasses.dtype, size)
            return builder.add("bias_add", [value, own, name], scope=node.scope)
    return value


def _adapter(builder: Builder, name: str, source: str, dtype: str, *shape: Size) -> str:
    return builder.parameter(Parameter(Value(name, tensor(dtype, *shape)), "adapter", source))
