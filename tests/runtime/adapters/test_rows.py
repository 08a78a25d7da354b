"""Adapters packed in host memory: once, as they lie on the device, for one copy without a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pcg.errors import UnsupportedError
from pcg.ir.analysis.verifier import verify
from pcg.ir.parser import parse_graph
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.adapters.row_memory import RowMemory
from pcg.runtime.adapters.sites import GraphSites
from pcg.runtime.adapters.stacked_weights import ServedWeights
from pcg.runtime.admission.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.memory.pool import PageTable
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.interpreter.stand_in import stand_in
from tests.support.interpreter.streams import ORDER

bf16.install()
PAGE_BYTES = 1024


def executor(layers: int, count: int = 2) -> Executor:
    """A model for Triton with adapters of ranks 20 and 4, at all linears and at some."""
    made = compiled.executor(
        oracle.random_model(BY_NAME["llama3"].config(layers)), backend="triton"
    )
    for number in range(count):
        targets: Any = ["q_proj", "v_proj", "down_proj"] if number % 2 else "all-linear"
        recipe = {"peft_type": "LORA", "r": 4 if number % 2 else 20, "target_modules": targets}
        added = made.add_adapter(f"a{number}", recipe, seed=number)
        for weights in added.weights.values():
            weights.b.normal_(generator=torch.Generator().manual_seed(number))
    return made


class Tables:
    """Tables in pages of a device, whose pages the test gives out."""

    def __init__(self, made: Executor, device: str = "cpu", pages: int = 1000) -> None:
        shapes = made.program.base.module_shapes()
        weights = ServedWeights(made.state.weight_store.linear(), shapes)
        own = RaggedTables(made.serving.runner.model, weights, torch.device(device))
        memory = torch.zeros((pages, PAGE_BYTES), dtype=torch.uint8, device=device)
        self.pages: dict[int, PageTable] = {}
        self.tables = own.in_pages(memory, lambda one: self.pages[one.version])
        self.own = own

    def bring(self, adapter: Adapter, pages: list[int]) -> None:
        self.pages[adapter.version] = PageTable("a", pages=pages)
        self.tables.order([adapter])

    def count(self, adapter: Adapter) -> int:
        return self.own.pages_of(adapter, PAGE_BYTES)


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


def rows(tables: Tables, adapter: Adapter, source: str) -> Tensor:
    """Read a matrix where the tables say that its rows lie, on the host."""
    lora = tables.tables.lora
    assert lora is not None
    slot, at = lora.slot(adapter), 0
    for site in lora.sites:
        for parameter, size in zip(site.matrices, site.row_sizes, strict=True):
            if parameter.source.format(layer=site.layer) == source:
                rank = int(lora._table.ranks[at, slot.number])
                first = slot.first + at * slot.width
                starts = lora._table.rows[first : first + rank].cpu()
                assert torch.equal(starts * 4 // PAGE_BYTES, (starts + size - 1) * 4 // PAGE_BYTES)
                return lora._allocator.memory.cpu()[starts[:, None] + torch.arange(size)]
            at += 1
    raise AssertionError(source)


def check(tables: Tables, adapter: Adapter) -> None:
    for path, weights in adapter.weights.items():
        assert torch.equal(rows(tables, adapter, f"{path}.lora_A"), weights.a)
        b = weights.b.t() * weights.scale
        assert torch.equal(rows(tables, adapter, f"{path}.lora_B"), b)


def test_rows_lie_in_whatever_pages_an_adapter_has_and_come_again_elsewhere() -> None:
    made = executor(2)
    tables = Tables(made)
    first, second = made.adapters.values()
    n, m = tables.count(first), tables.count(second)
    assert m < n < 250
    tables.bring(first, [*range(n)])
    tables.bring(second, [*range(500, 500 - m, -1)])
    check(tables, first)
    check(tables, second)
    tables.tables.evict(first)
    tables.bring(first, [*range(700, 700 + n // 2), *range(510, 510 + n - n // 2)])
    check(tables, first)
    check(tables, second)


def test_a_row_longer_than_a_page_is_refused() -> None:
    made = executor(1, count=1)
    with pytest.raises(UnsupportedError, match="row of 64 elements is longer than a page"):
        made.serving.tables.pages_of(made.adapters["a0"], 4 * 63)


def cost(layers: int, spread: Callable[[int], list[int]]) -> list[str]:
    """Return the operators that bring an adapter that was packed, on a device, without a wait."""
    made = executor(layers, count=1)
    adapter = made.adapters["a0"]
    with stand_in():
        tables = Tables(made, "cuda")
        tables.tables.reserve(2, [adapter])
        tables.tables.pack(adapter)
        pages = spread(tables.count(adapter))
        torch.cuda.set_sync_debug_mode("error")
        with Operators() as operators:
            tables.bring(adapter, pages)
        torch.cuda.set_sync_debug_mode("default")
        ORDER.synchronize()
        check(tables, adapter)
    return operators.names


def test_a_packed_adapter_costs_one_copy_however_many_matrices_it_has() -> None:
    few = cost(1, lambda count: [*range(count)])
    assert cost(3, lambda count: [*range(5, 5 + count)]) == few
    assert len(few) < 60
    # Each further run of pages is one more copy.
    halves = cost(1, lambda count: [*range(500, 500 + count // 2), *range(count - count // 2)])
    assert halves.count("aten.copy_.default") == few.count("aten.copy_.default") + 1


def test_an_adapter_is_packed_when_it_is_added_and_by_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the engine's thread nor that of copies reads the adapter's own tensors."""
    made = executor(1, count=1)
    made.save_adapter("a0", tmp_path / "a0")
    expected = made.generate([[3, 5, 7]], "a0", max_new_tokens=6)[0].token_ids
    part, threads = ServedWeights.part, set[str]()

    def noted(self: ServedWeights, adapter: Adapter, path: str) -> Tensor | None:
        threads.add(threading.current_thread().name)
        return part(self, adapter, path)

    with made.engine(Limits(running=2), kv_cache_bytes=2**20).start() as engine:
        monkeypatch.setattr(ServedWeights, "part", noted)
        engine.add_adapter("b", tmp_path / "a0").result()
        assert threads
        threads.clear()
        found = engine.submit([3, 5, 7], "b", max_new_tokens=6).wait()
    assert not threads
    assert found.token_ids == expected


def test_an_adapter_that_cannot_be_pinned_is_served_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = executor(1, count=1)
    adapter = made.adapters["a0"]
    zeros = torch.zeros

    def refused(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nand more")
        return zeros(*args, **kwargs)

    with stand_in():
        tables = Tables(made, "cuda")
        monkeypatch.setattr(torch, "zeros", refused)
        tables.bring(adapter, [*range(tables.count(adapter))])
        monkeypatch.setattr(torch, "zeros", zeros)
        check(tables, adapter)
    (said,) = [one.getMessage() for one in caplog.records if one.name == "pcg.adapters"]
    assert "MiB of pinned memory for adapter 'a0' (CUDA error: out of memory)" in said


# ------------------------------------------------------------------------------- rows in one memory

bf16.install()
RANKS = (1, 4, 8, 20, 33)
CPU = torch.device("cpu")


def executor_with_adapters() -> Executor:
    executor = compiled.executor(oracle.random_model(BY_NAME["llama3"].config(2)), backend="triton")
    for number, rank in enumerate(RANKS * 3):
        targets = "all-linear" if number % 2 else ["q_proj", "v_proj", "down_proj"]
        fields = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
        adapter = executor.add_adapter(f"a{number}", {"peft_type": "LORA", **fields}, seed=number)
        for weights in adapter.weights.values():
            weights.b.normal_(generator=torch.Generator().manual_seed(number))
    return executor


EXECUTOR = executor_with_adapters()


SERVED = ServedWeights(EXECUTOR.state.weight_store.linear(), EXECUTOR.program.base.module_shapes())


def memory() -> RowMemory:
    found = RaggedTables(EXECUTOR.serving.runner.model, SERVED, CPU).lora
    assert found is not None
    return found


SOME = """\
graph @g(%x: f32[T, 8]) {{
  frozen %w0: f32[{0}, 8] = "0.weight"
  frozen %w1: f32[{1}, 8] = "1.weight"
  adapter %a: {3}[r, 8] = "{2}.lora_A"
  adapter %b: {3}[{4}, r] = "{2}.lora_B"
  %y0: f32[T, {0}], %y1: f32[T, {1}] = lora_linear(%x, %w0, %w1, %a, %b) {{adapted=({2},), \
bias=False, count=2}}
  return %y0, %y1
}}
"""


@pytest.mark.parametrize(
    ("sizes", "adapted", "dtype", "fits"),
    [
        ((16, 8), 0, "f32", True),
        ((16, 8), 1, "f32", True),
        ((4, 8), 1, "f32", False),  # it begins at 4
        ((8, 4), 0, "f32", False),  # the next token's begin at 12
        ((16, 8), 0, "f64", False),
    ],
)
def test_what_lies_beside_adapted_outputs_is_aligned_too(
    sizes: tuple[int, int], adapted: int, dtype: str, fits: bool
) -> None:
    graph = parse_graph(SOME.format(*sizes, adapted, dtype, sizes[adapted]))
    verify(graph)
    (joined,) = GraphSites.of(graph).joined
    assert joined.fits_kernels == fits
