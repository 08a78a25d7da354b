"""Repetition of KV heads, so that each rank has whole KV heads for its own query heads.

    k = x Wᵀ: [T, kv d]  →  k = x (W, each head's rows n / kv times)ᵀ: [T, n d],   n = ranks

A KV head serves a run of query heads; after repetition, each copy serves a shorter run. If n is a
multiple of kv, the repetition moves up from attention to the weights, through operators that treat
all heads equally, including bypass networks: rank r holds only the rows of KV head r kv / n.
Otherwise each rank computes all KV heads, and attention reads them repeated, n = lcm(kv, ranks).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import lcm, prod

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.layouts import Layout, partitioned
from pcg.ir.operators import operator
from pcg.ir.program.program import ModelGraph
from pcg.parallel.base_plan import partitioned_attentions
from pcg.passes.graphs.pass_base import GraphPass, Pass, with_parts
from pcg.passes.stages import Prepared

_HEADS, _FEATURES = -2, -1


@dataclass(frozen=True)
class RepeatHeads(GraphPass):
    """Repeat a layer's KV heads so that `degree` ranks divide them.

    `attentions` names the attentions that ranks share by heads.
    """

    name = "repeat_heads"
    degree: int
    attentions: tuple[str, ...]

    def run(self, before: Graph) -> Graph:
        builder = Builder.extending(before.replace(nodes=()))
        builder.reserved = before.types
        for node in before.nodes:
            if node.name in self.attentions:
                heads, kv_heads = (before.types[name].features[-2] for name in node.inputs[:2])
                wanted = lcm(kv_heads, self.degree)
                wanted = wanted if heads % wanted == 0 else heads
                if wanted != kv_heads:
                    # Named after the attention, as a bypass network may precede its inputs.
                    inputs = list(node.inputs)
                    for place, kind in ((1, "keys"), (2, "values")):
                        inputs[place] = builder.add(
                            "repeat_interleave",
                            [inputs[place]],
                            name=f"{node.name}_{kind}_repeated",
                            scope=node.scope,
                            dim=-2,
                            repeats=wanted // kv_heads,
                        )
                    node = dataclasses.replace(node, inputs=tuple(inputs))
            builder.append(node)
        return builder.build(before.outputs)


class RepeatedRows:
    """The values and weights of a layer that repeat with its attentions' KV heads.

    Attributes:
        copies: number of copies of each KV head.
    """

    def __init__(self, graph: Graph, copies: int) -> None:
        self.graph = graph
        self.copies = copies
        self._dims: dict[str, int] = {}
        self._reads: set[tuple[str, int]] = set()

    def take(self, attentions: Iterable[str]) -> bool:
        """Repeat the weights behind these attentions' inputs; return False if impossible."""
        for node in self.graph.nodes:
            if node.name in attentions:
                for place in (1, 2):
                    self._reads.add((node.name, place))
                    if not self._moves(node.inputs[place], _HEADS):
                        return False
        reads = (
            (node.name, place, name)
            for node in self.graph.nodes
            for place, name in enumerate(node.inputs)
        )
        others = any(name in self._dims and (node, i) not in self._reads for node, i, name in reads)
        return not others and self._dims.keys().isdisjoint(self.graph.outputs)

    def _moves(self, name: str, dim: int) -> bool:
        """Return whether the repetition of weights can repeat a value along a dim."""
        if name in self._dims:
            return self._dims[name] == dim
        self._dims[name] = dim
        if name in self.graph.parameters_by_name:
            parameter = self.graph.parameters_by_name[name]
            return dim == -len(parameter.type.dims) and isinstance(parameter.type.shape[dim], int)
        node = self.graph.producers.get(name)
        if node is None or len(node.outputs) > 1:
            return False
        dims = self._dims_of_inputs(node, dim)
        if dims is None:
            return False
        self._reads.update((node.name, place) for place in dims)
        return all(self._moves(node.inputs[place], at) for place, at in dims.items())

    def _dims_of_inputs(self, node: Node, dim: int) -> Mapping[int, int] | None:
        """Return the dims of inputs, by index, that form a dim of the output."""
        types = tuple(self.graph.types[name] for name in node.inputs)
        if node.op == "reshape":
            *_, width = types[0].features
            rows = node.output.type.features
            is_cut = len(types[0].features) == 1 and width == prod(rows[dim:])
            return {0: _FEATURES} if is_cut else None
        attributes = dict(node.attributes)
        return operator(node.op).dims_behind(types, node.output.type, attributes, dim)

    @property
    def parameters(self) -> Mapping[str, Layout]:
        """The partitioned layouts of the weights with repeated rows."""
        types = self.graph.types
        return {
            name: partitioned(-len(types[name].dims))
            for name in self._dims
            if name in self.graph.parameters_by_name
        }

    def repeated(self) -> Graph:
        parameters = tuple(map(self._parameter, self.graph.parameters))
        nodes = tuple(map(self._node, self.graph.nodes))
        return self.graph.replace(parameters=parameters, nodes=nodes)

    def _value(self, value: Value) -> Value:
        dim = self._dims.get(value.name)
        if dim is None:
            return value
        sizes = list(value.type.shape)
        sizes[dim] = sizes[dim] * self.copies
        return Value(value.name, value.type.with_shape(tuple(sizes)))

    def _parameter(self, parameter: Parameter) -> Parameter:
        if parameter.name not in self._dims:
            return parameter
        value = self._value(parameter.value)
        return dataclasses.replace(parameter, value=value, copies=self.copies)

    def _node(self, node: Node) -> Node:
        if node.name not in self._dims:
            return node
        outputs = tuple(map(self._value, node.outputs))
        types = tuple(value.type for value in outputs)
        attributes = operator(node.op).local_attributes(dict(node.attributes), types)
        pairs = tuple(sorted(attributes.items()))
        return dataclasses.replace(node, outputs=outputs, attributes=pairs)


@dataclass(frozen=True)
class RepeatHeadsOfModels(Pass[Prepared, Prepared]):
    """Repeat the KV heads of attentions that the base's plan shares by heads, in each model.

    `moves` is False if a user's plan fixes the weights' layouts.
    """

    name = RepeatHeads.name
    degree: int
    moves: bool = True

    def run(self, before: Prepared) -> Prepared:
        repeats = [self._repeats(before, place) for place in range(len(before.base.blocks))]

        def repeated(model: ModelGraph) -> ModelGraph:
            pairs = zip(before.base_blocks(model), model.blocks, strict=True)
            blocks = tuple(repeats[place][0](block) for place, block in pairs)
            return dataclasses.replace(model, blocks=blocks)

        layouts = tuple(
            {**of_block, **held}
            for of_block, (_, held) in zip(before.layouts, repeats, strict=True)
        )
        return dataclasses.replace(
            with_parts(before, "base serving training", repeated), layouts=layouts
        )

    def _repeats(
        self, prepared: Prepared, place: int
    ) -> tuple[Callable[[Graph], Graph], Mapping[str, Layout]]:
        """Return the transformation of a base block and its models' blocks, and layouts of weights.

        All models share the base's weights, so rows are repeated in all models or in none.
        """
        plain, layouts = prepared.base.blocks[place], prepared.layouts[place]
        attentions = tuple(sorted(partitioned_attentions(plain, layouts)))
        rest = RepeatHeads(self.degree, attentions)
        copies = {
            _copies(plain, node, self.degree) for node in plain.nodes if node.name in attentions
        }
        (count,) = copies if len(copies) == 1 else (1,)
        if not self.moves or count == 1:
            return rest.run, {}
        models = [model for model in (prepared.serving, prepared.training) if model is not None]
        blocks = [
            block
            for model in models
            for at, block in zip(prepared.base_blocks(model), model.blocks, strict=True)
            if at == place
        ]
        rows = {block: RepeatedRows(block, count) for block in (plain, *blocks)}
        if not all(repeated.take(attentions) for repeated in rows.values()):
            return rest.run, {}
        return lambda block: rows[block].repeated(), rows[plain].parameters


def _copies(graph: Graph, attention: Node, degree: int) -> int:
    """Return the copies of a KV head that give each rank one; 1 if rows are not repeated."""
    kv_heads = int(graph.types[attention.inputs[1]].features[_HEADS])
    return degree // kv_heads if degree % kv_heads == 0 else 1
