"""The frozen base's weights for a rank's graphs, with each shard read once, and their digests.

SHA-256 digests are equal for a process with whole tensors and for ranks with parts. All ranks of a
group must have the same base weights, although each rank reads only a part. Ranks with the same
files, by machine and inode, need no comparison. Otherwise, ranks with the same files divide the
tensors, each rank digests its share, and the digests of all groups are compared: 8B in bf16 on two
machines of 8 ranks is 2 GB per rank, a second at 2 GB/s per core. For a module in memory, each rank
digests all weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.errors import AdapterError, UnsupportedError
from pcg.formats.format import Format, Parts
from pcg.formats.registry import FORMATS
from pcg.ir.graph import Graph, Parameter
from pcg.ir.operators.linear import multiplied
from pcg.ir.program.program import (
    ModelGraph,
    Program,
    adapted_weight,
    is_classifier,
    python_name,
    site_of,
)
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.devices import device_pool
from pcg.kernels.torch.products import (
    has_stand_in,
    stand_in_group,
    stand_in_of,
    stand_in_tensor,
)
from pcg.kernels.torch.quantized import (
    Block,
    LookupProducts,
    QuantizedWeight,
    float_weight,
)
from pcg.peft.adapter import Adapter, check_fits, check_replaced, with_shared
from pcg.peft.adapter_files import read_adapter
from pcg.peft.recipe import SEQ_CLS
from pcg.peft.separate_experts import with_joined_experts, with_swapped_experts
from pcg.ranks.agreement import agreed, check_same, compare
from pcg.ranks.group import SINGLE_RANK, Ranks
from pcg.ranks.shards import (
    FlatPlace,
    LayerShard,
    Ranges,
    has_zeros,
    is_in_shards,
    is_sharded,
    ranges_of,
    read_shard,
    shard_of,
)
from pcg.runtime.model.bound_weights import (
    BaseWeights,
    BoundLayer,
    GatheredLayers,
    LayerGathers,
    ProductLayout,
    ProductWeights,
    as_group,
    lie_side_by_side,
    product_weights,
)
from pcg.runtime.model.random_weights import RandomWeights
from pcg.runtime.model.weights import Weights
from pcg.source import COMPOSITE

_LOG = logging.getLogger("pcg.adapters")
_Key: TypeAlias = tuple[str, bool, object]
"""The name of a tensor in a checkpoint, True if it is transposed, and a rank's part of it."""
TensorSource: TypeAlias = Weights | RandomWeights


@dataclass(frozen=True)
class _Read:
    """A tensor that a graph reads.

    Attributes:
        parameter: the graph's parameter, with the shape of a rank's part.
        whole: the parameter with the shape of the whole tensor.
        layer: the index of the graph's layer.
    """

    parameter: Parameter
    whole: Parameter
    layer: int

    @property
    def name(self) -> str:
        return self.parameter.source.format(layer=self.layer)

    @property
    def key(self) -> _Key:
        parameter = self.parameter
        part = (parameter.rows, parameter.part, parameter.copies) if is_sharded(parameter) else None
        return self.name, parameter.transposed, part


class WeightStore:
    """Reads and keeps a program's frozen tensors, or a rank's shards of them.

    Attributes:
        digests: results of `weight_digests.base_digest`, by dtype.
    """

    def __init__(
        self,
        program: Program,
        source: TensorSource,
        device: torch.device,
        ranks: Ranks = SINGLE_RANK,
        replicas: Ranks = SINGLE_RANK,
    ) -> None:
        """Create a store.

        Args:
            ranks: ranks with the other shards of each matrix.
            replicas: ranks with the other parts of this rank's layers; a single rank holds whole
                layers.
        """
        self._program = program
        self._source = source
        self.device = device
        self._ranks = ranks
        self._loaded: dict[_Key, Tensor] = {}
        self._layout = ProductLayout(packs=program.options.packed_weights)
        self._replicas = replicas
        self._gathers = LayerGathers(replicas)
        self._shards: dict[int, LayerShard[_Key]] = {}
        self._binding = Lock()
        self.digests: dict[torch.dtype | None, str] = {}
        self._products: LookupProducts | None = None
        if program.options.backend == "triton":
            from pcg.kernels.triton.quantized import TritonProducts  # imports triton

            self._products = TritonProducts()

    @property
    def size_bytes(self) -> int:
        memory = {}
        for tensor in self._loaded.values():
            if has_stand_in(tensor):
                weight = stand_in_of(tensor)
                assert isinstance(weight, QuantizedWeight)  # others are not kept
                memory[id(weight)] = weight.size_bytes
            else:
                memory[tensor.data_ptr()] = tensor.nbytes
        return sum(memory.values()) + self._gathers.size_bytes

    def bind(self, model: ModelGraph, serves: bool = False) -> BaseWeights:
        """Return a model's weights, read once. WeightsError: a weight is missing or damaged.

        Args:
            serves: True to return the joined weights of each product in place of the first weight,
                and None for the others.
        """
        layers = tuple(SimpleNamespace() for _ in model.layers)
        weights = BaseWeights(SimpleNamespace(), layers, SimpleNamespace())
        in_shards: list[BoundLayer] = []
        outside = (model.prologue, model.epilogue)
        wholes = zip(weights.holders(model), weights.holders(self._program.base), strict=True)
        with self._binding:  # several threads may prepare jobs and adapters
            for (graph, layer, holder), (plain, _, _) in wholes:
                whole = {p.source: p for p in plain.parameters}
                reads = {
                    parameter.name: _Read(parameter, whole[parameter.source], layer)
                    for parameter in graph.parameters
                    if parameter.role != "adapter"
                }
                products = list(product_weights(graph)) if serves else []
                if self._replicas.size > 1 and graph not in outside:
                    places = self._places(layer, reads, products)
                    of_places = [each for each in products if each.weights[0] in places]
                    named = {python_name(name): place for name, place in places.items()}
                    in_shards.append(BoundLayer(holder, named, of_places))
                    reads = {name: read for name, read in reads.items() if name not in places}
                    products = [each for each in products if each not in of_places]
                away = self._stand_ins(graph, reads, serves)
                for product in products:
                    if product.weights[0] in away:
                        continue
                    self._lay_side_by_side([reads[name] for name in product.weights])
                    self._lay_side_by_side([reads[name] for name in product.biases])
                for name, read in reads.items():
                    tensor = away[name] if name in away else self._tensor(read)
                    setattr(holder, python_name(name), tensor)
                for product in products:
                    self._lay_out(product, reads, holder)
            self._source.release()
            if not in_shards:
                return weights
            if not self._gathers.size_bytes:
                self._gathers.put({layer: shard.memory for layer, shard in self._shards.items()})
        return dataclasses.replace(weights, gathered=GatheredLayers(self._gathers, in_shards))

    def _places(
        self, layer: int, reads: Mapping[str, _Read], products: Sequence[ProductWeights]
    ) -> Mapping[str, FlatPlace]:
        """Read a layer's shard once; return the places of the layer's tensors in it.

        Weights of a product are adjacent. Tensors that the first program did not read stay whole.
        """
        if layer not in self._shards:
            first = [name for product in products for name in (*product.weights, *product.biases)]
            kept = [reads[name] for name in dict.fromkeys([*first, *reads])]
            sharded = {read.key: read for read in kept if is_in_shards(read.parameter)}
            types = {
                key: (read.parameter.type.features, _dtype(read.parameter))
                for key, read in sharded.items()
            }

            def fill(key: _Key, ranges: Ranges, out: Tensor) -> None:
                self._fill(sharded[key], ranges, out)

            self._shards[layer] = read_shard(types, self._replicas, self.device, fill)
        places = self._shards[layer].places
        return {name: places[read.key] for name, read in reads.items() if read.key in places}

    def _fill(self, read: _Read, ranges: Ranges, out: Tensor) -> None:
        if has_zeros(read.parameter, self._ranks):
            out.zero_()
            return
        starts = [a for a, _ in ranges_of(read.parameter, read.whole.type.features, self._ranks)]
        moved = tuple((at + a, at + b) for at, (a, b) in zip(starts, ranges, strict=True))
        self._read(read.whole, read.name, self.device, moved, out)

    def _stand_ins(
        self, graph: Graph, reads: Mapping[str, _Read], serves: bool
    ) -> Mapping[str, Tensor]:
        """Return stand-ins for quantized matrices, and for those of another process.

        A matrix of another process has none if other operators of the graph also read it, such as
        an embedding.
        """
        names = [name for name in multiplied(graph) if name in reads]
        remote = {
            name: self._source.remote(reads[name].name, reads[name].whole.type.features, serves)
            for name in names
        }
        stand_ins = {name: tensor for name, tensor in remote.items() if tensor is not None}
        for name, read in reads.items():
            if read.parameter.type.dtype in FORMATS and name not in stand_ins:
                stand_ins[name] = self._quantized(read)
        return stand_ins

    def _quantized(self, read: _Read) -> Tensor:
        if read.key not in self._loaded:
            format_ = FORMATS[read.parameter.type.dtype]
            shape, transposed = read.whole.type.features, read.whole.transposed
            ranges = ranges_of(read.parameter, shape, self._ranks)
            experts = range(*ranges[0]) if len(shape) == 3 else None
            every = self._source.quantized(read.name, shape, format_, transposed, experts)
            if is_sharded(read.parameter):
                every = tuple(_cut(format_, every, ranges, shape, read.name))
            blocks = (format_.packed(parts.to(self.device)) for parts in every)
            self._loaded[read.key] = stand_in_tensor(
                [stop - start for start, stop in ranges],
                getattr(torch, TORCH_NAMES[self._program.dtype]),
                QuantizedWeight(tuple(Block(format_, parts, self._products) for parts in blocks)),
            )
        return self._loaded[read.key]

    def _tensor(self, read: _Read) -> Tensor:
        if read.key not in self._loaded:
            self._loaded[read.key] = self._load(read.parameter, read.whole, read.name)
        return self._loaded[read.key]

    def _lay_side_by_side(self, reads: Sequence[_Read]) -> None:
        """Load tensors as views of a single tensor, unless a packed copy joins them.

        Tensors that are already loaded are copied; programs bound earlier keep the old tensors.
        """
        if len(reads) < 2:
            return
        shapes, dtype = [read.parameter.type.features for read in reads], _dtype(reads[0].parameter)
        if self._layout.packs(len(shapes[0]), dtype, self.device):
            return
        keys = [read.key for read in reads]
        loaded = [self._loaded[key] for key in keys if key in self._loaded]
        tensors = loaded if len(loaded) == len(reads) else self._shared(reads)
        if not tensors or not lie_side_by_side(tensors):
            tensors = self._side_by_side(reads, shapes, dtype)
        self._loaded.update(zip(keys, tensors, strict=True))
        if loaded and tensors is not loaded:
            self._leave({tensor.untyped_storage().data_ptr() for tensor in loaded})

    def _side_by_side(
        self, reads: Sequence[_Read], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """Read or copy tensors into a single tensor; return its parts."""
        rows = [shape[0] for shape in shapes]
        size = (sum(rows), *shapes[0][1:])
        joined = torch.empty(size, dtype=dtype, device=self.device)
        parts: Sequence[Tensor] = joined.split(rows)
        for read, part in zip(reads, parts, strict=True):
            if read.key in self._loaded:
                part.copy_(self._loaded[read.key])
            else:
                self._load(read.parameter, read.whole, read.name, part)
        return parts

    def _leave(self, memory: Collection[int]) -> None:
        """Copy the remaining tensors out of the memory of moved tensors, to free that memory."""
        for key, tensor in self._loaded.items():
            if tensor.untyped_storage().data_ptr() in memory:
                self._loaded[key] = tensor.clone()

    def _shared(self, reads: Sequence[_Read]) -> Sequence[Tensor]:
        """Return the tensors in the source's memory, if all have the required layout; else none."""
        tensors = []
        for read in reads:
            if is_sharded(read.parameter) or read.parameter.role == "constant":
                return ()
            tensor = self._source.shared(read.name, *_place(read.whole), self.device)
            if tensor is None:
                return ()
            tensors.append(tensor)
        return tensors

    def _lay_out(
        self, product: ProductWeights, reads: Mapping[str, _Read], holder: SimpleNamespace
    ) -> None:
        """Replace the weights of a product by the joined or packed weight."""
        names = [python_name(name) for name in product.weights]
        weights = [getattr(holder, name) for name in names]
        # The holder keeps each bias, which other operators may read.
        biases = [getattr(holder, python_name(name)) for name in product.biases]
        if has_stand_in(weights[0]):
            for name in names:
                setattr(holder, name, None)
            setattr(holder, names[0], as_group(stand_in_group(weights), weights, biases))
            return
        keys = [tuple(reads[name].key for name in group) for group in dataclasses.astuple(product)]
        for name in names:
            setattr(holder, name, None)
        setattr(holder, names[0], self._layout.lay_out(tuple(keys), weights, biases))

    def _load(
        self, parameter: Parameter, whole: Parameter, name: str, out: Tensor | None = None
    ) -> Tensor:
        if parameter.role == "constant":
            constant = shard_of(self._program.constants[name], parameter, self._ranks)
            return constant.to(self.device) if out is None else out.copy_(constant)
        if not is_sharded(parameter):
            return self._read(whole, name, self.device, out=out)
        ranges = ranges_of(parameter, whole.type.features, self._ranks)
        if has_zeros(parameter, self._ranks):
            sizes = [stop - start for start, stop in ranges]
            return torch.zeros(sizes, dtype=_dtype(whole), device=self.device, out=out)
        return self._read(whole, name, self.device, ranges, out)

    def _read(
        self,
        whole: Parameter,
        name: str,
        device: torch.device | str = "cpu",
        ranges: Ranges | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._source.load(name, *_place(whole), device, ranges, out)

    def frozen(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the base's frozen tensors by name in a checkpoint, in each graph's order."""
        for parameter, layer in self._program.base.parameters():
            if parameter.role == "frozen":
                yield parameter.source.format(layer=layer), parameter

    def whole(self, name: str, parameter: Parameter) -> Tensor:
        """Return a whole frozen tensor, or the stand-in for a tensor of another process.

        The tensor is read again if this rank keeps only a shard; a quantized one is dequantized.
        """
        return float_weight(self.stored(name, parameter))

    def stored(self, name: str, parameter: Parameter) -> Tensor:
        """Return a whole frozen tensor, or the stand-in for a quantized or remote tensor."""
        loaded = self._loaded.get((name, parameter.transposed, None))
        if loaded is None:
            loaded = self._source.remote(name, parameter.type.features)
        if loaded is None and parameter.type.dtype in FORMATS:
            format_, shape = FORMATS[parameter.type.dtype], parameter.type.features
            every = self._source.quantized(name, shape, format_, parameter.transposed)
            weight = QuantizedWeight(tuple(Block(format_, parts) for parts in every))
            dtype = getattr(torch, TORCH_NAMES[self._program.dtype])
            return stand_in_tensor(shape, dtype, weight)
        return self._read(parameter, name) if loaded is None else loaded

    def is_own(self, name: str, tensor: Tensor) -> bool:
        """Return True if a tensor equals the base's weight or bias of a module, by name.

        The comparison uses the less precise of both dtypes. A weight that another process holds is
        not compared, and counts as different.
        """
        module, _, kind = name.rpartition(".")
        weight = self.linear().get(module) if kind == "weight" else None
        if weight is None:
            named = dict(self.frozen()).get(name)
            weight = None if named is None else self.whole(name, named)
        if weight is None or weight.is_meta or weight.shape != tensor.shape:
            return False
        least = max(weight.dtype, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return torch.equal(weight.to("cpu", least), tensor.to("cpu", least))

    def linear(self) -> Mapping[str, Tensor]:
        """Return the whole weight [out, in] of each linear module by path, read on demand."""
        return _Linear(self)


def _cut(
    format_: Format, every: Sequence[Parts], ranges: Ranges, shape: Sequence[int], name: str
) -> Iterator[Parts]:
    """Cut matrices below each other, those of each expert alike, to ranges of rows and columns."""
    (first, end), columns = ranges[-2:]
    start = 0
    for parts in every:
        rows = max(first - start, 0), min(end - start, parts.rows)
        if rows[0] < rows[1]:
            format_.check_cut(rows, columns, (parts.rows, parts.columns), name)
            yield format_.cut(parts, rows, columns)
        start = (start + parts.rows) % shape[-2]


def linear_parameters(base: ModelGraph) -> dict[str, tuple[str, Parameter]]:
    """Return the weight of each linear module, and of experts, by path: its name and parameter."""
    parameters = {}
    graphs = [(base.blocks[block], layer) for layer, block in enumerate(base.layers)]
    for graph, layer in [(base.prologue, 0), *graphs, (base.epilogue, 0)]:
        for node in graph.nodes:
            site = site_of(graph, node)
            if site is not None:
                parameter = graph.parameters_by_name[adapted_weight(node) or ""]
                name = parameter.source.format(layer=layer)
                parameters[site.format(layer=layer)] = (name, parameter)
    return parameters


class _Linear(Mapping[str, Tensor]):
    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._parameters = linear_parameters(store._program.base)

    def __getitem__(self, path: str) -> Tensor:
        return self._store.whole(*self._parameters[path])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _place(parameter: Parameter) -> tuple[Sequence[int], torch.dtype, bool]:
    """Return a whole tensor's shape and dtype, and True if the checkpoint holds it transposed."""
    return parameter.type.features, _dtype(parameter), parameter.transposed


def _dtype(parameter: Parameter) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[parameter.type.dtype])
    return dtype


def saved_adapter(
    path: str | os.PathLike[str],
    name: str,
    program: Program,
    weights: WeightStore,
    base_name: str,
) -> Adapter:
    """Read an adapter from a directory or a hub id, as `read_adapter` does, for a base.

    Logs a warning if the adapter fits but names another base, as outputs may then be meaningless.

    Args:
        base_name: the base's hub id or path; empty if unknown.
    Raises:
        AdapterError, UnsupportedError: as `read_adapter`, or it does not fit the base.
    """
    base, modules = program.base, program.base.module_shapes()
    adapter = read_adapter(path, name, weights.is_own, program.config.get(COMPOSITE, ""))
    if adapter.extra.get("task_type") == SEQ_CLS and not is_classifier(program.config):
        raise AdapterError(
            f"{path} is of a sequence classifier, and {program.name} is a causal LM; give the "
            "names of its labels: labels=[…] (--labels)"
        )
    model_type = str(program.config["model_type"])
    adapter = with_joined_experts(
        adapter, modules, base.output_module, model_type, program.renamings
    )
    adapter = with_swapped_experts(adapter, modules)
    check_fits(adapter, modules, program.name, base.output_module)
    adapter = with_shared(adapter, modules)
    check_replaced(adapter, base)
    # Only the last parts of names are compared, as a model may be in a folder of its name.
    bases = {program.name, base_name, str(program.config.get("_name_or_path") or "")}
    trained_on = adapter.base_model_name
    if trained_on and _last_part(trained_on) not in set(map(_last_part, bases)):
        _LOG.warning(
            "adapter %r was trained on the base %r, and this one is %r; its outputs mean "
            "something only if both have the same weights",
            name,
            trained_on,
            program.name,
        )
    return adapter


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def replaced_of_base(adapter: Adapter, weights: WeightStore) -> dict[str, Tensor]:
    """Return the base's values of the parameters that an adapter's recipe replaces, by name."""
    stored = adapter.recipe.replaced_in(weights._program.base, adapter.weights)
    replaced = {name: weights.whole(*of_base) for name, of_base in stored.items()}
    remote = next((name for name, tensor in replaced.items() if tensor.is_meta), None)
    if remote is not None:
        fix = "load a saved adapter, or leave it out of modules_to_save"
        if is_classifier(weights._program.config):  # whose head every adapter replaces
            fix = (
                "save one of an executor with the weights (add_adapter, save_adapter), and load it"
            )
        raise UnsupportedError(
            f"modules_to_save has {remote}, which the base's process keeps, so that a new adapter "
            f"cannot begin with a copy; {fix}"
        )
    return {name: tensor.clone() for name, tensor in replaced.items()}


_MOST_THREADS = 8


def base_digest(weights: WeightStore, dtype: torch.dtype | None = None) -> str:
    """Return "sha256:" and the SHA-256 of a base's `weight_digests`, computed once."""
    if dtype not in weights.digests:
        text = json.dumps(weight_digests(weights, dtype), sort_keys=True)
        weights.digests[dtype] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return weights.digests[dtype]


def weight_digests(weights: WeightStore, dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return the SHA-256 of the `row_digests` of each frozen tensor, in the dtype of computation.

    Args:
        dtype: floating type to which tensors in this process are rounded first.
    """

    def digest(item: tuple[str, Parameter]) -> str:
        tensor = weights.stored(*item)
        if has_stand_in(tensor):
            return stand_in_of(tensor).digest()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        return hashlib.sha256(row_digests(tensor)).hexdigest()

    frozen = dict(weights.frozen())
    with hashing_threads(weights.device) as pool:
        return dict(zip(frozen, pool.map(digest, frozen.items()), strict=True))


def row_digests(tensor: Tensor) -> bytes:
    """Return the concatenated SHA-256 of each row of a tensor; a vector is a single row.

    The concatenated digests of ranks with parts of the rows equal those of the whole tensor.
    """
    rows = torch.atleast_2d(tensor.detach()).flatten(0, -2).to("cpu").contiguous()
    return b"".join(hashlib.sha256(row).digest() for row in rows.view(torch.uint8).numpy())


def hashing_threads(device: torch.device) -> ThreadPoolExecutor:
    """Return threads for `row_digests`, which runs without the interpreter's lock.

    Args:
        device: the device of the tensors.
    """
    threads = max(1, min(_MOST_THREADS, torch.get_num_threads()))
    return device_pool(device, threads, "pcg digests")


CALL = "the base's weights"
FIX = "Give all ranks the same weights: one directory, or copies of the same files"
_DIGEST_BYTES = 32


def check_same_weights(ranks: Ranks, weights: TensorSource) -> None:
    """Refuse base weights that differ between ranks; a collective call.

    Raises:
        ParallelError: on every rank; names the ranks that differ from rank 0, and the tensors.
    """
    if ranks.size == 1:
        return
    if not isinstance(weights, Weights):
        check_same(ranks, CALL, {"random weights": weights.identity()}, FIX)
        return
    index = {name: f"{item.dtype} {list(item.shape)}" for name, item in weights.index.items()}
    check_same(ranks, CALL, index, FIX)
    identities = ranks.tell(hashlib.sha256(weights.identity().encode()).digest())
    if len(set(identities)) == 1:
        return
    sharing = [rank for rank, item in enumerate(identities) if item == identities[ranks.rank]]
    shares = _shares(weights, len(sharing))
    digests = agreed(ranks, CALL, lambda: _digests(weights, shares[sharing.index(ranks.rank)]))
    names = sorted(weights.index)
    replies = ranks.tell(b"".join(digests.get(name, bytes(_DIGEST_BYTES)) for name in names))
    by_rank = []
    for identity in identities:
        parts = [word for word, item in zip(replies, identities, strict=True) if item == identity]
        by_rank.append(dict(zip(names, _joined(parts), strict=True)))
    compare(CALL, by_rank, FIX)


def _shares(weights: Weights, count: int) -> list[list[str]]:
    shares: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name in sorted(weights.index, key=lambda name: (-weights.numel(name), name)):
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += weights.numel(name)
    return shares


def _digests(weights: Weights, names: Sequence[str]) -> Mapping[str, bytes]:
    with hashing_threads(torch.device("cpu")) as pool:
        digests = dict(zip(names, pool.map(weights.digest, names), strict=True))
    weights.release()
    return digests


def _joined(parts: Sequence[bytes]) -> list[str]:
    """Join the ranks' digests; for each tensor exactly a single rank has a digest."""
    pieces = [
        [part[at : at + _DIGEST_BYTES] for part in parts]
        for at in range(0, len(parts[0]), _DIGEST_BYTES)
    ]
    return [max(each).hex() for each in pieces]
