"""The page of a cut: `split.html`, in the frame that all pages share."""

from __future__ import annotations

from pcg.explain.split.report_data import STEPS, SplitData, tokens_per_s
from pcg.pages.environment import page_environment


def split_page(report: SplitData) -> str:
    """Return the whole page, which refers to no other file."""
    facts = {
        "architecture": report.architecture,
        "layers": f"{report.layers}",
        "dtype": report.dtype,
        "recipe": report.peft or "no adapters",
        "step": f"batch {report.batch:,} × {report.seq:,} tokens",
        "base": report.base,
        "client": report.client,
        "link": f"{report.link.name}, {report.link.latency_s * 1e3:g} ms a round trip, "
        f"{report.link.bytes_per_s * 8 / 1e9:g} Gbit/s",
        "sent": "linear operators alone" if report.privacy else "whatever is cheapest",
    }
    template = page_environment("pcg.explain.page").get_template("split.html")
    return template.render(report=report, facts=facts, step_words=STEPS, tokens_per_s=tokens_per_s)
