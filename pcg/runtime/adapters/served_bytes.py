"""The dtype and the bytes of adapters' copies for serving.

A step reads the weights of every running adapter, so that 16 bits halve the bytes. Training and
saved files keep the adapters' own dtype. Bytes are computed from an engine's layout of the adapters
on the meta device: rows in pages of the KV cache with tables, or stacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.sgmv import check_native, is_native
from pcg.kernels.torch.products import has_onednn
from pcg.options import CompileOptions
from pcg.peft.adapter import Adapter
from pcg.peft.method import Shape
from pcg.ranks.group import Ranks
from pcg.runtime.adapters.padded_tables import PaddedTables
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.adapters.stacked_weights import ServedWeights
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.memory.pool import PageTable


def served_dtype(
    options: CompileOptions, base: ModelGraph, device: torch.device
) -> torch.dtype | None:
    """Return the dtype of the copies; None for the adapters' own dtype.

    The default is the base's dtype if the serving kernels support 16 bits: Triton's kernels, and
    the native kernel on CPUs with native bfloat16.

    Raises:
        UnsupportedError: the kernels do not support `adapter_copies`.
    """
    dtype_name, is_triton = options.adapter_copies, options.backend == "triton"
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[base.dtype])
    if dtype_name is not None and base.adapter_dtype != "f32":
        raise UnsupportedError(
            f"adapter_copies={dtype_name!r} is for adapters in float32, and those over a base in "
            "float64 are float64; leave it out"
        )
    if dtype_name == "float32":
        return None
    if dtype_name is None:
        is_read = is_triton or (
            options.tp == 1
            and dtype is torch.bfloat16
            and device.type == "cpu"
            and has_onednn(dtype)
            and is_native(device, dtype)
        )
        return dtype if is_read and dtype.itemsize == 2 else None
    if not is_triton:
        check_native(device, torch.bfloat16, f"adapter_copies={dtype_name!r}")
    elif dtype is not torch.bfloat16:
        raise UnsupportedError(
            f"adapter_copies={dtype_name!r} would round activations in {dtype}, as tensor cores "
            "multiply by one dtype; leave it out, or compile for dtype='bfloat16'"
        )
    return torch.bfloat16


META = torch.device("meta")


def served_bytes(
    serving: ModelGraph,
    whole: ModelGraph,
    adapters: Sequence[Adapter],
    options: CompileOptions,
    device: torch.device,
) -> int:
    """Return the bytes of a rank's copies of adapters that run together, and were added together.

    Triton counts whole pages. PyTorch has stacks with a few empty slots, and matrices padded to the
    largest rank of their width.

    Args:
        serving: a rank's part of the serving model, with fused products.
        whole: the model without bypass networks.
        adapters: whole, on the meta device.
        device: the device that serves.
    Raises:
        UnsupportedError: the kernels do not support `adapter_copies`.
    """
    if not adapters:
        return 0
    with META:
        tables = _tables(serving, whole, adapters, options, device)
        tables.order(adapters)
        return tables.size_bytes


def bytes_in_pages(
    serving: ModelGraph,
    whole: ModelGraph,
    adapter: Adapter,
    options: CompileOptions,
    device: torch.device,
) -> int:
    """Return the bytes of an adapter's pages in an engine."""
    page_bytes = bytes_of_page(kv_types(serving))
    with META:
        return _empty(serving, whole, options, device).pages_of(adapter, page_bytes) * page_bytes


def _tables(
    serving: ModelGraph,
    whole: ModelGraph,
    adapters: Sequence[Adapter],
    options: CompileOptions,
    device: torch.device,
) -> PaddedTables:
    """Return an engine's tables for adapters, in pages of a cache if the backend uses pages."""
    tables = _empty(serving, whole, options, device)
    if options.backend != "triton":
        return tables
    page_bytes = bytes_of_page(kv_types(serving))
    page_tables: dict[int, PageTable] = {}
    most = 0
    for adapter in adapters:
        first, most = most, most + tables.pages_of(adapter, page_bytes)
        page_tables[adapter.version] = PageTable(adapter.name, [*range(first, most)])
    pages = torch.empty((most, page_bytes), dtype=torch.uint8)
    return tables.in_pages(pages, lambda adapter: page_tables[adapter.version])


def _empty(
    serving: ModelGraph, whole: ModelGraph, options: CompileOptions, device: torch.device
) -> PaddedTables:
    shapes = whole.module_shapes()
    weights = ServedWeights(_Shaped(shapes, whole.dtype), shapes)
    ranks = Ranks()
    ranks.size = options.tp
    kind = RaggedTables if options.backend == "triton" else PaddedTables
    dtype = served_dtype(options, whole, device)
    return kind(serving, weights, META, ranks, lora_dtype=dtype)


class _Shaped(Mapping[str, Tensor]):
    """The base's weights [out, in] on the meta device, by the paths of their modules."""

    def __init__(self, shapes: Mapping[str, Shape], dtype: str) -> None:
        self._shapes = shapes
        self._dtype: torch.dtype = getattr(torch, TORCH_NAMES[dtype])

    def __getitem__(self, path: str) -> Tensor:
        return torch.empty(self._shapes[path], dtype=self._dtype, device=META)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
