"""Memory that training saves for backward, and the memory of running graphs.

    saved     = Σ layers storages(saved by the layer) + values that layers share + the loss's inputs
    transient = max over graphs, max over nodes: live storages not counted elsewhere, and the
                temporaries of the node's kernel

Views of a value are saved once. A block's input is the output of the block before, so it counts
only once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Protocol

import sympy

from pcg.ir.analysis.dataflow import collective_of, waits
from pcg.ir.analysis.storages import TOKENS_OF_BATCH, Storage, Storages
from pcg.ir.graph import Attribute, Graph, Node
from pcg.ir.operators import operator
from pcg.ir.operators.attention import BLOCK_BYTES
from pcg.ir.operators.recurrent import state_bytes
from pcg.ir.program.program import ModelGraph, TrainingGraph
from pcg.ir.types import CONTEXT, TOKENS, TensorType, parts_of_tokens, tensor


class Planned(Protocol):
    """A training plan of layers: a `MemoryPlan`, or a compiled `Training`."""

    @property
    def plans(self) -> tuple[TrainingGraph, ...]: ...

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def restored(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class OutsideTensor:
    """A tensor saved outside the layers.

    Attributes:
        tensor: its graph and value, such as `prologue.cos`.
        needed_by: the operators that read it, or another reader.
    """

    tensor: str
    type: TensorType
    needed_by: tuple[str, ...]
    reason: str

    @property
    def size_bytes(self) -> sympy.Expr:
        return self.type.size_bytes.subs(TOKENS, TOKENS_OF_BATCH)


@dataclass(frozen=True)
class SavedMemory:
    """The memory that training saves in a step.

    Attributes:
        layers: bytes of each layer, formulas in B and S.
        outside: values that layers share, and inputs of the loss.
    """

    layers: tuple[sympy.Expr, ...]
    outside: tuple[OutsideTensor, ...]

    @property
    def total(self) -> sympy.Expr:
        return sympy.Add(*self.layers, *(row.size_bytes for row in self.outside))


def saved_memory(model: ModelGraph, plan: Planned) -> SavedMemory:
    """Return the memory that training a model with bypass networks saves under a plan."""
    saved = [_saved_storages(model.blocks[p.block], p) for p in plan.plans]
    sizes: dict[tuple[int, frozenset[int]], sympy.Expr] = {}
    layers: list[sympy.Expr] = []
    before: frozenset[int] = frozenset()  # the inputs of a layer that an earlier layer saves
    for layer, index in enumerate(plan.layers):
        known = before | {0} if layer in plan.restored else before
        key, forward = (index, known), plan.plans[index].forward
        block, storages = model.blocks[plan.plans[index].block], Storages.of(forward)
        left_out = {block.inputs[place].name for place in known}
        if key not in sizes:
            sizes[key] = sympy.Add(
                *(s.size_bytes(TOKENS_OF_BATCH) for s in saved[index] if s.name not in left_out)
            )
        layers.append(sizes[key])
        kept = saved[index] | {storages[block.inputs[place].name] for place in before}
        outputs = enumerate(block.outputs)
        before = frozenset(place for place, name in outputs if storages[name] in kept)
    outside = [*_shared(model, plan), *_read_by_loss(model, before)]
    return SavedMemory(tuple(layers), tuple(outside))


def balanced_memory(model: ModelGraph, plan: Planned) -> SavedMemory:
    """Return the memory that training saves if tokens choose all experts equally often.

    Otherwise ranks with whole experts save other numbers of rows; `saved_memory` has the most.
    """
    saved = saved_memory(model, plan)
    spared = [sympy.Add(*map(_spared, repeat(p.forward), p.forward.nodes)) for p in plan.plans]
    sizes = zip(saved.layers, plan.layers, strict=True)
    return SavedMemory(tuple(size - spared[index] for size, index in sizes), saved.outside)


def _spared(graph: Graph, node: Node) -> sympy.Expr:
    """Return the bytes of packed rows that no token needs if all experts are chosen equally."""
    if node.op != "pack_rows":
        return sympy.Integer(0)
    rows = graph.types[node.inputs[0]].size_bytes / node.attribute("parts")
    return (node.output.type.size_bytes - rows).subs(TOKENS, TOKENS_OF_BATCH)


def window_memory(model: ModelGraph, plan: Planned, ends: int = 0) -> SavedMemory:
    """Return the memory that sequences save window by window, before the first window's backward.

    The loss leaves its gradients at the last layer's outputs, and no logits; keys and values are in
    the KV cache, where the plan reads them (`pcg.passes.graphs.gradients`). Sizes are those of all
    windows together, for any division of sequences.

    Args:
        ends: the number of windows that end within a sequence, and keep its recurrent states there.
    """
    outside = [*_shared(model, plan), *_gradients_of_loss(model)]
    layers = zip(saved_memory(model, plan).layers, plan.layers, strict=True)
    sizes = (saved + ends * state_bytes(model.blocks[plan.plans[i].block]) for saved, i in layers)
    return SavedMemory(tuple(sizes), tuple(outside))


def outside_bytes(model: ModelGraph, shared: Iterable[str], tokens: int) -> int:
    """Return the most bytes saved outside the layers: shared inputs, and the loss's inputs."""
    types = {v.name: v.type for block in model.blocks for v in block.inputs}
    rows = [types[name] for name in dict.fromkeys(shared)]
    rows += [row.type for row in _read_by_loss(model)]
    return int(sympy.Add(*(type_.size_bytes.subs(TOKENS, tokens) for type_ in rows)))


def _saved_storages(block: Graph, plan: TrainingGraph) -> set[Storage]:
    """Return the storages that only this layer saves: neither weights nor shared values."""
    storages = Storages.of(plan.forward)
    shared = {value.name for value in block.inputs[len(block.outputs) :]}
    saved = {storages[name] for name in plan.saved}
    return {s for s in saved if not s.is_parameter and s.name not in shared}


def _shared(model: ModelGraph, plan: Planned) -> Iterable[OutsideTensor]:
    """Yield the prologue's values that some layer's backward reads."""
    values: dict[str, tuple[TensorType, dict[str, None]]] = {}
    for p in plan.plans:
        block = model.blocks[p.block]
        for value in block.inputs[len(block.outputs) :]:
            if p.backward is not None and value.name in p.saved:
                readers = values.setdefault(value.name, (value.type, {}))[1]
                nodes = p.backward.consumers.get(value.name, ())
                readers.update((node.op, None) for node in nodes)
            if plan.restored:
                values.setdefault(value.name, (value.type, {}))[1]["a layer's forward again"] = None
    for name, (type_, texts) in values.items():
        yield OutsideTensor(f"prologue.{name}", type_, tuple(texts), "all layers share it")


def _read_by_loss(model: ModelGraph, saved: Collection[int] = ()) -> Iterable[OutsideTensor]:
    """Yield the last layer's outputs, until the loss has read them, and the targets.

    Args:
        saved: the outputs that a layer saves, by their places.
    """
    carried = enumerate(model.epilogue.inputs[: len(model.blocks[0].outputs)])
    values = [(v.name, v.type) for place, v in carried if place not in saved]
    values.append(("targets", tensor("i64", *model.prologue.inputs[0].type.shape)))
    for name, type_ in values:
        yield OutsideTensor(f"epilogue.{name}", type_, ("cross_entropy",), "the loss reads it")


def _gradients_of_loss(model: ModelGraph) -> Iterable[OutsideTensor]:
    """Yield the gradients that a window's loss leaves to the layers' backward, and its targets."""
    for row in _read_by_loss(model):
        name = row.tensor.removeprefix("epilogue.")
        if name == "targets":
            yield dataclasses.replace(row, reason="a window's are held until all went back")
        else:
            reason = "the loss is taken in the forward, and no logits are kept"
            yield OutsideTensor(f"epilogue.d_{name}", row.type, ("a layer's backward",), reason)


# ------------------------------------------------------------------------------------ transients


@dataclass(frozen=True)
class Transient:
    """The peak of bytes that a graph needs in addition to bytes counted elsewhere.

    bytes = per_token · tokens + per_row · rows + fixed + pairs

    with rows = ceil(tokens / parts) of a rank that holds a part of the tokens, and pairs =
    per_pair · S² of attention in a block, or else BLOCK_BYTES + per_key · S of sums over blocks.
    """

    per_token: int
    fixed: int
    per_pair: int = 0
    per_row: int = 0
    parts: int = 1
    per_key: int = 0

    def size_bytes(self, tokens: int, seq: int) -> int:
        rows = -(-tokens // self.parts)
        pairs = self.per_pair * seq**2
        if pairs > BLOCK_BYTES:
            pairs = BLOCK_BYTES + self.per_key * seq
        return self.per_token * tokens + self.per_row * rows + self.fixed + pairs

    def formula(self, tokens: sympy.Expr) -> sympy.Expr:
        rows = sympy.ceiling(sympy.sympify(tokens) / self.parts)
        pairs = sympy.Integer(0)
        if self.per_pair:
            in_blocks = BLOCK_BYTES + self.per_key * CONTEXT
            longest = math.isqrt(BLOCK_BYTES // self.per_pair)
            pairs = sympy.Piecewise(
                (self.per_pair * CONTEXT**2, longest >= CONTEXT), (in_blocks, True)
            )
        return self.per_token * tokens + self.per_row * rows + self.fixed + pairs


_CONTEXT_COPIES: Mapping[str, int] = {"attention": 2, "attention_backward": 3}
"""Copies of gathered inputs that are alive at the same time: received parts and the whole; in
backward the whole, its gradients, and the gradients of a sequence's tokens."""


def training_transients(
    model: ModelGraph, plans: Sequence[TrainingGraph], tokens: int, seq: int, cp: int = 1
) -> list[tuple[Transient, Transient | None]]:
    """Return each plan's forward and backward transients, for `tokens` in sequences of `seq`.

    A layer's saved values count in its backward, which frees them one by one, and so do its
    adapters' gradients, until they are added to those of earlier micro-batches. `tokens` counts a
    rank's tokens, with `cp` ranks that share sequences.
    """
    resident = [{value.name for value in b.inputs[len(b.outputs) :]} for b in model.blocks]
    transients = []
    for plan in plans:
        storages = Storages.of(plan.forward)
        saved = {storages[name].name for name in plan.saved}
        forward = transient(plan.forward, tokens, seq, saved, cp)
        backward = None
        if plan.backward is not None:
            backward = transient(plan.backward, tokens, seq, resident[plan.block], cp)
        transients.append((forward, backward))
    return transients


def transient(
    graph: Graph, tokens: int, seq: int, counted: Iterable[str] = (), cp: int = 1
) -> Transient:
    """Return the most bytes alive at a node of a graph, for `tokens` in sequences of `seq`."""
    return Alive(graph, counted, cp).most(graph.nodes, tokens, seq)


class Alive:
    """The values alive at the nodes of a graph, in any order of the nodes.

    Parameters and `counted`, values with memory counted elsewhere, are excluded. Values are a
    rank's, with `cp` ranks that share sequences.
    """

    def __init__(self, graph: Graph, counted: Iterable[str] = (), cp: int = 1) -> None:
        storages = Storages.of(graph)
        self._names = {name: storages[name].name for name in graph.types}
        self._elsewhere = {self._names[name] for name in counted if name in graph.types}
        self._elsewhere |= {s for s in self._names.values() if storages[s].is_parameter}
        self._sizes = _sizes(storages, {*self._names.values()})
        leading = {t.shape[0] for t in graph.types.values() if t.is_token_wise}
        self._parts = max(map(parts_of_tokens, leading), default=1)
        self._kernels = {
            node.name: _temporaries(
                node.op,
                *graph.types_of(node),
                node.attributes,
                self._parts,
                cp,
            )
            for node in graph.nodes
        }
        self._graph = graph

    def most(self, nodes: Sequence[Node], tokens: int, seq: int) -> Transient:
        """Return the most bytes alive at a node, for `tokens` in sequences of `seq`."""
        moments = _moments(nodes)
        first = {self._names[value.name]: 0 for value in self._graph.inputs}
        last: dict[str, int] = {}
        for index, (node, reads) in enumerate(moments):
            outputs = [self._names[value.name] for value in node.outputs]
            for storage in outputs:
                first.setdefault(storage, index)
            last |= dict.fromkeys((*(self._names[name] for name in reads), *outputs), index)
        last |= dict.fromkeys((self._names[name] for name in self._graph.outputs), len(moments))
        changes = [[0, 0, 0] for _ in range(len(moments) + 2)]
        for storage in last.keys() - self._elsewhere:
            for kind, size in enumerate(self._sizes[storage]):
                changes[first[storage]][kind] += size
                changes[last[storage] + 1][kind] -= size
        alive, best = [0, 0, 0], Transient(0, 0)
        for (node, _), change in zip(moments, changes, strict=False):
            alive = list(map(sum, zip(alive, change, strict=True)))
            *kernel, per_pair, per_key = self._kernels[node.name]
            per_token, fixed, per_row = map(sum, zip(alive, kernel, strict=True))
            now = Transient(per_token, fixed, per_pair, per_row, self._parts, per_key)
            if now.size_bytes(tokens, seq) > best.size_bytes(tokens, seq):
                best = now
        return best


def _moments(nodes: Sequence[Node]) -> list[tuple[Node, tuple[str, ...]]]:
    """Return the nodes in order with their reads; a collective appears again at its wait.

    Its outputs are alive from its start, which allocates them.
    """
    begun = waits(nodes)
    moments: list[tuple[Node, tuple[str, ...]]] = []
    for index in range(len(nodes) + 1):
        for node in (nodes[place] for place, first in begun.items() if first == index):
            entry = collective_of(node)
            moments.append((node, node.inputs if entry and entry.holds_inputs else ()))
        moments += ((node, node.inputs) for node in nodes[index : index + 1])
    return moments


@lru_cache(maxsize=4096)
def _temporaries(
    op: str,
    types: tuple[TensorType, ...],
    outputs: tuple[TensorType, ...],
    attributes: tuple[tuple[str, Attribute], ...],
    parts: int,
    cp: int,
) -> tuple[int, int, int, int, int]:
    """Return a kernel's temporaries: bytes per token, fixed, per row of a rank, pair and key.

    A rank's tokens pair with those of all `cp` ranks, as it gathers their keys and values.
    """
    formula = operator(op).temporaries(types, outputs, dict(attributes))
    if cp > 1:
        gathered = operator(op).context_inputs(types)
        whole = cp * sympy.Add(*(type_.size_bytes for type_ in gathered))
        formula += _CONTEXT_COPIES.get(op, 0) * whole
    fixed, first, all_ranks, pair = (
        int(formula.subs({TOKENS: tokens, CONTEXT: seq}))
        for tokens, seq in ((0, 0), (1, 0), (parts, 0), (0, 1))
    )
    # One token makes a row of a rank, and so do as many tokens as parts.
    per_token = (all_ranks - first) // (parts - 1) if parts > 1 else first - fixed
    per_row = first - fixed - per_token
    per_pair = cp * max(pair - fixed, 0)
    return max(per_token, 0), max(fixed, 0), max(per_row, 0), per_pair, _key_bytes(op, outputs)


def _key_bytes(op: str, outputs: tuple[TensorType, ...]) -> int:
    """Return the bytes a key of dq, dk and dv summed over blocks, and of a block's dk and dv.

    A block's dk and dv are those of each head before those of each KV head.
    """
    if op not in ("attention_backward", "window_attention_backward", "latent_window_backward"):
        return 0
    (heads, size), (kv_heads, _), (_, value_size) = (type_.shape[1:] for type_ in outputs)
    return int(4 * (heads * size + (heads + 2 * kv_heads) * (size + value_size)))


def _sizes(storages: Storages, names: Iterable[str]) -> Mapping[str, tuple[int, int, int]]:
    """Return bytes per token, fixed bytes, and bytes per row of a rank of each storage."""
    sizes = {}
    for name in names:
        type_ = storages[name].type
        size = type_.row_bytes
        if not type_.is_token_wise:
            sizes[name] = (0, size, 0)
        else:
            sizes[name] = (size, 0, 0) if type_.shape[0] == TOKENS else (0, 0, size)
    return sizes
