"""The plot of a serving report: lines where the samples are, and a well-formed file."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pcg.runtime.metrics.events import Event, Kind
from pcg.runtime.metrics.report import ServingReport, Slo, serving_report
from pcg.simulate.latency_plot import draw_latencies, serving_svg


def request(name: str, submitted: float, *tokens: float, **slos: float) -> list[Event]:
    return [
        Event(submitted, Kind.SUBMITTED, name, {"prompt_tokens": 5, **slos}),
        *(Event(time, Kind.TOKEN, name, {"count": 1}) for time in tokens),
        Event(tokens[-1], Kind.FINISHED, name),
    ]


def report_of(events: list[Event], slo: Slo | None = None) -> ServingReport:
    return serving_report(sorted(events, key=lambda one: one.time_s), slo)


def drawn(events: list[Event], slo: Slo | None = None) -> Figure:
    figure = Figure()
    draw_latencies(figure, report_of(events, slo), "serving")
    return figure


def line(axes: Axes, label: str) -> list[tuple[float, float]]:
    (found,) = [one for one in axes.lines if one.get_label() == label]
    return [(float(x), float(y)) for x, y in found.get_xydata()]


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_samples_are_where_they_belong() -> None:
    # From 0 s to 60 s: each of the sixty parts is a second. TTFT is 1 s, then 3 s.
    log = [*request("a", 0.5, 1.5, 1.75), *request("b", 30.5, 33.5, 34.0)]
    log += [Event(0.0, Kind.STARTED, "job"), Event(60.0, Kind.COMPLETED, "job")]
    figure = drawn(log, Slo(ttft_s=2.0))
    over_time, distribution = figure.axes[:2]
    assert line(over_time, "median") == [(0.5, 1.0), (30.5, 3.0)]
    assert line(over_time, "99th percentile") == line(over_time, "median")  # of one sample each
    assert [height for _, height in line(over_time, "SLO")] == [2.0, 2.0]
    points = [(float(x), float(y)) for x, y in distribution.lines[0].get_xydata()]
    assert points[0] == (1.0, 0.0)
    assert points[-1] == (3.0, 1.0)
    assert points == sorted(points)
    assert list(distribution.lines[1].get_xdata()) == [2.0, 2.0]
    assert titles(figure)[::2] == [
        "time to first token, s",
        "time per output token, ms",
        "inter-token latency, ms",
    ]


def test_slos_that_differ_have_no_line() -> None:
    log = [*request("a", 0.0, 1.0, ttft_slo_s=1.0), *request("b", 0.0, 2.0, ttft_slo_s=3.0)]
    labels = [one.get_label() for one in drawn(log).axes[0].lines]
    assert labels == ["99th percentile", "median"]


def test_rows_without_samples_are_left_out() -> None:
    assert titles(drawn(request("a", 0.0, 1.0)))[::2] == ["time to first token, ms"]
    nobody = [Event(0.0, Kind.STARTED, "j"), Event(1.0, Kind.COMPLETED, "j")]
    assert drawn(nobody).axes == []
    assert "No request finished." in serving_svg(report_of(nobody), "serving")


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
    for axes in drawn(events).axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for one in axes.lines:
            for x, y in one.get_xydata():
                assert left <= x <= right
                assert low <= y <= high
