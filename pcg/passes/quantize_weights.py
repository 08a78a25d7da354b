"""Write weight formats into the types of the base's matrices: `bf16[4096, 4096]` to `nf4[…]`.

A checkpoint that is quantized says which modules are. A float checkpoint that is quantized on load
stores the matrices of the layers' linear modules in the format; embeddings, the head, routers and
norms stay in floating point, as in transformers. Layers of equal graphs whose matrices are stored
in different formats become different blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from pcg.errors import UnsupportedError
from pcg.formats.registry import FORMATS
from pcg.ir.graph import Graph, Parameter, Value
from pcg.ir.operators.linear import multiplied
from pcg.ir.program.program import ModelGraph
from pcg.passes.graphs.pass_base import Pass
from pcg.passes.stages import Base


@dataclass(frozen=True)
class QuantizeWeights(Pass[Base, Base]):
    """Write the weight formats of a checkpoint, or of a quantization on load, into types.

    Attributes:
        format: the format to quantize a float checkpoint to; None for the checkpoint's own.
    """

    name = "quantize_weights"
    format: str | None = None

    def run(self, before: Base) -> Base:
        stored = before.stored
        if stored is None and self.format is None:
            return before
        if stored is not None and self.format not in (None, stored.name):
            raise UnsupportedError(
                f"quantization={self.format!r}, and the checkpoint is stored as {stored.name}; "
                "leave quantization out, or give the float checkpoint"
            )

        embedded = _embedded(before.model.prologue) if stored and not stored.by_module else set()
        outside = (before.model.prologue, before.model.epilogue)

        def in_layer(graph: Graph, layer: int) -> Graph:
            head = _head(graph) if graph is before.model.epilogue else None

            def format_of(parameter: Parameter) -> str | None:
                module = parameter.source.removesuffix(".weight")
                if parameter.source in embedded:
                    return None
                if stored is not None:
                    is_head, is_in_layer = parameter.name == head, graph not in outside
                    return stored.of(module.format(layer=layer), is_head, is_in_layer)
                return self.format if "{layer}" in module else None

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


def quantized(graph: Graph, format_of: Callable[[Parameter], str | None]) -> Graph:
    """Return a graph with the formats in the types of its matrices.

    Raises:
        UnsupportedError: a matrix does not fit the format's blocks, or has experts.
    """
    names = set(multiplied(graph))

    def with_format(parameter: Parameter) -> Parameter:
        shape, name = parameter.type.features, format_of(parameter)
        if parameter.role != "frozen" or name is None:
            return parameter
        if len(shape) > 2:
            raise UnsupportedError(
                f"{parameter.source} has experts {list(shape)}, which are not stored as {name}; "
                "use float weights without quantization"
            )
        if parameter.name not in names or parameter.type.dtype in FORMATS:
            return parameter
        FORMATS[name].check(shape, parameter.source)
        type_ = parameter.type.with_dtype(name)
        return dataclasses.replace(parameter, value=Value(parameter.name, type_))

    return graph.replace(parameters=tuple(map(with_format, graph.parameters)))
