"""How the ranks share a layer: the base's plan, and each site's candidates with time and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcg.explain.page.element import Markup, element, row, scroll, section, table
from pcg.explain.report_data import ReportData

_LAYOUTS = {"|-2": "column-parallel", "|-1": "row-parallel", "-": "whole on each rank"}
_SEQUENCE_PARALLEL = (
    " Of norms and residuals each rank has a part of the tokens (sequence-parallel)."
)
_HEADS = ("strategy", "#µs", "#KiB sent", "#KiB a step", "#messages")


def parallel(report: ReportData) -> Markup | None:
    """The section; None for one rank."""
    found = report.parallel
    if not found["base"]:
        return None
    return section(
        "parallel",
        "Over ranks",
        element(
            "p",
            f"The base is fixed; what adapters add is the least of all typed ways, by the costs of "
            f"{found['costs']} at {found['tokens']:,} tokens in sequences of {found['context']:,}. "
            "Times and bytes are what a site adds to one layer and one rank: forward and backward, "
            "and the gradients of copied weights, which are summed once an optimizer step"
            + _share(found["gradient_accumulation_steps"])
            + (_SEQUENCE_PARALLEL if found["sequence_parallel"] else ""),
        ),
        *(_sent(sent) for sent in found["communication"]),
        scroll("The base's plan", _base(found)),
        *(_site(site) for site in found["bypass"]),
    )


def _share(batches: int) -> str:
    return "." if batches == 1 else f", of which each of its {batches} batches pays a part."


def _base(found: Mapping[str, Any]) -> Markup:
    groups: dict[str, list[str]] = {}
    for weight in found["base"]:
        name = weight["weight"].removesuffix(".weight")
        if name not in groups.setdefault(weight["layout"], []):
            groups[weight["layout"]].append(name)
    rows = [
        element(
            "tr",
            element("th", _LAYOUTS.get(layout, layout), scope="row"),
            element("td", ", ".join(names)),
        )
        for layout, names in groups.items()
    ]
    return table(("held", "weights"), element("tbody", *rows), caption="The base's plan")


def _sent(sent: Mapping[str, Any]) -> Markup:
    adapters = sent["bypass_forward_bytes"] + sent["bypass_backward_bytes"]
    both = sent["forward_bytes"] + sent["backward_bytes"]
    return element(
        "p",
        f"{sent['block']}: a rank sends {_kib(both)} KiB in "
        f"{sent['forward_messages'] + sent['backward_messages']} messages a step, "
        f"{_kib(adapters)} of it for adapters, and {_kib(sent['step_bytes'])} of gradients once an "
        "optimizer step.",
    )


def _site(site: Mapping[str, Any]) -> Markup:
    rows = [
        row(
            candidate["strategy"],
            f"{candidate['cost_us']:,.1f}",
            _kib(candidate["communication_bytes"]),
            _kib(candidate["step_bytes"]),
            str(candidate["messages"]),
            class_="chosen" if candidate["strategy"] == site["chosen"] else None,
        )
        for candidate in site["candidates"]
    ]
    made = table(_HEADS, element("tbody", *rows), caption=f"Candidates of {site['site']}")
    return element(
        "details",
        element("summary", element("code", site["site"]), f": {site['chosen']}"),
        element("p", site["why"]),
        scroll(f"Candidates of {site['site']}", made),
    )


def _kib(size: int) -> str:
    return f"{size / 1024:,.0f}"
