"""The report of `pcg.explain`, and its text rendering."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from pcg.explain.report.report_data import (
    HEADS,
    IN_PARTS,
    KINDS,
    LAYOUTS,
    STAGES,
    GpuCapacity,
    ReportData,
    compared_cells,
    fitting,
)
from pcg.pages import fact_table
from pcg.units import gib, number_ranges, rounded, size_text


def parallel_lines(parallel: Mapping[str, Any], candidates: bool) -> list[str]:
    """Return lines of the base's plan, each site's choice, and the traffic between ranks."""
    lines = [
        f"parallel plan, costs of {parallel['costs']} for {parallel['tokens']:,} tokens "
        f"in sequences of {parallel['context']:,}"
    ]
    if parallel["sequence_parallel"]:
        lines.append("  norms, residuals parts of the tokens on each rank (sequence-parallel)")
    several = len(parallel["communication"]) > 1
    for sent in parallel["communication"]:
        block = sent["block"]
        if several:
            lines.append(f"  {block}")
        rows = [row for row in parallel["base"] if row["block"] == block]
        for held in (*LAYOUTS.values(), IN_PARTS):
            names = [_module(row["weight"]) for row in rows if row["held"] == held]
            if names and held != LAYOUTS["-"]:
                lines.append(f"  {held:<16} {', '.join(names)}")
        for site in (row for row in parallel["bypass"] if row["block"] == block):
            lines += _site_lines(site, candidates)
        lines += [
            f"  a layer sends    {_mib(sent['forward_bytes'])} MiB forward and "
            f"{_mib(sent['backward_bytes'])} backward, of that for the adapters "
            f"{_mib(sent['bypass_forward_bytes'])} and {_mib(sent['bypass_backward_bytes'])},",
            f"  {'':<16} in {_count(sent['forward_messages'])} forward and "
            f"{sent['backward_messages']} backward, of that for the adapters "
            f"{sent['bypass_messages']};",
            f"  {'':<16} {_mib(sent['step_bytes'])} MiB of gradients once an optimizer step"
            + _share(parallel["gradient_accumulation_steps"]),
        ]
    lines += _total_lines(parallel) + _joint_lines(parallel["joint"])
    if parallel["host_ms"] is not None:
        lines.append(
            f"  the host         takes {parallel['host_ms']:.0f} ms to launch a step that decodes, "
            "as none is recorded over ranks"
        )
    return lines + _serving_lines(parallel.get("serving", ()))


def _serving_lines(serving: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for block in serving:
        several = f" of {block['block']}" if len(serving) > 1 else ""
        lines += ["", f"serving plan{several}, the best of all these steps together"]
        lines += [f"  {_module(site):<16} {name}" for site, name in block["sites"].items()]
        lines += [
            f"  {step['tokens']:>6,} token{'' if step['tokens'] == 1 else 's':<9} a layer takes "
            f"{step['layer_us']:,.1f} µs, and sends {_mib(step['bytes'])} MiB in "
            f"{_count(step['messages'])}"
            for step in block["steps"]
        ]
    return lines


def _total_lines(parallel: Mapping[str, Any]) -> list[str]:
    total = parallel["total"]
    if total is None:
        return []
    lines = [
        f"  a rank sends     {_mib(total['forward_bytes'])} MiB forward and "
        f"{_mib(total['backward_bytes'])} backward, of all {total['layers']} layers and both ends,",
        f"  {'':<16} in {_count(total['forward_messages'])} forward and "
        f"{total['backward_messages']} backward;",
    ]
    if total["repeated_messages"]:
        lines.append(
            f"  {'':<16} of that backward repeats {_mib(total['repeated_bytes'])} MiB in "
            f"{_count(total['repeated_messages'])}, which were not saved;"
        )
    text = f"  {'':<16} {_mib(total['step_bytes'])} MiB of gradients once an optimizer step"
    return [*lines, text + _share(parallel["gradient_accumulation_steps"])]


def _joint_lines(joint: Mapping[str, Any] | None) -> list[str]:
    if joint is None:
        return []
    least = (
        "no layouts take less"
        if joint["bound"] == 1
        else (f"no layouts take less than {joint['bound']:.1%} of it")
    )
    return [
        f"  chosen with what the layers keep, {_mib(joint['kept_bytes'])} of "
        f"{_mib(joint['limit_bytes'])} MiB: {joint['layers_ms']:,.1f} ms, of that "
        f"{joint['recomputed_ms']:,.1f} recomputed;",
        f"  {'':<16} one after the other {joint['sequential_ms']:,.1f} ms; {least}",
    ]


def _share(batches: int) -> str:
    return "" if batches == 1 else f", of {batches} batches"


def _site_lines(site: Mapping[str, Any], candidates: bool) -> list[str]:
    lines = [f"  {_module(site['site']):<16} {site['chosen']}"]
    if not candidates:
        return lines
    lines.append(f"  {'':<16} {site['why']}")
    return lines + [
        f"    {row['cost_us']:>12,.1f} µs {_mib(row['communication_bytes']):>9} MiB"
        f" in {row['messages']:>2}"
        f" {_mib(row['step_bytes']):>7} a step {_mib(row['kept_bytes']):>7} kept   "
        f"{row['strategy']}"
        for row in site["candidates"]
    ]


def region_lines(parallel: Mapping[str, Any]) -> list[str]:
    """Return lines of the best strategies by tokens, ranks, degrees and links."""
    lines: list[str] = []
    for variant, rows in parallel.get("regions", {}).items():
        most = f"{parallel['context']:,}"
        lines += ["", f"best strategies, {variant}, in sequences of {most} tokens at most"]
        lines += [_region_line(row) for row in rows]
    return lines


def _region_line(row: Mapping[str, Any]) -> str:
    groups: dict[str, list[str]] = {}
    for site, strategy in row["strategies"].items():
        block, _, path = site.rpartition("/")
        groups.setdefault(strategy, []).append(f"{block}{'/' if block else ''}{_module(path)}")
    words = "; ".join(f"{strategy}: {', '.join(names)}" for strategy, names in groups.items())
    where = f"{row['from_tokens']:,} to {row['to_tokens']:,}"
    return f"  {where:>16} tokens   {words}"


def _module(path: str) -> str:
    """Return the last name of a path, that of the module for a weight, and both for a bias."""
    module, _, name = re.sub(r"\.(weight|T)(?=[._]|$)", "", path).rpartition(".")
    return f"{module.rpartition('.')[2]}.{name}" if name.startswith("bias") else name


def _count(messages: int) -> str:
    return f"{messages} message{'' if messages == 1 else 's'}"


def _mib(size: int) -> str:
    mib = size / 2**20
    return f"{mib:,.2f}" if size else "0"


def context_lines(context: Mapping[str, Any], seq: int) -> list[str]:
    """Return lines of a rank's part of the tokens, and of the traffic between ranks."""
    cp, tokens = context["cp"], context["rank_tokens"]
    lines = [
        f"parts of sequences on {cp} ranks, each with {tokens:,} of {seq:,} tokens, and a layer's "
        "keys and values of all"
    ]
    several = len(context["layers"]) > 1
    for row in context["layers"]:
        name = f"a layer of {row['block']} sends" if several else "a layer sends"
        lines.append(f"  {name:<16} {_sent(row)}")
    return [
        *lines,
        f"  {'a rank sends':<16} {_sent(context['total'])}",
        f"  {'':<16} and {size_text(context['step_bytes'])} of gradients once an optimizer step",
    ]


def _sent(row: Mapping[str, int]) -> str:
    return (
        f"{size_text(row['forward_bytes'])} forward and {size_text(row['backward_bytes'])} "
        f"backward, in {row['forward_messages']} and {row['backward_messages']} messages"
    )


# --------------------------------------------------------------------------------------------- text


_SYMBOLS = ("B", "S", "r", "tp")
"""The symbols of formulas."""
_BAR_CELLS = 28
_BLOCKS = " ▏▎▍▌▋▊▉█"


def report_text(report: ReportData, tensors: bool, formulas: bool) -> str:
    """Return the report as text of at most 100 columns, except formulas."""
    if formulas:
        lines = [*_heading(report), "", *_formulas(report, report.formulas), *_region(report)]
        lines += region_lines(report.parallel)
        return "\n".join(lines)
    parts = [_heading(report), _memory(report)]
    if report.stages:
        parts.append(_pipeline(report))
    if report.activations:
        parts.append(_stages(report))
    if len({group.trained for group in report.layer_groups}) > 1:
        parts.append(_layer_groups(report))
    if len(report.pareto) > 1:
        parts.append(_budgets(report))
    if report.parallel["bypass"]:
        parts.append(parallel_lines(report.parallel, candidates=tensors))
    if report.context:
        parts.append(context_lines(report.context, report.seq))
    if report.peers:
        parts.append(_peers(report))
    if tensors and report.saved:
        parts.append(_tensors(report))
    parts += [_fit(fit) for fit in report.fits]
    if report.gpus and not report.fits:
        parts.append([fill(f"fits  {', '.join(report.gpus)}", 98, subsequent_indent="      ")])
    names = ("activations", "kv_cache", "total")
    if report.formulas:
        parts.append(_formulas(report, [name for name in names if report.formulas[name] != "0"]))
    if report.notes:
        parts.append(
            [fill(note, 98, initial_indent="* ", subsequent_indent="  ") for note in report.notes]
        )
    return "\n\n".join("\n".join(lines) for lines in parts)


def _heading(report: ReportData) -> list[str]:
    base, trainable = report.parameters["base"], report.parameters["trainable"]
    share = f" ({trainable / base:.2%} of the base)" if trainable else ""
    ranks = "one rank" if report.ranks == 1 else f"{report.ranks} ranks"
    step = f"batch {report.batch} × {report.seq:,} tokens"
    return [
        f"{report.model}  ·  {report.architecture}  ·  {report.layers} layers  ·  "
        + report.precision,
        f"{report.peft or 'no adapters'}  ·  {step}  ·  {ranks}",
        "",
        f"parameters   {rounded(base)} base, {rounded(trainable)} trainable{share}",
        fill(f"backend      {report.backend}", 98, subsequent_indent=" " * 13),
    ]


def _memory(report: ReportData) -> list[str]:
    total = report.memory_bytes["total"]
    lines = ["memory of a rank       GiB"]
    for kind in (*KINDS, "total"):
        size = report.memory_bytes[kind]
        if size or kind != "served_adapters":
            name = kind.replace("kv_", "KV ").replace("served_adapters", "served copies")
            lines.append(f"  {name:<14}{gib(size):>10}  {bar(size, total)}".rstrip())
    if report.gathered:
        layers, sent = report.gathered["layers"], gib(report.gathered["sent_bytes"])
        lines.append(f"  the layers are in {report.shard_base} parts: a step of one batch gathers")
        lines.append(f"  {layers:,} layers, and a rank sends {sent} GiB for them")
    if report.packed_bytes:
        copies = f"{gib(report.packed_bytes)} GiB are packed copies: --no-packed-weights"
        lines.append(f"  of the weights, {copies}")
    if report.allocator_bytes:
        holes = f"{gib(report.allocator_bytes)} GiB of holes in the allocator's heap"
        lines.append(f"  and beside it up to {holes}: none below --memory-budget 1")
    for kind, size in report.host_bytes.items():
        what = "the optimizer's states" if kind == "optimizer" else "versions of adapters"
        lines.append(f"  and in host memory: {gib(size)} GiB of {what}")
    if report.kept_bytes:
        kept = gib(report.kept_bytes)
        lines.append(f"  and beside other jobs: {kept} GiB that a job which has ended may keep")
    return lines


def _pipeline(report: ReportData) -> list[str]:
    lines = ["pipeline stages       layers   weights   activations    total GiB  sends on and back"]
    for row in report.stages:
        first, last = row["layers"]
        memory = row["memory_bytes"]
        held = "".join(
            f"{gib(memory[kind]):>{wide}}"
            for kind, wide in (("weights", 10), ("activations", 14), ("total", 13))
        )
        sent = f"{gib(row['forward_bytes'])}, {gib(row['backward_bytes'])}"
        lines.append(f"  {row['stage']:<14}{f'{first}-{last}':>12}{held}  {sent:>17}")
    most = max(row["micro_batches"] for row in report.stages)
    under_way = "1 micro-batch" if most == 1 else f"{most} micro-batches"
    lines.append(f"  the first stage has up to {under_way} under way, each later one fewer")
    return lines


def _stages(report: ReportData) -> list[str]:
    most = max(stage.bytes for stage in report.activations)
    wide = max(14, *(len(stage.stage) + 1 for stage in report.activations))
    lines = [f"{'saved for backward':<{wide + 3}}      GiB   MiB a layer   recomputed"]
    for stage in report.activations:
        if stage.stage == "checkpointing":
            lines += _least(report, wide, most)
        lines.append(
            f"  {stage.stage:<{wide}}{gib(stage.bytes):>10}{stage.bytes_per_block / 2**20:>14,.1f}"
            f"{stage.recompute_flops_ratio:>13.0%}  {bar(stage.bytes, most, 16):<16}"
            f"  {STAGES[stage.stage]}".rstrip()
        )
    return lines


def _least(report: ReportData, wide: int, most: int) -> list[str]:
    """Return the line of the smallest budget that is a share, beside checkpointing's."""
    points = [point for point in report.pareto if not point.restored]
    if len(points) < 2:
        return []
    point, name = points[-1], "budget 0"
    return [
        f"  {name:<{wide}}{gib(point.bytes):>10}{'':>14}{point.recompute_flops_ratio:>13.0%}"
        f"  {bar(point.bytes, most, 16):<16}  --memory-budget 0: pcg"
    ]


def _layer_groups(report: ReportData) -> list[str]:
    rows = [(number_ranges(group.layers), group) for group in report.layer_groups]
    wide = max(15, *(len(name) + 2 for name, _ in rows))
    lines = [f"{'layers':<{wide + 2}}  trained a layer   MiB a layer saved"]
    for name, group in rows:
        trained = rounded(group.trained) if group.trained else "-"
        size = f"{group.bytes / 2**20:,.1f}" if group.has_backward else "no backward"
        lines.append(f"  {name:<{wide}}{trained:>17}{size:>20}")
    return lines


def _budgets(report: ReportData) -> list[str]:
    shares = [point.bytes for point in report.pareto if not point.restored]
    most, least = shares[0], shares[-1]
    lines = ["memory budgets         GiB   recomputed"]
    for point in report.pareto:
        share = 1.0 if most == least else (point.bytes - least) / (most - least)
        name = "in bytes" if point.restored else f"{share:.3f}"
        line = f"  {name:<14}{gib(point.bytes):>10}{point.recompute_flops_ratio:>13.1%}"
        if point.restored:
            line += f"   {point.restored} layers share the saved input of one before"
        lines.append(line)
    bytes_too = "" if report.stages else ", or bytes"
    lines.append(f"  between two, layers mix their plans: --memory-budget 0 to 1{bytes_too}")
    return lines


def _peers(report: ReportData) -> list[str]:
    lines = ["torch's partitioner    GiB   MiB a layer   recomputed   pcg there, GiB"]
    for point in report.peers:
        ours = report.saved_bytes_at(point.recompute_flops_ratio)
        lines.append(
            f"  budget {point.budget:<7}{gib(point.bytes):>10}"
            f"{point.bytes_per_block / 2**20:>14,.1f}{point.recompute_flops_ratio:>13.1%}"
            f"{'-' if ours is None else gib(ours):>17}"
        )
    return lines


def _fit(fit: GpuCapacity) -> list[str]:
    verdict = "fits" if fit.fits else "does not fit"
    lines = [
        f"{fit.gpu}   {gib(fit.usable_bytes)} GiB of {gib(fit.memory_bytes)} usable: {verdict}",
        f"  largest batch  {fit.largest_batch:>10,}   {fit.least_largest_batch:>10,} with "
        "--memory-budget 0",
        f"  longest seq    {fit.largest_seq:>10,}   {fit.least_largest_seq:>10,} with "
        "--memory-budget 0",
    ]
    return lines + [f"  to make it fit: {option}" for option in fit.advice]


def _tensors(report: ReportData) -> list[str]:
    wide = max(len(row.tensor) for row in report.saved)
    lines = [f"{'tensor':<{wide}}  {'MiB':>9}  layers  decision and reason"]
    for row in report.saved:
        shape = f"{row.dtype}[{', '.join(map(str, row.shape))}]"
        lines.append(
            f"{row.tensor:<{wide}}  {row.bytes / 2**20:>9,.3f}  {row.layers:>6}  "
            f"{row.decision}: {row.reason}"
        )
        readers = f", read by {', '.join(row.needed_by)}" if row.needed_by else ""
        lines.append(f"{'':<{wide}}  {shape}{readers}")
    return lines


def _formulas(report: ReportData, names: Iterable[str]) -> list[str]:
    rank = " and adapters of rank r" if report.rank_region else ""
    over = " over tp ranks" if report.formula_degrees else ""
    lines = [f"bytes, for B sequences of S tokens{rank}{over}"]
    for name in names:
        label = name.replace("kv_", "KV ")
        for piece in _pieces(report.formulas[name]):
            lines.append(f"  {label:<12}= {piece}")
            label = ""
    return lines


def _pieces(formula: str) -> list[str]:
    """Return a formula as a line, or a piecewise formula, in S or tp, as a line per piece."""
    from sympy import Piecewise, Symbol, sympify  # the import takes half a second

    expression = sympify(formula, locals={name: Symbol(name, integer=True) for name in _SYMBOLS})
    if not isinstance(expression, Piecewise):
        return [formula]
    *bounded, (last, _) = expression.args
    lines = [f"{piece}  up to {when.lhs} = {int(when.rhs):,}" for piece, when in bounded]
    return [*lines, f"{last}  above"]


def _region(report: ReportData) -> list[str]:
    if report.region is None:
        return []
    low, high = report.region
    where = f"for S from {low:,} to {high:,} at B = {report.batch}"
    if report.rank_region is not None:
        where += ", and for r from {:,} to {:,}".format(*report.rank_region)
    return [
        "",
        *_degrees(report),
        f"The plan is the budget's optimum {where}:",
        "no other choice of saved tensors has fewer bytes for as few recomputed operations,",
        "where a tensor is saved whole or recomputed from those, and weights are resident.",
    ]


def _degrees(report: ReportData) -> list[str]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, degrees in report.formula_degrees.items():
        groups.setdefault(degrees, []).append(name.replace("kv_", "KV "))
    return [
        f"Exact at tp = {', '.join(map(str, degrees))}: {', '.join(names)}."
        for degrees, names in groups.items()
    ]


def comparison(reports: Mapping[str, ReportData]) -> str:
    """Return a text that compares reports of the same model, a line per report."""
    first = next(iter(reports.values()))
    wide = max(len(name) for name in reports)
    widths = (10, 8, 8, 10, 9, 8)

    def line(name: str, cells: Sequence[str]) -> str:
        columns = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return "  ".join((f"{name:<{wide}}", *columns))

    lines = [
        f"{first.model}  ·  {first.dtype}  ·  batch {first.batch} × {first.seq:,} tokens",
        "",
        f"{line('', HEADS)}  GiB",
    ]
    most = max(report.memory_bytes["total"] for report in reports.values())
    for name, report in reports.items():
        drawn = bar(report.memory_bytes["total"], most, 12)
        lines.append(f"{line(name, compared_cells(report))}  {drawn}")
    for gpu, names in fitting(reports).items():
        lines += ["", f"{gpu} holds {names}"]
    return "\n".join(lines)


def bar(part: int, whole: int, cells: int = _BAR_CELLS) -> str:
    """Return a bar for a share of the whole, in eighths of a cell, and at least an eighth."""
    eighths = round(8 * cells * part / whole) if whole else 0
    if part:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest] if rest else "")


@dataclass(frozen=True)
class Report(ReportData):
    """A report with its renderings as text and HTML; `to_json` renders its data."""

    def to_html(self) -> str:
        """Return the report as a self-contained HTML page, `pcg explain --html`."""
        from pcg.explain.report.page import page  # the plotting library takes a second to import

        return page(self)

    def _repr_html_(self) -> str:
        """Return the memory of a rank as a table, which notebooks show."""
        sizes = {kind: f"{gib(size)} GiB" for kind, size in self.memory_bytes.items() if size}
        step = f"batch {self.batch:,} × {self.seq:,} tokens"
        return fact_table(f"{self.model}, {self.peft or 'no adapters'}, {step}", sizes)

    def to_text(self, tensors: bool = False, formulas: bool = False) -> str:
        """Return the report as text of at most 100 columns, except formulas.

        Args:
            tensors: list every tensor of a layer with its decision.
            formulas: print formulas of every kind of memory instead of the numbers.
        """
        return report_text(self, tensors, formulas)
