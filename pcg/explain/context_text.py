"""Renders the `context` object of a report as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcg.units import size_text


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
