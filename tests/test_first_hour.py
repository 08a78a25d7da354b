"""The first hour on a GPU where there is none: what it counts, its processes, and a dry run."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tiny_llama

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import first_hour
import gpu_bench
import gpu_kernels
import gpu_model
from first_hour import CASES, FIRST, Hour, Results
from gpu_bench import (
    Bench,
    Case,
    Ceilings,
    CudaTimer,
    LlamaShape,
    Once,
    Row,
    Setting,
    Work,
    measured,
)

ROOT = Path(__file__).parents[1]
CEILINGS = Ceilings(bytes_per_s=1e12, flops_per_s=1e14, host_bytes_per_s=1e10)
LLAMA = LlamaShape.of(gpu_model.config())


def bench(**options: Any) -> Bench:
    return Bench(Once(), CEILINGS, **options)


# ------------------------------------------------------------------------------------- counting


def test_work_of_kernels() -> None:
    # x and dx of 3 by 4, W of 5 by 4, in bf16; a target, a slope and a loss for each token.
    assert gpu_bench.loss_work(3, 4, 5, 2) == Work(2 * (12 + 12 + 20) + 3 * 16, 2 * 2 * 3 * 5 * 4)
    # Punica's: two adapters of rank 16, h 4096, for three tokens.
    expected = Work(2 * (2 * 16 * 8192 + 3 * 4096 + 2 * 3 * 4096), 2 * 3 * 16 * 8192)
    assert gpu_bench.ranks_work([16, 16], [0, 0, 1], 4096, 4096, 2) == expected
    assert gpu_bench.ranks_work([8, 64], [0, 0, 1], 10, 20, 2).flops == 2 * (8 + 8 + 64) * 30


def test_work_of_attention() -> None:
    # One token that sees 8 keys and itself; 2 heads of 4 on one KV head: two products of 9 · 4.
    decode = gpu_bench.attention_work([(1, 8)], 2, 1, 4, 2)
    assert decode == Work(2 * (2 * 8 + 2 * 9 * 4), 2 * 2 * (9 * 4) * 2)
    # Three tokens see 1 + 2 + 3 keys.
    assert gpu_bench.attention_work([(3, 0)], 1, 1, 1, 1) == Work(6 + 6, 4 * 6)


def test_work_of_llama_8b() -> None:
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert LLAMA.product_weights == 32 * layer + 128_256 * 4096 == 7_504_658_432
    assert LLAMA.kv_elements == 65_536  # 128 KiB a token in bf16
    assert LLAMA.adapter_elements(16) == 41_943_040  # peft's count
    one = LLAMA.decode_work(1, 100, 0, 16, 4)
    assert one.bytes == 2 * 7_504_658_432 + 100 * 131_072
    assert one.flops == 2 * 7_504_658_432 + 4 * 100 * 32 * 4096
    mixed = LLAMA.decode_work(32, 100, 8, 16, 4)
    assert mixed.bytes == 2 * 7_504_658_432 + 32 * 100 * 131_072 + 8 * 41_943_040 * 4
    prefill = LLAMA.prefill_work(1, 2)
    assert prefill.flops == 2 * (2 * 32 * layer + 128_256 * 4096) + 4 * 3 * 32 * 4096
    trained = LLAMA.finetune_work(1, 2, 16)
    assert trained.flops == 2 * (4 * 7_504_658_432 + 6 * 41_943_040) + 14 * 3 * 32 * 4096


def test_a_floor_is_the_larger_of_both() -> None:
    assert CEILINGS.floor_us(Work(10**6)) == 1.0
    assert CEILINGS.floor_us(Work(10**6, 2 * 10**8)) == 2.0


def test_predictions_are_those_that_were_counted_at_the_devices_rates() -> None:
    """Of the sizes that the cases have; a device of half the rates is expected to take twice."""
    from roofline import H200, Sizes

    sizes = Sizes()
    assert (gpu_model.BATCH, len(gpu_model.NAMES)) == (sizes.batch, sizes.adapters)
    assert (sizes.prompts, sizes.prompt_tokens) == gpu_model.PROMPTS
    assert (sizes.trained, sizes.trained_tokens) == gpu_model.FINETUNED
    assert sizes.rank == gpu_model.RANK
    assert abs(gpu_model.CONTEXT + gpu_model.STEPS // 2 - sizes.keys) <= 16
    steps = json.loads((ROOT / "benchmarks/results/roofline.json").read_text())["steps"]
    for slower in (1, 2):
        rates = Ceilings(H200.bytes_per_s / slower, H200.flops_per_s / slower, 1e10)
        for name in ("decode, adapters", "prefill, base", "finetuning"):
            expected = slower * steps[name]["expected_us"]["value"]
            assert Bench(Once(), rates).expected_us(name) == pytest.approx(expected, rel=1e-5)


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


def test_the_assemblers_variable_is_pcgs() -> None:
    from pcg.kernels.triton import CHOICE

    assert first_hour.CHOICE == CHOICE


def test_rows_in_pages_are_those_of_the_matrices() -> None:
    drawn = torch.randn(3000, gpu_kernels.HIDDEN)
    matrices = drawn.split((256, 8, 1500, 1236))
    arena, firsts = gpu_kernels.in_pages(matrices)
    assert len(arena) % gpu_kernels.PAGE_ELEMENTS == 0
    found = [arena[first : first + gpu_kernels.HIDDEN] for first in torch.cat(firsts).tolist()]
    assert torch.equal(torch.stack(found), drawn)
    assert torch.cat(firsts).diff().ne(gpu_kernels.HIDDEN).sum() > 2


def test_groups_have_names_of_their_own() -> None:
    graphs = gpu_kernels.group_graphs(tiny_llama.config())
    names = [graph.name for graph in graphs]
    assert len(set(names)) == len(names) > 8
    (norm,) = (graph for graph in graphs if graph.name == "serving: rms_norm")
    assert gpu_kernels.group_work(norm, 5) == Work(2 * (5 * 32 + 32 + 5 * 32))


def test_repeats_of_the_timer() -> None:
    timer = object.__new__(CudaTimer)
    timer._seconds, timer._most = 0.1, 50
    assert [timer.repeats(us) for us in (10.0, 10_000.0, 10**6)] == [50, 10, 3]


# ------------------------------------------------------------------------------------------ rows


def test_what_cannot_be_measured_is_said_and_the_rest_goes_on() -> None:
    def broken() -> Row:
        raise ValueError("no such kernel")

    def settings(bench: Bench) -> Iterator[Setting]:
        yield "first", lambda: bench.timed_row(20.0, Work(10**7))
        yield "second", broken
        yield "third", lambda: Row(ours_us=bench.known["some", "first"].ours_us)

    case, own = Case("some", 5, settings), bench()
    found = list(measured(own, case))
    assert [name for name, row in found if row is None] == ["first", "second", "third"]
    rows = [row for _, row in found if row is not None]
    assert [(row.case, row.setting, row.failed) for row in rows] == [
        ("some", "first", False),
        ("some", "second", True),
        ("some", "third", False),
    ]
    assert rows[1].note == "ValueError: no such kernel"
    assert (rows[0].predicted_us, rows[2].ours_us) == (10.0, 20.0)
    assert [name for name, _ in measured(own, case, {"first", "third"})] == ["second"] * 2
    with pytest.raises(TimeoutError):
        next(measured(bench(until=0.0), case))


def test_a_peer_that_fails_leaves_our_time() -> None:
    def broken() -> None:
        raise RuntimeError("no backend\nsecond line")

    row = bench().row(lambda: None, Work(10**7), {"good": lambda: None, "bad": broken})
    assert (row.ours_us, row.peers_us) == (1.0, {"good": 1.0})
    assert row.note == "bad: RuntimeError: no backend"


def test_the_table_says_what_was_measured_beside_what_was_predicted(tmp_path: Path) -> None:
    results = Results(tmp_path)
    good = bench().timed_row(20.0, Work(10**7), peers_us={"torch": 15_000.0}, case="kernels")
    for setting, row in {
        "loss": good.of_ceiling(0.4),
        "signs": good.of_ceiling(0.6),
        "cold": Row("kernels", expected_us=10.0).at_most("few", None, 3),
    }.items():
        results.rows["kernels", setting] = Row(**{**vars(row), "setting": setting})
    why = "ModuleNotFoundError: no module a|b\nat all"
    results.add(Row.failure("8B", "all", why))
    results.finished = {case.name for case in CASES} - {"serve"}
    text = first_hour.table(results)
    assert "| kernels | loss | 20.0 µs | 10.0 µs | 2.00 | torch 15.0 ms | 40%" in text
    assert "40% of copy bandwidth: 0.5, met" in text
    assert "60% of copy bandwidth: 0.5, **missed**" in text
    assert "| cold |  | 10.0 µs |  |  | few: not measured |" in text
    assert "| 8B | all | **failed** |" in text
    assert "no module a\\|b at all |" in text
    assert "4 rows, 1 failed, 1 targets missed; unfinished cases: serve." in text


# ---------------------------------------------------------------------------------------- results


def test_results_go_on_unless_the_device_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(first_hour, "DAY", tmp_path / "day")
    results = Results.of(tmp_path / "out")
    versions = Row("device", "versions", details={"gpu": "H200"})
    results.add(versions)
    results.add(Row("kernels", "loss", 3.0))
    results.finished.add("kernels")
    results.add(Row("8B", "finetune", 5.0, details={"x": 1}))
    assert Results.of(tmp_path / "out") == results
    # The output of an earlier call may be where only the tree comes along.
    (tmp_path / "day").mkdir()
    (tmp_path / "day/first_hour.json").write_text(results.path.read_text())
    again = Results.of(tmp_path / "empty")
    assert (again.rows, again.finished) == (results.rows, {"kernels"})
    again.add(versions)
    assert len(again.rows) == 3
    again.add(Row("device", "versions", details={"gpu": "A100"}))
    assert [*again.rows] == [("device", "versions")]
    assert not again.finished


# -------------------------------------------------------------------------------------- processes

WORK = """
import json, os, sys, time
name, order = sys.argv[1], json.loads(sys.argv[2])
def say(**message):
    with open(order["messages"], "a") as file:
        file.write(json.dumps(message) + chr(10))
def row(setting, **fields):
    say(begun=setting)
    say(row={"case": name, "setting": setting, **fields})
"""
DEVICE = """
if name == "device":
    row("versions", details={"gpu": "H200"})
    row("assemblers", details={"/own": [12, 9], "/newest": [13, 4], "/newer": [13, 0]})
    row("ceilings", details=dict(bytes_per_s=1e12, flops_per_s=1e14, host_bytes_per_s=1e10))
    say(is_over=True)
if name == "assembler":
    row(os.environ["PCG_PTXAS"], failed=os.environ["PCG_PTXAS"] == "/newest")
    say(is_over=True)
"""


def hour(tmp_path: Path, program: str, row_s: float = 60.0, seconds: float = 60.0) -> Hour:
    """An hour whose processes run a program with the name of the case, and its order."""
    command = [sys.executable, "-c", WORK + program]
    return Hour(Results.of(tmp_path), command, {}, row_s, time.monotonic() + seconds)


def cases_of(*names: str) -> list[Case]:
    return [Case(name, 20, lambda bench: ()) for name in names]


def settings(own: Hour, case: str) -> dict[str, str]:
    """The notes of the rows of a case, by setting."""
    rows = own.results.rows.values()
    return {row.setting: row.note for row in rows if row.case == case}


def test_the_newest_assembler_that_is_right_is_used(tmp_path: Path) -> None:
    own = hour(
        tmp_path, DEVICE + "if name == 'one': row(os.environ['PCG_PTXAS']); say(is_over=True)"
    )
    assert own.begin()
    own.run_all(cases_of("one"))
    assert {*settings(own, "assembler")} == {"/own", "/newest", "/newer"}
    assert [*settings(own, "one")] == ["/newer"]
    written = json.loads((tmp_path / "first_hour.json").read_text())
    assert written["finished"] == ["assembler", "device", "one"]


def test_without_a_device_nothing_goes_on(tmp_path: Path) -> None:
    own = hour(tmp_path, "sys.exit('no driver')")
    assert not own.begin()
    assert settings(own, "device") == {first_hour.START: "its process ended with status 1"}
    assert "no driver" in (tmp_path / "first_hour.log").read_text()


def test_rows_after_one_that_hangs_or_dies_are_measured_by_a_new_process(tmp_path: Path) -> None:
    own = hour(
        tmp_path,
        "known = order['skipped']\n"
        "for setting in ('good', 'hangs', 'dies', 'last'):\n"
        "    if setting in known: continue\n"
        "    say(begun=setting)\n"
        "    if setting == 'hangs': time.sleep(60)\n"
        "    if setting == 'dies': os._exit(3)\n"
        "    row(setting)\n"
        "say(is_over=True)",
        row_s=2.0,
    )
    own.run_all(cases_of("one"))
    assert settings(own, "one") == {
        "good": "",
        "hangs": "took longer than 2 s",
        "dies": "its process ended with status 3",
        "last": "",
    }
    assert own.results.finished == {"one"}


def test_at_the_end_of_the_time_a_process_ends_without_a_row(tmp_path: Path) -> None:
    own = hour(tmp_path, "say(begun='first'); time.sleep(60)", seconds=1.0)
    own.run_all(cases_of("one", "two"))
    assert (own.results.rows, own.results.finished) == ({}, set())


def test_a_second_call_measures_what_is_missing_and_what_failed(tmp_path: Path) -> None:
    program = (
        "for setting in ('a', 'bad', 'b'):\n"
        "    if setting not in order['skipped']: row(setting, failed=setting == 'bad', note=NOTE)\n"
        "say(is_over=True)"
    )
    hour(tmp_path, "NOTE = 'first'\n" + program).run_all(cases_of("one"))
    own = hour(tmp_path, "NOTE = 'second'\n" + program)
    own.run_all(cases_of("one"))
    assert settings(own, "one") == {"a": "first", "bad": "second", "b": "first"}


def test_a_process_that_never_begins_ends_the_case(tmp_path: Path) -> None:
    own = hour(tmp_path, "sys.exit(1)")
    own.run_all(cases_of("one", "two"))
    assert {row.note for row in own.results.rows.values()} == {"its process ended with status 1"}
    assert not own.results.finished


# ---------------------------------------------------------------------------------------- the day


def test_wheels_and_assemblers_come_along(tmp_path: Path) -> None:
    day, folder = tmp_path / "day", tmp_path / "unpacked"
    day.mkdir()
    folder.mkdir()
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name, module in {
        f"lacked-1-{tag}-{tag}-linux": "lacked",
        "torch-9-py3-none-any": "torch",
    }.items():
        with zipfile.ZipFile(day / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", "")
    (day / "ptxas.xz").write_bytes(lzma.compress(b"#!/bin/sh\necho 13.4\n"))
    variables = first_hour.prepared(day, folder)
    assert variables["PYTHONPATH"].split(os.pathsep)[:2] == [str(folder / "site"), str(ROOT)]
    assert [path.name for path in (folder / "site").iterdir()] == ["lacked"]
    ran = subprocess.run(["ptxas"], env=variables, capture_output=True, check=True)
    assert ran.stdout == b"13.4\n"
    (day / "other-1-cp27-cp27-linux.whl").touch()
    with pytest.raises(SystemExit, match=r"other-1-cp27.*make day DAY_PYTHON=3"):
        first_hour.prepared(day, folder)


# ---------------------------------------------------------------------------------------- dry runs


def test_cases_have_names_of_their_own_and_room_in_a_call() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    before_pytest = names.index("pytest")
    assert names[len(FIRST) : before_pytest] == ["kernels", "8B", "serve"]
    assert sum(case.seconds for case in CASES[len(FIRST) : names.index("8B")]) < 200


def dry(output: Path, *arguments: str) -> Results:
    """The results of a dry run, whose rows are all there and right."""
    command = [sys.executable, str(ROOT / "benchmarks/first_hour.py"), "--dry"]
    ran = subprocess.run(
        [*command, "--seconds", "1000", "--output", str(output), *arguments],
        capture_output=True, text=True, cwd=output, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = Results.of(output)
    assert first_hour.table(results) == (output / "first_hour.md").read_text()
    return results


def check_rows(results: Results) -> None:
    """Each time has its prediction, and each peer its time."""
    assert not [row.note for row in results.rows.values() if row.failed]
    rows: dict[str, dict[str, Row]] = {}
    for (case, setting), row in results.rows.items():
        rows.setdefault(case, {})[setting] = row
        assert row.ours_us is None or row.predicted_us, setting
    for row in rows.get("kernels", {}).values():
        assert row.predicted_us
        assert row.peers_us
        assert not row.note  # of a peer that failed
    if "8B" in results.finished:
        assert sum("peft" in name or "transformers" in name for name in rows["8B"]) == 5
        assert "greedy tokens of 1B in bf16" in rows["8B"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["kernels", "8B"])
def test_a_dry_run(tmp_path: Path, name: str) -> None:
    """The same code with small sizes, as far as it does not take long."""
    results = dry(tmp_path, "--only", name)
    assert results.finished == {"device", "assembler", name}
    check_rows(results)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_whole_dry_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    before = dry(tmp_path, "--only", "groups")
    results = dry(tmp_path)
    assert results.finished == {case.name for case in CASES}
    check_rows(results)
    for key in (key for key in before.rows if key[0] == "groups"):
        assert results.rows[key] == before.rows[key]
