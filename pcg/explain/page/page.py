"""The page of a report: its heading, its sections, and the style and script that it carries."""

from __future__ import annotations

from pcg.explain.page.bars import chosen_stage, memory, stages
from pcg.explain.page.block import block
from pcg.explain.page.element import Markup, element, section
from pcg.explain.page.moments import moments
from pcg.explain.page.parallel import parallel
from pcg.explain.page.pareto import pareto
from pcg.explain.page.script import SCRIPT
from pcg.explain.page.style import STYLE
from pcg.explain.page.tensors import tensors
from pcg.explain.report_data import ReportData
from pcg.explain.text import count_text, gib

_NAV = {
    "memory": "Memory",
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
    """The whole page; it refers to no other file."""
    sections = {
        "memory": memory(report),
        "stages": stages(report),
        "timeline": moments(report),
        "pareto": pareto(report),
        "parallel": parallel(report),
        "tensors": tensors(report),
        "graph": block(report),
        "formulas": _formulas(report),
        "notes": _notes(report),
    }
    present = [name for name, made in sections.items() if made is not None]
    links = (element("a", _NAV[name], href=f"#{name}") for name in present)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{report.model} – pcg explain"),
        element("style", Markup(STYLE)),
    )
    body = element(
        "body",
        element("header", *_heading(report)),
        element("nav", *links, aria_label="Sections"),
        element("main", *sections.values()),
        element("footer", "Sizes in binary units: 1 GiB = 2", element("sup", "30"), " bytes."),
        element("script", Markup(SCRIPT)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _heading(report: ReportData) -> list[Markup]:
    step = f"batch {report.batch:,} × {report.seq:,} tokens"
    facts = {
        "architecture": report.architecture,
        "layers": f"{report.layers}",
        "dtype": report.dtype,
        "recipe": report.peft or "no adapters",
        "step": step,
        "ranks": f"{report.tp}",
    }
    if report.pareto:
        number, _, unit = report.memory_budget.partition(" ")
        facts["memory budget"] = f"{gib(int(number))} GiB" if unit else number
    pairs = [element("div", element("dt", k), element("dd", v)) for k, v in facts.items()]
    return [
        element("p", "pcg explain", class_="kicker"),
        element("h1", report.model),
        element("dl", *pairs, class_="facts"),
        element("ul", *_key_numbers(report), class_="keys"),
    ]


def _key_numbers(report: ReportData) -> list[Markup]:
    size = report.memory_bytes
    base, trainable = report.parameters["base"], report.parameters["trainable"]
    found = [_key(f"{gib(size['total'])} GiB", "in total", "of one rank")]
    kept = {stage.stage: stage for stage in report.activations}
    if kept:
        ours, eager = kept[chosen_stage(report)], kept.get("eager")
        aside = "" if eager is None else f"eager keeps {gib(eager.bytes)} GiB"
        if ours is eager:
            aside = "as eager PyTorch keeps"
        elif eager is not None and ours.bytes:
            aside += f", {eager.bytes / ours.bytes:.1f} times as much"
        found.append(_key(f"{gib(ours.bytes)} GiB", "kept for backward", aside))
        ratio = f"{ours.recompute_flops_ratio:.0%}"
        found.append(_key(ratio, "recomputed", "of the forward's products and attention"))
        share = f"{trainable / base:.2%} of {count_text(base)}" if base else ""
        found.append(_key(count_text(trainable), "trainable parameters", share))
    else:
        found.append(
            _key(f"{gib(size['weights'])} GiB", "weights", f"{count_text(base)} parameters")
        )
        found.append(_key(f"{gib(size['kv_cache'])} GiB", "KV cache", "of one batch"))
        found.append(_key(f"{gib(size['workspace'])} GiB", "workspace", "of a forward"))
    return found


def _key(number: str, name: str, aside: str) -> Markup:
    return element(
        "li",
        element("strong", number),
        element("span", name),
        element("span", aside, class_="aside"),
    )


def _formulas(report: ReportData) -> Markup:
    rows = [
        element("div", element("dt", name), element("dd", element("code", formula)))
        for name, formula in report.formulas.items()
    ]
    return section(
        "formulas",
        "Formulas",
        element("p", "Bytes of one rank, for B sequences of S tokens."),
        element("dl", *rows, class_="formulas"),
    )


def _notes(report: ReportData) -> Markup | None:
    if not report.notes:
        return None
    return section("notes", "Notes", element("ul", *(element("li", note) for note in report.notes)))
