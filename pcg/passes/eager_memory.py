"""What eager Hugging Face + PEFT keeps for backward of a whole model, read off the traced graph.

    kept = Σ layers + what layers share + epilogue and loss      each by `pcg.passes.eager_walk`

In the first layer the carried input needs no gradient. cos and sin of the rotary embedding are kept
once a model, [1, S, d]: transformers makes them once for all layers and all sequences of a batch.
tests/passes/test_eager_memory.py measures all of it, to the byte, with
torch.autograd.graph.saved_tensors_hooks.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from pcg.ir.graph import Graph
from pcg.ir.program import ModelGraph, site_of
from pcg.passes.eager_walk import Eager, EagerWalk, Kept


@dataclass(frozen=True)
class EagerMemory:
    """What eager PyTorch keeps for one step.

    Attributes:
        layers: bytes of each layer, in B and S.
        outside: of everything else: what layers share, the epilogue and the loss.
        block: what a layer that is not the first keeps.
        epilogue: what is kept outside the layers.
    """

    layers: tuple[sympy.Expr, ...]
    outside: sympy.Expr
    block: tuple[Kept, ...]
    epilogue: tuple[Kept, ...]

    @property
    def total(self) -> sympy.Expr:
        return sympy.Add(*self.layers, self.outside)


def eager_memory(model: ModelGraph, eager: Eager) -> EagerMemory:
    """What eager autograd keeps of a folded model, before `raise`.

    Args:
        model: one node an ATen operator.
        eager: how it is run.
    """
    positional = _positional(model.prologue)
    prologue = EagerWalk(model.prologue, eager, (), positional, None).run()
    # What the prologue gives is carried first, then what all layers share.
    carries = prologue.requires[: len(model.blocks[0].outputs)]
    layers: list[sympy.Expr] = []
    cache: dict[object, EagerWalk] = {}
    shared: dict[str, Kept] = {}
    is_first, kept_before = True, False
    last = prologue
    for layer, index in enumerate(model.layers):
        block = model.blocks[index]
        key = (index, carries, _adapted(block, eager, layer))
        if key not in cache:
            cache[key] = EagerWalk(block, eager, carries, positional, layer).run()
        last = cache[key]
        shared.update(last.shared)
        size = last.size
        if not is_first and kept_before:
            size -= last.size_of_input
        layers.append(size)
        carries, kept_before, is_first = last.requires, last.keeps_output, False
    epilogue = EagerWalk(model.epilogue, eager, carries, positional, None).run()
    epilogue.loss()
    shared.update(epilogue.shared)
    outside = [*prologue.kept.values(), *shared.values(), *epilogue.kept.values()]
    if kept_before:
        outside = [row for row in outside if row.tensor != model.epilogue.inputs[0].name]
    return EagerMemory(
        tuple(layers),
        sympy.Add(*(row.size_bytes for row in outside)),
        tuple(last.kept.values()),
        tuple(outside),
    )


def _positional(prologue: Graph) -> frozenset[str]:
    """Values that depend on positions and constants alone: one row for all sequences of a batch."""
    names = {value.name for value in prologue.inputs if value.name == "position_ids"}
    names.update(p.name for p in prologue.parameters if p.role == "constant")
    for node in prologue.nodes:
        if all(name in names for name in node.inputs):
            names.update(value.name for value in node.outputs)
    return frozenset(names)


def _adapted(block: Graph, eager: Eager, layer: int) -> tuple[tuple[str, int], ...]:
    sites = [site for node in block.nodes if (site := site_of(block, node)) is not None]
    ranks = [(site, eager.ranks.get(site.format(layer=layer))) for site in sites]
    return tuple((site, rank) for site, rank in ranks if rank is not None)
