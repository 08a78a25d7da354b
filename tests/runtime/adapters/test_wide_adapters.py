"""A wide adapter beside narrow ones: its own programs, bytes and entries, and nobody else's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import pcg
from pcg.kernels.batch import LoraRows
from pcg.kernels.triton.adapters.dispatch import expand_add, shrink
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.executor import Executor
from tests.support.interpreter import bf16
from tests.support.lora_pair import lora_pair, small_llama
from tests.support.oracle import logits, relative_error

bf16.install()

NARROW = [f"narrow-{number}" for number in range(31)]
RANKS = {"wide": 256, **dict.fromkeys(NARROW, 16)}


def recipe(rank: int, **fields: Any) -> dict[str, Any]:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **fields}


# ------------------------------------------------------------------------------------------ counts


@dataclass
class Seen:
    """What kernels did: programs of their grids, programs that stored anything, and loads."""

    programs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    busy: dict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))
    loaded: set[int] = field(default_factory=set)

    def bytes_of(self, memory: torch.Tensor) -> int:
        start, size = memory.data_ptr(), memory.nbytes
        inside = sum(start <= address < start + size for address in self.loaded)
        return inside * memory.itemsize


@contextmanager
def seen() -> Iterator[Seen]:
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    found = Seen()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    run = GridExecutor.__call__
    kernel = [""]

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel[0] = self.fn.__name__
        found.programs[kernel[0]] += int(np.prod(self.grid))
        return run(self, *args, **kwargs)

    def addresses(pointers: Any, mask: Any) -> Any:
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        return np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape)]

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        found.loaded.update(addresses(pointers, mask).tolist())
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if len(addresses(pointers, mask)):
            found.busy[kernel[0]].add(self.grid_idx)
        return store(self, pointers, value, mask, *rest)

    with (
        patch.object(GridExecutor, "__call__", launched),
        patch.object(InterpreterBuilder, "create_masked_load", loaded),
        patch.object(InterpreterBuilder, "create_masked_store", stored),
    ):
        yield found


def site_of(tables: RaggedTables, adapters: Sequence[Adapter]) -> LoraRows:
    """What programs read of the joined q, k and v, one token of each adapter."""
    order = tables.order(adapters)
    bound = tables.bind([adapters[i] for i in order], [1] * len(adapters))
    rows = [one for one in vars(bound.layers[0]).values() if isinstance(one, LoraRows)]
    return next(one for one in rows if len(one.out_sizes) == 3)


def check_work(executor: Executor, names: Sequence[str]) -> None:
    """A step's kernels do what each of its adapters' own rank takes, and no more."""
    tables: Any = executor.serving.tables
    adapters = [executor.adapters[name] for name in names]
    site = site_of(tables, adapters)
    x = torch.randn(len(names), site.in_size)
    y = torch.randn(len(names), sum(site.out_sizes))
    with seen() as down:
        s = shrink(x, site)
    with seen() as up:
        expand_add(y, s, site)
    ranks = [RANKS[name] for name in names]
    blocks, outputs = sum(-(-rank // 16) for rank in ranks), len(site.out_sizes)
    assert down.programs == {"shrink_kernel": outputs * blocks}
    assert len(down.busy["shrink_kernel"]) == outputs * blocks
    assert up.programs == {"expand_tokens_kernel": outputs * len(names)}
    assert len(up.busy["expand_tokens_kernel"]) == outputs * len(names)
    size = site.memory.itemsize
    assert down.bytes_of(site.memory) == size * sum(ranks) * outputs * site.in_size
    assert up.bytes_of(site.memory) == size * sum(ranks) * sum(site.out_sizes)
    assert s.shape == (1, outputs, sum(ranks))  # and no sums are kept for ranks of others


def test_a_wide_adapter_takes_its_own_programs_and_bytes() -> None:
    executor = pcg.compile(small_llama(), backend="triton", device="cpu")
    for name, rank in RANKS.items():
        if name != "wide":
            executor.add_adapter(name, {"peft_type": "LORA", **recipe(rank)})
    check_work(executor, NARROW)
    executor.add_adapter("wide", {"peft_type": "LORA", **recipe(256)})
    check_work(executor, ["wide", *NARROW])
    check_work(executor, NARROW)  # it is in memory, and has no tokens
    executor.remove_adapter("wide")
    check_work(executor, NARROW)


def test_memory_gets_smaller_as_adapters_leave() -> None:
    executor = pcg.compile(small_llama(), backend="triton", device="cpu")
    for name, rank in RANKS.items():
        executor.add_adapter(name, {"peft_type": "LORA", **recipe(rank)})
    tables: Any = executor.serving.tables
    few = [executor.adapters[name] for name in NARROW[:4]]
    tables.order(few)
    entries = tables.lora.entries
    tables.order([executor.adapters[name] for name in RANKS])
    most = tables.lora.size_bytes
    layout = tables.layout
    for name in RANKS:
        if name not in NARROW[:4]:
            executor.remove_adapter(name)
    assert tables.layout != layout  # so that recorded graphs are not replayed
    assert tables.lora.entries <= entries
    assert tables.lora.size_bytes <= most / 4
    check_work(executor, NARROW[:4])


def test_a_wide_adapter_that_comes_moves_no_table_of_others() -> None:
    """Graphs that were recorded stay, as long as there is room for its entries and its rows."""
    executor = pcg.compile(small_llama(), backend="triton", device="cpu")
    for name in ("wide", *NARROW[:8]):
        executor.add_adapter(name, {"peft_type": "LORA", **recipe(RANKS[name])})
    tables: Any = executor.serving.tables
    wide, *narrow = executor.adapters.values()
    tables.order([*narrow, wide])
    layout = tables.layout
    for _ in range(2):
        tables.forget(wide)
        tables.order(narrow)
        assert tables.layout == layout
        tables.order([*narrow[:2], wide])
        assert tables.layout == layout


# ---------------------------------------------------------------------------------------- numerics


RECIPES = {
    "one": recipe(1),
    "usual": recipe(16),
    "odd": recipe(17, use_rslora=True),
    "wide": recipe(256),
    "mixed": recipe(8, rank_pattern={"q_proj": 100, "down_proj": 3, "layers.1.mlp.up_proj": 33}),
    "some": {**recipe(64), "target_modules": ["v_proj", "gate_proj"]},
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_mixed_ranks_are_those_of_peft(backend: str) -> None:
    executor, wrapped = lora_pair(RECIPES, small_llama(), backend=backend, device="cpu")
    names = [*RECIPES, "usual", None]
    for lengths in ((1,) * len(names), (7, 1, 4, 5, 2, 3, 18, 2)):
        ids = [[3 + (7 * i + n) % 90 for i in range(n)] for n in lengths]
        found = executor.logits(ids, names)
        for name, sequence, ours in zip(names, ids, found, strict=True):
            if name is None:
                with wrapped.disable_adapter():
                    expected = logits(wrapped, sequence)
            else:
                wrapped.set_adapter(name)
                expected = logits(wrapped, sequence)
            assert relative_error(ours, expected) < 2e-5, (name, len(sequence))
