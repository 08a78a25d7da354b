"""Write weight formats into the types of the base's matrices: `bf16[4096, 4096]` to `nf4[…]`.

A checkpoint that is quantized says which modules are. A float checkpoint that is quantized on load
stores the matrices of the layers' linear modules and experts in the format; embeddings, the head,
routers and norms stay in floating point, as in transformers. int8 and q8_0 store the head, too, as
llama.cpp does, and with it an embedding that is tied to it. Layers of equal graphs whose matrices
are stored in different formats become different blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from pcg.errors import UnsupportedError
from pcg.formats.registry import FORMATS
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.module_paths import parameter_of
from pcg.ir.operators.linear import multiplied
from pcg.ir.program.program import ModelGraph, site_of
from pcg.options import NONE
from pcg.passes.graphs.pass_base import Pass
from pcg.passes.stages import Base


@dataclass(frozen=True)
class QuantizeWeights(Pass[Base, Base]):
    """Write the weight formats of a checkpoint, or of a quantization on load, into types.

    Attributes:
        format: the format to quantize a float checkpoint to; None for the checkpoint's own, "none"
            for floating point.
    """

    name = "quantize_weights"
    format: str | None = None

    def run(self, before: Base) -> Base:
        stored = before.stored
        if self.format == NONE or (stored is None and self.format is None):
            return before
        if stored is not None and self.format not in (None, stored.name):
            raise UnsupportedError(
                f"quantization={self.format!r}, and the checkpoint is stored as {stored.name}; "
                "leave quantization out, give 'none' to decode it, or give the float checkpoint"
            )

        embedded = _embedded(before.model.prologue) if stored and not stored.by_module else set()
        outside = (before.model.prologue, before.model.epilogue)
        has_heads = stored is None and FORMATS[str(self.format)].has_heads
        quantized_head = _head_source(before.model.epilogue) if has_heads else None

        def in_layer(graph: Graph, layer: int) -> Graph:
            head = _head(graph) if graph is before.model.epilogue else None
            experts = experts_of(graph)

            def format_of(parameter: Parameter) -> str | None:
                module = parameter.source.removesuffix(".weight")
                if parameter.source in embedded:
                    return None
                if stored is not None and parameter.name in experts:
                    return stored.of_experts(module.format(layer=layer))
                if stored is not None:
                    is_head, is_in_layer = parameter.name == head, graph not in outside
                    return stored.of(module.format(layer=layer), is_head, is_in_layer)
                is_stored = "{layer}" in module or parameter.source == quantized_head
                return self.format if is_stored else None

            return quantized(graph, format_of)

        model = before.model
        of_layers = [
            in_layer(model.blocks[block], layer) for layer, block in enumerate(model.layers)
        ]
        blocks: list[Graph] = []
        for graph in of_layers:
            if graph not in blocks:
                blocks.append(graph)
        model = ModelGraph(
            in_layer(model.prologue, 0),
            tuple(block.replace(name=f"block_{i}") for i, block in enumerate(blocks)),
            tuple(blocks.index(block) for block in of_layers),
            in_layer(model.epilogue, 0),
        )
        return dataclasses.replace(before, model=model)


def _embedded(prologue: Graph) -> set[str]:
    """Return the sources of parameters that the prologue reads otherwise than by a product."""
    names = set(multiplied(prologue))
    return {p.source for p in prologue.parameters if p.name not in names}


def _head(epilogue: Graph) -> str | None:
    """Return the parameter of the last product."""
    names = set(multiplied(epilogue))
    reads = [name for node in epilogue.nodes for name in node.inputs if name in names]
    return reads[-1] if reads else None


def _head_source(epilogue: Graph) -> str | None:
    head = _head(epilogue)
    return None if head is None else epilogue.parameters_by_name[head].source


def _tables(graph: Graph) -> dict[str, str]:
    """Return the dtypes of parameters that a graph reads as embedding tables only, by name."""
    others = {
        name
        for node in graph.nodes
        for place, name in enumerate(node.inputs)
        if node.op != "embedding" or place
    }
    tables = [node.inputs[0] for node in graph.nodes if node.op == "embedding"]
    return {name: graph.types[name].dtype for name in tables if name not in others}


def experts_of(graph: Graph) -> set[str]:
    """Return the parameters with a matrix for each expert, [E, out, in]."""
    return {node.inputs[2] for node in graph.nodes if node.op == "expert_linear"}


def _routers(graph: Graph) -> set[str]:
    """Return the matrices that select experts."""
    sites = {node.inputs[1]: site_of(graph, node) for node in graph.nodes if node.op == "linear"}
    return {name for name, site in sites.items() if site and parameter_of(site)}


def quantized(graph: Graph, format_of: Callable[[Parameter], str | None]) -> Graph:
    """Return a graph with the formats in the types of its matrices.

    Raises:
        UnsupportedError: a matrix does not fit the format's blocks.
    """
    tables = _tables(graph)
    names = {*multiplied(graph), *tables, *experts_of(graph)} - _routers(graph)

    def with_format(parameter: Parameter) -> Parameter:
        name = format_of(parameter) if parameter.role == "frozen" else None
        if name is None or parameter.name not in names or parameter.type.dtype in FORMATS:
            return parameter
        FORMATS[name].check(parameter.type.features, parameter.source)
        type_ = parameter.type.with_dtype(name)
        return dataclasses.replace(parameter, value=Value(parameter.name, type_))

    parameters = tuple(map(with_format, graph.parameters))
    changed = {p.name for p in parameters if p.type.dtype in FORMATS}

    def with_dtype(node: Node) -> Node:
        if node.op != "embedding" or node.inputs[0] not in changed:
            return node
        return node.changed(attributes={"dtype": tables[node.inputs[0]]})

    return graph.replace(parameters=parameters, nodes=tuple(map(with_dtype, graph.nodes)))
