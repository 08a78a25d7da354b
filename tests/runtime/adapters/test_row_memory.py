"""LoRA's rows in one memory: tables point at each adapter's own, whoever came and went."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pcg.compiler as compiler
from pcg.ir.analysis.verifier import verify
from pcg.ir.parser import parse_graph
from pcg.kernels.batch import AdapterSlot, LoraRows, TokenSpans
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.adapters.row_memory import RowMemory
from pcg.runtime.adapters.sites import GraphSites
from pcg.runtime.adapters.stacked_weights import ServedWeights
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16

bf16.install()
RANKS = (1, 4, 8, 20, 33)
CPU = torch.device("cpu")


def executor_with_adapters() -> Executor:
    executor = compiler.compile(oracle.random_model(BY_NAME["llama3"].config(2)), backend="triton")
    for number, rank in enumerate(RANKS * 3):
        targets = "all-linear" if number % 2 else ["q_proj", "v_proj", "down_proj"]
        fields = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
        adapter = executor.add_adapter(f"a{number}", {"peft_type": "LORA", **fields}, seed=number)
        for weights in adapter.weights.values():
            weights.b.normal_(generator=torch.Generator().manual_seed(number))
    return executor


EXECUTOR = executor_with_adapters()
ADAPTERS = list(EXECUTOR.adapters.values())


SERVED = ServedWeights(EXECUTOR.state.weight_store.linear(), EXECUTOR.program.base.module_shapes())


def memory() -> RowMemory:
    found = RaggedTables(EXECUTOR.serving.runner.model, SERVED, CPU).lora
    assert found is not None
    return found


def read(rows: LoraRows, matrix: int, output: int, slot: AdapterSlot, size: int) -> torch.Tensor:
    rank = int(rows.ranks[output, slot.number])
    first = slot.first + (rows.first + matrix) * slot.width
    assert rank <= slot.width
    starts = rows.rows[first : first + rank]
    return rows.memory[starts[:, None] + torch.arange(size)]


def check(lora: RowMemory, adapters: list[Adapter]) -> None:
    for site, rows in lora.bound(TokenSpans(())):
        for adapter in adapters:
            slot = lora.slot(adapter)
            for output, one in enumerate(site.modules):
                module = one.a.source.format(layer=site.layer).rpartition(".")[0]
                weights = adapter.weights.get(module)
                own = read(rows, output, output, slot, site.in_size)
                other = read(rows, len(site.modules) + output, output, slot, one.size)
                if weights is None:
                    assert not len(own)
                    continue
                scale = 2.0  # alpha / r
                assert one.b.source.format(layer=site.layer).startswith(module)
                assert torch.equal(own, weights.a)
                torch.testing.assert_close(other, weights.b.t() * scale)


wanted = st.lists(st.integers(0, len(ADAPTERS) - 1), min_size=1, max_size=6, unique=True)


@settings(max_examples=10)
@given(steps=st.lists(st.tuples(wanted, wanted, st.integers(0, len(ADAPTERS) - 1)), max_size=8))
def test_tables_point_at_each_adapters_rows(steps: list[tuple[list[int], list[int], int]]) -> None:
    lora = memory()
    for running, coming, gone in steps:
        adapters = [ADAPTERS[i] for i in running]
        lora.admit(adapters)
        lora.prefetch([ADAPTERS[i] for i in coming])
        check(lora, adapters)
        lora.forget(ADAPTERS[gone])
        check(lora, [one for one in adapters if one is not ADAPTERS[gone]])


def test_who_is_idle_gives_way_before_the_memory_grows() -> None:
    lora = memory()
    lora.admit(ADAPTERS[:4])
    size = lora.size_bytes
    lora.admit(ADAPTERS[4:6])
    assert lora.size_bytes >= size
    for _ in range(3):  # by turns, the same few at once: what there is stays enough
        for first in range(0, len(ADAPTERS), 3):
            lora.admit(ADAPTERS[first : first + 3])
    settled = lora.size_bytes
    lora.prefetch(ADAPTERS[3:9])
    lora.admit(ADAPTERS[3:6])
    check(lora, ADAPTERS[3:6])
    for first in range(0, len(ADAPTERS), 3):
        lora.admit(ADAPTERS[first : first + 3])
        check(lora, ADAPTERS[first : first + 3])
    assert lora.size_bytes == settled


def test_an_adapter_at_the_address_of_one_that_is_gone() -> None:
    """Rows are kept by an adapter's version, which no other adapter ever has."""
    lora, others = memory(), []
    gone: Adapter | None = replace(ADAPTERS[0])
    lora.admit([gone])
    address = id(gone)
    gone = None
    for _ in range(1000):
        others.append(replace(ADAPTERS[3]))
        if id(others[-1]) == address:
            break
    assert id(others[-1]) == address
    lora.admit([others[-1]])
    check(lora, [others[-1]])


def test_a_removed_adapter_is_read_anew() -> None:
    executor = executor_with_adapters()
    before = executor.logits([[3, 5, 7]], ["a1"])[0]
    executor.remove_adapter("a1")
    fields = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    again = executor.add_adapter("a1", {"peft_type": "LORA", **fields}, seed=99)
    for weights in again.weights.values():
        weights.b.normal_(generator=torch.Generator().manual_seed(5))
    after = executor.logits([[3, 5, 7]], ["a1"])[0]
    assert not torch.allclose(before, after)
    plain = compiler.compile(oracle.random_model(BY_NAME["llama3"].config(2)))
    other = plain.add_adapter("a1", {"peft_type": "LORA", **fields}, seed=99)
    for weights in other.weights.values():
        weights.b.normal_(generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(after, plain.logits([[3, 5, 7]], ["a1"])[0], rtol=1e-4, atol=1e-5)


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
