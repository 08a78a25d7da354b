"""Renders the `parallel` and `context` objects of a report as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pcg.units import size_text

LAYOUTS = {"|-2": "column-parallel", "|-1": "row-parallel"}


def parallel_lines(parallel: Mapping[str, Any], candidates: bool) -> list[str]:
    """Return lines of the base's plan, each site's choice, and the bytes between ranks."""
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
        for layout, called in LAYOUTS.items():
            names = [_module(row["weight"]) for row in rows if row["layout"] == layout]
            if names:
                lines.append(f"  {called:<16} {', '.join(names)}")
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
    """Return lines of the plan that serves, if requests are served beside."""
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
    """Return lines of what a rank sends of the whole model; none where it is not trained."""
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
    told = "; ".join(f"{strategy}: {', '.join(names)}" for strategy, names in groups.items())
    where = f"{row['from_tokens']:,} to {row['to_tokens']:,}"
    return f"  {where:>16} tokens   {told}"


def _module(path: str) -> str:
    """Return the last part of a module's path, or of a weight's."""
    return path.removesuffix(".weight").rpartition(".")[2]


def _count(messages: int) -> str:
    return f"{messages} message{'' if messages == 1 else 's'}"


def _mib(size: int) -> str:
    mib = size / 2**20
    return f"{mib:,.2f}" if size else "0"


def context_lines(context: Mapping[str, Any], seq: int) -> list[str]:
    """Return lines of a rank's part of the tokens, and of the bytes between ranks."""
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
