"""`pcg plan`: machines for a workload, without weights and without a GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pcg.plan.workload import MachineOptions, parse_workload

from .options.console import busy, check_page, show_report
from .options.fields import Given, Json, Model
from .options.method import Method


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Options of a plan's presentation.

    Attributes:
        html: a file to write the plan to, with a figure, as one HTML page.
    """

    title: ClassVar[str] = "Report"

    html: Path | None = None


def plan_command(
    model: Model,
    method: Method,
    options: Given[MachineOptions],
    show: PageOptions,
    json: Json = False,
) -> None:
    """Find machines for a workload: their memory, times, promises and prices.

    Neither weights nor a GPU are needed. Times come from data sheets, unless --costs names a
    profile.
    """
    parse_workload(options.make().workload)  # reports errors before torch is imported
    if show.html is not None:
        check_page(show.html)
    from pcg.source import resolve

    source = resolve(model)
    peft = method.configuration()
    with busy(f"planning {source.name}"):
        from pcg.plan import plan as planning

        plan = planning.plan(model, peft, **options.values)
    if plan.method is not None:
        plan = dataclasses.replace(plan, method_options=method.words)
    show_report(plan, plan.to_text(), show.html, json)
