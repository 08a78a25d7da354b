"""Times of an engine's steps on a device, from a program's graphs and a cost model.

    step      Σ nodes of prologue · layers · epilogue
    part      Σ nodes of a layer, forward or backward, for a window; of the loss, for some tokens

A token-wise operator costs the cost model's time for the number of tokens. Two kinds of operators
depend on more sizes; their operations f and bytes b are sums over the chunks of a step, and the sum
is a single call:

    attention       f = pairs · f₁       b = tokens · b₁ + cached · b₂
    a bypass        f = Σ tokens · rank · f₁, b = Σ over adapters of b(tokens, rank)

pairs: keys that tokens attend to, summed over tokens. cached: keys and values, read once for each
chunk, as by the blocks of a kernel (FlashAttention). A sliding window of w keys bounds both: a
token in position p has min(p, w) pairs, and c tokens after others read at most w + c - 1 keys.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple, Protocol

from pcg.errors import CostModelError
from pcg.ir.graph import Attribute, Graph, Node
from pcg.ir.operators.base import Attributes, Types
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TOKENS, TensorType
from pcg.parallel.costs.cost_model import CostModel, message_of
from pcg.parallel.costs.work import (
    Work,
    is_free,
    parts_of,
    size_bytes,
    with_rank,
    work_of,
    works_of,
)

HOST_LAUNCH_S = 29e-6
"""Host seconds per launch of an unrecorded step.

0.53 ms of processor time for a decoding layer of 18 launches, including the program's Python, on an
AMD EPYC without a GPU.
"""
_LAUNCHES = 15
"""Launches of a decoding layer with adapters over ranks: 13 of Llama-3.1-8B, as counted by
`benchmarks/roofline.py`, and two collectives."""


def host_seconds(layers: int) -> float:
    """Return the host seconds to launch an unrecorded step over ranks."""
    return layers * _LAUNCHES * HOST_LAUNCH_S


class SequenceChunk(NamedTuple):
    """Tokens of a sequence in a step, after `context` others.

    Sampled chunks need logits of their last token; trained tokens have their loss later. `adapter`,
    of rank `rank`, is None for the base.
    """

    tokens: int
    context: int
    is_sampled: bool = False
    is_trained: bool = False
    adapter: Hashable = None
    rank: int = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that a step's time depends on, in tokens unless stated.

    Attributes:
        pairs: the number of keys that each token attends to, summed over tokens.
        cached: tokens with keys and values to read, summed over chunks.
        sampled: rows of logits.
        adapted: tokens with an adapter.
        adapted_ranks: ranks of these tokens' adapters, summed over tokens.
        adapters: the number of different adapters.
        ranks: ranks of the different adapters, summed.
        spans: (tokens, tokens before them) of each chunk, for windows of attention.
    """

    tokens: int = 0
    pairs: int = 0
    cached: int = 0
    sampled: int = 0
    trained: int = 0
    adapted: int = 0
    adapted_ranks: int = 0
    adapters: int = 0
    ranks: int = 0
    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, chunks: Iterable[SequenceChunk]) -> StepShape:
        tokens = pairs = cached = sampled = trained = adapted = adapted_ranks = 0
        ranks: dict[Hashable, int] = {}
        spans = []
        for chunk in chunks:
            count = chunk.tokens
            spans.append((count, chunk.context))
            tokens += count
            pairs += count * chunk.context + count * (count + 1) // 2
            cached += chunk.context + count
            sampled += chunk.is_sampled
            trained += count * chunk.is_trained
            if chunk.adapter is not None:
                adapted += count
                adapted_ranks += count * chunk.rank
                ranks[chunk.adapter] = chunk.rank
        adapters = (adapted, adapted_ranks, len(ranks), sum(ranks.values()))
        return cls(tokens, pairs, cached, sampled, trained, *adapters, tuple(spans))

    def seen(self, window: int) -> tuple[int, int]:
        """Return `cached` and `pairs` of attention to a window of keys; 0 for all keys.

        A negative window is the size of chunks of positions, within which tokens attend.

        Raises:
            CostModelError: the chunks of the step are not known.
        """
        if not window:
            return self.cached, self.pairs
        if self.tokens and not self.spans:
            raise CostModelError(
                f"attention sees a window of {window} tokens, and the step's chunks are not known; "
                "make its shape with StepShape.of"
            )
        cached = pairs = 0
        for count, context in self.spans:
            if window < 0:
                cached += context % -window + count
                pairs += _pairs_in_chunks(context + count, -window)
                pairs -= _pairs_in_chunks(context, -window)
                continue
            cached += min(context + count, window + count - 1)
            short = min(max(window - context, 0), count)  # tokens that see all earlier tokens
            pairs += short * context + short * (short + 1) // 2 + (count - short) * window
        return cached, pairs


def _pairs_in_chunks(tokens: int, size: int) -> int:
    """Return the pairs of tokens and keys from a sequence's start, in chunks of a size."""
    whole, rest = divmod(tokens, size)
    return whole * size * (size + 1) // 2 + rest * (rest + 1) // 2


class StepCosts(Protocol):
    """Seconds of a device's work for an engine.

    `layers` is the number of the model's layers; layers below all trained layers also have a
    backward.
    """

    layers: int

    def step_seconds(self, shape: StepShape) -> float:
        """Return the seconds of a forward."""

    def layer_seconds(self, layer: int, shape: StepShape) -> float:
        """Return the seconds of a layer's forward of a window, without requests."""

    def loss_seconds(self, tokens: int) -> float:
        """Return the seconds of the loss of this many tokens, with its gradient."""

    def backward_seconds(self, layer: int, shape: StepShape) -> float:
        """Return the seconds of a layer's backward of a window; the first has the prologue's."""

    def update_seconds(self) -> float:
        """Return the seconds of an optimizer's update."""

    def copy_seconds(self, size_bytes: int) -> float:
        """Return the seconds of a copy from the host's memory."""


class GraphCosts:
    """The costs of a rank's graphs, for a group of `degree` ranks.

    Args:
        serving: the model with bypass networks of symbolic rank.
        backward: each layer's backward; empty without training.
        loss: graph of the loss and its gradient; None without training.
        trained: count of numbers that an optimizer updates on the rank, also an attribute.
        prologue: the prologue's backward; None if it has no trained parameters.
        host_bytes_per_s: bandwidth of copies from the host's memory.
    Raises:
        CostModelError: an operator has no cost.
    """

    def __init__(
        self,
        model: CostModel,
        degree: int,
        serving: ModelGraph,
        backward: Sequence[Graph | None] = (),
        loss: Graph | None = None,
        trained: int = 0,
        *,
        prologue: Graph | None = None,
        host_bytes_per_s: float,
    ) -> None:
        self.layers = len(serving.layers)
        by_graph: dict[int, GraphSeconds] = {}

        def seconds_of(graph: Graph) -> GraphSeconds:
            if id(graph) not in by_graph:
                by_graph[id(graph)] = GraphSeconds(graph, model, degree)
            return by_graph[id(graph)]

        blocks = [seconds_of(block) for block in serving.blocks]
        counts = [serving.layers.count(index) for index in range(len(blocks))]
        self._forward = [(seconds_of(serving.prologue), 1), *zip(blocks, counts, strict=True)]
        self._layers = [blocks[index] for index in serving.layers]
        self._head = seconds_of(serving.epilogue)
        self._loss = None if loss is None else seconds_of(loss)
        self._backward = [None if graph is None else seconds_of(graph) for graph in backward]
        self._first = None if prologue is None else seconds_of(prologue)
        self.trained = trained
        self._update_s = model.work_seconds(_update(trained)) if trained else 0.0
        self._host_bytes_per_s = host_bytes_per_s

    def on(self, model: CostModel) -> GraphCosts:
        """Return the costs of the same graphs on another device, except copies from the host."""
        by_graph: dict[int, GraphSeconds] = {}

        def moved(graph: GraphSeconds) -> GraphSeconds:
            if id(graph) not in by_graph:
                by_graph[id(graph)] = graph.on(model)
            return by_graph[id(graph)]

        costs = copy.copy(self)
        costs._forward = [(moved(graph), count) for graph, count in self._forward]
        costs._layers = [moved(graph) for graph in self._layers]
        costs._head = moved(self._head)
        costs._loss = None if self._loss is None else moved(self._loss)
        costs._backward = [None if graph is None else moved(graph) for graph in self._backward]
        costs._first = None if self._first is None else moved(self._first)
        costs._update_s = model.work_seconds(_update(self.trained)) if self.trained else 0.0
        return costs

    def step_seconds(self, shape: StepShape) -> float:
        total = 0.0
        if shape.tokens:
            total += sum(count * graph.seconds(shape) for graph, count in self._forward)
        if shape.sampled:
            total += self._head.seconds(StepShape(shape.sampled))
        return total

    def layer_seconds(self, layer: int, shape: StepShape) -> float:
        return self._layers[layer].seconds(shape)

    def loss_seconds(self, tokens: int) -> float:
        if self._loss is None:
            raise CostModelError("tokens are trained, and there is no graph of their loss")
        return self._loss.seconds(StepShape(tokens))

    def backward_seconds(self, layer: int, shape: StepShape) -> float:
        graphs = (self._backward[layer], self._first if layer == 0 else None)
        return sum((graph.seconds(shape) for graph in graphs if graph is not None), 0.0)

    def update_seconds(self) -> float:
        return self._update_s

    def copy_seconds(self, size_bytes: int) -> float:
        return size_bytes / self._host_bytes_per_s


class GraphSeconds:
    """Seconds of a rank's graph, for a group of `degree` ranks and any step."""

    def __init__(self, graph: Graph, model: CostModel, degree: int) -> None:
        self._model = model
        self._degree = degree
        self._plain: Counter[_Call] = Counter()
        self._attention: list[tuple[int, _Bilinear]] = []
        self._bypass: list[_Bilinear] = []
        self._messages: list[tuple[str, Types]] = []
        self._open: list[tuple[str, Types]] = []
        for node in graph.nodes:
            self._add(graph, node)
        self._works: dict[int, list[tuple[tuple[Work, ...], int]]] = {}
        self._known: dict[int, float] = {}

    def on(self, model: CostModel) -> GraphSeconds:
        """Return the seconds of the same graph on another device, reusing the counted work."""
        seconds = copy.copy(self)
        seconds._model, seconds._known = model, {}
        return seconds

    def seconds(self, shape: StepShape) -> float:
        tokens = shape.tokens
        total = self._known.get(tokens)
        if total is None:
            total = self._known[tokens] = self._plain_seconds(tokens)
        for window, work in self._attention:
            total += work.seconds(self._model, 1, tokens, *shape.seen(window))
        if shape.adapters:
            sums = (shape.adapters, shape.adapted, shape.ranks, shape.adapted_ranks)
            for work in self._bypass:
                total += work.seconds(self._model, *sums)
        for kind, types in self._open:
            total += self._message_seconds(kind, types, tokens, shape.adapted_ranks)
        return total

    def _plain_seconds(self, tokens: int) -> float:
        """Return the seconds that depend only on the number of tokens."""
        total = sum(self._message_seconds(kind, types, tokens) for kind, types in self._messages)
        if tokens not in self._works:
            self._works[tokens] = [
                (works_of(op, ins, outs, dict(attributes), tokens, 1), count)
                for (op, ins, outs, attributes), count in self._plain.items()
            ]
        for works, count in self._works[tokens]:
            total += count * sum(map(self._model.work_seconds, works), 0.0)
        return total

    def _add(self, graph: Graph, node: Node) -> None:
        ins, outs = graph.types_of(node)
        attributes = dict(node.attributes)
        is_open = any(_is_open(type_) for type_ in (*ins, *outs))
        message = message_of(node, ins, outs)
        if message is not None:
            (self._open if is_open else self._messages).append(message)
        elif is_free(node.op):
            pass
        elif "window" in attributes:
            window = int(str(attributes.get("window") or 0)) or -int(
                str(attributes.get("chunk", 0))
            )
            self._attention.append((window, _attention(node.op, ins, outs, attributes)))
        elif is_open:
            for op, inputs, outputs, part_attributes in parts_of(node.op, ins, outs, attributes):
                self._bypass.append(_bypass(op, inputs, outputs, part_attributes))
        else:
            self._plain[node.op, ins, outs, node.attributes] += 1

    def _message_seconds(self, kind: str, types: Types, tokens: int, ranks: int = 0) -> float:
        """Return the seconds of a message; `ranks` are all tokens' adapter ranks, summed."""
        by_token = sum(size_bytes(type_, tokens, 1) for type_ in types if not _is_open(type_))
        by_rank = ranks * sum(size_bytes(type_, 1, 1) for type_ in types if _is_open(type_))
        size = by_token + by_rank
        return self._model.collective_seconds(kind, size, self._degree) if size else 0.0


_Call = tuple[str, Types, Types, tuple[tuple[str, Attribute], ...]]
_Coefficients = tuple[float, float, float, float]


@dataclass(frozen=True)
class _Bilinear:
    """An operator's work as a sum over 1, x, y and x · y, by its coefficients; `work` is a call."""

    work: Work
    flops: _Coefficients
    moved_bytes: _Coefficients

    def seconds(self, model: CostModel, *sums: float) -> float:
        flops, moved_bytes = (sum(map(mul, f, sums)) for f in (self.flops, self.moved_bytes))
        kernel, is_product, dtype = self.work.kernel, self.work.is_product, self.work.dtype
        return model.work_seconds(Work(kernel, is_product, dtype, "", sums[1], flops, moved_bytes))


def _coefficients(at: Callable[[int, int], float], what: str) -> _Coefficients:
    """Return the coefficients of a bilinear function; CostModelError if it is not bilinear."""
    a, x, y, xy = at(1, 1), at(2, 1), at(1, 2), at(2, 2)
    both = xy - x - y + a
    f = (a - (x - a) - (y - a) + both, x - a - both, y - a - both, both)
    wanted = at(5, 3)
    if abs(f[0] + 5 * f[1] + 3 * f[2] + 15 * f[3] - wanted) > 1e-6 * abs(wanted):
        raise CostModelError(f"the work of {what} is not a sum over tokens and ranks")
    return f


def _bypass(op: str, ins: Types, outs: Types, attributes: Attributes) -> _Bilinear:
    """Return the work of an operator of symbolic rank: x tokens, y ranks."""

    def at(tokens: int, rank: int) -> Work:
        inputs, outputs = (tuple(with_rank(t, rank) for t in types) for types in (ins, outs))
        return work_of(op, inputs, outputs, attributes, tokens, 1)

    flops = _coefficients(lambda x, y: at(x, y).flops, op)
    return _Bilinear(at(1, 1), flops, _coefficients(lambda x, y: at(x, y).moved_bytes, op))


def _attention(op: str, ins: Types, outs: Types, attributes: Attributes) -> _Bilinear:
    """Return the work of attention: x tokens, y keys and values to read, x · y pairs."""
    shorter, longer = (work_of(op, ins, outs, attributes, 1, keys) for keys in (1, 2))
    cached = longer.moved_bytes - shorter.moved_bytes
    # A token's own keys and values are among the read ones.
    bytes_ = (0.0, shorter.moved_bytes - cached, cached, 0.0)
    return _Bilinear(shorter, (0.0, 0.0, 0.0, shorter.flops), bytes_)


def _update(count: int) -> Work:
    """Return AdamW's work: read weight, gradient, two moments; write all but the gradient."""
    return Work("add", False, "f32", "", count, 12.0 * count, 7 * 4.0 * count)


def _is_open(type_: TensorType) -> bool:
    return any(not isinstance(size, int) and size.free_symbols - {TOKENS} for size in type_.shape)
