"""Parallelize: the graphs of a model over the ranks of a tensor-parallel group.

The base's plan comes first, from each layer's own graph (`pcg.parallel.base_plan`), and does not
depend on adapters; bypass networks are sharded under it (dependent parallelization, FlexLLM §5.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from pcg.ir.graph import Graph
from pcg.ir.layouts import REPLICATED, Layout
from pcg.ir.program import ModelGraph, token_embedding
from pcg.parallel.base_plan import COLUMN, ROW, base_plan
from pcg.parallel.sharder import shard
from pcg.passes.localize import localize
from pcg.passes.repeat_heads import repeat_heads
from pcg.passes.split import split


@dataclass(frozen=True)
class Sharded:
    """A model over ranks.

    Attributes:
        typed: its graphs with layouts in their types and parallelization operators between.
        local: the graphs of one rank.
    """

    typed: ModelGraph
    local: ModelGraph


def parallelize(model: ModelGraph, base: ModelGraph, degree: int) -> Sharded:
    """A model over so many ranks.

    Args:
        model: with bypass networks attached, or without.
        base: the same without.
        degree: number of ranks, at least 2.
    Raises:
        ParallelError: the degree divides neither heads nor products; those that do are named.
    """
    blocks = tuple(
        _layer(block, plain, degree) for block, plain in zip(model.blocks, base.blocks, strict=True)
    )
    prologue = shard(model.prologue, degree, _vocabulary(model, base, degree, prologue=True))
    epilogue = shard(model.epilogue, degree, _vocabulary(model, base, degree, prologue=False))
    typed = dataclasses.replace(model, prologue=prologue, blocks=blocks, epilogue=epilogue)
    return Sharded(typed, typed.map(lambda graph: localize(graph, degree)))


def _layer(block: Graph, plain: Graph, degree: int) -> Graph:
    plan = base_plan(split(plain), degree)
    whole = repeat_heads(split(block), degree)
    return shard(whole, degree, {**plan, **_bypass_plan(whole, plan)})


def _bypass_plan(graph: Graph, plan: Mapping[str, Layout]) -> dict[str, Layout]:
    """LoRA without a word between ranks: partitioned as the base's weight, replicated beside it.

    Under a column-parallel product B has its rows and A is a copy, under a row-parallel one A has
    its columns and B is a copy; only the copies' gradients are summed, once an optimizer step.
    """
    found: dict[str, Layout] = {}
    for node in graph.nodes:
        if node.op == "shrink":
            for reader in graph.consumers[node.name]:
                weight = _base_weight(graph, reader.inputs[0])
                layout = plan.get(weight or "")
                if layout == ROW:
                    found |= {node.inputs[1]: ROW, reader.inputs[2]: REPLICATED}
                elif layout is not None:
                    found |= {node.inputs[1]: REPLICATED, reader.inputs[2]: layout}
    return found


def _base_weight(graph: Graph, name: str) -> str | None:
    """The weight of the product that a bypass network stands beside."""
    node = graph.producers.get(name)
    while node is not None and node.op != "linear":
        node = graph.producers.get(node.inputs[0])
    return None if node is None else node.inputs[1]


def _vocabulary(
    model: ModelGraph, base: ModelGraph, degree: int, *, prologue: bool
) -> dict[str, Layout]:
    """Rows of the token embedding, or of the output's weight, on each rank, if equally many."""
    graph = base.prologue if prologue else base.epilogue
    if prologue:
        node = token_embedding(graph)
        weight = node.inputs[0] if node is not None else None
    else:
        scope = base.output_module
        products = [n for n in graph.nodes if n.op == "linear"]
        weight = products[-1].inputs[1] if products and scope else None
    if weight is None or graph.types[weight].features[0] % degree:
        return {}
    return {weight: COLUMN}
