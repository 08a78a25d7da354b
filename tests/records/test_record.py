"""The record of a run: what is written is read, whatever ended the run, and no step is doubled."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pcg.errors import FinetuneError, RecordError
from pcg.pages.charts import Axis, tick_text
from pcg.records.curves import Curve, figure, smoothed, thinned
from pcg.records.page import comparison_page, run_page
from pcg.records.record import RunRecord
from pcg.records.run import compare, find_runs, read_run
from pcg.runtime.training.options import FinetuneOptions
from tests.support.browser import open_tab


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert all(row.pop("time") > 1e9 for row in found)
    return found


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text("utf-8"))
    return found


def test_numbers_of_any_name_are_kept(tmp_path: Path) -> None:
    config = {"lr": 1e-4, "path": tmp_path, "targets": ("q", "v"), "bad": math.nan, "set": {"b"}}
    with RunRecord(tmp_path / "a", config, kind="grpo") as record:
        record.log(1, loss=torch.tensor(2.5), **{"reward/mean": 0.25, "tokens": 7})
        record.log(1, margin=math.inf)
        record.log(3, loss=1)
        assert record.last_step == 3
    assert rows(tmp_path / "a") == [
        {"step": 1, "loss": 2.5, "reward/mean": 0.25, "tokens": 7},
        {"step": 1, "margin": None},
        {"step": 3, "loss": 1},
    ]
    found = facts(tmp_path / "a")
    assert (found["status"], found["kind"], found["name"]) == ("completed", "grpo", "a")
    assert json.loads((tmp_path / "a/config.json").read_text("utf-8")) == {
        "lr": 1e-4, "path": str(tmp_path), "targets": ["q", "v"], "bad": "nan", "set": ["b"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("step", "numbers", "said"),
    [
        (2, {"loss": 1.0}, "has 'loss' already"),
        (1, {"loss": 1.0}, "step 1 is logged after step 2"),
        (-1, {"loss": 1.0}, "step=-1; use an int"),
        (True, {"loss": 1.0}, "step=True; use an int"),
        (2**53, {"loss": 1.0}, "use an int from 0 to below"),
        (3, {"loss": 10**400}, "log numbers alone"),
        (3, {"loss": "1.0"}, "loss='1.0'; log numbers alone"),
        (3, {"loss": torch.zeros(2)}, "log numbers alone"),
        (3, {"loss": None}, "log numbers alone"),
        (3, {"time": 1.0}, "'time' is no name"),
        (3, {"x" * 129: 1.0}, "no name of a number"),
        (3, {"": 1.0}, "no name of a number"),
    ],
)
def test_what_cannot_be_logged_is_refused(
    tmp_path: Path, step: int, numbers: dict[str, Any], said: str
) -> None:
    with RunRecord(tmp_path) as record:
        record.log(2, loss=0.5)
        with pytest.raises(RecordError, match=said):
            record.log(step, **numbers)
        record.log(3, loss=0.25)
    assert [row["step"] for row in rows(tmp_path)] == [2, 3]
    with pytest.raises(RecordError, match="has ended"):
        record.log(4, loss=0.1)


def interrupted(folder: Path) -> None:
    with RunRecord(folder, {"steps": 5}) as record:
        for step in range(1, 6):
            record.log(step, loss=float(step))
            record.samples(step, [{"text": f"{step}"}])
        raise KeyboardInterrupt


def test_a_run_that_goes_on_appends_and_doubles_no_step(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path)
    begun = facts(tmp_path)["begun_s"]
    assert facts(tmp_path)["status"] == "interrupted"
    with RunRecord(tmp_path, {"steps": 9}, done=3) as record:
        assert (record.last_step, record.names_of_last) == (3, {"loss"})
        with pytest.raises(RecordError, match="has 'loss' already"):
            record.log(3, loss=0.0)
        record.log(4, loss=0.5)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 0.5),
    ]  # fmt: skip
    samples = (tmp_path / "samples.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in samples] == [1, 2, 3]
    assert facts(tmp_path)["begun_s"] == begun
    assert json.loads((tmp_path / "config.json").read_text("utf-8")) == {"steps": 9}


@pytest.mark.parametrize("torn", ['{"step":3,"lo', "\0\0\0\0\n", '{"step":3}'])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: str) -> None:
    record = RunRecord(tmp_path)
    for step in (1, 2):
        record.log(step, loss=1.0)
    record.end("failed")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    with RunRecord(tmp_path, done=5) as record:
        assert record.last_step == 2
        record.log(3, loss=0.5)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_damage_elsewhere_is_named(tmp_path: Path) -> None:
    with RunRecord(tmp_path) as record:
        for step in (1, 2, 3):
            record.log(step, loss=1.0)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join([lines[0], "nothing", lines[2], ""]), "utf-8")
    with pytest.raises(RecordError, match="line 2, is damaged"):
        RunRecord(tmp_path, done=3)
    assert path.read_text("utf-8").splitlines()[2] == lines[2]


def test_another_run_is_set_aside(tmp_path: Path) -> None:
    for number in range(3):
        with RunRecord(tmp_path, {"number": number}) as record:
            record.log(1, loss=float(number))
    assert rows(tmp_path)[0]["loss"] == 2.0
    assert [rows(tmp_path / f"earlier-{place}")[0]["loss"] for place in (1, 2)] == [0.0, 1.0]
    assert facts(tmp_path / "earlier-1")["status"] == "completed"


def test_one_run_writes_a_folder_at_a_time(tmp_path: Path) -> None:
    with RunRecord(tmp_path) as record:
        record.log(1, loss=1.0)
        with pytest.raises(RecordError, match=r"another run writes .*metrics\.jsonl now"):
            RunRecord(tmp_path)
    assert len(rows(tmp_path)) == 1


def test_kill_9_leaves_every_step_that_was_logged(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pcg.records.record import RunRecord\n"
        "record = RunRecord(sys.argv[1], {'a': 1})\n"
        "for step in range(1, 10**9):\n"
        "    record.log(step, loss=1 / step)\n"
        "    print(step, flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    told = [int(writer.stdout.readline()) for _ in range(50)][-1]
    writer.send_signal(signal.SIGKILL)
    told = max([told, *map(int, writer.stdout.read().splitlines())])
    assert writer.wait() == -signal.SIGKILL
    writer.stdout.close()
    with RunRecord(tmp_path, {"a": 1}, done=told) as record:
        assert record.last_step == told
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, told + 1)]


def test_a_full_disk_is_said_and_what_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.write, [120]

    def full(handle: int, data: bytes) -> int:
        taken = min(len(data), room[0])
        room[0] -= taken
        if data and not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[:taken])

    record = RunRecord(tmp_path)
    monkeypatch.setattr(os, "write", full)
    record.log(1, loss=1.0)
    refused = None
    while refused is None:
        try:
            record.log(record.last_step + 1, loss=1.0)
        except RecordError as error:
            refused = error
    assert "No space left on device; what was there stays" in str(refused)
    there = record.last_step
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, there + 1)]
    room[0] = 10**6
    record.log(there + 1, loss=0.5)
    record.end()
    assert rows(tmp_path)[-1] == {"step": there + 1, "loss": 0.5}


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/in", tmp_path / "zero\0byte"):
        with pytest.raises(RecordError, match="cannot be written in"):
            RunRecord(folder)


# ---------------------------------------------------------------------------- tensorboard and wandb


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "wandb"])
def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda asked, *more: None if asked == name else find(asked)
    )
    said = rf"needs the library {name}.*pip install 'pcg\[{name}\]'"
    with pytest.raises(RecordError, match=said):
        FinetuneOptions(record=tmp_path, report_to=(name,))  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=said):
        RunRecord(tmp_path / "run", report_to=(name,))
    with RunRecord(tmp_path / "run"):  # nothing holds the folder
        pass


def test_what_is_no_sink_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="report_to='comet'; use some of mlflow, tensorboard"):
        RunRecord(tmp_path, report_to=("comet",))
    with pytest.raises(FinetuneError, match=r"report_to=.* has no effect without record"):
        FinetuneOptions(report_to=("wandb",))


def test_tensorboard_reads_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunRecord(tmp_path, {"a": 1}, report_to=("tensorboard",)) as record:
        for step in range(1, 6):
            record.log(step, loss=1.0 / step, nothing=float("nan"))
    with RunRecord(tmp_path, {"a": 1}, done=3, report_to=("tensorboard",)) as record:
        record.log(4, loss=7.0)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert read.Tags()["scalars"] == ["loss"]
    found = [(one.step, one.value) for one in read.Scalars("loss")]
    assert found == [pytest.approx(pair) for pair in [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 7.0)]]


def test_a_run_that_goes_on_is_one_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda numbers, step: calls.append((step, numbers)),
        finish=lambda exit_code: calls.append(exit_code),
    )

    def init(**given: Any) -> Any:
        calls.append(given)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=object()))
    with pytest.raises(KeyboardInterrupt):
        interrupted_run(tmp_path)
    with RunRecord(tmp_path, {"a": 1}, done=1, report_to=("wandb",)) as record:
        record.log(2, loss=1.0)
    first, second = (one for one in calls if isinstance(one, dict))
    assert first["id"] == second["id"]
    assert (first["config"], first["resume"], first["dir"]) == ({"a": 1}, "allow", str(tmp_path))
    assert [one for one in calls if not isinstance(one, dict)] == [
        (1, {"loss": 2.0}), 1, (2, {"loss": 1.0}), 0,
    ]  # fmt: skip


def test_a_run_that_goes_on_is_one_of_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # without a database
    with pytest.raises(KeyboardInterrupt):
        interrupted_run(tmp_path / "run", "mlflow")
    client = tracking.MlflowClient()
    experiment = client.get_experiment_by_name("pcg").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FAILED"
    with RunRecord(tmp_path / "run", {"a": 1}, done=1, report_to=("mlflow",)) as record:
        record.log(2, loss=1.0)
    (run,) = client.search_runs([experiment])
    assert (run.info.status, run.data.params) == ("FINISHED", {"a": "1"})
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 2.0), (2, 1.0)]


def interrupted_run(folder: Path, library: str = "wandb") -> None:
    with RunRecord(folder, {"a": 1}, report_to=(library,)) as record:
        record.log(1, loss=2.0)
        raise KeyboardInterrupt


# ---------------------------------------------------------------------------- the pages of records

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'\ud800\x1b[31m"
VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """Counts of elements, the text, and what attributes refer to; tags have to match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.given: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.given += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["style"], ["script"]):
            self.text += data


def record(folder: Path, rate: float = 1e-3, steps: int = 30) -> Path:
    config = {"learning_rate": rate, "peft": {"r": 8}, "total_steps": steps, HOSTILE: HOSTILE}
    with RunRecord(folder, config, name=HOSTILE, kind=HOSTILE) as run:
        for step in range(1, steps + 1):
            found = {"eval_loss": 3 / step} if step % 10 == 0 else {}
            run.log(step, loss=2 / step, learning_rate=rate, **{HOSTILE: float(step)}, **found)
        run.samples(steps, [{"completion": HOSTILE, HOSTILE: 0.5, "reward": None}])
    return folder


def check_alone(html: str) -> Page:
    """Check that a page refers to nothing else and has no element of hostile text."""
    page = Page(html)
    assert "img" not in page.tags
    assert page.tags.count("script") == 1
    assert HOSTILE[:-6] in page.text
    for name, value in page.given:
        assert not name.startswith("on")
        assert name not in ("src", "href") or (value or "").startswith("#")
    assert not re.search(r"@import|url\(", html)
    html.encode()
    return page


def test_the_page_of_a_run_says_all_of_it(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    html = (folder / "report.html").read_text("utf-8")
    assert html == run_page(read_run(folder))
    page = check_alone(html)
    assert page.tags.count("svg") == 3  # the loss with its evaluation, the rate, the hostile one
    for words in ("completed", "30 of 30", "0.06667", "best 0.1 at step 30", "peft.r", "0.001"):
        assert words in page.text
    assert len(html) < 60_000


def test_the_page_of_runs_lays_their_curves_over_each_other(tmp_path: Path) -> None:
    runs = [record(tmp_path / name / "record", rate) for name, rate in (("a", 1e-3), ("b", 2e-3))]
    compared = compare([read_run(run) for run in runs])
    assert list(compared.names) == ["a", "b"]
    assert compared.differing == {"learning_rate": [1e-3, 2e-3]}
    page = check_alone(comparison_page(compared))
    labels = [value for name, value in page.given if name == "data-label"]
    assert labels == ["a", "b"] * 4
    assert compared.results["loss, last"] == pytest.approx([2 / 30] * 2)
    assert json.loads(json.dumps(compared.json))["runs"][1]["options"] == {"learning_rate": 2e-3}


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [0.0, 0.0],
        [1e308, -1e308],
        [5e-324, 0.0],
        [1.0, math.nextafter(1.0, 2.0)],
        [-3.0, 2.5, 7.0],
        [1e15, 1e15 + 1],
    ],
)
def test_a_figure_of_any_numbers_has_places(values: list[float]) -> None:
    drawn = figure("x", [Curve("x", [*enumerate(values)])])
    Page(drawn)
    assert not re.search(r"\b(nan|inf)\b", drawn)
    shown = re.search(r'data-values="([^"]*)"', drawn)
    assert shown is not None
    assert [float(pair.split(":")[1]) for pair in shown[1].split()] == pytest.approx(values)


def test_ticks_are_round_and_within() -> None:
    assert Axis(0.0, 10.0, 0, 1).ticks(5) == [0, 2, 4, 6, 8, 10]
    assert Axis(-0.3, 0.31, 0, 1).ticks(4) == pytest.approx([-0.2, 0, 0.2])
    assert [tick_text(one) for one in (0, 12500.0, 2e-5, 0.25, 3e9)] == [
        "0", "12.5k", "2e-05", "0.25", "3G",
    ]  # fmt: skip


def test_a_long_curve_is_thinned_and_keeps_its_peaks() -> None:
    points = [(step, float(step == 7777)) for step in range(20_000)]
    found = thinned(points)
    assert len(found) <= 400
    assert (7777, 1.0) in found
    assert found == sorted(found)
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert len(smoothed(points)) == 50
    assert sum(value for _, value in smoothed(points)) == pytest.approx(50 / 20_000)


def test_readers_tolerate_a_torn_end_and_name_other_damage(tmp_path: Path) -> None:
    record(tmp_path / "a/run", steps=4)
    metrics = tmp_path / "a/run/metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step":5,"ti')
    assert read_run(tmp_path / "a/run").last_step == 4
    assert list(find_runs(tmp_path)) == [tmp_path / "a/run"]
    for damage in (
        '{"step":"5"}\n',
        "[]\n{}\n",
        '{"step":1}\n{}\n',
        '{"step":1,"time":[]}\n{}\n',
        '{"step":1e400,"time":1}\n',
        '{"step":1,"time":1,"x":"nan"}\n',
    ):
        metrics.write_text(damage)
        with pytest.raises(RecordError, match=r"metrics\.jsonl.* (is damaged|holds)"):
            read_run(tmp_path / "a/run")


def test_a_run_that_is_killed_is_stopped_and_one_that_goes_on_runs(tmp_path: Path) -> None:
    run = RunRecord(tmp_path / "a")
    run.log(1, loss=1.0)
    assert read_run(tmp_path / "a").status == "running"
    run._metrics.close()  # as the death of its process does
    assert read_run(tmp_path / "a").status == "stopped"


def test_a_browser_says_the_numbers_that_are_pointed_at(tmp_path: Path) -> None:
    folder = record(tmp_path / "run")
    with open_tab(tmp_path / "profile") as tab:
        for width in (360, 1280):
            tab.show(width, 900)
            tab.open((folder / "report.html").as_uri())
            assert tab.run("document.documentElement.scrollWidth") <= width
            said = tab.run(
                """(() => {
                  const drawn = document.querySelector("#curves svg");
                  const place = drawn.getBoundingClientRect();
                  const x = place.x + place.width * (62 + 448 * 9 / 29) / 520;
                  drawn.dispatchEvent(new PointerEvent("pointermove", {clientX: x}));
                  return drawn.parentElement.querySelector(".readout").textContent;
                })()"""
            )
            assert said == "step 10: loss 0.2 · eval_loss 0.3"
        assert tab.errors == []
