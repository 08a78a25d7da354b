"""Self-contained HTML pages: the page of a run, and the comparison of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pcg.pages.environment import page_environment
from pcg.records.curves import Curve, figure
from pcg.records.run import EVALUATION, Comparison, Run, flat, read_run, text_of, time_text
from pcg.records.run_files import REPORT, write_whole
from pcg.units import counted, duration_text, size_text

_FIRST = ("loss", "reward")
_LAST = ("learning_rate", "gradient_norm", "tokens", "tokens_per_second", "memory_bytes")
_UNSEEN = ("epoch",)
_MOST_FIGURES = 60
_MOST_SAMPLES = 40
_MOST_COLUMNS = 12
_MOST_OPTIONS = 400


def run_page(run: Run) -> str:
    """Return the page of a run."""
    names = _figures_of([run])
    samples = run.samples
    options = flat(run.config)
    return _rendered(
        "run.html",
        command=f"pcg {run.facts.kind}",
        subject=run.facts.name,
        facts={
            "status": run.status,
            "begun": time_text(run.facts.begun_s),
            "steps": _steps(run),
            "time": duration_text(run.seconds),
            "pcg": run.facts.pcg,
        },
        error=run.facts.error,
        key_numbers=_key_numbers(run),
        figures=[
            (title, _drawn(title, _own_curves(run, title))) for title in names[:_MOST_FIGURES]
        ],
        left_out=max(0, len(names) - _MOST_FIGURES),
        options={
            name: text_of(value)
            for name, value in [*options.items()][:_MOST_OPTIONS]
            if value is not None
        },
        sample_count=counted(len(samples), "sample"),
        sample_columns=_columns(samples),
        samples=[
            (step, [[text_of(row.get(name)) for name in _columns(samples)] for row in rows])
            for step, rows in groupby(reversed(samples[-_MOST_SAMPLES:]), lambda row: row["step"])
        ],
    )


def comparison_page(comparison: Comparison) -> str:
    """Return the page of several runs."""
    names = _figures_of(comparison.runs, merged=False)
    return _rendered(
        "comparison.html",
        command="pcg runs compare",
        subject=" · ".join(comparison.names),
        facts={"runs": len(comparison.runs)},
        comparison=comparison,
        results=[
            (name, [text_of(value) for value in values])
            for name, values in comparison.results.items()
        ],
        options=[
            (name, [text_of(value) for value in values])
            for name, values in [*comparison.differing.items()][:_MOST_OPTIONS]
        ],
        figures=[
            (name, _drawn(name, _curves_of(comparison, name))) for name in names[:_MOST_FIGURES]
        ],
        left_out=max(0, len(names) - _MOST_FIGURES),
    )


def _rendered(template: str, **values: Any) -> str:
    page = page_environment("pcg.records").get_template(template).render(**values)
    return page.encode("utf-8", "replace").decode()  # names and samples may have lone surrogates


def _figures_of(runs: Sequence[Run], *, merged: bool = True) -> list[str]:
    """Return the names to draw; an evaluation shares the figure of the number it evaluates."""
    names = dict.fromkeys(name for run in runs for name, points in run.series.items() if points)
    shown = [name for name in names if name not in _UNSEEN]
    if merged:
        shown = [
            name
            for name in shown
            if name.removeprefix(EVALUATION) not in names or not name.startswith(EVALUATION)
        ]
    first = [name for name in shown if name.removeprefix(EVALUATION) in _FIRST]
    last = [name for name in _LAST if name in shown]
    return [*first, *(name for name in shown if name not in (*first, *last)), *last]


def _own_curves(run: Run, name: str) -> list[Curve]:
    evaluation = f"{EVALUATION}{name}"
    curves = [Curve(name, run.series[name], is_marked=name.startswith(EVALUATION))]
    if run.series.get(evaluation):
        curves.append(Curve(evaluation, run.series[evaluation], 1, is_marked=True))
    return curves


def _curves_of(comparison: Comparison, name: str) -> list[Curve]:
    return [
        Curve(called, run.series[name], place, is_marked=name.startswith(EVALUATION))
        for place, (called, run) in enumerate(zip(comparison.names, comparison.runs, strict=True))
        if run.series.get(name)
    ]


def _drawn(title: str, curves: Sequence[Curve]) -> tuple[Markup, Sequence[Curve]]:
    return figure(title, curves), curves


def _key_numbers(run: Run) -> list[tuple[str, str, str]]:
    numbers = []
    for name in ("loss", f"{EVALUATION}loss", "reward"):
        points, least = run.series.get(name), run.least(name)
        if not points or least is None:
            continue
        best = max(points, key=lambda point: point[1]) if name == "reward" else least
        numbers.append((f"{points[-1][1]:.4g}", name, f"best {best[1]:.4g} at step {best[0]:,}"))
    speed, memory = run.last("tokens_per_second"), run.last("memory_bytes")
    if speed is not None:
        numbers.append((f"{speed:,.0f}", "tokens/s", "since the start, or since it was resumed"))
    if memory is not None:
        numbers.append((size_text(memory), "memory", "at the last step"))
    return numbers


def _steps(run: Run) -> str:
    total = run.config.get("total_steps")
    return f"{run.last_step:,} of {total:,}" if type(total) is int else f"{run.last_step:,}"


def _columns(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in samples[-_MOST_SAMPLES:] for name in row)
    return [name for name in names if name != "step"][:_MOST_COLUMNS]


def write_report(folder: Path) -> Path:
    """Write the page of a recorded run; return the file.

    Raises:
        RecordError: the record is missing or damaged, or the page cannot be written.
    """
    path = folder / REPORT
    write_whole(path, run_page(read_run(folder)))
    return path
