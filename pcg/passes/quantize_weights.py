"""Write weight formats into the types of the base's matrices: `bf16[4096, 4096]` to `nf4[…]`.

A checkpoint that is quantized says which modules are. A float checkpoint that is quantized on load
stores the matrices of the layers' linear modules in the format; embeddings, the head, routers and
norms stay in floating point, as in transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from pcg.errors import UnsupportedError
from pcg.formats.registry import FORMATS
from pcg.ir.graph import Graph, Parameter, Value
from pcg.ir.operators.linear import multiplied
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
        name = stored.name if stored else self.format
        assert name is not None

        def is_stored(parameter: Parameter) -> bool:
            module = parameter.source.removesuffix(".weight")
            return stored.has(module) if stored else "{layer}" in module

        model = before.model.map(lambda graph: quantized(graph, name, is_stored))
        return dataclasses.replace(before, model=model)


def quantized(graph: Graph, name: str, is_stored: Callable[[Parameter], bool]) -> Graph:
    """Return a graph with the format in the types of its matrices.

    Raises:
        UnsupportedError: a matrix does not fit the format's blocks, or has experts.
    """
    names = set(multiplied(graph))

    def with_format(parameter: Parameter) -> Parameter:
        shape = parameter.type.features
        if parameter.role != "frozen" or not is_stored(parameter):
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
