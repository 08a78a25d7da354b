"""Latencies of a serving report as one SVG: over time, and their distribution.

A row for each of TTFT, TPOT and ITL. On the left, median and 99th percentile of what came in each
of sixty parts of the time; TTFT and TPOT stand where their request was submitted, an ITL where its
gap ended. On the right, the share of samples up to a latency. A dashed line is the SLO, where all
requests have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pcg.explain.page.element import Markup, element
from pcg.explain.page.plot import Scale
from pcg.runtime.metrics.distribution import cumulative, percentile
from pcg.runtime.metrics.metrics import ServingReport
from pcg.runtime.metrics.timelines import Outcome, Timeline

_Samples = Sequence[tuple[float, float]]
"""(time, latency), seconds."""

_PARTS = 60
_POINTS = 200
"""Of the distribution's line."""

_WIDTH, _ROW = 960, 190
_LEFT, _WIDE, _HIGH = 64.0, 520.0, 130.0
_RIGHT, _NARROW = 664.0, 260.0
"""Pixels: the left panel's edge, its size, and the right one's edge and width."""

_COLORS = {"median": "#1f6fb4", "p99": "#c46a1b", "SLO": "#888888"}


def serving_svg(report: ServingReport, title: str) -> str:
    """The plot as a file that stands alone; `title` stands at its top."""
    finished = [one for one in report.requests if one.outcome is Outcome.FINISHED]
    rows = [
        ("time to first token", _at_submission(finished, "ttft_s"), _common(finished, "ttft_s")),
        ("time per output token", _at_submission(finished, "tpot_s"), _common(finished, "tpot_s")),
        ("inter-token latency", _gaps(finished), None),
    ]
    shown = [row for row in rows if row[1]]
    height = 64 + _ROW * max(len(shown), 1)
    children = [
        element("rect", width="100%", height="100%", fill="#fff"),
        _text(20, 24, title, font_size=14),
        *_legend(any(slo is not None for _, _, slo in shown)),
    ]
    if not shown:
        children.append(_text(_LEFT, 90, "No request finished."))
    for index, (name, samples, slo) in enumerate(shown):
        children += _row(report, name, samples, slo, 88.0 + _ROW * index)
    drawn = element(
        "svg",
        element("title", title),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {height}",
        font_family="sans-serif",
        font_size=11,
        fill="#333",
    )
    return f"{drawn}\n"


def _at_submission(finished: Sequence[Timeline], name: str) -> _Samples:
    pairs = ((one.submitted_s, getattr(one, name)) for one in finished)
    return [(time, latency) for time, latency in pairs if latency is not None]


def _gaps(finished: Sequence[Timeline]) -> _Samples:
    return [
        (after, after - before)
        for one in finished
        for (before, _), (after, _) in pairwise(one.tokens)
    ]


def _common(finished: Sequence[Timeline], name: str) -> float | None:
    """The SLO of all requests; None where they differ or have none."""
    found = {getattr(one.slo, name) for one in finished}
    return found.pop() if len(found) == 1 else None


def _row(
    report: ServingReport, name: str, samples: _Samples, slo: float | None, top: float
) -> list[Markup]:
    ordered = sorted(latency for _, latency in samples)
    up = _scale(max(ordered[-1], slo or 0.0))
    over = Scale(report.duration_s)
    found = [
        _text(_LEFT, top - 10, f"{name}, {up.name}", font_weight="bold"),
        *_frame(_LEFT, top, _WIDE, up, over, "s"),
        *_frame(_RIGHT, top, _NARROW, Scale(1.0, 0.01, "%"), up, up.name),
    ]
    if slo is not None:
        y, x = top + _HIGH * (1 - up.share(slo)), _RIGHT + _NARROW * up.share(slo)
        dashed = {"stroke": _COLORS["SLO"], "stroke_dasharray": "5 4"}
        found.append(element("path", d=f"M{_LEFT} {y:.1f}h{_WIDE}", **dashed))
        found.append(element("path", d=f"M{x:.1f} {top}v{_HIGH}", **dashed))
    for kind, share in (("p99", 0.99), ("median", 0.5)):
        points = [
            (over.share(time - report.start_s), up.share(latency))
            for time, latency in _in_parts(report, samples, share)
        ]
        found += _line(points, _LEFT, top, _WIDE, _COLORS[kind])
    steps = [(up.share(latency), share) for latency, share in cumulative(ordered, _POINTS)]
    return found + _line(steps, _RIGHT, top, _NARROW, _COLORS["median"])


def _in_parts(report: ServingReport, samples: _Samples, share: float) -> _Samples:
    """(middle of a part of the time, percentile of the samples in it), of parts that have any."""
    width = report.duration_s / _PARTS
    parts: dict[int, list[float]] = {}
    for time, latency in samples:
        # What ends after the report's span counts to its last part.
        part = min(int((time - report.start_s) / width), _PARTS - 1)
        parts.setdefault(part, []).append(latency)
    return [
        (report.start_s + (part + 0.5) * width, percentile(sorted(latencies), share))
        for part, latencies in sorted(parts.items())
    ]


def _scale(most_s: float) -> Scale:
    unit, name = (1.0, "s") if most_s >= 2.0 else (1e-3, "ms")
    return Scale(max(most_s * 1.05, 1e-6), unit, name)


def _frame(
    left: float, top: float, wide: float, up: Scale, across: Scale, unit: str
) -> list[Markup]:
    """Grid lines and labels of a panel."""
    found = []
    for share, label in up.ticks(4):
        y = top + _HIGH * (1 - share)
        found.append(element("path", d=f"M{left} {y:.1f}h{wide}", stroke="#e4e4e4"))
        mark = f"{label} %" if up.name == "%" else label
        found.append(_text(left - 6, y + 4, mark, text_anchor="end"))
    ticks = across.ticks(int(wide / 70))
    for share, label in ticks:
        words = f"{label} {unit}" if share == ticks[-1][0] else label
        found.append(_text(left + wide * share, top + _HIGH + 16, words, text_anchor="middle"))
    return found


def _line(
    points: Sequence[tuple[float, float]], left: float, top: float, wide: float, color: str
) -> list[Markup]:
    """A line through shares of a panel, with a dot where it is one point alone."""
    placed = [(left + wide * x, top + _HIGH * (1 - y)) for x, y in points]
    if len(placed) == 1:
        (x, y) = placed[0]
        return [element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5, fill=color)]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return [element("polyline", points=joined, fill="none", stroke=color, stroke_width=1.5)]


def _legend(has_slo: bool) -> list[Markup]:
    titles = {"median": "median; share of samples", "p99": "99th percentile"}
    if has_slo:
        titles["SLO"] = "SLO"
    found = []
    for index, (kind, title) in enumerate(titles.items()):
        x = _LEFT + 190 * index
        dash = "5 4" if kind == "SLO" else None
        rule = {"stroke": _COLORS[kind], "stroke_dasharray": dash}
        found.append(element("path", d=f"M{x} 46h22", stroke_width=1.5, **rule))
        found.append(_text(x + 28, 50, title))
    return found


def _text(x: float, y: float, words: str, **attributes: str | float) -> Markup:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)
