"""`pcg plan`: machines for a workload, without weights and without a GPU."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pcg.plan.options import MachineOptions
from pcg.plan.workload import parse_workload
from pcg.units import size_text

from .options.arguments import Json, Model
from .options.console import busy, print_json
from .options.fields import Given
from .options.method import Method
from .options.pages import check_page, write_page


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Options of how a plan is shown.

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

    Weights are not needed, and no GPU. Times come from data sheets, unless --costs names a profile.
    """
    parse_workload(options.make().workload)  # what is wrong is said before torch is imported
    if show.html is not None:
        check_page(show.html)
    from pcg.source import resolve

    source = resolve(model)
    peft = method.configuration()
    with busy(f"planning {source.name}"):
        from pcg.plan import plan as planning

        found = planning.plan(model, peft, **options.values)
    if found.method is not None:
        found = dataclasses.replace(found, method_options=method.words)
    if json:
        print_json(found.to_json())
    else:
        print(found.to_text())
    if show.html is not None:
        size = write_page(show.html, found.to_html())
        # With --json the one object is alone on standard output.
        print(f"wrote {show.html} ({size_text(size)})", file=sys.stderr if json else sys.stdout)
