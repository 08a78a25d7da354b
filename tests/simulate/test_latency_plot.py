"""The plot of a serving report: lines where the samples are, and a well-formed file."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from pcg.runtime.metrics.events import Event, Kind
from pcg.runtime.metrics.report import ServingReport, Slo, serving_report
from pcg.simulate.latency_plot import serving_svg


def request(name: str, submitted: float, *tokens: float, **slos: float) -> list[Event]:
    return [
        Event(submitted, Kind.SUBMITTED, name, {"prompt_tokens": 5, **slos}),
        *(Event(time, Kind.TOKEN, name, {"count": 1}) for time in tokens),
        Event(tokens[-1], Kind.FINISHED, name),
    ]


def report_of(events: list[Event], slo: Slo | None = None) -> ServingReport:
    return serving_report(sorted(events, key=lambda one: one.time_s), slo)


class Drawn:
    """The lines of a plot, and its texts."""

    def __init__(self, events: list[Event], slo: Slo | None = None) -> None:
        root = ElementTree.fromstring(serving_svg(report_of(events, slo), "serving"))
        parts = list(root.iter())
        self.texts = [part.text for part in parts if part.tag.endswith("text")]
        self.lines: list[tuple[str, list[tuple[float, float]]]] = []
        self.paths: list[list[tuple[float, float]]] = []
        self.box = tuple(map(float, root.attrib["viewBox"].split()))
        for part in parts:
            if "data-label" in part.attrib:
                pairs = (pair.split(":") for pair in part.attrib["data-values"].split())
                points = [(float(x), float(y)) for x, y in pairs]
                self.lines.append((part.attrib["data-label"], points))
                places = (pair.split() for pair in part.attrib["d"][1:].split("L"))
                self.paths.append([(float(x), float(y)) for x, y in places])

    def line(self, label: str, place: int = 0) -> list[tuple[float, float]]:
        return [points for name, points in self.lines if name == label][place]


def test_samples_are_where_they_belong() -> None:
    # From 0 s to 60 s: each of the sixty parts is a second. TTFT is 1 s, then 3 s.
    log = [*request("a", 0.5, 1.5, 1.75), *request("b", 30.5, 33.5, 34.0)]
    log += [Event(0.0, Kind.STARTED, "job"), Event(60.0, Kind.COMPLETED, "job")]
    plot = Drawn(log, Slo(ttft_s=2.0))
    assert plot.line("median") == [(0.5, 1.0), (30.5, 3.0)]
    assert plot.line("99th percentile") == plot.line("median")  # of one sample each
    assert [height for _, height in plot.line("SLO")] == [2.0, 2.0]
    points = plot.line("share")
    assert points[0] == (1.0, 0.0)
    assert points[-1] == (3.0, 1.0)
    assert points == sorted(points)
    assert [latency for latency, _ in plot.line("SLO", 1)] == [2.0, 2.0]
    kinds = ("time to first token, s", "time per output token, ms", "inter-token latency, ms")
    assert [text for text in plot.texts if text in kinds] == list(kinds)


def test_slos_that_differ_have_no_line() -> None:
    log = [*request("a", 0.0, 1.0, ttft_slo_s=1.0), *request("b", 0.0, 2.0, ttft_slo_s=3.0)]
    labels = [label for label, _ in Drawn(log).lines[:3]]
    assert labels == ["99th percentile", "median", "share"]


def test_rows_without_samples_are_left_out() -> None:
    assert [label for label, _ in Drawn(request("a", 0.0, 1.0)).lines] == [
        "99th percentile",
        "median",
        "share",
    ]
    nobody = [Event(0.0, Kind.STARTED, "j"), Event(1.0, Kind.COMPLETED, "j")]
    assert Drawn(nobody).lines == []
    assert "No request finished." in Drawn(nobody).texts


def test_the_file_is_well_formed_and_says_its_title() -> None:
    title = "<b> & 'c' $"
    report = report_of(request("a", 0.0, 1.0, 1.5))
    file = serving_svg(report, title)
    words = {one.text for one in ElementTree.fromstring(file).iter() if one.tag.endswith("text")}
    assert {title, "median", "99th percentile"} <= words
    assert serving_svg(report, title) == file


@given(
    requests=st.lists(
        st.tuples(
            st.floats(0, 1e4),
            st.lists(st.floats(0, 1e3), min_size=1, max_size=5),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_all_that_is_drawn_lies_in_its_panel(
    requests: list[tuple[float, list[float]]],
) -> None:
    events = [Event(0.0, Kind.STARTED, "job")]
    for index, (start, gaps) in enumerate(requests):
        times = [start + sum(gaps[: i + 1]) for i in range(len(gaps))]
        events += request(f"r{index}", start, *times)
    events.append(Event(2e4, Kind.COMPLETED, "job"))
    plot = Drawn(events)
    left, top, width, height = plot.box
    for points in plot.paths:
        for x, y in points:
            assert left <= x <= left + width
            assert top <= y <= top + height
