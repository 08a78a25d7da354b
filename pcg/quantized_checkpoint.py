"""`pcg.quantize`: write a float checkpoint in a weight format, in a layout that transformers reads.

    for each stored tensor, in the checkpoint's order:
        a matrix of the layers' linear modules    write(quantize(W))
        any other tensor                          as it is

The folder equals quantization on load: `pcg.compile(folder)` has the parts of
`pcg.compile(model, quantization=format)`. Memory holds a file of the new checkpoint and a matrix.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pcg.checkpoint_writer import check_room, free_folder, shard_limit, write_checkpoint
from pcg.compiler import compile_program
from pcg.errors import UnsupportedError, WeightsError
from pcg.formats.format import Format
from pcg.formats.registry import FORMATS, stored_format
from pcg.gguf_file import SUFFIX
from pcg.ir.program.program import Program
from pcg.keywords import takes
from pcg.runtime.model.weights import Checkpoint
from pcg.source import COMPOSITE, resolve

_WHAT = "the quantized model"


@dataclass(frozen=True)
class QuantizeArguments:
    """Arguments of `quantize`.

    Attributes:
        model: directory or hub id of a float checkpoint.
        format: the weight format, such as nf4 or fp8_block.
        output: the folder to write; it must not exist, or be empty.
        max_shard_size: the largest size of a file, such as 2GB.
    """

    model: str | os.PathLike[str]
    format: str
    output: str | os.PathLike[str]
    max_shard_size: str = field(default="2GB", kw_only=True)


@dataclass(frozen=True)
class _Matrix:
    """A matrix to quantize.

    Attributes:
        name: its name in the model.
        shape: [out, in].
        transposed: True if the checkpoint holds [in, out].
    """

    name: str
    shape: tuple[int, int]
    transposed: bool


@takes(QuantizeArguments)
def quantize(arguments: QuantizeArguments) -> Path:
    """Quantize a float checkpoint tensor by tensor, and return the new folder.

    Raises:
        UnsupportedError: no layout of the format is known, or a matrix does not fit its blocks.
        WeightsError: the checkpoint cannot be read, or the folder not be written.
    """
    format_ = _format_with_layout(arguments.format)
    target = free_folder(arguments.output, _WHAT)
    limit = shard_limit(arguments.max_shard_size)
    source = resolve(arguments.model, weights=True)
    stored = stored_format(source.config)
    if stored is not None:
        raise UnsupportedError(
            f"{source.name} is already quantized, to {stored.name}; give the float checkpoint"
        )
    if source.weight_files[0].suffix == SUFFIX:
        raise UnsupportedError(
            f"{source.name} is a GGUF file, whose layout no library reads in {format_.name}; give "
            "a directory with safetensors, or quantize on loading: "
            f"quantization={format_.name!r} (--quantization {format_.name})"
        )
    if COMPOSITE in source.config:
        raise UnsupportedError(
            f"{source.name} is a composite checkpoint ({source.config[COMPOSITE]}), of which pcg "
            f"reads the language model; quantize on loading: quantization={format_.name!r} "
            f"(--quantization {format_.name})"
        )
    program = compile_program(arguments.model, None, quantization=format_.name)
    checkpoint = Checkpoint.open(source, program.base_prefix, program.renamings)
    matrices = {_stored_name(checkpoint, matrix.name): matrix for matrix in _matrices(program)}
    _check_layouts(format_, matrices)
    check_room(target, _size_bytes(checkpoint, format_, matrices), _WHAT)
    config = {**source.config, "quantization_config": _settings(program, format_, matrices)}
    tensors = _tensors(program, checkpoint, format_, matrices)
    write_checkpoint(target, source, config, tensors, limit, _WHAT)
    checkpoint.release()
    return target


def _format_with_layout(name: str) -> Format:
    if name in FORMATS and FORMATS[name].library:
        return FORMATS[name]
    written = ", ".join(known for known, each in FORMATS.items() if each.library)
    loading = f", or quantize on loading: quantization={name!r} (--quantization {name})"
    raise UnsupportedError(
        f"transformers reads no checkpoint of {name}; use one of {written}"
        f"{loading if name in FORMATS else ''}"
    )


def _matrices(program: Program) -> Iterator[_Matrix]:
    for parameter, layer in program.base.parameters():
        if parameter.type.dtype in FORMATS:
            name = parameter.source.format(layer=layer)
            *experts, rows, columns = parameter.type.features
            if experts:
                raise UnsupportedError(
                    f"{name} has experts, of which pcg writes no quantized checkpoint; quantize on "
                    f"loading: quantization={parameter.type.dtype!r} (--quantization "
                    f"{parameter.type.dtype})"
                )
            yield _Matrix(name, (rows, columns), parameter.transposed)


def _stored_name(checkpoint: Checkpoint, name: str) -> str:
    stored = checkpoint.stored_name(name)
    if stored is None:
        raise WeightsError(
            f"{name} is not among the {len(checkpoint.index)} tensors of {checkpoint.where}; give "
            "the checkpoint that belongs to its config.json"
        )
    return stored


def _check_layouts(format_: Format, matrices: Mapping[str, _Matrix]) -> None:
    """Refuse matrices of GPT-2's Conv1D, which libraries other than bitsandbytes skip."""
    transposed = next((matrix for matrix in matrices.values() if matrix.transposed), None)
    if transposed is not None and format_.library != "bitsandbytes":
        raise UnsupportedError(
            f"{transposed.name} belongs to a Conv1D, which stores [in, out], and {format_.library} "
            f"quantizes Linear modules alone; use nf4, fp4 or int8_weight instead of "
            f"{format_.name}, or quantize on loading"
        )


def _size_bytes(checkpoint: Checkpoint, format_: Format, matrices: Mapping[str, _Matrix]) -> int:
    needed = sum(format_.size_bytes(*matrix.shape) for matrix in matrices.values())
    for name, info in checkpoint.index.items():
        if name not in matrices:
            needed += math.prod(info.shape) * _ITEM_BYTES.get(info.dtype, 4)
    return needed


_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1}


def _tensors(
    program: Program, checkpoint: Checkpoint, format_: Format, matrices: Mapping[str, _Matrix]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the new checkpoint, with the base prefixes that old ones lack."""
    prefix = f"{program.base_prefix}."
    known = [parameter.source.format(layer=layer) for parameter, layer in program.base.parameters()]
    names = {name.removeprefix(prefix): name for name in known}
    for stored in checkpoint.index:
        checkpoint.release()  # The pages of a mapped file stay in memory.
        matrix = matrices.get(stored)
        if matrix is None:
            yield names.get(stored, stored), checkpoint.stored(stored).clone()
            continue
        dtype = checkpoint.float_dtype(matrix.name)
        weight = checkpoint.load(matrix.name, matrix.shape, dtype, matrix.transposed)
        module = matrix.name.removesuffix(".weight")
        for suffix, tensor in format_.write(format_.quantize(weight), dtype).items():
            yield f"{module}.{suffix}", tensor


def _settings(program: Program, format_: Format, matrices: Mapping[str, _Matrix]) -> dict[str, Any]:
    quantized = {matrix.name.removesuffix(".weight") for matrix in matrices.values()}
    skipped = [path for path in program.base.linear_modules() if path not in quantized]
    return format_.settings(str(program.options.dtype), skipped)
