"""HTML page of a report: the values of the template `page.html`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pcg.explain.report.figures import (
    front_plot,
    front_points,
    named_points,
    peer_points,
    step_plot,
)
from pcg.explain.report.layer_graph import graph_plot
from pcg.explain.report.report_data import (
    HEADS,
    STAGES,
    ReportData,
    SavedTensor,
    compared_cells,
    fitting,
)
from pcg.pages.environment import page_environment
from pcg.units import gib, rounded

KINDS = {
    "weights": "the base model, frozen",
    "adapters": "trainable parameters",
    "gradients": "one per trainable parameter",
    "optimizer": "the states of {optimizer}",
    "served_adapters": "copies that requests read",
    "kv_cache": "keys and values of served requests",
    "activations": "saved for backward",
    "workspace": "other memory at the peak",
}
DECISIONS = {
    "save": "saved for backward",
    "compress": "saved, packed",
    "recompute": "recomputed in backward",
    "drop": "freed: backward does not read it",
}
SECTIONS = {
    "memory": "Memory",
    "fits": "GPUs",
    "stages": "Stages",
    "timeline": "Over time",
    "pareto": "Front",
    "parallel": "Ranks",
    "tensors": "Tensors",
    "graph": "Graph",
    "formulas": "Formulas",
    "notes": "Notes",
}


def page(report: ReportData) -> str:
    """Return the whole page, which needs no other file."""
    environment = page_environment("pcg.explain.report")
    environment.filters |= {"mib": _mib, "kib": _kib, "count": rounded}
    values = _heading(report) | _memory(report) | _plots(report) | _tensors(report)
    return environment.get_template("page.html").render(values, report=report)


def comparison_page(reports: Mapping[str, ReportData]) -> str:
    """Return the page of a comparison of reports of the same model."""
    first = next(iter(reports.values()))
    facts = {
        "architecture": first.architecture,
        "dtype": first.precision,
        "step": f"batch {first.batch:,} × {first.seq:,} tokens",
        "ranks": f"{first.ranks}",
    }
    values = {
        "facts": facts,
        "heads": HEADS,
        "rows": {name: compared_cells(report) for name, report in reports.items()},
        "fits": fitting(reports),
        "notes": {name: report.notes for name, report in reports.items() if report.notes},
    }
    template = page_environment("pcg.explain.report").get_template("compare.html")
    return template.render(values, subject=first.model)


def _heading(report: ReportData) -> dict[str, Any]:
    facts = {
        "architecture": report.architecture,
        "layers": f"{report.layers}",
        "dtype": report.precision,
        "recipe": report.peft or "no adapters",
        "step": f"batch {report.batch:,} × {report.seq:,} tokens",
        "ranks": f"{report.ranks}",
    }
    if report.pareto:
        number, _, unit = report.memory_budget.partition(" ")
        facts["memory budget"] = f"{gib(int(number))} GiB" if unit else number
    present = {
        "fits": report.fits,
        "stages": report.activations,
        "timeline": report.timeline,
        "pareto": report.pareto,
        "parallel": report.parallel["base"],
        "tensors": report.saved,
        "graph": report.graph,
        "notes": report.notes,
    }
    return {
        "facts": facts,
        "key_numbers": _key_numbers(report),
        "sections": {id_: name for id_, name in SECTIONS.items() if present.get(id_, True)},
    }


def _key_numbers(report: ReportData) -> list[tuple[str, str, str]]:
    size = report.memory_bytes
    base, trainable = report.parameters["base"], report.parameters["trainable"]
    total = (f"{gib(size['total'])} GiB", "in total", "of one rank")
    chosen = report.chosen_stage
    if chosen is None:
        return [
            total,
            (f"{gib(size['weights'])} GiB", "weights", f"{rounded(base)} parameters"),
            (f"{gib(size['kv_cache'])} GiB", "KV cache", "of one batch"),
            (f"{gib(size['workspace'])} GiB", "workspace", "of a forward"),
        ]
    against = ""
    eager = report.stage("eager")
    if chosen is eager:
        against = "as eager PyTorch saves"
    elif eager is not None:
        times = f", {eager.bytes / chosen.bytes:.1f} times as much" if chosen.bytes else ""
        against = f"eager saves {gib(eager.bytes)} GiB{times}"
    ratio = f"{chosen.recompute_flops_ratio:.0%}"
    return [
        total,
        (f"{gib(chosen.bytes)} GiB", "saved for backward", against),
        (ratio, "recomputed", "of the forward's products and attention"),
        (
            rounded(trainable),
            "trainable parameters",
            f"{trainable / base:.2%} of {rounded(base)}",
        ),
    ]


def _memory(report: ReportData) -> dict[str, Any]:
    return {
        "kinds": {kind: words.format(optimizer=report.optimizer) for kind, words in KINDS.items()},
        "chosen": report.chosen_stage,
        "most_of_stages": max((stage.bytes for stage in report.activations), default=0) or 1,
        "stage_words": STAGES,
    }


def _plots(report: ReportData) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if report.graph:
        values["graph_plot"] = graph_plot(report)
    if report.pareto:
        points = [*front_points(report), *named_points(report), *peer_points(report)]
        values["points"] = sorted(points, key=lambda point: -point.size_bytes)
        values["front_plot"] = front_plot(report)
    if report.timeline:
        peak = max(report.timeline, key=lambda moment: moment.total_bytes)
        phase, _, layer = peak.label.partition(" ")
        words = f"{phase} of layer {layer}" if layer else f"the {phase}"
        if phase == "again":
            words = f"the forward that recomputes the input of layer {layer}"
        resident = ("weights", "adapters", "gradients", "optimizer")
        values |= {
            "peak": peak,
            "peak_words": words,
            "resident_bytes": sum(report.memory_bytes[kind] for kind in resident),
            "step_plot": step_plot(report.timeline),
        }
    return values


def _tensors(report: ReportData) -> dict[str, Any]:
    groups: dict[str, list[SavedTensor]] = {}
    for row in report.saved:
        groups.setdefault(row.tensor.partition(".")[0], []).append(row)
    counts = Counter(row.decision for row in report.saved)
    return {
        "decisions": DECISIONS,
        "decision_counts": {word: counts[word] for word in DECISIONS if counts[word]},
        "tensor_groups": groups,
        "group_words": _group_words,
        "readers": _readers,
    }


def _group_words(name: str, rows: Sequence[SavedTensor]) -> str:
    saved = _mib(sum(row.bytes for row in rows if row.decision in ("save", "compress")))
    if name in ("prologue", "epilogue"):
        return f"outside the layers, {saved} MiB saved"
    layers = {row.layers for row in rows}
    many = f"{layers.pop()}" if len(layers) == 1 else "some"
    return f"{many} layer{'s' * (many != '1')} × {saved} MiB saved"


def _readers(row: SavedTensor) -> list[str]:
    """Return backward's readers, grouped by module: `linear, outer (mlp.up_proj)`."""
    ops: dict[str, list[str]] = {}
    for reader in row.needed_by:
        op, _, scope = reader.partition(" ")
        ops.setdefault(scope, []).append(op)
    return [f"{', '.join(names)} {scope}".rstrip() for scope, names in ops.items()]


def _mib(size_bytes: int) -> str:
    size = size_bytes / 2**20
    return f"{size:,.{2 if size >= 0.1 or not size else 4}f}"


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:,.0f}"
