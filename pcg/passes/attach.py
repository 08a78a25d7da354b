"""Attach bypass networks: Y = f_B(X) + f_A(X) at named sites (FlexLLM §4.1).

A site is a linear operator of the base, named by its module path with `{layer}` for the layer's
index. LoRA adds two products beside it,

    s = shrink(x, A)         [T, r]
    z = expand_add(y, s, B)  [T, out]

and an adapter's own bias, where its recipe trains biases, replaces the base's after the operator
that adds it. In training, A may read dropout(x). B's own bias is added behind it. (IA)³ scales the
operator's output, or its input. DoRA scales z, but not the base's bias, by a factor that training
makes of the weights, and that serving has as an adapter's parameter,

    n = column_norm(W, A, B);  f = column_factor(m, n);  scale(z, f, b)

VeRA is LoRA whose A and B training makes of matrices that all sites share, and of the site's
vectors; serving has LoRA's A and B in their place,

    A = vera_down(vera_A);  B = vera_up(vera_B, λ_b, λ_d)

AdaLoRA is LoRA whose A has singular values, which serving has in A,

    A' = singular_down(A, E)

A bottleneck adapter reads the site's output, or the MLP's input where it is parallel,

    h = activate(shrink(x, D), d);  z = bias_add(expand_add(y, h, U), u)

A prompt's embeddings stand in the rows of virtual tokens, behind the token embedding,

    x = virtual_tokens(embedding(ids), p)

A prefix's keys and values stand there in each layer, behind rotary embedding,

    k = virtual_tokens(k, p_k);  v = virtual_tokens(v, p_v)

so that what the layers make of virtual tokens is read by no other token.

The base program is unchanged but for reading these instead of y, x, k and v.

A site where adapters of several methods meet has the operators of all. A token has one adapter, and
the others' operators change nothing of it, so that their order does not matter.
"""

from __future__ import annotations

import dataclasses
from math import prod

import sympy

from pcg.errors import UnsupportedError
from pcg.ir.builder import Builder
from pcg.ir.graph import Attribute, Graph, Node, Parameter, Value
from pcg.ir.program.program import ModelGraph, site_of, token_embedding
from pcg.ir.types import RANK, Size, tensor
from pcg.passes.bypasses import Bottleneck, Bypasses
from pcg.peft.bottleneck import MLP_INPUTS

VIRTUAL = sympy.Symbol("n", integer=True, positive=True)
"""Virtual tokens of prompts of any length."""


def attach(model: ModelGraph, bypasses: Bypasses) -> ModelGraph:
    """The model with bypass networks at the given sites.

    Raises:
        UnsupportedError: a bias is to be trained whose operator pcg cannot give another; named.
    """
    shapes = [shape for site, shape in model.linear_sites().items() if site in bypasses.vera]
    largest = tuple(map(max, zip(*shapes, strict=True))) if shapes else ()
    prompted = embeds(model.prologue) if bypasses.prompt != 0 else ""
    attached = model.map(
        lambda graph: _attach_graph(
            graph, bypasses, largest, prompted if graph is model.prologue else ""
        )
    )
    there = {p.source for graph in attached.graphs for p in graph.parameters if p.role == "adapter"}
    missing = sorted(bypasses.biases - there)
    if missing:
        raise UnsupportedError(
            f"{missing[0]} is not added by a linear operator or a layer norm, and pcg trains no "
            'other biases; use bias="none"'
        )
    return attached


def embeds(prologue: Graph) -> str:
    """What the module gives that looks token ids up.

    Its last node: peft hands a model embeddings in place of ids, which some scale within that
    module (Gemma), and others behind it, a prompt's as any (Granite).
    """
    embedding = token_embedding(prologue)
    if embedding is None:
        raise UnsupportedError(
            "the model has no token embedding that pcg knows, before which virtual tokens would be"
        )
    return [node.name for node in prologue.nodes if node.scope == embedding.scope][-1]


def _attach_graph(
    graph: Graph, bypasses: Bypasses, largest: tuple[int, ...], prompted: str
) -> Graph:
    builder = Builder(graph.name)
    for value in graph.inputs:
        builder.input(value.name, value.type)
    for parameter in graph.parameters:
        builder.parameter(parameter)
    names: dict[str, str] = {}
    for node in graph.nodes:
        inputs = tuple(names.get(name, name) for name in node.inputs)
        node_ = dataclasses.replace(node, inputs=inputs)
        place = _Place(builder, graph, node_, bypasses, largest)
        new = place.attach()
        if node.name == prompted:
            new = place.prompt(new)
        if new != node.name:
            names[node.name] = new
    return builder.build([names.get(name, name) for name in graph.outputs])


class _Place:
    """A node of the base, and what attaches to it."""

    def __init__(
        self,
        builder: Builder,
        graph: Graph,
        node: Node,
        bypasses: Bypasses,
        largest: tuple[int, ...],
    ) -> None:
        self._builder = builder
        self._graph = graph
        self._node = node
        self._bypasses = bypasses
        self._largest = largest  # (out, in) of VeRA's shared matrices
        self._site = site_of(graph, node) or ""
        weight = node.inputs[1] if self._site else ""
        # What the names of the site's parameters begin with in the graph.
        self._stem = weight.removesuffix(".weight") if "{layer}" in self._site else node.scope

    def attach(self) -> str:
        """Add the node with its bypass networks; returns what stands for its output."""
        site, bypasses, node = self._site, self._bypasses, self._node
        if site in bypasses.scaled_inputs:
            x = self._scaled(node.inputs[0], "ia3_l_in", "scaled_x")
            node = self._node = dataclasses.replace(node, inputs=(x, *node.inputs[1:]))
        if node.op == "attention" and bypasses.prefix != 0:
            node = self._node = self._prefixed(node)
        self._builder.append(node)
        value = node.name
        if site in bypasses.ranks:
            value = self._lora(value)
        if site in bypasses.vera:
            value = self._vera(value)
        if site in bypasses.adalora:
            value = self._adalora(value)
        value = self._bias(value)
        for bottleneck, size in bypasses.bottlenecks.items():
            if bottleneck.site == site:
                value = self._bottleneck(value, bottleneck, size)
        if site in bypasses.scaled:
            value = self._scaled(value, "ia3_l", "scaled")
        return value

    def prompt(self, value: str) -> str:
        """Put a prompt's embeddings into the virtual rows of the token embedding's."""
        (width,) = self._builder.types[value].features
        kind = "prompt_embeddings"
        prompt = self._parameter(kind, kind, self._bypasses.prompt or VIRTUAL, width)
        return self._add("virtual_tokens", "prompted", value, prompt)

    def _prefixed(self, node: Node) -> Node:
        """Attention to a prefix's keys and values in the virtual rows."""
        q, *read = node.inputs
        for index, kind in enumerate(("prefix_keys", "prefix_values")):
            size = prod(self._builder.types[read[index]].features)
            prefix = self._parameter(
                kind, f"layers.{{layer}}.{kind}", self._bypasses.prefix or VIRTUAL, size
            )
            read[index] = self._add("virtual_tokens", kind, read[index], prefix)
        return dataclasses.replace(node, inputs=(q, *read))

    def _lora(self, value: str) -> str:
        out, in_ = self._graph.types[self._node.inputs[1]].features
        rank: Size = self._bypasses.ranks[self._site] or RANK
        a, b = self._adapter("lora_A", rank, in_), self._adapter("lora_B", out, rank)
        is_dora = self._site in self._bypasses.magnitudes
        x = self._dropped(keeps_dtype=is_dora)
        y = value
        if is_dora and x != self._node.inputs[0]:
            # The base's product is of what was not dropped, too (peft 0.21.2, DoraLinearVariant).
            y = self._add("linear", "dropped", x, self._node.inputs[1])
        z = self._add("expand_add", "z", y, self._add("shrink", "s", x, a), b)
        if self._site in self._bypasses.lora_biases:
            z = self._add("bias_add", "b", z, self._adapter("lora_B_bias", out))
        if not is_dora:
            return z
        factor = self._factor(a, b, out)
        if y == value:
            return self._add("scale", "dora", z, factor, *self._node.inputs[2:])
        change = self._add("sub", "change", self._add("scale", "dora", z, factor), y)
        return self._add("add", "changed", value, change)

    def _vera(self, value: str) -> str:
        out, in_ = self._graph.types[self._node.inputs[1]].features
        (rows, columns), rank = self._largest, self._bypasses.vera[self._site]
        a = self._parameter("vera_A", "vera_A", rank, columns)
        b = self._parameter("vera_B", "vera_B", rows, rank)
        down = self._add("vera_down", "down", a, size=in_)
        vectors = self._adapter("vera_lambda_b", out), self._adapter("vera_lambda_d", rank)
        up = self._add("vera_up", "up", b, *vectors)
        s = self._add("shrink", "vera_s", self._dropped(keeps_dtype=False), down)
        return self._add("expand_add", "vera_z", value, s, up)

    def _adalora(self, value: str) -> str:
        out, in_ = self._graph.types[self._node.inputs[1]].features
        rank = self._bypasses.adalora[self._site]
        a, e = self._adapter("adalora_A", rank, in_), self._adapter("adalora_E", rank, 1)
        down = self._add("singular_down", "adalora_down", a, e)
        s = self._add("shrink", "adalora_s", self._dropped(keeps_dtype=False), down)
        b = self._adapter("adalora_B", out, rank)
        return self._add("expand_add", "adalora_z", value, s, b)

    def _bottleneck(self, value: str, bottleneck: Bottleneck, size: int | None) -> str:
        kind, rank = bottleneck.kind, size or RANK
        (out,) = self._builder.types[value].features
        x = self._mlp_input() if bottleneck.is_parallel else value
        (in_,) = self._builder.types[x].features
        down, up = self._adapter(f"{kind}_down", rank, in_), self._adapter(f"{kind}_up", out, rank)
        biases = self._adapter(f"{kind}_down_bias", rank), self._adapter(f"{kind}_up_bias", out)
        s = self._add("shrink", f"{kind}_s", x, down)
        function = bottleneck.non_linearity
        h = self._add("activate", f"{kind}_h", s, biases[0], function=function)
        z = self._add("expand_add", f"{kind}_z", value, h, up)
        return self._add("bias_add", f"{kind}_b", z, biases[1])

    def _mlp_input(self) -> str:
        """What the MLP reads whose output the site makes."""
        parent = self._site.rpartition(".")[0]
        for node in self._builder.nodes:
            path, _, name = (site_of(self._graph, node) or "").rpartition(".")
            if path == parent and name in MLP_INPUTS:
                return node.inputs[0]
        raise UnsupportedError(
            f"{self._site} ends no MLP whose input pcg knows, beside which a parallel adapter "
            f"would be; its first module is named {', '.join(MLP_INPUTS)}"
        )

    def _factor(self, a: str, b: str, out: int) -> str:
        """DoRA's factor of each output."""
        if self._bypasses.serving:
            return self._adapter("lora_factor", out)
        norm = self._add("column_norm", "norm", self._node.inputs[1], a, b)
        magnitude = self._adapter("lora_magnitude_vector", out)
        return self._add("column_factor", "factor", magnitude, norm)

    def _dropped(self, keeps_dtype: bool) -> str:
        """The bypass network's input; with dropout in the adapters' dtype, as peft drops.

        Args:
            keeps_dtype: drop in the base's dtype, as the base multiplies it, too.
        """
        x, bypasses = self._node.inputs[0], self._bypasses
        if not bypasses.dropout:
            return x
        key = [node.name for node in self._graph.nodes].index(self._node.name)
        attributes: dict[str, Attribute] = {"p": bypasses.dropout, "key": key}
        if self._builder.types[x].dtype != bypasses.dtype and not keeps_dtype:
            attributes["dtype"] = bypasses.dtype
        return self._add("dropout", "x", x, **attributes)

    def _scaled(self, value: str, kind: str, suffix: str) -> str:
        """The site's input or output, each token's by its own adapter's vector."""
        vector = self._adapter(kind, self._builder.types[value].features[-1])
        return self._add("scale", suffix, value, vector)

    def _bias(self, value: str) -> str:
        if self._node.op not in ("linear", "layer_norm"):
            return value
        for name in self._node.inputs[1:]:
            parameter = self._graph.parameters_by_name.get(name)
            if parameter is not None and parameter.source in self._bypasses.biases:
                size = parameter.type.features[0]
                own = self._parameter(f"{name}.own", parameter.source, size)
                return self._builder.add("bias_add", [value, own, name], scope=self._node.scope)
        return value

    def _adapter(self, kind: str, *shape: Size) -> str:
        return self._parameter(f"{self._stem}.{kind}", f"{self._site}.{kind}", *shape)

    def _parameter(self, name: str, source: str, *shape: Size) -> str:
        value = Value(name, tensor(self._bypasses.dtype, *shape))
        return self._builder.parameter(Parameter(value, "adapter", source))

    def _add(self, op: str, suffix: str, *inputs: str, **attributes: Attribute) -> str:
        name = f"{self._node.name}_{suffix}"
        return self._builder.add(op, inputs, name=name, scope=self._node.scope, **attributes)
