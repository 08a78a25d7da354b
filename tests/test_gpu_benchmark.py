"""The GPU benchmark where there is none: what it counts, how it reports, and that its cases run.

Every setting of every case runs in small sizes, with a timer that calls what it is given and makes
up the time: kernels in the interpreter, decode steps on a GPU that is not there.

Long because each case of the benchmark has tests of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from pcg import compiler
from pcg.kernels.triton import ptxas
from pcg.runtime.model import step_graphs
from tests.support import tiny_llama
from tests.support.interpreter import bf16
from tests.support.interpreter.stand_in import stand_in

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import gpu
import gpu_correctness
import gpu_decode
import gpu_groups
import gpu_kernels
import gpu_lora
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


def bench(device: str = "cpu", **options: Any) -> Bench:
    return Bench(MadeUp(), CEILINGS, device=device, **options)


# ------------------------------------------------------------------------------------- counting


def test_work_of_kernels() -> None:
    assert gpu_work.copy_work(10, 2) == Work(40)
    assert gpu_work.product_work(2, 3, 5, 2) == Work(2 * (10 + 15 + 6), 60)
    # x and dx of 3 by 4, W of 5 by 4, in bf16; a target, a slope and a loss for each token.
    assert gpu_work.loss_work(3, 4, 5, 2) == Work(2 * (12 + 12 + 20) + 3 * 16, 2 * 2 * 3 * 5 * 4)
    assert gpu_work.pack_work(16, 2) == Work(32 + 2)
    assert gpu_work.unpack_work(16, 2) == Work(64 + 2)
    # Punica's: two adapters of rank 16, h 4096, for three tokens.
    expected = Work(2 * (2 * 16 * 8192 + 3 * 4096 + 2 * 3 * 4096), 2 * 3 * 16 * 8192)
    assert gpu_work.ranks_work([16, 16], [0, 0, 1], 4096, 4096, 2) == expected
    assert gpu_work.ranks_work([8, 64], [0, 0, 1], 10, 20, 2).flops == 2 * (8 + 8 + 64) * 30


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
    slots = gpu_lora.slots_of(popularity, 16)
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


def test_each_part_ends_in_eight_minutes() -> None:
    names = [case.name for case in gpu.CASES]
    assert len(set(names)) == len(names)
    for cases in gpu.PARTS.values():
        assert sum(case.seconds for case in cases) + gpu.START_S <= gpu.LIMIT_S < 8 * 60


def test_goals_pass_or_miss_or_were_not_measured() -> None:
    good = Row("decode", "batch 32, 0 adapters", 10.0, target="of it", reached=1.2, met=True)
    bad = Row("lora", "distinct, batch 64", 10.0, target="of copy", reached=0.5, met=False)
    rows = [
        Row("correctness, ptxas 12.8", "loss", met=True),
        Row.failure("correctness, ptxas 12.8", "attention", "AssertionError: off"),
        Row("correctness, ptxas 13.0 (ptxas)", "loss", met=True),
        good,
        bad,
    ]
    found = {name: (reached, is_met) for name, reached, is_met in gpu.goals(rows)}
    assert found["correctness, ptxas 12.8"] == ("1 of 2 checks, attention", False)
    assert found["correctness, ptxas 13.0 (ptxas)"] == ("1 of 1 checks", True)
    assert found["decode, batch 32, 0 adapters: of it"] == ("1.20", True)
    assert found["lora, distinct, batch 64: of copy"] == ("0.50", False)
    assert found["finetune, against eager"] == ("", None)
    console = Console(width=120, file=StringIO())
    console.print(gpu.goal_table(rows))
    text = console.file.getvalue()
    assert [text.count(word) for word in ("pass", "MISS", "not measured")] == [2, 2, 4]


def test_goals_are_settings_of_the_cases() -> None:
    """At the sizes of the goals, without measuring anything."""
    known = {("finetune", name) for name, _ in gpu_model.finetune_settings(bench())}
    popularities = ("distinct", "identical", "uniform", "skewed")
    known |= {("lora", f"{one}, batch {gpu_lora.BATCHES[0]}") for one in popularities}
    for batch in (gpu_decode.BATCHES[0],):
        known |= {("decode", f"batch {batch}, {count} adapters") for count in (0, 32)}
    prompts = gpu_decode.PROMPTS[0]
    known.add(("decode", gpu_decode._prefill_setting(prompts, ["a"] * prompts[0])))
    assert set(gpu.GOALS) <= known


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Row:
    """The command with two cases that give this row each, and what it asks of a GPU made up."""
    row = Bench(MadeUp(), CEILINGS).row("one", "first", 20.0, Work(10**7))
    cases = [
        Case(
            name,
            5,
            lambda bench: [("first", lambda: bench.row("one", "first", 20.0, Work(10**7)))],
        )
        for name in ("one", "other")
    ]
    device = SimpleNamespace(name="H200", total_memory=10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu, "CudaTimer", lambda **_: MadeUp())
    monkeypatch.setattr(gpu, "ceilings", lambda _: CEILINGS)
    monkeypatch.setattr(gpu, "PARTS", {1: (gpu.CHECKS, cases[0]), 2: (cases[1],)})
    monkeypatch.setattr(gpu, "CASES", (gpu.CHECKS, *cases))
    return row


def test_parts_check_first_and_write_as_they_go(
    as_on_a_gpu: Row,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is timed uses the first ptxas that is right; the second part keeps the first's rows."""
    output = tmp_path / "new" / "gpu.json"
    asked: list[tuple[list[str], str | None]] = []
    written: list[int] = []
    newer = {"PCG_PTXAS": "/newer"}
    checks = [
        Case("correctness, ptxas 1", 5, gpu.CHECKS.settings),
        Case("correctness, ptxas 2 (newer)", 5, gpu.CHECKS.settings, newer),
    ]
    monkeypatch.setattr(gpu_correctness, "cases", lambda: checks)

    def rows_of(command: list[str], case: str, seconds: float, variables: Any) -> Iterator[Row]:
        asked.append((command, variables.get("PCG_PTXAS")))
        if case == checks[0].name:
            yield Row.failure(case, "loss", "AssertionError: off")
        yield replace(as_on_a_gpu, case=case)
        written.append(len(json.loads(output.read_text())["rows"]))

    monkeypatch.setattr(gpu, "rows_of", rows_of)
    assert gpu.main(["--part", "1", "--output", str(output)]) == 1
    names = [command[command.index("--case") + 1] for command, _ in asked]
    assert names == ["correctness", "correctness", "one"]
    assert [path for _, path in asked] == [None, "/newer", "/newer"]
    assert written == [2, 3, 4]
    assert gpu.main(["--part", "2", "--output", str(output)]) == 1
    found = json.loads(output.read_text())
    assert [row["case"] for row in found["rows"]] == [
        checks[0].name, checks[0].name, checks[1].name, "one", "other",
    ]  # fmt: skip
    assert [one["passes"] for one in found["goals"][:2]] == [False, True]
    assert found["environment"]["gpu"] == "H200"
    captured = capsys.readouterr()
    assert "MISS" in captured.out
    assert "one, first" in captured.err


def test_rows_of_another_device_are_not_kept(as_on_a_gpu: Row, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    there = gpu.result([as_on_a_gpu], CEILINGS, 1.0)
    output.write_text(json.dumps(there))
    cases = gpu.PARTS[2]
    assert gpu.Results.of(output, CEILINGS, 0.0, cases).rows == [as_on_a_gpu]
    assert gpu.Results.of(output, CEILINGS, 0.0, gpu.PARTS[1]).rows == []
    there["environment"]["gpu"] = "A100"
    output.write_text(json.dumps(there))
    assert gpu.Results.of(output, CEILINGS, 0.0, cases).rows == []


def test_a_process_has_its_variables_and_its_rows_the_cases_name() -> None:
    row = json.dumps(bench().row("some", "first", 20.0, Work(10**7)).to_json())
    program = f"import os; print('noise'); print(os.environ['FIRST'] + {row!r})"
    command = [sys.executable, "-c", program]
    (found,) = gpu.rows_of(command, "other", 60.0, {"FIRST": "gpu-row "})
    assert (found.case, found.setting) == ("other", "first")


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
    monkeypatch.setattr(gpu, "LIMIT_S", 2.0)
    assert gpu.main(["--only", "one", "other", "--output", str(tmp_path / "gpu.json")]) == 1
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["failed"] for row in written["rows"]] == [True, True]


def test_it_is_refused_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "error: benchmarks/gpu.py needs an NVIDIA GPU" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ assemblers


def test_checks_run_with_each_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in processes of its own, with the assembler named, so that none is chosen there."""
    there = [
        ptxas.Ptxas("/own", (12, 8)),
        ptxas.Ptxas("/newest", (13, 4)),
        ptxas.Ptxas("/x", (13,)),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ptxas, "assemblers", lambda architecture: there)
    assert [(case.name, case.environment) for case in gpu_correctness.cases()] == [
        ("correctness, ptxas 12.8", {"PCG_PTXAS": "/own"}),
        ("correctness, ptxas 13.4", {"PCG_PTXAS": "/newest"}),
    ]


# ------------------------------------------------------------------------------ all cases, small


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for the interpreter, and what only a GPU has."""
    sizes: dict[Any, dict[str, Any]] = {
        gpu_kernels: {
            "HIDDEN": 64, "VOCABULARY": 200, "HEADS": 4, "KV_HEADS": 2, "HEAD": 16,
            "LOSSES": (5,), "SIGNS": (3, 64), "DECODES": ((2, 48),), "PREFILLS": ((1, 32),),
            "DRAWN": (2,), "CHECKED_ATTENTION": ((2, 1, 48), (1, 32, 32)),
        },
        gpu_lora: {
            "HIDDEN": 64, "LAYERS": 2, "BATCHES": (3, 1), "PAGE_ELEMENTS": 8 * 64, "RANK": 8,
            "HIGH_RANKS": (4, 20), "CHECKED_RANKS": ((8,), (4, 20)),
        },
        gpu_training: {
            "HIDDEN": 64, "INTERMEDIATE": 136, "FORWARD": 20, "BACKWARDS": ((9,), (8, 8)),
        },
        gpu_groups: {"TOKENS": 5, "LEAST_BYTES": 0, "config": tiny_llama.config},
        gpu_decode: {
            "CONTEXT": 5, "STEPS": 2, "EAGER_STEPS": 1, "BATCHES": (2,), "HIGH_RANK": 24,
            "PROMPTS": ((1, 6),),
        },
        gpu_model: {
            "ADAPTERS": 2, "KV_CACHE_BYTES": 2**21, "VOCABULARY": 500, "FINETUNED": (2, 12),
            "SERVED_S": 0.5, "PROMPT_TOKENS": (8, 16), "NEW_TOKENS": (2, 4),
            "config": tiny_llama.config,
        },
    }  # fmt: skip
    for module, values in sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**21)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


KERNEL_CASES = [*gpu_kernels.CASES, *gpu_lora.CASES, *gpu_training.CASES, *gpu_groups.CASES]


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_cases_of_kernels(case: Case) -> None:
    rows = list(measured(bench(), case))
    assert rows
    for row in rows:
        assert not row.failed, row.note
        assert not row.note
        assert row.ours_us == 10.0
        assert row.peers_us
        assert set(row.peers_us.values()) == {10.0}
        assert row.bytes


@pytest.mark.usefixtures("small")
def test_what_is_checked_first() -> None:
    """Kernels, and a program in bf16; the other checks are those of `test_stand_in.py`."""
    for _, check in gpu_correctness.kernel_checks(bench()):
        check()
    programs = dict(gpu_correctness.program_checks(bench()))
    programs["a program in bf16"]()
    assert len(programs) > 5
    ((name, checked), *_) = gpu_correctness.settings(bench())
    assert (checked().setting, checked().met) == (name, True)


def test_rows_in_pages_are_those_of_the_matrices() -> None:
    drawn = torch.randn(3000, gpu_lora.HIDDEN)
    matrices = drawn.split((256, 8, 1500, 1236))
    arena, firsts = gpu_lora.in_pages(matrices)
    assert len(arena) % gpu_lora.PAGE_ELEMENTS == 0
    found = [arena[first : first + gpu_lora.HIDDEN] for first in torch.cat(firsts).tolist()]
    assert torch.equal(torch.stack(found), drawn)
    assert torch.cat(firsts).diff().ne(gpu_lora.HIDDEN).sum() > 2


def test_targets_of_lora() -> None:
    times = {("identical", 64): 11.0, ("identical", 1): 10.0}
    row = bench().row("lora", "", 10.0, Work(8 * 10**6))
    assert gpu_lora._lora_aimed(bench(), row, "distinct", 64, times).met
    identical = gpu_lora._lora_aimed(bench(), row, "identical", 1, times)
    assert (identical.reached, identical.met) == (pytest.approx(1.1), True)
    assert gpu_lora._lora_aimed(bench(), row, "skewed", 64, times).met is None


def test_groups_have_names_of_their_own() -> None:
    graphs = gpu_groups.group_graphs(tiny_llama.config())
    names = [graph.name for graph in graphs]
    assert len(set(names)) == len(names) > 8
    (norm,) = (graph for graph in graphs if graph.name == "serving: rms_norm")
    assert gpu_groups.group_work(norm, 5) == Work(2 * (5 * 32 + 32 + 5 * 32))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_cases_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is not there, where steps are recorded and replayed."""
    config = tiny_llama.config() | {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 1}
    monkeypatch.setattr(gpu_model, "config", lambda: config)
    monkeypatch.setattr(step_graphs, "EAGER_STEPS", 1)
    with stand_in():
        rows = list(measured(bench("cuda"), *gpu_decode.CASES))
    assert not [row.note for row in rows if row.failed]
    found = {row.setting: row for row in rows}
    assert [(name, row.reached is not None) for name, row in found.items()] == [
        ("batch 2, 0 adapters", True),
        ("batch 2, 2 adapters", True),
        ("batch 2, 1 adapters", False),
        ("prefill, 1 of 6 tokens, 0 adapters", False),
        ("prefill, 1 of 6 tokens, 1 adapters", True),
        ("batch 2, one of rank 24", True),
    ]
    assert found["batch 2, 0 adapters"].peers_us["eager"] > 0
    own = found["batch 2, 2 adapters"].bytes - found["batch 2, 0 adapters"].bytes
    # In bf16, in which they are served.
    assert own == 2 * 2 * LlamaShape.of(config).adapter_elements(gpu_model.RANK)


def test_targets_of_decode() -> None:
    there, row = bench(), bench().row("decode", "", 12.0, Work(10**7))
    alone = gpu_decode._decode_aimed(there, row, None, None)
    assert (alone.reached, alone.met) == (pytest.approx(1.2), True)
    mixed = gpu_decode._decode_aimed(there, row, Work(10**6), 11.0)
    assert (mixed.reached, mixed.met) == (pytest.approx(1.0), True)
    assert gpu_decode._decode_aimed(there, row, Work(10**6), 10.5).met is False
    assert gpu_decode._decode_aimed(there, row, Work(10**6), None).met is None


@pytest.fixture
def by_pytorch(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    """Programs with PyTorch's kernels, for the time it takes."""
    made = compiler.compile_program
    monkeypatch.setattr(
        compiler, "compile_program", lambda *a, **k: made(*a, **{**k, "backend": "torch"})
    )


@pytest.mark.usefixtures("by_pytorch")
def test_cases_of_finetuning() -> None:
    case = next(case for case in gpu_model.CASES if case.name == "finetune")
    rows = list(measured(bench(), case))
    assert not [row.note for row in rows if row.failed]
    assert [*gpu_model.PEERS] == [peer for row in rows for peer in row.peers_us]
    assert [row.reached is not None for row in rows] == [True, True, False]


@pytest.mark.usefixtures("by_pytorch")
def test_cases_of_serving() -> None:
    case = next(case for case in gpu_model.CASES if case.name == "serve")
    rows = list(measured(bench(), case))
    assert not [row.note for row in rows if row.failed]
    assert [row.setting for row in rows] == ["alone", "beside finetuning"]
    for row in rows:
        assert row.details["completed"] == row.details["submitted"] > 0
        assert "tokens/s out, median TTFT" in row.note
