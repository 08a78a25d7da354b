"""The KV cache: rows of keys and values in pages, and their gradients in training.

A layer's cache is two tensors [kv_heads, rows, head_dim]; a row holds a token, and a page holds
`PAGE_TOKENS` rows in every layer. Heads are the first dim, so that the rows of a head are
contiguous if the pages are. For kernels that follow block tables, a page is a run of bytes instead,
with the keys and values of each layer in turn, and adapters have pages as well.

Free pages hold zeros: values of an owner, including NaN, are erased before another owner reads
them. Each pipeline stage has the keys and values of its layers. All ranks count equal pages, so the
stage with the largest rows determines the size of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.ir.operators.attention import LatentAttention
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import DTYPE_BYTES, TOKENS, TORCH_NAMES, TensorType, tensor
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.ranks.stages import Stages
from pcg.runtime.memory.host_memory import untouched
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.memory.recurrent_states import LayerStates, RecurrentStates, recurrent_types


def kv_types(model: ModelGraph) -> tuple[tuple[TensorType, TensorType], ...]:
    """Return the types of each layer's keys and values, [T, kv_heads, head_dim].

    Latents are keys of a single head, without values. Layers of other pipeline stages have no
    heads.
    """
    none = tensor("f32", TOKENS, 0, 0)
    by_block = []
    for block in model.blocks:
        pair = (none, none)
        for node in block.nodes:
            if node.op == "attention":
                pair = (block.types[node.inputs[1]], block.types[node.inputs[2]])
            elif node.op == LatentAttention.name:
                row = LatentAttention.cached(block.types_of(node)[0])
                pair = (row, row.with_features(0, 0))
        by_block.append(pair)
    return tuple(by_block[block] for block in model.layers)


def without_rows(type_: TensorType, device: torch.device) -> Tensor:
    """Return keys or values as a layer's cache without rows has them, [kv_heads, 0, head_dim]."""
    heads, size = type_.features
    dtype = getattr(torch, TORCH_NAMES[type_.dtype])
    return torch.empty((heads, 0, size), dtype=dtype, device=device)


def bytes_of_row(type_: TensorType) -> int:
    """Return the bytes per token of a [T, …] tensor."""
    return prod(type_.features) * DTYPE_BYTES[type_.dtype]


def bytes_of_token(model: ModelGraph) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    return sum(bytes_of_row(type_) for pair in kv_types(model) for type_ in pair)


class KvCache:
    """Rows of keys and values for every layer, and the pool of their pages.

    Attributes:
        pages: all memory, [pages, bytes of a page], u8; None if pages are not runs of bytes.
        keys, values: tensors of each layer, [kv_heads, rows, head_dim]; with `pages` [pages,
            kv_heads, PAGE_TOKENS, head_dim].
        states: the recurrent states of sequences; None if no layer has any.
        snapshots: the number of slots behind those of sequences.
    """

    def __init__(
        self,
        types: Sequence[tuple[TensorType, TensorType]],
        pages: int,
        device: torch.device,
        *,
        in_pages: bool = False,
        page_bytes: int | None = None,
        states: LayerStates = (),
        slots: int = 0,
        snapshots: int = 0,
    ) -> None:
        """Create a cache of free pages.

        Args:
            types: the types of each layer's keys and values.
            in_pages: True to make pages runs of bytes.
            page_bytes: the bytes of such a page; by default computed from the types.
            states: the types of each layer's recurrent states.
            slots: the number of sequences with recurrent states.
            snapshots: the number of further states, for prefixes.
        """
        has_states = any(states)
        self.pool = PagePool(pages, slots if has_states else 0)
        self.states: RecurrentStates | None = None
        self.snapshots = 0
        if has_states:
            self.states = RecurrentStates(states, slots + snapshots, device)
            self.snapshots = snapshots
        self.pages: Tensor | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        if in_pages:
            size = bytes_of_page(types) if page_bytes is None else page_bytes
            self.pages = untouched((pages, size), torch.uint8, device)
            offset = 0
            for pair in types:
                for store, type_ in zip((self.keys, self.values), pair, strict=True):
                    store.append(_in_pages(self.pages, type_, offset))
                    offset += PAGE_TOKENS * bytes_of_row(type_)
            self.pool.on_free = partial(_scrub_pages, self.pages)
            return
        for pair in types:
            for store, type_ in zip((self.keys, self.values), pair, strict=True):
                dtype = getattr(torch, TORCH_NAMES[type_.dtype])
                heads, size = type_.features
                shape = (heads, self.rows, size)
                store.append(untouched(shape, dtype, device))
        self.pool.on_free = partial(_scrub_rows, (*self.keys, *self.values))

    @property
    def rows(self) -> int:
        return self.pool.size * PAGE_TOKENS

    @property
    def size_bytes(self) -> int:
        """The bytes of all pages."""
        stores = (*self.keys, *self.values) if self.pages is None else (self.pages,)
        return sum(store.nbytes for store in stores)

    def copy_page(self, page: int, to: int) -> None:
        if self.pages is not None:
            self.pages[to] = self.pages[page]
            return
        first, second = page * PAGE_TOKENS, to * PAGE_TOKENS
        for store in (*self.keys, *self.values):
            store[:, second : second + PAGE_TOKENS] = store[:, first : first + PAGE_TOKENS]


def _in_pages(pages: Tensor, type_: TensorType, offset: int) -> Tensor:
    elements = pages.view(getattr(torch, TORCH_NAMES[type_.dtype]))
    heads, size = type_.features
    shape = (len(pages), heads, PAGE_TOKENS, size)
    strides = (elements.shape[1], PAGE_TOKENS * size, size, 1)
    return elements.as_strided(shape, strides, offset // elements.itemsize)


def _scrub_pages(pages: Tensor, start: int, count: int) -> None:
    pages[start : start + count].zero_()


def _scrub_rows(stores: Sequence[Tensor], start: int, count: int) -> None:
    rows = slice(start * PAGE_TOKENS, (start + count) * PAGE_TOKENS)
    for store in stores:
        store[:, rows].zero_()


EMPTY_PAGE_BYTES = 4096
"""The bytes of a page, for adapters, in a model whose layers have recurrent states alone."""


def bytes_of_page(types: Sequence[tuple[TensorType, TensorType]]) -> int:
    """Return the bytes of a page in all layers."""
    rows = sum(bytes_of_row(type_) for pair in types for type_ in pair)
    return PAGE_TOKENS * rows or EMPTY_PAGE_BYTES


def stage_kv_types(
    model: ModelGraph, stages: Stages, index: int
) -> tuple[tuple[TensorType, TensorType], ...]:
    """Return the types of each layer's keys and values; layers of other stages have no heads."""
    return kv_types(stages[index].own(model))


def page_bytes_of(model: ModelGraph, stages: Stages) -> int:
    """Return the bytes of a page in the stage with the largest rows.

    Raises:
        UnsupportedError: no layer has attention or a recurrent state.
    """
    if not bytes_of_token(model) and not any(recurrent_types(model)):
        raise UnsupportedError(
            "no layer of the model has attention or a recurrent state, by which an engine plans; "
            "Executor.logits computes the logits of such a model"
        )
    return max(bytes_of_page(stage_kv_types(model, stages, i)) for i in range(stages.count))
