"""The frozen base's weights, as the graphs of a rank read them: each piece is read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor

from pcg.ir.graph import Graph, Parameter
from pcg.ir.program.program import ModelGraph, Program, python_name, site_of
from pcg.ir.types import TORCH_NAMES
from pcg.parallel.ranks.group import ALONE, Ranks
from pcg.parallel.ranks.shards import Ranges, has_zeros, is_piece, piece_of, ranges_of


class TensorSource(Protocol):
    """Where the base's weights come from: a checkpoint, or a state dict."""

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
        ranges: Ranges | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class BaseWeights:
    """The frozen weights and constants, as the emitted functions read them: `w`."""

    prologue: SimpleNamespace
    layers: tuple[SimpleNamespace, ...]
    epilogue: SimpleNamespace

    def holders(self, model: ModelGraph) -> Iterator[tuple[Graph, int, SimpleNamespace]]:
        """Each graph of the model with its layer's index (0 outside the layers) and weights."""
        yield model.prologue, 0, self.prologue
        for layer, block in enumerate(model.layers):
            yield model.blocks[block], layer, self.layers[layer]
        yield model.epilogue, 0, self.epilogue

    def by_source(self, model: ModelGraph) -> Iterator[tuple[str, Tensor]]:
        """The frozen tensors by their names in a checkpoint."""
        for graph, layer, holder in self.holders(model):
            for parameter in graph.parameters:
                if parameter.role == "frozen":
                    name = python_name(parameter.name)
                    yield parameter.source.format(layer=layer), getattr(holder, name)


class WeightStore:
    """Reads a program's frozen tensors, or a rank's pieces of them, and keeps what graphs read.

    Args:
        program: whose base it is.
        source: of the tensors.
        device: of what graphs read.
        ranks: the group.
    """

    def __init__(
        self,
        program: Program,
        source: TensorSource,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self._program = program
        self._source = source
        self._device = device
        self._ranks = ranks
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._binding = Lock()

    @property
    def size_bytes(self) -> int:
        """Of what is kept."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self._kept.values()}.values())

    def bind(self, model: ModelGraph) -> BaseWeights:
        """The weights of a model's graphs; what is not there yet is read, layer by layer.

        Raises:
            WeightsError: a tensor is missing, damaged or of another shape.
        """
        with self._binding:  # a job may be made ready beside an adapter that is added
            return self._bind(model)

    def _bind(self, model: ModelGraph) -> BaseWeights:
        layers = tuple(SimpleNamespace() for _ in model.layers)
        weights = BaseWeights(SimpleNamespace(), layers, SimpleNamespace())
        base = self._program.base
        wholes = zip(weights.holders(model), weights.holders(base), strict=True)
        for (graph, layer, holder), (plain, _, _) in wholes:
            whole = {p.source: p for p in plain.parameters}
            for parameter in graph.parameters:
                if parameter.role != "adapter":
                    tensor = self._piece(parameter, whole[parameter.source], layer)
                    setattr(holder, python_name(parameter.name), tensor)
        return weights

    def _piece(self, parameter: Parameter, whole: Parameter, layer: int) -> Tensor:
        name = parameter.source.format(layer=layer)
        piece = (parameter.rows, parameter.part) if is_piece(parameter) else None
        key = (name, parameter.transposed, piece)
        if key not in self._kept:
            self._kept[key] = self._load(parameter, whole, name)
        return self._kept[key]

    def _load(self, parameter: Parameter, whole: Parameter, name: str) -> Tensor:
        if parameter.role == "constant":
            constant = self._program.constants[name]
            return piece_of(constant, parameter, self._ranks).to(self._device)
        if not is_piece(parameter):
            return self._read(whole, name, self._device)
        ranges = ranges_of(parameter, whole.type.features, self._ranks)
        if has_zeros(parameter, self._ranks):
            sizes = [stop - start for start, stop in ranges]
            return torch.zeros(sizes, dtype=_dtype(whole), device=self._device)
        return self._read(whole, name, self._device, ranges)

    def _read(
        self,
        whole: Parameter,
        name: str,
        device: torch.device | str = "cpu",
        ranges: Ranges | None = None,
    ) -> Tensor:
        shape, dtype = whole.type.features, _dtype(whole)
        return self._source.load(name, shape, dtype, whole.transposed, device, ranges)

    # ------------------------------------------------------------------------- whole tensors

    def frozen(self) -> Iterator[tuple[str, Parameter]]:
        """The base's frozen tensors by their names in a checkpoint, each graph's in its order."""
        for parameter, layer in self._program.base.parameters():
            if parameter.role == "frozen":
                yield parameter.source.format(layer=layer), parameter

    def whole(self, name: str, parameter: Parameter) -> Tensor:
        """A frozen tensor as a whole; read anew where this rank keeps a piece of it."""
        kept = self._kept.get((name, parameter.transposed, None))
        return self._read(parameter, name) if kept is None else kept

    def samples(self, name: str, parameter: Parameter, count: int) -> Tensor:
        """So many entries of a frozen tensor, at equal distances, on the CPU in fp64."""
        total, stride = _numbers(parameter, count)
        kept = self._kept.get((name, parameter.transposed, None))
        if kept is not None:
            return kept.detach().reshape(-1)[::stride][:count].to("cpu", torch.float64)
        found = []
        for index in range(0, total, stride)[:count]:
            at, ranges = index, []
            for size in reversed(parameter.type.features):
                ranges.append((at % size, at % size + 1))
                at //= size
            found.append(self._read(parameter, name, ranges=tuple(reversed(ranges))).reshape(1))
        return torch.cat(found).to(torch.float64)

    def linear(self) -> Mapping[str, Tensor]:
        """Weight [out, in] of each linear module by its path, as a whole."""
        return _Linear(self)


class _Linear(Mapping[str, Tensor]):
    """Weights of linear modules, each got when it is asked for."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._parameters: dict[str, tuple[str, Parameter]] = {}
        base = store._program.base
        graphs = [(base.blocks[block], layer) for layer, block in enumerate(base.layers)]
        for graph, layer in [(base.prologue, 0), *graphs, (base.epilogue, 0)]:
            for node in graph.nodes:
                site = site_of(graph, node)
                if site is not None:
                    parameter = graph.parameters_by_name[node.inputs[1]]
                    name = parameter.source.format(layer=layer)
                    self._parameters[site.format(layer=layer)] = (name, parameter)

    def __getitem__(self, path: str) -> Tensor:
        return self._store.whole(*self._parameters[path])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _dtype(parameter: Parameter) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[parameter.type.dtype])
    return dtype


def _numbers(parameter: Parameter, count: int) -> tuple[int, int]:
    """How many entries a tensor has, and the distance of samples."""
    total = 1
    for size in parameter.type.features:
        total *= size
    return total, max(1, total // count)
