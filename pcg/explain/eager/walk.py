"""A walk over one graph as eager transformers + peft run it, and what autograd saves of it.

On the imported graph, one node an ATen operator, this is

    requires(y) = any requires(x)                    from trained parameters on
    saved        = ∪ storage(v) for v in saves(node)  once each, without parameters

with `Operator.eager_saves` after torch's derivatives.yaml. Everything else is modelled after its
source: adapters (`pcg.explain.eager.adapters`), attention
(`pcg.explain.eager.attention`), and here transformers' grouped experts, BLOOM's GELU and the loss
(transformers 5.23 integrations/moe.py, models/bloom/modeling_bloom.py, loss/loss_utils.py).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from math import prod

import sympy

from pcg.explain.eager.adapters import save_for_adapter
from pcg.explain.eager.attention import save_for_attention
from pcg.explain.eager.saved_storages import EagerRun, Invariants, SavedStorage, SavedStorages
from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.program.program import site_of
from pcg.ir.types import DTYPE_BYTES, promote
from pcg.peft.method import Bypass

OWN_FUNCTIONS = ("gelu_impl",)
"""Modules that are one torch.autograd.Function, which saves its input alone: BloomGelu."""


class EagerWalk:
    """One pass over a graph, as eager PyTorch runs it.

    Args:
        graph: the graph, one node an ATen operator.
        eager: the way that PyTorch runs it.
        carries: for each carried input, True if it requires a gradient.
        invariants: the prologue's outputs that all layers read.
        layer: the index of the layer; None outside the layers.
        trained: values that require a gradient in any case.
    """

    def __init__(
        self,
        graph: Graph,
        eager: EagerRun,
        carries: tuple[bool, ...],
        invariants: Invariants,
        layer: int | None = None,
        trained: Collection[str] = (),
    ) -> None:
        self._graph = graph
        self._eager = eager
        self._layer = layer
        self._trained = trained
        self._tensors = SavedStorages(graph, eager, carries, invariants)
        self._carried = [value.name for value in graph.inputs[: len(carries)]]

    def run(self) -> EagerWalk:
        for node in self._graph.nodes:
            if node.op == "attention":
                save_for_attention(self._tensors, node)
            elif node.op == "experts":
                self._experts(node)
            elif node.scope.endswith(OWN_FUNCTIONS):
                self._own_function(node)
            else:
                self._plain(node)
                for bypass in self._bypasses(node):
                    save_for_adapter(self._tensors, node, bypass)
            if node.name in self._trained:
                self._tensors.needs[node.name] = True
        return self

    @property
    def saved(self) -> dict[str, SavedStorage]:
        """The saved storages by name, without those that layers share."""
        return self._tensors.rows

    @property
    def shared(self) -> dict[str, SavedStorage]:
        """The storages saved once for all layers, by name."""
        return self._tensors.shared

    @property
    def requires(self) -> tuple[bool, ...]:
        """True for each output that requires a gradient."""
        return tuple(self._tensors.needs[name] for name in self._graph.outputs)

    @cached_property
    def size(self) -> sympy.Expr:
        """The saved bytes without those that layers share, after the run."""
        return sympy.Add(*(row.size_bytes for row in self.saved.values()))

    @property
    def saves_output(self) -> bool:
        """True if the storage of the first output is saved here already."""
        return self._tensors.storages[self._graph.outputs[0]].name in self.saved

    @property
    def size_of_input(self) -> sympy.Expr:
        """The bytes of the first carried input, if saved."""
        row = self.saved.get(self._carried[0])
        return sympy.Integer(0) if row is None else row.size_bytes

    # ------------------------------------------------------------------------------- operators

    def _bypasses(self, node: Node) -> Collection[Bypass]:
        site = site_of(self._graph, node)
        return () if site is None else self._eager.at.get(site.format(layer=self._layer), ())

    def _plain(self, node: Node) -> None:
        saved = self._tensors
        needs = self._pass_needs(node)
        if not any(needs):
            return
        for index in operator(node.op).eager_saves(needs, dict(node.attributes)):
            name = node.inputs[index] if index >= 0 else node.outputs[~index].name
            saved.save(name, reader=node.name)
        if node.op == "layer_norm":
            rows = prod(self._graph.types[node.inputs[0]].features[:-1])
            for statistic in ("mean", "rstd"):
                name = f"{node.name}.{statistic}"
                saved.save_new(name, node.op, self._eager.statistics_dtype, rows)
        if node.op == "slice" and node.get("copied"):
            saved.save_bytes(f"{node.name}.index", node.op, DTYPE_BYTES["i64"])

    def _pass_needs(self, node: Node) -> list[bool]:
        """Return the inputs that require a gradient as True, and mark the outputs."""
        saved = self._tensors
        saved.storages.add(node)
        needs = [saved.needs[name] for name in node.inputs]
        for value in node.outputs:
            saved.needs[value.name] = any(needs) and value.type.is_float
        return needs

    def _own_function(self, node: Node) -> None:
        if any(self._pass_needs(node)):
            made = {other.name for other in self._graph.nodes if other.scope == node.scope}
            self._tensors.save(*(name for name in node.inputs if name not in made))

    def _experts(self, node: Node) -> None:
        """Rows sorted by expert, two grouped products: grouped_mm_experts_forward."""
        saved = self._tensors
        saved.storages.add(node)
        x, indices, weights, gate_up, down = node.inputs[:5]
        types = self._graph.types
        if not saved.needs[x] and not saved.needs[weights]:
            return
        saved.needs[node.name] = True
        k = types[indices].features[-1]
        width, hidden, dtype = types[down].features[2], types[down].features[1], types[x].dtype
        if saved.needs[x]:
            saved.save_new(f"{node.name}.rows_of_x", node.op, "i64", k)
            saved.save_new(f"{node.name}.gate_up", node.op, dtype, k * types[gate_up].features[1])
            saved.save_new(f"{node.name}.activated", node.op, dtype, k * width)
            saved.save_new(f"{node.name}.sorted_weights", node.op, types[weights].dtype, k)
            saved.save_bytes(f"{node.name}.offsets", node.op, 4 * types[down].features[0])
        if saved.needs[weights]:
            saved.save_new(f"{node.name}.permutation", node.op, "i64", k)
            saved.save_new(f"{node.name}.down", node.op, dtype, k * hidden)
        saved.save_new(f"{node.name}.inverse", node.op, "i64", k)

    def loss(self) -> None:
        """ForCausalLMLoss: log-probabilities in fp32, the shifted targets and their weight.

        Of one sequence, the targets are a view of its labels with one more at the end.
        """
        saved, logits = self._tensors, self._graph.outputs[0]
        if not saved.needs[logits]:
            return
        type_ = self._graph.types[logits]
        dtype = promote(type_.dtype, "f32")
        saved.save_new("log_probabilities", "cross_entropy", dtype, type_.features[-1])
        padded = DTYPE_BYTES["i64"] * (self._eager.batch == 1)
        saved.save_bytes("targets", "cross_entropy", DTYPE_BYTES["i64"] * saved.tokens + padded)
        saved.save_bytes("total_weight", "cross_entropy", 4)
