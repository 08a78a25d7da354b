"""Jobs to record in advance, and the obstacles to recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcg.errors import FinetuneError
from pcg.ir.graph import Graph
from pcg.ir.operators import OPERATORS
from pcg.ir.program.program import ModelGraph, counts_on_host


@dataclass(frozen=True)
class WarmJob:
    """A job to record in advance.

    Attributes:
        peft: the recipe, as for `Executor.finetune`.
        batch: the maximum number of sequences per step.
        seq: the maximum number of tokens per sequence.
    Raises:
        FinetuneError: a number is not an int above 0.
    """

    peft: object
    batch: int = 1
    seq: int = 1024

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise FinetuneError(f"{name}={value!r} of a warm job; use an int of at least 1")


def why_not_recorded(model: ModelGraph, restored: Sequence[int], virtual_tokens: int) -> str | None:
    """Return why a job's windows run eagerly on every device; None if they can be recorded."""
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
    """Return True if a graph has dropout."""
    return any(OPERATORS[node.op].is_random for node in graph.nodes)
