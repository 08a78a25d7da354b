"""The pages of records: complete without a network or other files, escaped, and right."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pcg.errors import RecordError
from pcg.pages.charts import Axis, tick_text
from pcg.records.curves import Curve, figure, smoothed, thinned
from pcg.records.page import comparison_page, run_page
from pcg.records.record import RunRecord
from pcg.records.run import compare, find_runs, read_run
from tests.support.browser import open_tab

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
