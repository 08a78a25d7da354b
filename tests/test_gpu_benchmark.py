"""The GPU benchmark where there is none: what it counts, how it reports, and that its cases run.

Cases run on the CPU in small sizes, their kernels in the interpreter, with a timer that calls what
it is given and makes up the time.

Long by a line or two: every case of the benchmark has one here.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from pcg import compiler
from tests.support import tiny_llama
from tests.support.interpreter import bf16

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import gpu
import gpu_groups
import gpu_kernels
import gpu_model
import gpu_training
import gpu_work
from gpu_case import Bench, Case, Row, Setting, measured
from gpu_work import Ceilings, LlamaShape, Work

bf16.install()

CEILINGS = Ceilings(bytes_per_s=1e12, flops_per_s=1e14)
LLAMA = LlamaShape.of(gpu_model.config())


class MadeUp:
    """Calls what it is given once, and says 10 µs."""

    def median_us(self, run: Callable[[], object], captured: bool = False, times: int = 1) -> float:
        run()
        return 10.0


def bench(**options: Any) -> Bench:
    return Bench(MadeUp(), CEILINGS, device="cpu", **options)


# ------------------------------------------------------------------------------------- counting


def test_work_of_kernels() -> None:
    assert gpu_work.copy_work(10, 2) == Work(40)
    assert gpu_work.product_work(2, 3, 5, 2) == Work(2 * (10 + 15 + 6), 60)
    # x and dx of 3 by 4, W of 5 by 4, in bf16; a target, a slope and a loss for each token.
    assert gpu_work.loss_work(3, 4, 5, 2) == Work(2 * (12 + 12 + 20) + 3 * 16, 2 * 2 * 3 * 5 * 4)
    assert gpu_work.pack_work(16, 2) == Work(32 + 2)
    assert gpu_work.unpack_work(16, 2) == Work(64 + 2)
    # Punica's: two adapters of rank 16, h 4096, for three tokens.
    expected = 2 * (2 * 16 * 8192 + 3 * 4096 + 2 * 3 * 4096)
    assert gpu_work.lora_work(3, 2, 4096, 4096, 16, 2) == Work(expected, 2 * 3 * 16 * 8192)


def test_work_of_attention() -> None:
    # One token that sees 8 keys and itself; 2 heads of 4 on one KV head: two products of 9 · 4.
    decode = gpu_work.attention_work([(1, 8)], 2, 1, 4, 2)
    assert decode == Work(2 * (2 * 8 + 2 * 9 * 4), 2 * 2 * (9 * 4) * 2)
    # Three tokens see 1 + 2 + 3 keys.
    assert gpu_work.attention_work([(3, 0)], 1, 1, 1, 1) == Work(6 + 6, 4 * 6)


def test_work_of_llama_8b() -> None:
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert LLAMA.product_weights == 32 * layer + 128_256 * 4096 == 7_504_658_432
    assert LLAMA.kv_elements == 65_536  # 128 KiB a token in bf16
    assert LLAMA.adapter_elements(16) == 41_943_040  # peft's count
    one = gpu_work.decode_work(LLAMA, 1, 100, 0, 16, 4)
    assert one.bytes == 2 * 7_504_658_432 + 100 * 131_072
    assert one.flops == 2 * 7_504_658_432 + 4 * 100 * 32 * 4096
    mixed = gpu_work.decode_work(LLAMA, 32, 100, 8, 16, 4)
    assert mixed.bytes == 2 * 7_504_658_432 + 32 * 100 * 131_072 + 8 * 41_943_040 * 4
    prefill = gpu_work.prefill_work(LLAMA, 1, 2)
    assert prefill.flops == 2 * (2 * 32 * layer + 128_256 * 4096) + 4 * 3 * 32 * 4096
    trained = gpu_work.finetune_work(LLAMA, 1, 2, 16)
    assert trained.flops == 2 * (4 * 7_504_658_432 + 6 * 41_943_040) + 14 * 3 * 32 * 4096


def test_a_floor_is_the_larger_of_both() -> None:
    assert CEILINGS.floor_us(Work(10**6)) == 1.0
    assert CEILINGS.floor_us(Work(10**6, 2 * 10**8)) == 2.0


@pytest.mark.parametrize(
    ("popularity", "counts"),
    [
        ("distinct", [1] * 16),
        ("uniform", [4] * 4),
        ("skewed", [6, 4, 3, 2, 1]),
        ("identical", [16]),
    ],
)
def test_popularities_are_punicas(popularity: str, counts: list[int]) -> None:
    slots = gpu_kernels.slots_of(popularity, 16)
    assert [slots.count(slot) for slot in range(max(slots) + 1)] == counts
    assert slots == sorted(slots)


# ------------------------------------------------------------------------------------ reporting


def test_what_cannot_be_measured_is_said_and_the_rest_goes_on() -> None:
    def broken() -> Row:
        raise ValueError("no such kernel")

    def settings(bench: Bench) -> Iterator[Setting]:
        yield "first", lambda: bench.row("some", "first", 20.0, Work(10**7))
        yield "second", broken
        yield "third", lambda: bench.row("some", "third", 20.0, Work(10**7))
        raise RuntimeError("out of memory")

    rows = list(measured(bench(), Case("some", 5, settings)))
    assert [(row.setting, row.failed) for row in rows] == [
        ("first", False),
        ("second", True),
        ("third", False),
        ("the rest", True),
    ]
    assert rows[1].note == "ValueError: no such kernel"
    assert rows[0].share == 0.5
    late = list(measured(bench(until=0.0), Case("some", 5, settings)))
    assert [row.note for row in late[:3]] == ["the case's 5 s were over"] * 3


def test_a_peer_that_fails_leaves_our_time() -> None:
    def broken() -> None:
        raise RuntimeError("no backend\nsecond line")

    times, wrong = bench().peers_us({"good": lambda: None, "bad": broken})
    assert times == {"good": 10.0}
    assert wrong == "bad: RuntimeError: no backend"


def test_the_table_and_the_file_say_what_was_measured() -> None:
    good = bench().row("loss", "8 tokens", 20.0, Work(10**7), peers_us={"torch": 15_000.0})
    rows = [
        bench().aimed(good, "40 % of copy bandwidth", 0.4),
        bench().aimed(good, "60 % of copy bandwidth", 0.6),
        Row.failure("lora", "all", "ModuleNotFoundError: no such module"),
    ]
    console = Console(width=200, file=StringIO())
    console.print(gpu.table(rows, CEILINGS))
    text = console.file.getvalue()
    assert "copy 1,000 GB/s, bf16 products 100 TFLOP/s" in text
    assert "40 % of copy bandwidth: 0.50, met" in text
    assert "60 % of copy bandwidth: 0.50, missed" in text
    assert "torch 15.0 ms" in text
    assert "ModuleNotFoundError: no such module" in text
    written = json.loads(json.dumps(gpu.result(rows, CEILINGS, 12.34)))
    assert written["ceilings"] == {"bytes_per_s": 1e12, "flops_per_s": 1e14}
    assert written["seconds"] == 12.3
    assert written["environment"]["torch"] == importlib.metadata.version("torch")
    assert [Row.from_json(fields) for fields in written["rows"]] == rows
    assert written["rows"][0]["share"] == 0.5


def test_a_process_that_hangs_is_ended_and_what_it_measured_counts() -> None:
    row = json.dumps(bench().row("some", "first", 20.0, Work(10**7)).to_json())
    program = f"print('gpu-row ' + {row!r}, flush=True); import time; time.sleep(60)"
    rows = list(gpu.rows_of([sys.executable, "-c", program], "some", 2.0))
    assert [(found.setting, found.failed) for found in rows] == [
        ("first", False),
        ("the rest", True),
    ]
    assert rows[1].note == "ended after 2 s"


def test_a_process_that_fails_is_a_failed_row() -> None:
    (row,) = gpu.rows_of([sys.executable, "-c", "raise SystemExit(3)"], "some", 60.0)
    assert row.failed
    assert row.note == "its process ended with status 3"


def test_it_ends_in_nine_minutes() -> None:
    names = [case.name for case in gpu.CASES]
    assert len(set(names)) == len(names)
    assert sum(case.seconds for case in gpu.CASES) + gpu.START_S <= gpu.LIMIT_S < 9 * 60


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Row:
    """The command with two cases that give this row each, and what it asks of a GPU made up."""
    row = Bench(MadeUp(), CEILINGS).row("some", "first", 20.0, Work(10**7))
    cases = [
        Case(
            name,
            5,
            lambda bench: [("first", lambda: bench.row("some", "first", 20.0, Work(10**7)))],
        )
        for name in ("one", "other")
    ]
    device = SimpleNamespace(name="H200", total_memory=10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu, "CudaTimer", lambda **_: MadeUp())
    monkeypatch.setattr(gpu, "ceilings", lambda _: CEILINGS)
    monkeypatch.setattr(gpu, "CASES", tuple(cases))
    return row


def test_the_command_runs_the_cases_asked_for_and_writes_what_they_gave(
    as_on_a_gpu: Row,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = f"print('noise'); print('gpu-row ' + {json.dumps(as_on_a_gpu.to_json())!r})"
    asked: list[list[str]] = []

    def command(case: Case, *numbers: Any) -> list[str]:
        asked.append(command_of(case, *numbers))
        return [sys.executable, "-c", program]

    command_of = gpu.command_of
    monkeypatch.setattr(gpu, "command_of", command)
    output = tmp_path / "new" / "gpu.json"
    assert gpu.main(["--only", "other", "--quick", "--output", str(output)]) == 0
    ((_, file, *arguments),) = asked
    assert Path(file).name == "gpu.py"
    assert arguments == ["--case", "other", "1000000000000.0", "100000000000000.0", "5", "--quick"]
    written = json.loads(output.read_text())
    assert [Row.from_json(fields) for fields in written["rows"]] == [as_on_a_gpu]
    assert written["environment"]["gpu"] == "H200"
    captured = capsys.readouterr()
    assert "first" in captured.out
    assert "noise" in captured.err


def test_a_case_in_its_process_prints_its_rows(
    as_on_a_gpu: Row, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--case", "one", "1e12", "1e14", "60"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("gpu-row ")
    assert Row.from_json(json.loads(line.removeprefix("gpu-row "))) == as_on_a_gpu


def test_without_time_nothing_is_begun(
    as_on_a_gpu: Row, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "LIMIT_S", 5.0)
    assert gpu.main(["--output", str(tmp_path / "gpu.json")]) == 1
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["failed"] for row in written["rows"]] == [True, True]


def test_it_is_refused_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "error: benchmarks/gpu.py needs an NVIDIA GPU" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- cases


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for the interpreter, and what only a GPU has."""
    sizes = {"HIDDEN": 64, "VOCABULARY": 200, "LAYERS": 2, "HEADS": 4, "KV_HEADS": 2, "HEAD": 16}
    for name, value in sizes.items():
        monkeypatch.setattr(gpu_kernels, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**21)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


@pytest.mark.usefixtures("small")
def test_cases_of_kernels() -> None:
    there = bench()
    rows = [
        gpu_kernels._loss(there, 5),
        gpu_kernels._signs(there, True, (3, 64)),
        gpu_kernels._signs(there, False, (3, 64)),
        gpu_kernels._greedy(there, 2),
        gpu_kernels._draw(there, 2),
    ]
    for row in rows:
        assert row.ours_us == 10.0
        assert row.peers_us
        assert set(row.peers_us.values()) == {10.0}
        assert row.bytes
        assert not row.note


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("popularity", ["distinct", "uniform", "skewed", "identical"])
def test_case_of_lora(popularity: str) -> None:
    row = gpu_kernels._lora(bench(), popularity, 5)
    assert set(row.peers_us) == {"torch loop", "gather-bmm"}
    assert not row.note


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("batch", "tokens", "keys"), [(2, 1, 48), (1, 32, 32)])
def test_case_of_attention(batch: int, tokens: int, keys: int) -> None:
    row = gpu_kernels._attention(bench(), batch, tokens, keys)
    assert set(row.peers_us) == {"SDPA", "FlexAttention"}
    assert not row.note


def test_cases_of_adapters_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    row = gpu_training._forward(bench(), 20, 64, 136)
    assert (row.setting, row.bytes) == ("forward, 20 tokens", 2 * 20 * 336 + 4 * 16 * 200)
    row = gpu_training._backward(bench(), (20, 5), 64, 136)
    assert row.setting == "backward, 2 of 20 tokens"
    assert row.bytes == 2 * (25 * (136 + 128) + 64 * 136) + 8 * 2 * 16 * 200
    assert row.peers_us.keys() == {"torch", "torch.compile"}


def test_targets_of_lora() -> None:
    times = {("identical", 64): 11.0, ("identical", 1): 10.0}
    row = bench().row("lora", "", 10.0, Work(8 * 10**6))
    assert gpu_kernels._lora_aimed(bench(), row, "distinct", 64, times).met
    identical = gpu_kernels._lora_aimed(bench(), row, "identical", 1, times)
    assert (identical.reached, identical.met) == (pytest.approx(1.1), True)
    assert gpu_kernels._lora_aimed(bench(), row, "skewed", 64, times).met is None


def test_cases_of_groups() -> None:
    graphs = gpu_groups.group_graphs(tiny_llama.config())
    names = [graph.name for graph in graphs]
    assert len(set(names)) == len(names) > 8
    for graph in graphs:
        inputs = gpu_groups.made_inputs(graph, 5, "cpu")
        ours, theirs = (gpu_groups.emitted(graph, name) for name in ("triton", "torch"))
        gpu_groups.check_same(graph, ours(*inputs), theirs(*inputs))
    (norm,) = (graph for graph in graphs if graph.name == "serving: rms_norm")
    assert gpu_groups.group_work(norm, 5) == Work(2 * (5 * 32 + 32 + 5 * 32))


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch, small: None) -> dict[str, Any]:
    """The cases of whole steps with a tiny Llama; kernels are PyTorch's, for the time it takes."""
    config = tiny_llama.config()
    made = compiler.compile_program
    monkeypatch.setattr(gpu_model, "config", lambda: config)
    monkeypatch.setattr(
        compiler, "compile_program", lambda *a, **k: made(*a, **{**k, "backend": "torch"})
    )
    monkeypatch.setattr(gpu_model, "KV_CACHE_BYTES", 2**20)
    monkeypatch.setattr(gpu_model, "CONTEXT", 8)
    monkeypatch.setattr(gpu_model, "STEPS", 3)
    monkeypatch.setattr(gpu_model, "VOCABULARY", 500)
    monkeypatch.setattr(gpu_model, "FINETUNED", (2, 12))
    monkeypatch.setattr(gpu_model, "SERVED_S", 0.5)
    monkeypatch.setattr(gpu_model, "PROMPT_TOKENS", (8, 16))
    monkeypatch.setattr(gpu_model, "NEW_TOKENS", (2, 4))
    return config


@pytest.mark.usefixtures("small_model")
def test_cases_of_decode() -> None:
    there = bench()
    executor = gpu_model.executor_of(there, "lora")
    names = gpu_model.with_adapters(executor, 2)
    base_us: dict[int, float] = {}
    alone = gpu_model._decode(there, executor, 3, [], base_us)
    mixed = gpu_model._decode(there, executor, 3, names, base_us)
    assert base_us == {3: alone.ours_us}
    assert mixed.setting == "batch 3, 2 adapters"
    assert mixed.bytes > alone.bytes
    assert gpu_model._prefill(there, executor, 2, 16).flops


def test_targets_of_decode() -> None:
    row = bench().row("decode", "", 12.0, Work(10**7))
    alone = gpu_model._decode_aimed(row, 32, 0, {})
    assert (alone.reached, alone.met) == (pytest.approx(1.2), True)
    mixed = gpu_model._decode_aimed(row, 32, 32, {32: 11.0})
    assert (mixed.reached, mixed.met) == (pytest.approx(12 / 11), False)
    assert gpu_model._decode_aimed(row, 8, 0, {}).met is None


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("peer", ["eager", pytest.param("checkpointing", marks=pytest.mark.slow)])
def test_cases_of_finetuning(peer: str) -> None:
    row = gpu_model._finetune(bench(), peer, {})
    assert row.ours_us
    assert row.peers_us[peer] > 0
    assert row.reached is not None


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("trains", [False, True])
def test_cases_of_serving(trains: bool) -> None:
    executor = gpu_model.executor_of(bench(), "lora")
    gpu_model.with_adapters(executor, 2)
    row = gpu_model._serve(executor, trains, 2)
    assert row.details["completed"] == row.details["submitted"] > 0
    assert "tokens/s out, median TTFT" in row.note
    assert row.setting == ("beside finetuning" if trains else "alone")
