"""The bytes that eager transformers + peft save for backward, read off the traced graph.

    saved = virtual tokens + Σ layers + what layers share + epilogue and loss

each but the first by `pcg.explain.eager.walk`. In the first layer the carried input needs no
gradient, unless a prompt is trained. cos and sin of the rotary embedding, [1, S, d], are saved once
for all layers and all sequences. tests/explain/test_eager_memory.py measures all of it to the byte
with torch.autograd.graph.saved_tensors_hooks.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import sympy

from pcg.explain.eager.saved_storages import EagerRun, Invariants, SavedStorage
from pcg.explain.eager.walk import EagerWalk
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph, site_of
from pcg.ir.types import DTYPE_BYTES
from pcg.passes.attach import embeds
from pcg.peft.method import Bypass


@dataclass(frozen=True)
class EagerMemory:
    """The bytes that eager PyTorch saves for one step.

    Attributes:
        layers: the bytes of each layer, in B and S.
        outside: the bytes of what layers share, the epilogue and the loss.
        block: the tensors saved by a layer that is not the first.
        epilogue: the tensors saved outside the layers.
    """

    layers: tuple[sympy.Expr, ...]
    outside: sympy.Expr
    block: tuple[SavedStorage, ...]
    epilogue: tuple[SavedStorage, ...]

    @property
    def total(self) -> sympy.Expr:
        return sympy.Add(*self.layers, self.outside)


def eager_memory(model: ModelGraph, eager: EagerRun) -> EagerMemory:
    """Return the bytes that eager autograd saves of a folded model, before `raise`.

    Args:
        model: the model, one node an ATen operator.
        eager: the way that PyTorch runs it.
    """
    invariants = _invariants(model.prologue)
    trained = (embeds(model.prologue),) if eager.prompt else ()
    prologue = EagerWalk(model.prologue, eager, (), invariants, trained=trained).run()
    # The prologue's first outputs are carried, the others are shared by all layers.
    carries = prologue.requires[: len(model.blocks[0].outputs)]
    layers: list[sympy.Expr] = []
    cache: dict[object, EagerWalk] = {}
    shared: dict[str, SavedStorage] = {}
    last = prologue
    for layer, index in enumerate(model.layers):
        block = model.blocks[index]
        key = (index, carries, _adapted(block, eager, layer))
        saved_before = last.saves_output
        if key not in cache:
            cache[key] = EagerWalk(block, eager, carries, invariants, layer).run()
        last = cache[key]
        shared.update(last.shared)
        layers.append(last.size - (last.size_of_input if saved_before else 0))
        carries = last.requires
    epilogue = EagerWalk(model.epilogue, eager, carries, invariants).run()
    epilogue.loss()
    shared.update(epilogue.shared)
    outside = [
        *_virtual_tokens(eager),
        *prologue.saved.values(),
        *shared.values(),
        *epilogue.saved.values(),
    ]
    if last.saves_output:
        outside = [row for row in outside if row.tensor != model.epilogue.inputs[0].name]
    return EagerMemory(
        tuple(layers),
        sympy.Add(*(row.size_bytes for row in outside)),
        tuple(last.saved.values()),
        tuple(outside),
    )


def _virtual_tokens(eager: EagerRun) -> list[SavedStorage]:
    """Return the indices of virtual tokens, which are alike in all sequences of a batch."""
    tokens = eager.prompt + eager.prefix
    size = sympy.Integer(tokens * DTYPE_BYTES["i64"])
    return [SavedStorage("virtual_tokens", "embedding", size)] if tokens else []


def _invariants(prologue: Graph) -> Invariants:
    """Return the invariants that depend on positions and constants alone, and those of each layer.

    Each layer recomputes what is computed within a layer's module, as `transformer.h.0.attn`.
    """
    names = {value.name for value in prologue.inputs if value.name == "position_ids"}
    names.update(p.name for p in prologue.parameters if p.role == "constant")
    recomputed = set()
    for node in prologue.nodes:
        outputs = [value.name for value in node.outputs]
        if all(name in names for name in node.inputs):
            names.update(outputs)
        if re.search(r"\.\d+(\.|$)", node.scope):
            recomputed.update(outputs)
    return Invariants(frozenset(names), frozenset(recomputed))


def _adapted(
    block: Graph, eager: EagerRun, layer: int
) -> tuple[tuple[str, Collection[Bypass]], ...]:
    """Return the adapters of a layer, by site."""
    sites = [site for node in block.nodes if (site := site_of(block, node)) is not None]
    found = [(site, eager.at.get(site.format(layer=layer), ())) for site in sites]
    return tuple((site, tuple(at)) for site, at in found)
