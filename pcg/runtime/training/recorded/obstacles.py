"""Obstacles to recording: what has the windows of a job run eagerly, whatever the device."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.ir.graph import Graph
from pcg.ir.operators import OPERATORS
from pcg.ir.program.program import ModelGraph, counts_on_host


def why_not_recorded(model: ModelGraph, restored: Sequence[int], virtual_tokens: int) -> str | None:
    """Return why a job's windows run eagerly, whatever the device; None if they need not.

    Args:
        model: the model with the job's bypass networks.
        restored: layers whose inputs backward recomputes.
        virtual_tokens: those of its adapter.
    """
    if virtual_tokens:
        return "its adapter has virtual tokens"
    if restored:
        return "its memory budget has layers' inputs recomputed"
    if drops_in(model.prologue):
        return "it has dropout before its layers"
    if counts_on_host(model):
        return "the host counts the tokens of its experts"
    return None


def drops_in(graph: Graph) -> bool:
    """Return whether a graph has dropout."""
    return any(OPERATORS[node.op].is_random for node in graph.nodes)
