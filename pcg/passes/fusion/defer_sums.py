"""Moves of appends and sums into neighbouring kernels, in programs for Triton.

**Split cache append.** The kernel that computes keys stores them directly in the cache:

    out = attention(q, k, v)      keys = append(k), values = append(v)
                                  out = attention(q, keys, values)

If no such kernel computes keys, as in models without rotary embedding, attention appends both.

**Defer residual sums.** A layer returns two summands, and the next norm's kernel adds them:

    x' = a + b                  a, b                      of each layer
    n = norm(x')                x' = a + b;  n = norm(x')     of the next, and of the epilogue

A separate kernel would add a launch per layer, and would write and read the norm's input again. The
first layer gets x and zeros. Only serving programs defer: backward would save both summands.

**Defer LoRA.** The kernel that reads a product with LoRA adds LoRA's summand:

    z = lora_linear(x, W, A, B)         y, d = lora_linear(x, W, A, B) {deferred=True}
    n = norm(a + z)                     z = add_deferred(y, d);  n = norm(a + z)

A separate kernel would read and write y again, with a launch per site. The sum is deferred if all
its readers, also through views, are nodes of groups, or attention after the kernel that appends v.
A sum that a layer returns moves to the next layer and to the epilogue if all of them can add it;
the first layer gets an empty summand. The sum stays if a collective or another adapter's operator
reads it, or if no group does. The runtime defers for few tokens only
(`pcg.kernels.triton.adapters`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pcg.ir.graph import Graph, Node, Value
from pcg.ir.operators import operator
from pcg.ir.operators.lora import LoraLinear
from pcg.ir.program.program import ModelGraph, python_name
from pcg.ir.types import TOKENS
from pcg.kernels.sizes import HEAD_SIZES, KERNEL_DTYPES
from pcg.passes.fusion.group_kernels import is_fusible
from pcg.passes.graphs.pass_base import GraphPass, ModelPass, unused_name

# ------------------------------------------------------------------------------- split cache append


@dataclass(frozen=True)
class SplitCacheAppend(GraphPass):
    """Append keys and values to the cache by nodes before attention.

    Attributes:
        sizes: head sizes that attention's kernels support; other attention appends itself.
        dtypes: dtypes that these kernels support.
    """

    name = "split_cache_append"
    sizes: tuple[int, ...] = HEAD_SIZES
    dtypes: tuple[str, ...] = KERNEL_DTYPES

    def run(self, before: Graph) -> Graph:
        names = {python_name(name) for name in before.types}
        nodes: list[Node] = []
        for node in before.nodes:
            if node.op != "attention" or not self.splits(before, node):
                nodes.append(node)
                continue
            q, k, v, *rest = node.inputs
            appended = []
            for value, to in ((k, "keys"), (v, "values")):
                name = unused_name(to, names)
                names.add(name)
                appended.append(name)
                output = Value(name, before.types[value])
                nodes.append(Node("append", (value,), (output,), (("to", to),), node.scope))
            nodes.append(dataclasses.replace(node, inputs=(q, *appended, *rest)))
        return before.replace(nodes=tuple(nodes))

    def splits(self, graph: Graph, node: Node) -> bool:
        """Return whether the kernel that computes an attention's keys appends them."""
        q, k, v = (graph.types[name] for name in node.inputs[:3])
        sizes = {q.features[-1], v.features[-1]}
        known = sizes.issubset(self.sizes) and q.dtype in self.dtypes
        same = q.dtype == k.dtype == v.dtype
        return known and same and _is_made_by_a_kernel(graph, node.inputs[1])


def _is_made_by_a_kernel(graph: Graph, value: str) -> bool:
    node = graph.producers.get(value)
    while node is not None and operator(node.op).is_view:
        node = graph.producers.get(node.inputs[0])
    return node is not None and is_fusible(graph, node)


# ------------------------------------------------------------------------------- defer residual add


class DeferResidualAdd(ModelPass):
    """Move the sum at the end of every layer to its readers."""

    name = "defer_residual_add"

    def run(self, before: ModelGraph) -> ModelGraph:
        sums = [_last_sum(block) for block in before.blocks]
        # If ranks hold parts of the tokens, gather a layer's input once, not both summands.
        if before.epilogue.inputs[0].type.shape[0] != TOKENS:
            return before
        blocks = []
        for block, last in zip(before.blocks, sums, strict=True):
            if last is None:
                return before
            nodes = tuple(node for node in block.nodes if node is not last)
            blocks.append(_summed(block.replace(nodes=nodes, outputs=last.inputs)))
        prologue = before.prologue
        first, *shared = prologue.outputs
        zeros = Value(unused_name("zeros", prologue.types), prologue.types[first])
        nodes = (*prologue.nodes, Node("sub", (first, first), (zeros,)))
        return dataclasses.replace(
            before,
            prologue=prologue.replace(nodes=nodes, outputs=(first, zeros.name, *shared)),
            blocks=tuple(blocks),
            epilogue=_summed(before.epilogue),
        )


def _last_sum(block: Graph) -> Node | None:
    """Return the sum that is a layer's only output; None unless both summands are in memory."""
    if len(block.outputs) != 1:
        return None
    last = block.producers.get(block.outputs[0])
    if last is None or last.op != "add" or len({*last.inputs, last.name}) != 3:
        return None
    if block.consumers.get(last.name):
        return None
    types = {block.types[name] for name in (*last.inputs, last.name)}
    return last if len(types) == 1 and all(_is_there(block, n) for n in last.inputs) else None


def _is_there(block: Graph, name: str) -> bool:
    """Return whether a value is in memory, regardless of the kernel that adds it."""
    maker = block.producers.get(name)
    return maker is None or not is_fusible(block, maker) or len(block.consumers[name]) > 1


def _summed(graph: Graph) -> Graph:
    """Replace the first input by the sum of two inputs."""
    x = graph.inputs[0]
    names = (unused_name(name, graph.types) for name in ("residual", "branch"))
    summands = [Value(name, x.type) for name in names]
    total = Node("add", tuple(value.name for value in summands), (x,))
    return graph.replace(inputs=(*summands, *graph.inputs[1:]), nodes=(total, *graph.nodes))


# --------------------------------------------------------------------------------------- defer lora


class DeferLora(ModelPass):
    """Move the sums of products and their LoRA to readers that are groups."""

    name = "defer_lora"

    def run(self, before: ModelGraph) -> ModelGraph:
        of_lora = [{*_of_one_lora(block)} for block in before.blocks]
        carried = [
            index
            for index in _carried(before)
            if any(
                block.outputs[index] in of for block, of in zip(before.blocks, of_lora, strict=True)
            )
        ]
        received = [
            {block.outputs[index] for index in carried} & of
            for block, of in zip(before.blocks, of_lora, strict=True)
        ]
        blocks = []
        for block, names in zip(before.blocks, received, strict=True):
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
    """Return indices of layer outputs whose LoRA the next layer and the epilogue can add."""
    count = len(model.blocks[0].outputs)
    graphs = (*model.blocks, model.epilogue)
    return [
        index
        for index in range(count)
        if all(_is_read_by_groups(graph, graph.inputs[index].name) for graph in graphs)
    ]


def _of_one_lora(graph: Graph) -> Iterator[str]:
    """Yield outputs of LoRA products that the graph returns once and does not read."""
    for node in graph.nodes:
        if node.op == "lora_linear" and len(node.outputs) == 1:
            name = node.outputs[0].name
            if graph.outputs.count(name) == 1 and not graph.consumers.get(name):
                yield name


def _is_read_by_groups(graph: Graph, name: str) -> bool:
    """Return whether all readers of a value, also through views, are nodes of groups."""
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
    """Defer the LoRA of each product whose sums are returned or read by groups."""
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
        nodes.append(node.changed(outputs=(*outputs, *deferred), attributes={"deferred": True}))
        for value, summand in zip(
            (value for value in node.outputs if value.name in names), deferred, strict=True
        ):
            if value.name in products:
                read = (products[value.name].name, summand.name)
                nodes.append(Node("add_deferred", read, (value,), (), node.scope))
    return _Deferred(graph.replace(nodes=tuple(nodes)), summands)


@dataclasses.dataclass(frozen=True)
class _Deferred:
    """A graph, and the names of the summands missing in its outputs."""

    graph: Graph
    summands: Mapping[str, str]


def _adapted(node: Node) -> list[str]:
    return [node.outputs[i].name for i in LoraLinear.adapted(dict(node.attributes))]


def _returned(left: _Deferred, before: Graph, carried: Collection[int]) -> Graph:
    """Add the summands to the outputs; an empty summand for outputs without LoRA."""
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
    """Replace inputs that were sums by the sums of an input and its LoRA summand."""
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
    """Insert an empty summand into the outputs."""
    nothing = Value(unused_name("nothing", graph.types), graph.types[like])
    outputs = (*graph.outputs[:place], nothing.name, *graph.outputs[place:])
    nodes = (*graph.nodes, Node("nothing_deferred", (like,), (nothing,)))
    return graph.replace(nodes=nodes, outputs=outputs)
