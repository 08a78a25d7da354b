"""`pcg explain`: memory and cuts of a model under a PEFT method, without its weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from pcg.options import ExplainOptions, SplitOptions

from .options.console import busy, check_page, print_json, show_report, write_page
from .options.fields import Given, Json, Model, flags_of
from .options.method import Method, adapter_or_none

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of a report's presentation.

    Attributes:
        tensors: list every tensor's decision and its reason; over ranks, list all candidates.
        compare: methods to compare side by side: words of --peft, separated by commas.
        html: a file to write the report to, with figures, as one HTML page.
        split: instead of memory, show the cut between a base that holds the frozen weights and a
            client that holds the adapters: the work and the traffic of each round trip.
    """

    title: ClassVar[str] = "Report"

    tensors: bool = False
    compare: str | None = None
    html: Path | None = None
    split: bool = False

    def check(self, json: bool, peers: bool) -> None:
        """Refuse incompatible options before the work."""
        if json and self.tensors:
            raise typer.BadParameter("--json lists every tensor anyway", param_hint="--tensors")
        if self.compare is not None and (self.tensors or peers):
            raise typer.BadParameter(
                "it goes with neither --tensors nor --peers", param_hint="--compare"
            )
        if self.split and (self.tensors or self.compare is not None):
            raise typer.BadParameter(
                "it goes with neither --tensors nor --compare", param_hint="--split"
            )
        if self.html is not None:
            check_page(self.html)


def explain_command(
    model: Model,
    method: Method,
    options: Given[ExplainOptions],
    show: ReportOptions,
    between: Given[SplitOptions],
    json: Json = False,
) -> None:
    """Show the memory that a model and a PEFT method need, and why; or how to split it (--split).

    Weights are not needed.
    """
    asked = options.make()
    show.check(json, asked.peers)
    _check_split(show.split, options.values, between.values)
    from pcg.runtime.training.torch_optimizers import Optimizer
    from pcg.source import resolve

    source = resolve(model)
    # Report a wrong name within milliseconds, before the slow import of torch.
    Optimizer.of(asked.optimizer, asked.optimizer_options, asked.offload_optimizer)
    if show.split:
        configuration = method.configuration()
        with busy(f"tracing {source.name}"):
            from pcg.explain.explain_split import explain_split

            cut = explain_split(model, configuration, **options.values, **between.values)
        show_report(cut, cut.to_text(), show.html, json)
        return
    if show.compare is not None:
        words = [word.strip() for word in show.compare.split(",")]
        methods = {word: adapter_or_none(word, "--compare") for word in words}
        with busy(f"tracing {source.name}"):
            from pcg.explain import explain as explaining
            from pcg.explain.report.page import comparison_page
            from pcg.explain.report.report import comparison

            reports = explaining.compare(model, methods, **options.values)
        if json:
            print_json({name: report.to_json() for name, report in reports.items()})
        else:
            print(comparison(reports))
        if show.html is not None:
            write_page(show.html, comparison_page(reports), json)
        return
    peft = method.configuration()
    with busy(f"tracing {source.name}"):
        from pcg.explain import explain as explaining

        report = explaining.explain(model, peft, **options.values)
    text = report.to_text(tensors=show.tensors, formulas=asked.find_region)
    show_report(report, text, show.html, json)


SPLIT_STEP = ("batch", "seq", "dtype")
"""The step's options that a cut depends on."""


def _check_split(is_split: bool, options: Collection[str], between: Collection[str]) -> None:
    """Refuse options that do not affect the chosen report."""
    if not is_split:
        for name in between:
            raise typer.BadParameter(
                "it has no effect without --split", param_hint=flags_of(name)[0]
            )
        return
    for name in options:
        if name not in SPLIT_STEP:
            raise typer.BadParameter("it has no effect with --split", param_hint=flags_of(name)[0])
