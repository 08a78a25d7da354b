"""The weights of a GGUF file, mapped: linear modules in their stored blocks, the rest in float.

Embeddings that are stored in blocks are dequantized when they are loaded, and so is a head that is
tied to them. The rows of q and k are put in the model's order, which copies their blocks; all other
blocks stay in the file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcg.formats.format import Format, Parts
from pcg.formats.registry import FORMATS
from pcg.gguf_file import SUFFIX, GgufHeader, read_gguf
from pcg.gguf_model import heads_in_other_order, tensors_of
from pcg.ir.program.program import Program
from pcg.ranks.agreement import tensor_digest
from pcg.ranks.shards import Ranges
from pcg.runtime.model.weights import (
    DTYPE_NAMES,
    Checkpoint,
    Weights,
    identity_of,
    slices_of,
)
from pcg.source import ModelSource
from pcg.tensor_file import TensorInfo

_FLOATS = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def open_weights(source: ModelSource, program: Program) -> Weights:
    """Read the headers of a model's files.

    A program without matrices in a format reads all of them in floating point.

    Raises:
        WeightsError: there are no files, or one is damaged.
    """
    weights: Weights
    if source.weight_files and source.weight_files[0].suffix == SUFFIX:
        weights = GgufWeights(read_gguf(source.weight_files[0]), source, program.base_prefix)
    else:
        weights = Checkpoint.open(source, program.base_prefix, program.renamings)
        formats = (parameter.type.dtype for parameter, _ in program.base.parameters())
        weights.decodes = FORMATS.keys().isdisjoint(formats)
    if program.options.labels:
        weights.drawn = f"{program.base.output_module}.weight"
    return weights


class GgufWeights(Weights):
    """The tensors of a GGUF file, by the model's names."""

    dtypes = (*DTYPE_NAMES.values(), *FORMATS)

    def __init__(self, header: GgufHeader, source: ModelSource, base_prefix: str = "") -> None:
        self._path = header.path
        self._tensors = tensors_of(header)
        self._heads = {name: heads_in_other_order(header, name) for name in self._tensors}
        index = {name: TensorInfo(each.type, each.shape) for name, each in self._tensors.items()}
        super().__init__(index, base_prefix, source.config, source.name)
        self._content: Tensor | None = None

    def quantized(
        self,
        name: str,
        shape: Sequence[int],
        format_: Format,
        transposed: bool = False,
        experts: range | None = None,
    ) -> tuple[Parts, ...]:
        """Return a matrix in its stored blocks; see `Weights.quantized`."""
        stored_name = self._find(name)
        if stored_name is None or self._tensors[stored_name].type != format_.name:
            return super().quantized(name, shape, format_, transposed, experts)
        self._check(name, stored_name, tuple(shape))
        self._used.add(stored_name)
        parts = self._parts(stored_name)
        self.read_bytes += parts.size_bytes
        return (parts,)

    def digest(self, name: str) -> bytes:
        return bytes.fromhex(tensor_digest(self._bytes(name)))

    def identity(self) -> str:
        return identity_of([self._path])

    def release(self) -> None:
        # The file stays mapped while a tensor is a view of it.
        self._content = None

    def _place(self, name: str) -> str:
        return str(self._path)

    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        tensor = self._tensors[name]
        if tensor.is_float:
            values = self._bytes(name).view(_FLOATS[tensor.type]).view(tensor.shape)
            values = self._in_order(name, values)
        else:
            values = _dequantized(FORMATS[tensor.type], self._parts(name), ranges)
            ranges = None
        return values if ranges is None else values[slices_of(ranges)]

    def _parts(self, name: str) -> Parts:
        rows, columns = self._tensors[name].shape
        blocks = self._in_order(name, self._bytes(name).view(rows, -1))
        return Parts({"blocks": blocks}, rows, columns)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Return rows of q and k in the model's order, others as they are."""
        heads = self._heads[name]
        if not heads:
            return rows
        pairs = rows.view(heads, len(rows) // heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(rows.shape)

    def in_file_order(self, name: str, rows: Tensor) -> Tensor:
        """Return rows of a tensor in the file's order, from the model's."""
        heads = self._heads[name]
        if not heads:
            return rows
        halves = rows.view(heads, 2, len(rows) // heads // 2, -1)
        return halves.transpose(1, 2).reshape(rows.shape)

    def _bytes(self, name: str) -> Tensor:
        """Return the bytes of a tensor in the file's mapping."""
        if self._content is None:
            size = self._path.stat().st_size
            self._content = torch.from_file(
                str(self._path), shared=False, size=size, dtype=torch.uint8
            )
        tensor = self._tensors[name]
        return self._content[tensor.offset : tensor.offset + tensor.size_bytes]


def _dequantized(format_: Format, parts: Parts, ranges: Ranges | None) -> Tensor:
    """Return a matrix, or a part of it, in fp32."""
    (start, stop), columns = ranges or ((0, parts.rows), (0, parts.columns))
    like = torch.empty(0)
    out = torch.empty(stop - start, columns[1] - columns[0])
    for first, last, tile in format_.tiles(parts, start, stop, like):
        out[first - start : last - start] = tile[:, slice(*columns)]
    return out
