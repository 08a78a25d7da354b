"""The plot of a serving report: well-formed, with lines where the samples are."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from pcg.runtime.engine.events import Event, Kind
from pcg.runtime.metrics.metrics import serving_report
from pcg.runtime.metrics.timelines import Slo
from pcg.simulate.latency_plot import serving_svg

SVG = "{http://www.w3.org/2000/svg}"


def request(name: str, submitted: float, *tokens: float, **slos: float) -> list[Event]:
    return [
        Event(submitted, Kind.SUBMITTED, name, {"prompt_tokens": 5, **slos}),
        *(Event(time, Kind.TOKEN, name, {"count": 1}) for time in tokens),
        Event(tokens[-1], Kind.FINISHED, name),
    ]


def drawn(events: list[Event], slo: Slo | None = None, title: str = "serving"):
    log = sorted(events, key=lambda one: one.time_s)
    return ElementTree.fromstring(serving_svg(serving_report(log, slo), title))


def lines(root: ElementTree.Element, color: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, point.split(","))) for point in one.attrib["points"].split()]
        for one in root.iter(f"{SVG}polyline")
        if one.attrib["stroke"] == color
    ]


def words(root: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in root.iter(f"{SVG}text")]


MEDIAN, P99 = "#1f6fb4", "#c46a1b"


def test_samples_are_where_they_belong() -> None:
    # From 0 s to 60 s: each of the sixty parts is a second. TTFT is 1 s, then 3 s.
    log = [*request("a", 0.5, 1.5, 1.75), *request("b", 30.5, 33.5, 34.0)]
    log += [Event(0.0, Kind.STARTED, "job"), Event(60.0, Kind.COMPLETED, "job")]
    root = drawn(log, Slo(ttft_s=2.0))
    over_time, distribution = lines(root, MEDIAN)[:2]
    left, wide, top, high = 64.0, 520.0, 88.0, 130.0
    most = 3.0 * 1.05
    expected = [
        (left + wide * 0.5 / 60, top + high * (1 - 1 / most)),
        (left + wide * 30.5 / 60, top + high * (1 - 3 / most)),
    ]
    for point, place in zip(over_time, expected, strict=True):
        assert all(abs(one - other) <= 0.051 for one, other in zip(point, place, strict=True))
    assert lines(root, P99)[0] == over_time  # of one sample each
    # The share of samples rises from 0 at 1 s to 1 at 3 s.
    assert distribution[0][1] > distribution[-1][1]
    assert abs(distribution[-1][0] - (664 + 260 * 3 / most)) <= 0.051
    dashed = [
        one.attrib["d"] for one in root.iter(f"{SVG}path") if "stroke-dasharray" in one.attrib
    ]
    assert f"M{left} {top + high * (1 - 2 / most):.1f}h{wide}" in dashed
    assert {"time to first token, s", "time per output token, ms", "SLO"} <= set(words(root))


def test_slos_that_differ_have_no_line() -> None:
    log = [*request("a", 0.0, 1.0, ttft_slo_s=1.0), *request("b", 0.0, 2.0, ttft_slo_s=3.0)]
    assert "SLO" not in words(drawn(log))


def test_rows_without_samples_are_left_out() -> None:
    found = words(drawn(request("a", 0.0, 1.0)))
    assert "time to first token, ms" in found
    assert not any("per output token" in one or "inter-token" in one for one in found)
    nobody = [Event(0.0, Kind.STARTED, "j"), Event(1.0, Kind.COMPLETED, "j")]
    assert "No request finished." in words(drawn(nobody))


def test_titles_are_escaped() -> None:
    assert "<b> & 'c'" in words(drawn(request("a", 0.0, 1.0), title="<b> & 'c'"))


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
    root = drawn(events)
    height = float(root.attrib["viewBox"].split()[3])
    for points in lines(root, MEDIAN) + lines(root, P99):
        for x, y in points:
            assert 64 - 0.1 <= x <= 584 + 0.1 or 664 - 0.1 <= x <= 924 + 0.1
            assert 88 - 0.1 <= y <= height
