"""`pcg explain`: what a model needs under a PEFT method, without its weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import typer

from pcg.options import ExplainOptions
from pcg.units import size_text

from .console import busy, print_json
from .options.arguments import Json, Model
from .options.fields import Given
from .options.method import Method, adapter_or_none
from .pages import check_page, write_page


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of how a report is shown.

    Attributes:
        tensors: say what becomes of every tensor, and why; over ranks, list all candidates.
        compare: methods to compare side by side: words of --peft, separated by commas.
        html: a file to write the report to, with figures, as one HTML page.
    """

    title: ClassVar[str] = "Report"

    tensors: bool = False
    compare: str | None = None
    html: Path | None = None

    def check(self, json: bool, peers: bool) -> None:
        """Refuse options that do not go together, before the work."""
        if json and self.tensors:
            raise typer.BadParameter("--json lists every tensor anyway", param_hint="--tensors")
        if self.compare is not None and (self.tensors or peers or self.html is not None):
            raise typer.BadParameter(
                "it goes with none of --tensors, --peers and --html", param_hint="--compare"
            )
        if self.html is not None:
            check_page(self.html)


def explain_command(
    model: Model,
    method: Method,
    options: Given[ExplainOptions],
    show: ReportOptions,
    json: Json = False,
) -> None:
    """Show the memory that a model and a PEFT method need, and why.

    Weights are not needed.
    """
    asked = options.make()
    show.check(json, asked.peers)
    from pcg.source import resolve

    source = resolve(model)
    if show.compare is not None:
        words = [word.strip() for word in show.compare.split(",")]
        methods = {word: adapter_or_none(word, "--compare") for word in words}
        with busy(f"tracing {source.name}"):
            from pcg.explain import explain as explaining
            from pcg.explain.text import comparison

            reports = explaining.compare(model, methods, **options.values)
        if json:
            print_json({name: report.to_json() for name, report in reports.items()})
        else:
            print(comparison(reports))
        return
    peft = method.configuration()
    with busy(f"tracing {source.name}"):
        from pcg.explain import explain as explaining

        report = explaining.explain(model, peft, **options.values)
    if json:
        print_json(report.to_json())
    else:
        print(report.to_text(tensors=show.tensors, formulas=asked.find_region))
    if show.html is not None:
        size = write_page(show.html, report.to_html())
        # With --json the one object is alone on standard output.
        print(f"wrote {show.html} ({size_text(size)})", file=sys.stderr if json else sys.stdout)
