"""The frozen base's weights, as a rank's graphs read them; each shard is read once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.ir.graph import Graph, Parameter
from pcg.ir.program.program import ModelGraph, Program, python_name, site_of
from pcg.ir.types import TORCH_NAMES
from pcg.parallel.ranks.group import SINGLE_RANK, Ranks
from pcg.parallel.ranks.shards import Ranges, has_zeros, is_sharded, ranges_of, shard_of
from pcg.runtime.model.product_weights import is_packed, product_weights
from pcg.runtime.model.weights import RandomWeights, Weights

_Key: TypeAlias = tuple[str, bool, object]
"""The name of a tensor in a checkpoint, True if it is transposed, and a rank's part of it."""
TensorSource: TypeAlias = Weights | RandomWeights


@dataclass(frozen=True)
class BaseWeights:
    """The frozen weights and constants, which emitted functions read as `w`."""

    prologue: SimpleNamespace
    layers: tuple[SimpleNamespace, ...]
    epilogue: SimpleNamespace

    def holders(self, model: ModelGraph) -> Iterator[tuple[Graph, int, SimpleNamespace]]:
        """Yield each graph of the model with its layer's index (0 outside layers) and weights."""
        yield model.prologue, 0, self.prologue
        for layer, block in enumerate(model.layers):
            yield model.blocks[block], layer, self.layers[layer]
        yield model.epilogue, 0, self.epilogue


class WeightStore:
    """Reads a program's frozen tensors, or a rank's shards of them, and keeps what graphs read."""

    def __init__(
        self,
        program: Program,
        source: TensorSource,
        device: torch.device,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        self._program = program
        self._source = source
        self._device = device
        self._ranks = ranks
        self._loaded: dict[_Key, Tensor] = {}
        self._joined: set[_Key] = set()
        self._binding = Lock()

    @property
    def size_bytes(self) -> int:
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self._loaded.values()}.values())

    def bind(self, model: ModelGraph, serves: bool = False) -> BaseWeights:
        """Return a model's weights, read once. WeightsError: one is missing or damaged.

        Args:
            serves: lay what serving joins side by side, so that it is not held twice.
        """
        layers = tuple(SimpleNamespace() for _ in model.layers)
        weights = BaseWeights(SimpleNamespace(), layers, SimpleNamespace())
        wholes = zip(weights.holders(model), weights.holders(self._program.base), strict=True)
        with self._binding:  # several threads may prepare jobs and adapters
            for (graph, layer, holder), (plain, _, _) in wholes:
                whole = {p.source: p for p in plain.parameters}
                keys = {
                    parameter.name: self._shard(parameter, whole[parameter.source], layer)
                    for parameter in graph.parameters
                    if parameter.role != "adapter"
                }
                for product in product_weights(graph) if serves else ():
                    self._lay_side_by_side([keys[name] for name in product.weights])
                    self._lay_side_by_side([keys[name] for name in product.biases])
                for name, key in keys.items():
                    setattr(holder, python_name(name), self._loaded[key])
        return weights

    def _shard(self, parameter: Parameter, whole: Parameter, layer: int) -> _Key:
        """Load what a graph reads; returns its key."""
        name = parameter.source.format(layer=layer)
        shard = (parameter.rows, parameter.part) if is_sharded(parameter) else None
        key = (name, parameter.transposed, shard)
        if key not in self._loaded:
            self._loaded[key] = self._load(parameter, whole, name)
        return key

    def _lay_side_by_side(self, keys: Sequence[_Key]) -> None:
        """Make tensors views of one; not if they are packed, or lie beside others already."""
        tensors = [self._loaded[key] for key in keys]
        if len(keys) < 2 or not self._joined.isdisjoint(keys):
            return
        if tensors[0].dim() == 2 and is_packed(tensors[0].dtype, tensors[0].device):
            return
        parts = torch.cat(tensors).split([tensor.shape[0] for tensor in tensors])
        self._loaded.update(zip(keys, parts, strict=True))
        self._joined.update(keys)

    def _load(self, parameter: Parameter, whole: Parameter, name: str) -> Tensor:
        if parameter.role == "constant":
            constant = self._program.constants[name]
            return shard_of(constant, parameter, self._ranks).to(self._device)
        if not is_sharded(parameter):
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

    def frozen(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the base's frozen tensors by their names in a checkpoint, in each graph's order."""
        for parameter, layer in self._program.base.parameters():
            if parameter.role == "frozen":
                yield parameter.source.format(layer=layer), parameter

    def whole(self, name: str, parameter: Parameter) -> Tensor:
        """Return a whole frozen tensor; it is read again if this rank keeps a shard of it."""
        loaded = self._loaded.get((name, parameter.transposed, None))
        return self._read(parameter, name) if loaded is None else loaded

    def samples(self, name: str, parameter: Parameter, count: int) -> Tensor:
        """Return `count` entries of a frozen tensor, at equal distances, on the CPU in fp64."""
        total = math.prod(parameter.type.features)
        stride = max(1, total // count)
        loaded = self._loaded.get((name, parameter.transposed, None))
        if loaded is not None:
            return loaded.detach().reshape(-1)[::stride][:count].to("cpu", torch.float64)
        found = []
        for index in range(0, total, stride)[:count]:
            at, ranges = index, []
            for size in reversed(parameter.type.features):
                ranges.append((at % size, at % size + 1))
                at //= size
            found.append(self._read(parameter, name, ranges=tuple(reversed(ranges))).reshape(1))
        return torch.cat(found).to(torch.float64)

    def linear(self) -> Mapping[str, Tensor]:
        """Return the whole weight [out, in] of each linear module, by its path, read on demand."""
        return _Linear(self)


class _Linear(Mapping[str, Tensor]):
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
