"""Graphs whose nodes are grouped to kernels, as the pipeline groups them for Triton."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pcg.ir.analysis.kernel_group import KernelGroup, items_of
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph, KernelGraph, Node
from pcg.ir.program.program import Program
from pcg.passes.fusion.defer_sums import SplitCacheAppend
from pcg.passes.fusion.group_kernels import GroupKernels, OrderKernels, SideBySide
from tests.support.families import FAMILIES


def grouped(graph: Graph) -> KernelGraph:
    """A graph grouped as it is, without appends to the cache of its own."""
    found = OrderKernels().run(SideBySide().run(GroupKernels().run(graph)))
    verify(found)
    return found


def lowered(graph: Graph) -> KernelGraph:
    """A graph as it is emitted for Triton."""
    return grouped(SplitCacheAppend().run(graph))


def schedule(graph: Graph) -> tuple[Node | KernelGroup, ...]:
    """The groups and the other nodes of a graph, in the order in which they run."""
    return items_of(grouped(graph))


def groups(graph: Graph) -> list[KernelGroup]:
    """The groups of a graph, in the order in which they run."""
    return [item for item in schedule(graph) if isinstance(item, KernelGroup)]


def graphs(program: Program) -> Iterator[Graph]:
    yield from program.serving.model.graphs
    training = program.training
    assert training is not None
    for plan in training.plans:
        yield plan.forward
        if plan.backward is not None:
            yield plan.backward
    yield training.epilogue


USUAL = {"llama3", "qwen3", "gemma2", "opt", "gpt2", "gptj", "falcon-7b", "cohere-qk_norm"}


EVERY = [
    pytest.param(f.name, marks=[] if f.name in USUAL else [pytest.mark.slow]) for f in FAMILIES
]
