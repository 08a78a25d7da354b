"""A base executor of some of a model's layers: the matrices of the others are in other processes.

Clients connect with all of them, and a request goes to the base of its layer. The head's matrix is
with the last layer. Each base has embeddings, norms and biases, which clients fetch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcg.compiler import compile_program, make_executor
from pcg.errors import SplitError
from pcg.ir.graph import Parameter
from pcg.ir.program.program import Program
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.torch.products import RemoteWeight, remote_tensor
from pcg.ranks.mesh import SINGLE_MESH
from pcg.ranks.shards import Ranges
from pcg.runtime.executor import Executor
from pcg.runtime.model.bound_weights import multiplied
from pcg.runtime.model.weight_digests import row_digests
from pcg.runtime.model.weights import Checkpoint, Weights
from pcg.source import resolve


def held_layers(text: str, count: int) -> range:
    """Read layers as `4-7` or `4`. SplitError: the model has no such layers."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if not 0 <= first <= last < count:
        raise SplitError(
            f"layers={text}; use the first and the last of those that this base has, as "
            f"0-{count - 1} for all {count}"
        )
    return range(first, last + 1)


def layers_executor(model: str, layers: str, dtype: str | None, device: str | None) -> Executor:
    """Load some layers of a model. PcgError: it cannot be read, or has no such layers."""
    source = resolve(model, weights=True)
    program = compile_program(
        source.config, None, backend="torch", dtype=dtype, packed_weights=False
    )
    return executor_of(program, Checkpoint.open(source, program.base_prefix), layers, device)


def executor_of(program: Program, source: Weights, layers: str, device: str | None) -> Executor:
    """Load some layers of a compiled model; errors as of `layers_executor`."""
    held = held_layers(layers, len(program.base.layers))
    return make_executor(
        program, HeldLayers(program, source, held), None, None, device, SINGLE_MESH
    )


class HeldLayers(Weights):
    """A model's tensors without the matrices of layers that others hold."""

    def __init__(self, program: Program, source: Weights, held: range) -> None:
        super().__init__(source.index, source.base_prefix, source.config, source.where)
        self._source = source
        self._absent: dict[str, Parameter] = {}
        base, last = program.base, len(program.base.layers) - 1
        layers = [(base.blocks[block], layer) for layer, block in enumerate(base.layers)]
        for graph, layer in [(base.prologue, 0), *layers, (base.epilogue, last)]:
            if layer not in held:
                for name in multiplied(graph):
                    parameter = graph.parameters_by_name[name]
                    self._absent[parameter.source.format(layer=layer)] = parameter

    def remote(self, name: str, shape: Sequence[int], serves: bool = False) -> Tensor | None:
        parameter = self._absent.get(name)
        if parameter is None:
            return None
        dtype = getattr(torch, TORCH_NAMES[parameter.type.dtype])
        return remote_tensor(shape, dtype, _Absent((name,), parameter, dtype, self))

    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        return self._source._read(name, ranges)


@dataclass(frozen=True, eq=False)
class _Absent(RemoteWeight):
    """A matrix of a layer that another process holds."""

    names: tuple[str, ...]
    parameter: Parameter
    dtype: torch.dtype
    source: HeldLayers

    @property
    def refusal(self) -> str:
        return f"this base executor does not hold {self.names[0]}"

    def digest(self) -> str:
        parameter = self.parameter
        weight = self.source.load(
            self.names[0], parameter.type.features, self.dtype, parameter.transposed
        )
        return hashlib.sha256(row_digests(weight)).hexdigest()
