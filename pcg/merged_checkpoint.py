"""`pcg.merge`: write a checkpoint with an adapter in its weights.

    for each stored tensor, in the checkpoint's order:
        a weight that the adapter changes    W + ΔW, computed in fp32 and rounded once
        any other tensor                     as it is

ΔW is B A of LoRA and methods like it; DoRA and (IA)³ also scale W. Names, dtypes and formats stay
those of the checkpoint: a quantized matrix is dequantized, changed, and quantized again,

    error = ||stored - (W + ΔW)|| / ||W + ΔW||,    change = ||ΔW|| / ||W||       over all matrices

A GGUF file is copied, and its changed tensors are replaced in their types; with a dtype, it becomes
a folder of float tensors. A head that is tied to the embedding becomes a tensor of its own. Memory
holds a file of the new checkpoint, and the matrices of a layer.

Where the error is as large as the change, rounding removes the adapter: `MergeResult.keeps_change`.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pcg.checkpoint_writer import check_room, free_file, free_folder, shard_limit, write_checkpoint
from pcg.compiler import compile_program
from pcg.errors import AdapterError, UnsupportedError, WeightsError
from pcg.files import read_json, replacing
from pcg.formats.format import StoredMatrix
from pcg.formats.registry import FORMATS
from pcg.gguf_file import SUFFIX, GgufTensor, read_gguf
from pcg.gguf_model import tensors_of
from pcg.ir.graph import Parameter
from pcg.ir.module_paths import embedding_path, is_embedding, module_name, parameter_of
from pcg.ir.program.program import Program
from pcg.ir.types import TORCH_NAMES
from pcg.keywords import takes
from pcg.options import NONE
from pcg.peft.adapter import Adapter, check_finite, check_fits, check_replaced
from pcg.peft.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from pcg.peft.weights import Around, ModuleWeights
from pcg.runtime.model.base_weights import (
    WeightStore,
    linear_parameters,
    saved_adapter,
)
from pcg.runtime.model.gguf_weights import GgufWeights, open_weights
from pcg.runtime.model.weights import Checkpoint, Weights
from pcg.source import COMPOSITE, CONFIG, ModelSource, adapter_directory, resolve
from pcg.tensor_file import read_header
from pcg.trace.model_config import with_labels

_WHAT = "the merged model"
_OLD_HEAD = "lm_head."
"""Start of the names of a causal LM's head, in families whose classifiers have a generic head."""
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MergeArguments:
    """Arguments of `merge`.

    Attributes:
        model: directory or hub id of the base.
        adapter: directory or hub id of an adapter, or an adapter of an executor.
        output: the folder to write; with a GGUF file as the base and no dtype, the file.
        dtype: write the tensors in this float dtype, but for those in floating point of a base
            that is quantized in part; None keeps their dtype or format.
        labels: the names of a sequence classifier's labels, whose head the adapter brings to the
            layers of a causal LM.
        overwrite: replace a folder that has files.
        max_shard_size: the largest size of a file, such as 2GB.
    """

    model: str | os.PathLike[str]
    adapter: str | os.PathLike[str] | Adapter
    output: str | os.PathLike[str]
    dtype: str | None = field(default=None, kw_only=True)
    labels: Sequence[str] = field(default=(), kw_only=True)
    overwrite: bool = field(default=False, kw_only=True)
    max_shard_size: str = field(default="2GB", kw_only=True)


@dataclass(frozen=True)
class MergeResult:
    """A merged checkpoint.

    Attributes:
        path: its folder, or GGUF file.
        matrices: the number of matrices that the adapter changed.
        relative_change: ||ΔW|| / ||W|| over these matrices.
        relative_error: ||stored - (W + ΔW)|| / ||W + ΔW|| over these matrices.
    """

    path: Path
    matrices: int
    relative_change: float
    relative_error: float

    @property
    def keeps_change(self) -> bool:
        """True if storing the matrices keeps most of the change, by length."""
        return 2 * self.relative_error <= self.relative_change


@takes(MergeArguments)
def merge(arguments: MergeArguments) -> MergeResult:
    """Write a checkpoint with an adapter merged into its weights, for transformers and for pcg.

    Raises:
        UnsupportedError: the method is no change of weights, or the base's format is not written.
        AdapterError: the adapter cannot be read, or does not fit the base.
        WeightsError: the checkpoint cannot be read, or the folder not be written.
    """
    source = resolve(arguments.model, weights=True)
    is_gguf = source.weight_files[0].suffix == SUFFIX
    if is_gguf and arguments.dtype is None:
        return _merge_into_file(arguments, source)
    directory = source.directory
    assert directory is not None  # of weights
    target = free_folder(arguments.output, _WHAT, directory, overwrite=arguments.overwrite)
    limit = shard_limit(arguments.max_shard_size)
    if arguments.dtype not in (None, *_FLOATS):
        raise UnsupportedError(f"dtype={arguments.dtype!r}; use one of {', '.join(_FLOATS)}")
    format_ = NONE if is_gguf else None
    program = compile_program(arguments.model, None, quantization=format_, labels=arguments.labels)
    weights = open_weights(source, program)
    merging = _Merging(
        program, adapter_of_base(arguments.adapter, program, weights, source.location)
    )
    config = dict(source.config) if is_gguf else read_json(directory / CONFIG, WeightsError)
    config = with_labels(config, arguments.labels) if arguments.labels else config
    merging.plan(config, arguments.dtype)
    check_room(target, merging.size_bytes(source), _WHAT)
    if isinstance(weights, Checkpoint):
        tensors = _Tensors(merging, weights).every()
    else:
        tensors = _of_gguf(merging, weights)
    write_checkpoint(target, source, config, tensors, limit, _WHAT)
    weights.release()
    return merging.result(target)


def adapter_of_base(
    adapter: str | os.PathLike[str] | Adapter, program: Program, weights: Weights, location: str
) -> Adapter:
    """Return an adapter on the CPU, checked against its base, of a hub id or path.

    Errors are those of `merge`.
    """
    store = WeightStore(program, weights, torch.device("cpu"))
    if isinstance(adapter, Adapter):
        check_fits(adapter, program.base.module_shapes(), program.name, program.base.output_module)
        check_replaced(adapter, program.base)
        return adapter.map(lambda tensor: tensor.detach().cpu())
    read = saved_adapter(adapter, Path(adapter).name, program, store, location)
    check_finite(read, adapter)
    if COMPOSITE in program.config:
        _check_whole(read, adapter_directory(adapter) / ADAPTER_WEIGHTS)
    return read


def _check_whole(adapter: Adapter, file: Path) -> None:
    """Refuse a file with weights outside the language model, which are no part of `adapter`."""
    ends = tuple(f".{suffix}" for suffix in adapter.recipe.weights.suffixes)
    stored = [key for key in read_header(file, AdapterError) if key.endswith(ends)]
    if len(stored) > sum(len(weights.stored) for weights in adapter.weights.values()):
        raise UnsupportedError(
            f"{file} also adapts modules outside the language model, which pcg does not merge; "
            "merge it with peft's merge_and_unload"
        )


@dataclass(frozen=True)
class _Change:
    """A weight or a bias to write.

    Attributes:
        name: its name in the model.
        parameter: the base's.
        weights: of the adapter's module, if there are any.
        replacement: the trained parameter that replaces the base's.
    """

    name: str
    parameter: Parameter
    weights: ModuleWeights | None = None
    replacement: Tensor | None = None


class _Merging:
    """The changes of an adapter, and their errors.

    Attributes:
        program: of the base.
        precise: the dtype of sums.
        changes: all tensors that change, but for `added`.
        added: the name and the change of a head that was tied to the embedding, or of a sequence
            classifier's, which the checkpoint lacks.
        dtype: of the new tensors, or of a quantized base's matrices; None keeps theirs.
        settings: the base's quantization_config.
    """

    def __init__(self, program: Program, adapter: Adapter) -> None:
        self.program = program
        self.precise = torch.float64 if program.base.adapter_dtype == "f64" else torch.float32
        self._adapter = adapter.map(lambda tensor: tensor.to(self.precise))
        frozen = program.base.parameters()
        self._frozen = {p.source.format(layer=layer): p for p, layer in frozen}
        names = {site: f"{module_name(site)}.weight" for site in program.base.embedding_sites()}
        embeddings = {site: (name, self._frozen[name]) for site, name in names.items()}
        self._modules = linear_parameters(program.base) | embeddings
        self.changes: list[_Change] = []
        self.added: tuple[str, _Change] | None = None
        self.dtype: torch.dtype | None = None
        self.settings: Mapping[str, Any] = {}
        self._matrices = 0
        self._squares = dict.fromkeys(("base", "change", "merged", "error"), 0.0)

    @property
    def casts(self) -> bool:
        """True to write all tensors in `dtype`."""
        return self.dtype is not None and not self.settings

    def plan(self, config: dict[str, Any], dtype: str | None) -> None:
        """Find the tensors to write, and adjust config.json; refuse what cannot be merged."""
        self.settings = config.get("quantization_config") or {}
        if dtype is not None:
            self.dtype = _FLOATS[dtype]
            config.pop("quantization_config", None)
            config.pop("torch_dtype", None)
            config["dtype"] = dtype
        for path, weights in self._adapter.weights.items():
            self._add_module(path, weights, config)
        stored = self._adapter.recipe.replaced_in(self.program.base, self._adapter.weights)
        for name, tensor in self._adapter.replaced.items():
            self._add_replaced(name, *stored[name], tensor, config)
        if self.dtype is not None:
            for name, parameter in self._frozen.items():
                if parameter.type.dtype in FORMATS:
                    self.changes.append(_Change(name, parameter))

    def size_bytes(self, source: ModelSource) -> int:
        """Return about the bytes of the new checkpoint."""
        if self.dtype is None:
            return sum(path.stat().st_size for path in source.weight_files)
        numbers = sum(math.prod(each.type.features) for each in self._frozen.values())
        return numbers * self.dtype.itemsize

    def _add_module(self, path: str, weights: ModuleWeights, config: dict[str, Any]) -> None:
        if not weights.can_merge:
            raise UnsupportedError(
                f"{self._adapter.recipe.method} is no change of the base's weights, so that it "
                "cannot be merged; serve the base with the adapter"
            )
        name, parameter = self._modules[path]
        parameter_name, _ = parameter_of(path) or (f"{module_name(path)}.weight", 1)
        change = _Change(name, parameter, weights)
        of_name = [
            other
            for other, (its, _) in self._modules.items()
            if its == name and is_embedding(other) == is_embedding(path)
        ]
        is_head = path == self.program.base.output_module
        if is_embedding(path) and of_name == [path]:
            self._add_embedding(change, config)
            return
        is_tied = (
            parameter_name != name
            or name.removesuffix(".weight") in self.program.base.embedding_modules()
        )
        if not is_tied and of_name == [path]:
            self.changes.append(change)
        elif is_head and of_name == [path] and COMPOSITE not in self.program.config:
            if parameter.type.dtype in FORMATS:
                raise UnsupportedError(
                    f"{path} is tied to an embedding in {parameter.type.dtype}, which pcg does "
                    "not separate; leave the head out of the adapter's targets"
                )
            self.added = f"{path}.weight", change
            config["tie_word_embeddings"] = False
        else:
            raise UnsupportedError(
                f"{path} has the weight {name}, which other modules share, so that the adapter "
                "cannot be merged; serve the base with the adapter"
            )
        if f"{path}.bias" in self._frozen:
            if f"{path}.bias" not in self._adapter.replaced:
                bias = self._frozen[f"{path}.bias"]
                self.changes.append(_Change(f"{path}.bias", bias, weights))
        elif "lora_B_bias" in weights.parameters:
            raise UnsupportedError(
                f"lora_bias: {path} has no bias in the base, which could hold the adapter's; serve "
                "the base with the adapter"
            )

    def _add_embedding(self, change: _Change, config: dict[str, Any]) -> None:
        """Add the change of an embedding; a head that is tied to it keeps the base's weight."""
        head, dtype = self.program.base.output_module, change.parameter.type.dtype
        is_tied = change.name == self._modules[head][0]
        if dtype in FORMATS or (is_tied and COMPOSITE in self.program.config):
            raise UnsupportedError(
                f"{change.name} is in {dtype} or tied to a head, which pcg does not separate; "
                "leave the embedding out of the adapter's targets"
            )
        self.changes.append(change)
        if is_tied and self.added is None:
            self.added = f"{head}.weight", _Change(change.name, change.parameter)
            config["tie_word_embeddings"] = False

    def _add_replaced(
        self, name: str, stored: str, parameter: Parameter, tensor: Tensor, config: dict[str, Any]
    ) -> None:
        module, _, kind = name.rpartition(".")
        change = _Change(stored, parameter, self._adapter.weights.get(module), tensor)
        if embedding_path(module) in self._modules:
            self._add_embedding(change, config)
        elif self.program.options.labels and module == self.program.base.output_module:
            self.added = name, change
        elif stored == name and (kind == "bias" or parameter.type.dtype not in FORMATS):
            self.changes.append(change)
        elif parameter.type.dtype not in FORMATS and COMPOSITE not in self.program.config:
            self.added = name, change
            config["tie_word_embeddings"] = False
        else:
            raise UnsupportedError(
                f"{name} is {parameter.type.dtype} in the base, or another's in a composite "
                "model, where pcg does not replace it; serve the base with the adapter"
            )

    def merged(self, change: _Change, base: Tensor) -> Tensor:
        base = base if change.replacement is None else change.replacement
        if change.parameter.source.endswith(".bias"):
            return base if change.weights is None else change.weights.merged_bias(base)
        if change.weights is None:
            return base
        out, in_ = base.shape[-2:]
        return change.weights.merged(base, Around(lambda: base, self._adapter.shared, (out, in_)))

    def count(self, change: _Change, base: Tensor, exact: Tensor, stored: Tensor) -> None:
        """Add to the sums of squares of errors; refuse numbers beyond the dtype's range."""
        if not stored.isfinite().all():
            raise WeightsError(
                f"{change.name} with the adapter is beyond the range of {stored.dtype}; merge into "
                "a float32 or bfloat16 checkpoint"
            )
        if (change.weights is None and change.replacement is None) or base.dim() < 2:
            return
        self._matrices += 1
        tensors = base, exact - base, exact, stored.to(exact.dtype) - exact
        for name, tensor in zip(self._squares, tensors, strict=True):
            self._squares[name] += float(tensor.square().sum(dtype=torch.float64))

    def result(self, path: Path) -> MergeResult:
        """Return the result, after all tensors are written."""
        squares = {name: max(each, 1e-300) for name, each in self._squares.items()}
        change, error = squares["change"] / squares["base"], squares["error"] / squares["merged"]
        return MergeResult(path, self._matrices, math.sqrt(change), math.sqrt(error))


class _Tensors:
    """The tensors of a merged checkpoint of safetensors files."""

    def __init__(self, merging: _Merging, checkpoint: Checkpoint) -> None:
        self._merging = merging
        self._checkpoint = checkpoint
        self._changes: dict[str, _Change] = {}
        for change in merging.changes:
            for name in self._names(change):
                self._changes.setdefault(name, change)

    def _names(self, change: _Change) -> tuple[str, ...]:
        """Return the names of stored tensors to write; refuse layouts that pcg does not write."""
        shape, dtype = change.parameter.type.features, change.parameter.type.dtype
        if dtype not in FORMATS:
            return self._checkpoint.stored_names(change.name, shape)
        if len(shape) > 2:
            raise UnsupportedError(
                f"{change.name} has experts in {dtype}, which pcg does not write; give the float "
                "checkpoint"
            )
        method, format_ = self._merging.settings.get("quant_method", "bitsandbytes"), FORMATS[dtype]
        ours = format_.settings("float32", [])["quant_method"] if format_.library else None
        if self._merging.dtype is None and ours != method:
            raise UnsupportedError(self._unwritten(change.name, dtype))
        return tuple(self._checkpoint.quantized_suffixes(change.name))

    def _unwritten(self, name: str, format_: str) -> str:
        return (
            f"{name} is stored in {format_}, in a layout that pcg does not write; write floats: "
            "dtype='bfloat16' (--dtype bfloat16)"
        )

    @torch.no_grad()
    def every(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the new checkpoint's tensors, by their names in its files."""
        ready: dict[str, Tensor] = {}
        written: set[str] = set()
        places = self._checkpoint.places
        for (_, file_name), group in groupby(places, key=lambda name: places[name][:2]):
            self._checkpoint.release()  # The pages of a mapped file stay in memory.
            names = list(group)
            change = self._changes.get(names[0])
            if self._merging.added is not None and file_name == self._merging.added[0]:
                continue
            if self._merging.program.options.labels and file_name.startswith(_OLD_HEAD):
                continue
            if change is not None and change.parameter.type.dtype in FORMATS:
                if change.name not in written:
                    written.add(change.name)
                    yield from self._quantized(change, names[0], file_name)
                continue
            for name in names:
                if name in self._changes and name not in ready:
                    ready.update(self._changed(self._changes[name]))
            parts = [
                ready.pop(name) if name in ready else self._checkpoint.stored(name).clone()
                for name in names
            ]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
            is_cast = self._merging.casts and tensor.is_floating_point()
            yield file_name, tensor.to(self._merging.dtype) if is_cast else tensor
        if self._merging.added is not None:
            name, change = self._merging.added
            yield name, self._float(change)

    def _changed(self, change: _Change) -> Iterator[tuple[str, Tensor]]:
        parameter = change.parameter
        tensor = self._float(change)
        return self._checkpoint.as_stored(change.name, tensor, parameter.transposed)

    def _float(self, change: _Change) -> Tensor:
        """Return a changed weight or bias in the dtype to write."""
        name, parameter = change.name, change.parameter
        shape = parameter.type.features
        if name == self._checkpoint.drawn:
            stored_as = getattr(torch, TORCH_NAMES[self._merging.program.dtype])
        else:
            stored_as = self._checkpoint.float_dtype(self._checkpoint.stored_names(name, shape)[0])
        if self._merging.casts and self._merging.dtype is not None:
            stored_as = self._merging.dtype
        base = self._checkpoint.load(name, shape, self._merging.precise, parameter.transposed)
        exact = self._merging.merged(change, base)
        stored = exact.to(stored_as)
        self._merging.count(change, base, exact, stored)
        return stored

    def _quantized(
        self, change: _Change, name: str, file_name: str
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors of a quantized matrix.

        Args:
            name, file_name: of a stored tensor, in the index and in the file.
        """
        parameter = change.parameter
        format_, (rows, columns) = FORMATS[parameter.type.dtype], parameter.type.features
        (parts,) = self._checkpoint.quantized(
            change.name, (rows, columns), format_, parameter.transposed
        )
        base = format_.whole(parts, self._merging.precise)
        exact = self._merging.merged(change, base)
        suffixes = self._checkpoint.quantized_suffixes(change.name)
        prefix = file_name.removesuffix(suffixes[name])
        if self._merging.dtype is not None:
            weight = exact.to(self._merging.dtype)
            self._merging.count(change, base, exact, weight)
            yield f"{prefix}weight", weight.mT.contiguous() if parameter.transposed else weight
            return
        dtype = getattr(torch, TORCH_NAMES[self._merging.program.dtype])
        written = format_.write(format_.quantize(exact.to(dtype)), dtype)
        matrix = StoredMatrix(
            change.name,
            rows,
            columns,
            written.__contains__,
            written.__getitem__,
            self._merging.settings,
        )
        read = format_.read(matrix)
        if read is None or {*written} != {*suffixes.values()}:
            raise UnsupportedError(self._unwritten(change.name, format_.name))
        self._merging.count(change, base, exact, format_.whole(read, self._merging.precise))
        for suffix, tensor in written.items():
            yield f"{prefix}{suffix}", tensor


@torch.no_grad()
def _of_gguf(merging: _Merging, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a GGUF file in the dtype to write, by the model's names."""
    assert merging.dtype is not None
    changes = {change.name: change for change in merging.changes}
    every = [(name, changes.get(name)) for name in weights.index]
    for name, change in (*every, *([merging.added] if merging.added else ())):
        stored_name = name if change is None else change.name
        shape = weights.index[name].shape if change is None else change.parameter.type.features
        base = weights.load(stored_name, shape, merging.precise)
        exact = base if change is None else merging.merged(change, base)
        stored = exact.to(merging.dtype)
        if change is not None:
            merging.count(change, base, exact, stored)
        yield name, stored


def _merge_into_file(arguments: MergeArguments, source: ModelSource) -> MergeResult:
    """Write a GGUF file with an adapter: a copy, of which the changed tensors are replaced."""
    if arguments.labels:
        raise UnsupportedError(
            "labels: a GGUF file has no head of a sequence classifier; write a folder, such as "
            "dtype='bfloat16' (--dtype bfloat16)"
        )
    (base,) = source.weight_files
    target = free_file(arguments.output, _WHAT, base, overwrite=arguments.overwrite)
    program = compile_program(arguments.model, None)
    weights = open_weights(source, program)
    assert isinstance(weights, GgufWeights)
    merging = _Merging(
        program, adapter_of_base(arguments.adapter, program, weights, source.location)
    )
    merging.plan({}, None)
    if merging.added is not None:
        raise UnsupportedError(
            f"{merging.added[1].name} is the embedding's, too, and a GGUF file has no room for "
            "another head; leave the head out of the adapter's targets"
        )
    check_room(target, merging.size_bytes(source), _WHAT)
    tensors = tensors_of(read_gguf(base))
    places = {change.name: tensors[change.name] for change in merging.changes}
    for name in {tensor.type for tensor in places.values() if not tensor.is_float}:
        FORMATS[name].quantize(torch.zeros(1, FORMATS[name].column_block))  # refuses, if any does
    with replacing(target, WeightsError) as beside:
        shutil.copyfile(base, beside)
        with beside.open("r+b") as file:
            for change in merging.changes:
                rows = _rows_in_file(merging, weights, change, places[change.name])
                file.seek(places[change.name].offset)
                file.write(rows.contiguous().view(torch.uint8).numpy().data)
    return merging.result(target)


@torch.no_grad()
def _rows_in_file(
    merging: _Merging, weights: GgufWeights, change: _Change, place: GgufTensor
) -> Tensor:
    """Return a changed tensor's numbers, or bytes of blocks, in the order of the file."""
    base = weights.load(change.name, place.shape, merging.precise)
    exact = merging.merged(change, base)
    if place.is_float:
        rows = stored = exact.to(weights.float_dtype(change.name))
    else:
        format_ = FORMATS[place.type]
        parts = format_.quantize(exact)
        rows, stored = parts["blocks"], format_.whole(parts, merging.precise)
    merging.count(change, base, exact, stored)
    return weights.in_file_order(change.name, rows)
