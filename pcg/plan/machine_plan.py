"""The plan that `pcg.plan` returns, and its text rendering."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill

from pcg.explain.report.report import bar
from pcg.plan.candidate import Candidate
from pcg.plan.plan_data import MACHINE, PlanData, front_columns, price_words
from pcg.units import gib

MOST_ROWS = 16
"""Maximum number of rows of the front in the table."""


def plan_text(plan: PlanData) -> str:
    """Return the plan as text of at most 100 columns, except commands."""
    parts = [_heading(plan)]
    if plan.chosen is None:
        parts.append(_closest(plan))
    else:
        parts += [_front(plan), _memory(plan.chosen), _start(plan, plan.chosen)]
    parts.append(_notes(plan))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _heading(plan: PlanData) -> list[str]:
    return [
        f"{plan.model}  ·  {plan.method or 'no adapters'}",
        str(plan.workload),
        "",
        f"{plan.candidates} machines tried, {plan.kept} keep what is promised",
    ]


def _front(plan: PlanData) -> list[str]:
    columns = front_columns(plan)
    shown = plan.front[:MOST_ROWS]
    if plan.chosen is not None and plan.chosen not in shown:
        shown = (*shown[:-1], plan.chosen)
    rows = [[*columns], *([cell(candidate) for cell in columns.values()] for candidate in shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, candidate in zip(rows, (None, *shown), strict=True):
        cells = (
            cell.ljust(width) if name == MACHINE else cell.rjust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        )
        mark = "→" if candidate is not None and candidate is plan.chosen else " "
        lines.append(f"{mark} {'  '.join(cells)}".rstrip())
        if mark == "→":
            lines += _cheaper_tokens(plan)
    if len(plan.front) > len(shown):
        lines.append(f"  {len(plan.front) - len(shown)} more in --json and --html")
    return lines


def _cheaper_tokens(plan: PlanData) -> list[str]:
    """Name the next machine whose tokens are much cheaper than those of the cheapest machine."""
    chosen, other = plan.chosen, plan.cheaper_tokens
    if chosen is None or chosen.dollars_per_hour is None:
        return []
    if other is None or other.dollars_per_hour is None:
        return []
    price = other.dollars_per_hour / chosen.dollars_per_hour
    tokens = plan.tokens_ratio(other)
    return [f"  └ {other.machine}: {tokens:,.1f} × the tokens for {price:,.1f} × the price"]


def _memory(chosen: Candidate) -> list[str]:
    total = chosen.memory_bytes["total"]
    lines = [f"memory of a rank of {chosen.machine}, GiB of {gib(chosen.usable_bytes)} usable"]
    for kind, size in chosen.memory_bytes.items():
        if size:
            name = kind.replace("kv_", "KV ").replace("_", " ")
            lines.append(f"  {name:<16}{gib(size):>10}  {bar(size, total)}".rstrip())
    return lines


def _start(plan: PlanData, chosen: Candidate) -> list[str]:
    # The replicas of a job without requests belong to the same job.
    replicas = 1 if plan.workload.serving is None else chosen.machine.replicas
    each = f"each of {replicas} replicas" if replicas > 1 else "it"
    lines = [f"start {each}:", f"  {plan.command(chosen)}"]
    if plan.workload.serving is not None:
        lines.append(f"  {plan.serve_command(chosen)}")
    return lines


def _closest(plan: PlanData) -> list[str]:
    closest = plan.closest
    assert closest is not None
    broken = [promise for promise in closest.promises if not promise.is_kept]
    return [
        f"no machine keeps what is promised; the closest is {closest.machine}:",
        *(f"  {promise}" for promise in broken),
    ]


def _notes(plan: PlanData) -> list[str]:
    words = price_words(plan)
    notes = [*plan.notes, words] if words else plan.notes
    return [fill(note, 98, initial_indent="* ", subsequent_indent="  ") for note in notes]


@dataclass(frozen=True)
class MachinePlan(PlanData):
    """A plan with its renderings as text and HTML; `to_json` renders its data."""

    def to_html(self) -> str:
        """Return the plan as a self-contained HTML page, `pcg plan --html`."""
        from pcg.plan.page import page  # the templates are slow to import

        return page(self)

    def to_text(self) -> str:
        """Return the plan as text of about 100 columns, except commands."""
        return plan_text(self)
