"""Defer LoRA's summands: the kernel that reads a product's sum with its LoRA makes that sum.

    z = lora_linear(x, W, A, B)         y, d = lora_linear(x, W, A, B) {deferred=True}
    n = norm(a + z)                     z = add_deferred(y, d);  n = norm(a + z)

A kernel of its own would read and write y again, and is a launch at each site. The sum is made
where all that reads it, through views, are nodes of groups, or attention that has the kernel before
it append v. Of what a layer returns the next one makes the sum, and the epilogue, if all of them
can; the first layer is given a summand of nothing. Where a collective, or another adapter's
operator, reads the sum, or nothing that a group runs, the operator stays as it is.

For few tokens only the runtime leaves something to be added (`pcg.kernels.triton.adapters`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from pcg.ir.graph import Graph, Node, Value
from pcg.ir.operators import operator
from pcg.ir.operators.lora import LoraLinear
from pcg.ir.program.program import ModelGraph
from pcg.passes.fusion.group_kernels import is_fusible
from pcg.passes.fusion.split_cache_append import SplitCacheAppend
from pcg.passes.naming import unused_name
from pcg.passes.pass_base import ModelPass


class DeferLora(ModelPass):
    """Make the sums of products and their LoRA where they are read, where groups can."""

    name = "defer_lora"

    def run(self, before: ModelGraph) -> ModelGraph:
        own = [{*_of_one_lora(block)} for block in before.blocks]
        carried = [
            index
            for index in _carried(before)
            if any(block.outputs[index] in of for block, of in zip(before.blocks, own, strict=True))
        ]
        given = [
            {block.outputs[index] for index in carried} & of
            for block, of in zip(before.blocks, own, strict=True)
        ]
        blocks = []
        for block, names in zip(before.blocks, given, strict=True):
            left = _deferred(block, names)
            blocks.append(_received(_returned(left, block, carried), carried, len(block.outputs)))
        prologue, count = before.prologue, len(before.blocks[0].outputs)
        for place, index in enumerate(carried):
            prologue = _with_nothing(prologue, count + place, prologue.outputs[index])
        epilogue = _received(before.epilogue, carried, count)
        if blocks == [*before.blocks] and not carried:
            return before
        return dataclasses.replace(
            before, prologue=prologue, blocks=tuple(blocks), epilogue=epilogue
        )


def _carried(model: ModelGraph) -> list[int]:
    """Indices of what layers return whose LoRA the next layer, and the epilogue, can add."""
    count = len(model.blocks[0].outputs)
    graphs = (*model.blocks, model.epilogue)
    return [
        index
        for index in range(count)
        if all(_is_read_by_groups(graph, graph.inputs[index].name) for graph in graphs)
    ]


def _of_one_lora(graph: Graph) -> Iterator[str]:
    """Names that a graph returns once, and reads nowhere, of products by one weight with LoRA."""
    for node in graph.nodes:
        if node.op == "lora_linear" and len(node.outputs) == 1:
            name = node.outputs[0].name
            if graph.outputs.count(name) == 1 and not graph.consumers.get(name):
                yield name


def _is_read_by_groups(graph: Graph, name: str) -> bool:
    """Return whether nodes that groups can have, and no others, read a value, also by views."""
    if name in graph.outputs or not graph.consumers.get(name):
        return False
    return all(_is_of_a_group(graph, name, reader) for reader in graph.consumers[name])


def _is_of_a_group(graph: Graph, name: str, reader: Node) -> bool:
    if operator(reader.op).is_view:
        return is_fusible(graph, reader) and _is_read_by_groups(graph, reader.name)
    if reader.op == "attention":
        is_value = reader.inputs[1:3].count(name) == 1 and reader.inputs[2] == name
        return is_value and SplitCacheAppend().splits(graph, reader)
    return is_fusible(graph, reader)


# ------------------------------------------------------------------------------------- one graph


def _deferred(graph: Graph, returned: Collection[str]) -> _Deferred:
    """The graph with the LoRA deferred of each product whose sums are returned or read by groups.

    What is returned stays without it.
    """
    taken = {*graph.types}
    nodes: list[Node] = []
    summands: dict[str, str] = {}
    for node in graph.nodes:
        is_new = node.op == "lora_linear" and not node.get("deferred")
        names = _adapted(node) if is_new else []
        if not names or not all(n in returned or _is_read_by_groups(graph, n) for n in names):
            nodes.append(node)
            continue
        products: dict[str, Value] = {}
        deferred: list[Value] = []
        for value in (value for value in node.outputs if value.name in names):
            stem = value.name.removesuffix("_z")
            for to, suffix in ((products, "y"), (deferred, "d")):
                name = unused_name(f"{stem}_{suffix}", taken)
                taken.add(name)
                if to is deferred:
                    deferred.append(Value(name, value.type))
                elif value.name not in returned:
                    products[value.name] = Value(name, value.type)
            if value.name in returned:
                summands[value.name] = deferred[-1].name
        outputs = tuple(products.get(value.name, value) for value in node.outputs)
        attributes = tuple(sorted((*node.attributes, ("deferred", True))))
        nodes.append(
            dataclasses.replace(node, outputs=(*outputs, *deferred), attributes=attributes)
        )
        for value, summand in zip(
            (value for value in node.outputs if value.name in names), deferred, strict=True
        ):
            if value.name in products:
                read = (products[value.name].name, summand.name)
                nodes.append(Node("add_deferred", read, (value,), (), node.scope))
    return _Deferred(graph.replace(nodes=tuple(nodes)), summands)


@dataclasses.dataclass(frozen=True)
class _Deferred:
    """A graph, and the names of the summands of what it returns without them."""

    graph: Graph
    summands: Mapping[str, str]


def _adapted(node: Node) -> list[str]:
    return [node.outputs[i].name for i in LoraLinear.adapted(dict(node.attributes))]


def _returned(left: _Deferred, before: Graph, carried: Collection[int]) -> Graph:
    """The graph that returns the summands, too; where there is none, one of nothing."""
    graph = left.graph
    nodes, outputs = [*graph.nodes], [*graph.outputs]
    for index in carried:
        name = before.outputs[index]
        if name not in left.summands:
            nothing = Value(unused_name("nothing", graph.types), graph.types[name])
            nodes.append(Node("nothing_deferred", (name,), (nothing,)))
            graph = graph.replace(nodes=tuple(nodes))
            outputs.append(nothing.name)
        else:
            outputs.append(left.summands[name])
    return graph.replace(outputs=tuple(outputs))


def _received(graph: Graph, carried: Collection[int], count: int) -> Graph:
    """The graph with the sums of what it is given and its LoRA, in place of the sums."""
    inputs, sums = [*graph.inputs], []
    taken = {*graph.types}
    for place, index in enumerate(carried):
        whole = inputs[index]
        names = []
        for suffix in ("y", "d"):
            names.append(unused_name(f"{whole.name}_{suffix}", taken))
            taken.add(names[-1])
        inputs[index] = Value(names[0], whole.type)
        inputs.insert(count + place, Value(names[1], whole.type))
        sums.append(Node("add_deferred", tuple(names), (whole,)))
    return graph.replace(inputs=tuple(inputs), nodes=(*sums, *graph.nodes))


def _with_nothing(graph: Graph, place: int, like: str) -> Graph:
    """The graph that returns a summand of nothing at a place among its outputs."""
    nothing = Value(unused_name("nothing", graph.types), graph.types[like])
    outputs = (*graph.outputs[:place], nothing.name, *graph.outputs[place:])
    nodes = (*graph.nodes, Node("nothing_deferred", (like,), (nothing,)))
    return graph.replace(nodes=nodes, outputs=outputs)
