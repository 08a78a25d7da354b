"""Plots the latencies of a serving report as one SVG: over time, and their distribution.

There is a row for each of TTFT, TPOT and ITL. On the left are the median and the 99th percentile of
the samples in each sixtieth of the time; TTFT and TPOT count at their request's submission, an ITL
at the end of its gap. On the right is the share of samples up to a latency. A dashed line is the
SLO, where all requests have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from pcg.explain.page.svg import svg_file
from pcg.runtime.metrics.report import Outcome, ServingReport, Timeline

Samples: TypeAlias = NDArray[np.float64]
"""Rows of (time, latency), in seconds."""

_PARTS = 60
_POINTS = 200
"""The points of the distribution's line."""
_MEDIAN, _P99, _SLO = "#1f6fb4", "#c46a1b", "#888888"


def serving_svg(report: ServingReport, title: str) -> str:
    """Return the plot as a file that stands alone, with a title at its top."""
    rows = _rows(report)
    size = (11.0, 0.9 + 2.1 * max(len(rows), 1))
    return svg_file(lambda figure: draw_latencies(figure, report, title), size, title)


def draw_latencies(figure: Figure, report: ServingReport, title: str) -> None:
    """Fill a figure with the plot."""
    figure.set_layout_engine("constrained")
    figure.suptitle(title, x=0.02, ha="left")
    rows = _rows(report)
    if not rows:
        figure.text(0.02, 0.5, "No request finished.")
        return
    grid = figure.subplots(len(rows), 2, squeeze=False, width_ratios=(2, 1))
    for (name, (samples, slo)), (left, right) in zip(rows.items(), grid, strict=True):
        _over_time(left, report, name, samples, slo)
        _distribution(right, samples[:, 1], slo)
    grid[-1][0].set_xlabel("time, s")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=3)


def _rows(report: ServingReport) -> dict[str, tuple[Samples, float | None]]:
    """Return the samples of each kind of latency that has any, and their SLO."""
    finished = [one for one in report.requests if one.outcome is Outcome.FINISHED]
    rows = {
        "time to first token": (_at_submission(finished, "ttft_s"), _common(finished, "ttft_s")),
        "time per output token": (_at_submission(finished, "tpot_s"), _common(finished, "tpot_s")),
        "inter-token latency": (_gaps(finished), None),
    }
    return {name: (samples, slo) for name, (samples, slo) in rows.items() if len(samples)}


def _at_submission(finished: Sequence[Timeline], name: str) -> Samples:
    """Return the latencies of requests that have one, at their submissions."""
    pairs = [(one.submitted_s, getattr(one, name)) for one in finished]
    return np.array([pair for pair in pairs if pair[1] is not None])


def _gaps(finished: Sequence[Timeline]) -> Samples:
    times = [pair for one in finished for pair in pairwise(one.tokens)]
    return np.array([(after, after - before) for (before, _), (after, _) in times])


def _common(finished: Sequence[Timeline], name: str) -> float | None:
    """Return the SLO of all requests; None where they differ or have none."""
    found = {getattr(one.slo, name) for one in finished}
    return found.pop() if len(found) == 1 else None


def _over_time(
    axes: Axes,
    report: ServingReport,
    name: str,
    samples: Samples,
    slo: float | None,
) -> None:
    scale, unit = _unit(samples[:, 1], slo)
    width = report.duration_s / _PARTS
    # What ends after the report's span counts to its last part.
    parts = np.minimum((samples[:, 0] - report.start_s) / width, _PARTS - 1).astype(int)
    present = np.unique(parts)
    for share, label, color in ((0.99, "99th percentile", _P99), (0.5, "median", _MEDIAN)):
        heights = [np.quantile(samples[parts == part, 1], share) / scale for part in present]
        axes.plot((present + 0.5) * width, heights, color=color, label=label, marker=".")
    if slo is not None:
        axes.axhline(slo / scale, color=_SLO, linestyle="--", label="SLO")
    axes.set_title(f"{name}, {unit}", loc="left", size=10)
    axes.set_xlim(0, report.duration_s)
    axes.set_ylim(bottom=0)


def _distribution(axes: Axes, latencies: NDArray[np.float64], slo: float | None) -> None:
    scale, unit = _unit(latencies, slo)
    shares = np.linspace(0, 1, _POINTS)
    axes.plot(np.quantile(latencies, shares) / scale, shares, color=_MEDIAN)
    if slo is not None:
        axes.axvline(slo / scale, color=_SLO, linestyle="--")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(f"share of samples up to a latency, {unit}", loc="left", size=10)
    axes.set_xlim(left=0)


def _unit(latencies: NDArray[np.float64], slo: float | None) -> tuple[float, str]:
    return (1.0, "s") if max(latencies.max(), slo or 0.0) >= 2.0 else (1e-3, "ms")
