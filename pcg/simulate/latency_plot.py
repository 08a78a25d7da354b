"""Plot of a serving report's latencies as SVG: over time, and their distribution.

TTFT, TPOT and ITL have a row each. The left plot shows the median and the 99th percentile of the
samples in each sixtieth of the time; TTFT and TPOT count at their request's submission, an ITL at
the end of its gap. The right plot shows the share of samples up to a latency. A dashed line marks
the SLO, if all requests have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pcg.pages import charts
from pcg.pages.charts import Axis
from pcg.runtime.metrics.report import Outcome, ServingReport, Timeline

Samples: TypeAlias = NDArray[np.float64]
"""Rows of (time, latency), in seconds."""

_PARTS = 60
_POINTS = 200
"""The points of the distribution's line."""
_WIDTH, _ROW = 1056, 200
_MEDIAN, _P99, _SLO = "save", "activations", "other"
_DASH = "6 3"


def serving_svg(report: ServingReport, title: str) -> str:
    """Return the plot as an SVG file with a title."""
    rows = _rows(report)
    height = 60 + _ROW * max(len(rows), 1)
    parts = [charts.text(14, 18, title, "start", "ink")]
    if not rows:
        parts.append(charts.text(14, height / 2, "No request finished.", "start", "ink"))
        return charts.svg_file(_WIDTH, height, title, parts)
    lines = {"99th percentile": _P99, "median": _MEDIAN}
    marks = {label: charts.sample_line(color) for label, color in lines.items()}
    if any(slo is not None for _, slo in rows.values()):
        marks["SLO"] = charts.sample_line(_SLO, _DASH)
    parts.append(charts.legend(marks, 740, 18, _WIDTH)[0])
    for place, (name, (samples, slo)) in enumerate(rows.items()):
        top = 60 + place * _ROW
        parts += _over_time(report, name, samples, slo, top)
        parts += _distribution(samples[:, 1], slo, top)
    parts.append(charts.text(360, height - 8, "time, s"))
    return charts.svg_file(_WIDTH, height, title, parts)


def _rows(report: ServingReport) -> dict[str, tuple[Samples, float | None]]:
    finished = [each for each in report.requests if each.outcome is Outcome.FINISHED]
    rows = {
        "time to first token": (_at_submission(finished, "ttft_s"), _common(finished, "ttft_s")),
        "time per output token": (_at_submission(finished, "tpot_s"), _common(finished, "tpot_s")),
        "inter-token latency": (_gaps(finished), None),
    }
    return {name: (samples, slo) for name, (samples, slo) in rows.items() if len(samples)}


def _at_submission(finished: Sequence[Timeline], name: str) -> Samples:
    pairs = [(each.submitted_s, getattr(each, name)) for each in finished]
    return np.array([pair for pair in pairs if pair[1] is not None])


def _gaps(finished: Sequence[Timeline]) -> Samples:
    times = [pair for each in finished for pair in pairwise(each.tokens)]
    return np.array([(after, after - before) for (before, _), (after, _) in times])


def _common(finished: Sequence[Timeline], name: str) -> float | None:
    """Return the common SLO of all requests; None if SLOs differ or are missing."""
    slos = {getattr(timeline.slo, name) for timeline in finished}
    return slos.pop() if len(slos) == 1 else None


def _over_time(
    report: ServingReport, name: str, samples: Samples, slo: float | None, top: float
) -> list[str]:
    scale, unit = _unit(samples[:, 1], slo)
    width = report.duration_s / _PARTS
    # Samples after the report's span count in its last part.
    parts = np.minimum((samples[:, 0] - report.start_s) / width, _PARTS - 1).astype(int)
    present = np.unique(parts)
    lines = {}
    for share, label in ((0.99, "99th percentile"), (0.5, "median")):
        heights = [np.quantile(samples[parts == part, 1], share) / scale for part in present]
        lines[label] = list(zip((present + 0.5) * width, heights, strict=True))
    most = max(height for _, height in lines["99th percentile"])
    x = Axis(0, report.duration_s, 46, 676)
    y = _from_zero(max(most, (slo or 0.0) / scale), top + _ROW - 48, top)
    drawn = [charts.text(46, top - 12, f"{name}, {unit}", "start", "ink")]
    drawn.append(charts.grid(x, y, charts.ticks(x, 6), charts.ticks(y, 4)))
    for (label, points), color in zip(lines.items(), (_P99, _MEDIAN), strict=True):
        drawn.append(charts.line(points, x, y, color, label=label))
        drawn += [charts.mark(x(a), y(b), color) for a, b in points]
    if slo is not None:
        ends = [(0, slo / scale), (report.duration_s, slo / scale)]
        drawn.append(charts.line(ends, x, y, _SLO, dash=_DASH, label="SLO"))
    return drawn


def _distribution(latencies: NDArray[np.float64], slo: float | None, top: float) -> list[str]:
    scale, unit = _unit(latencies, slo)
    shares = np.linspace(0, 1, _POINTS)
    points = list(zip(np.quantile(latencies, shares) / scale, shares, strict=True))
    x = _from_zero(max(points[-1][0], (slo or 0.0) / scale), 740, 1046)
    y = Axis(0, 1, top + _ROW - 48, top)
    words = f"share of samples up to a latency, {unit}"
    drawn = [charts.text(740, top - 12, words, "start", "ink")]
    drawn.append(charts.grid(x, y, charts.ticks(x, 6), charts.ticks(y, 5, percent=True)))
    drawn.append(charts.line(points, x, y, _MEDIAN, label="share"))
    if slo is not None:
        ends = [(slo / scale, 0), (slo / scale, 1)]
        drawn.append(charts.line(ends, x, y, _SLO, dash=_DASH, label="SLO"))
    return drawn


def _from_zero(most: float, start: float, end: float) -> Axis:
    return Axis(0, 1.04 * most or 1.0, start, end)


def _unit(latencies: NDArray[np.float64], slo: float | None) -> tuple[float, str]:
    return (1.0, "s") if max(latencies.max(), slo or 0.0) >= 2.0 else (1e-3, "ms")
