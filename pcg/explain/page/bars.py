"""Memory as bars: one rank's by kind, and what each stage keeps for backward."""

from __future__ import annotations

from pcg.explain.page.element import Markup, element, joined, row, section, table
from pcg.explain.report_data import KINDS, ReportData
from pcg.explain.text import gib

WORDS = {
    "weights": "the base model, frozen",
    "adapters": "trainable parameters",
    "gradients": "one for each of them",
    "optimizer": "what {optimizer} keeps of each",
    "kv_cache": "keys and values of as many served tokens",
    "activations": "kept for backward",
    "workspace": "what the fullest moment needs beside",
}
"""What each kind of memory is."""

STAGES = {
    "eager": "transformers + peft",
    "pruned": "what gradients read, no more",
    "rematerialized": "the rest made again",
    "compressed": "and bits for signs: pcg",
    "token-level": "in windows, keys and values in the KV cache",
    "checkpointing": "layer inputs, forward run twice",
    "torch-partitioner": "torch's min-cut partitioner",
}
"""What each stage is."""


def memory(report: ReportData) -> Markup:
    """One stacked bar of a rank's memory, and its table."""
    total = report.memory_bytes["total"]
    parts, rows, left = [], [], 0.0
    for kind in KINDS:
        size = report.memory_bytes[kind]
        name = kind.replace("kv_cache", "KV cache")
        share = size / total if total else 0.0
        if size:
            title = element("title", f"{name}: {gib(size)} GiB, {share:.1%}")
            part = element(
                "rect",
                title,
                x=f"{100 * left:.3f}%",
                width=f"{100 * share:.3f}%",
                height="100%",
                class_=f"k-{kind} point",
            )
            parts.append(part)
        left += share
        swatch = element("span", class_=f"swatch k-{kind}", aria_hidden="true")
        words = element("span", WORDS[kind].format(optimizer=report.optimizer), class_="aside")
        rows.append(row(joined((swatch, name, words)), gib(size), f"{share:.1%}"))
    rows.append(row("total", gib(total), "100%", class_="sum"))
    bar = element(
        "svg",
        element("title", "Memory of one rank by kind; the table below has the numbers"),
        *parts,
        class_="stack",
        role="img",
    )
    body = element("tbody", *rows)
    return section(
        "memory",
        "Memory of one rank",
        element("figure", bar),
        table(("kind", "#GiB", "#share"), body, caption="Memory of one rank by kind"),
    )


def stages(report: ReportData) -> Markup | None:
    """What each stage keeps for backward; None where nothing is trained."""
    if not report.activations:
        return None
    most = max(stage.bytes for stage in report.activations) or 1
    rows = []
    for stage in report.activations:
        length = f"{100 * stage.bytes / most:.3f}%"
        ours = stage.stage == chosen_stage(report)
        rect = element("rect", width=length, height="100%", class_="ours" if ours else "other")
        words = element("span", STAGES.get(stage.stage, ""), class_="aside")
        name = element("strong", stage.stage) if ours else stage.stage
        rows.append(
            row(
                joined((name, words, element("svg", rect, class_="bar", aria_hidden="true"))),
                gib(stage.bytes),
                f"{stage.bytes_per_block / 2**20:,.1f}",
                f"{stage.recompute_flops_ratio:.0%}",
            )
        )
    return section(
        "stages",
        "Kept for backward, stage by stage",
        element(
            "p",
            "Recomputed: floating-point operations of matrix products and attention done again, as "
            "a share of the forward's.",
        ),
        table(
            ("stage", "#GiB", "#MiB a layer", "#recomputed"),
            element("tbody", *rows),
            class_="stages",
            caption="Bytes kept for backward by stage",
        ),
    )


def chosen_stage(report: ReportData) -> str:
    """The stage that the report's activations are of."""
    names = [stage.stage for stage in report.activations]
    return "compressed" if "compressed" in names else "eager"
