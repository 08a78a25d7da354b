"""Proof of the bias of an attention of an exported graph: a causal mask, a window, ALiBi.

An attention is transformers' marker (`pcg.trace.markers`), a call of scaled_dot_product_attention,
or an explicit matmul, softmax, matmul. Its mask, or its scores except q kᵀ, is a subgraph over
positions, which must be, for every number of tokens n,

    bias[h, i, j] = slope[h] · j + constant of the row   for visible j, hidden otherwise

with visible j ≤ i, or i - window < j ≤ i, or j ≤ i in the same chunk of positions. Any other form
is refused.

`pcg.trace.mask_evaluation` evaluates the subgraph at chosen positions. It may have only operators
that are piecewise linear in i, j and n, so its corners are where positions, their distances or n
meet a constant derived from the graph's; the positions next to all corners are evaluated, at every
such n. A table, such as a mask in a buffer, must be a function of the position or of the distance,
and its corners are included.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pcg.trace.mask_evaluation import (
    ADDED,
    Evaluation,
    Subgraph,
    Traced,
    refused_attention,
)

_aten = torch.ops.aten
_SOFTMAX = {_aten.softmax.int, _aten._softmax.default}
_PRODUCT = {_aten.matmul.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mm.default}
_CALL = _aten.scaled_dot_product_attention.default
_VIEWS = ("dropout", "view", "reshape", "type_as", "contiguous", "clone", "_to_copy")
_TRANSPARENT = {_aten.to.dtype, *(getattr(_aten, name).default for name in _VIEWS)}
_HIDDEN = -5e3
"""The largest bias of a hidden key: models add -1e4 or less."""
_MOST_CORNERS = 250
"""Maximum number of evaluated corners."""
_LENGTHS = (2, 3, 6, 9, 33)
_LONG = 4096
"""Least value of the largest evaluated number of tokens, unless a table is shorter."""


@dataclass(frozen=True)
class ScoreAttention:
    """An attention found in a graph.

    Attributes:
        q, k, v: the nodes of the queries, the keys (transposed or not) and the values.
        scale: the factor on the scores.
        window: the number of tokens that a token attends to; 0 for all.
        chunk: the size of the chunks of positions, within which a token attends; 0 for all.
        slopes: the ALiBi slope of each head; empty without ALiBi.
        sinks: the node with a logit of each head that takes probability, or None.
        softcap: the bound of the scores; 0 for none.
    """

    q: Node
    k: Node
    v: Node
    scale: float
    window: int
    chunk: int
    slopes: tuple[float, ...]
    sinks: Node | None = None
    softcap: float = 0.0

    @property
    def inputs(self) -> list[Node]:
        return [self.q, self.k, self.v, *([self.sinks] if self.sinks is not None else [])]


def find_scores(
    graph: Graph, constants: Mapping[str, Tensor], positions: int | None
) -> dict[Node, ScoreAttention]:
    """Return the attentions of a graph, by the attention's node or its last product.

    Args:
        graph: a graph with symbolic token dims.
        constants: the values of constant placeholders, by name.
        positions: the number of positions of the model; None if unbounded.
    Raises:
        TraceError: probabilities over tokens are not causal attention.
    """
    attentions: dict[Node, ScoreAttention] = {}
    prover = _Prover(graph, constants, positions)
    for node in graph.nodes:
        if node.target is torch.ops.pcg.attention.default:
            attentions[node] = prover.marker(node)
        elif node.target is _CALL:
            attentions[node] = prover.call(node)
        elif node.target in _PRODUCT and node.target is not ADDED:
            softmax = _probabilities(node.args[0])
            if softmax is not None:
                attentions[node] = prover.written_out(node, softmax)
    return attentions


def _probabilities(node: Any) -> Node | None:
    """Return the softmax over keys that a value is, up to casts, views and inactive dropout."""
    while node.target in _TRANSPARENT:
        node = node.args[0]
    value = node.meta.get("val")
    if node.target in _SOFTMAX and not isinstance(value.shape[-1], int):
        return node  # type: ignore[no-any-return]
    return None


def _score_product(softmax: Node) -> Node:
    queue, seen, products = [softmax.args[0]], set(), []
    while queue:
        node = queue.pop()
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if node.target in _PRODUCT and _is_square(node):
            products.append(node)
            if node.target is ADDED:
                queue.append(node.args[0])
        else:
            queue.extend(node.all_input_nodes)
    if len(products) != 1:
        raise refused_attention(softmax, f"its scores come from {len(products)} products, not one")
    return products[0]


def _is_square(node: Node) -> bool:
    shape = node.meta["val"].shape
    return len(shape) >= 2 and not isinstance(shape[-1], int) and not isinstance(shape[-2], int)


# ------------------------------------------------------------------------------------ what is seen

_Seen = tuple[int, int, tuple[float, ...], float]
"""Window, chunk, slopes and scale."""


class _Prover:
    """Proves the masks of a graph, each once."""

    def __init__(
        self, graph: Graph, constants: Mapping[str, Tensor], positions: int | None
    ) -> None:
        self._graph = Traced(graph, constants)
        self._positions = positions
        self._proved: dict[tuple[Node, Node | None], _Seen] = {}

    def marker(self, node: Node) -> ScoreAttention:
        q, k, v, mask, sinks, scale, softcap, window = node.args
        seen = chunk = 0
        slopes: tuple[float, ...] = ()
        if mask is not None:
            seen, chunk, slopes, _ = self._prove(node, mask, None)  # type: ignore[arg-type]
        if window is not None and window != seen:
            raise refused_attention(
                node,
                f"it is given sliding_window={window} and a mask of window {seen or 'none'}, of "
                "which flash attention reads the first",
            )
        arguments: Any = (q, k, v, scale, seen, chunk, slopes, sinks, softcap)
        return ScoreAttention(*arguments)

    def call(self, node: Node) -> ScoreAttention:
        names = [argument.name for argument in _CALL._schema.arguments]
        arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
        if arguments.get("dropout_p"):
            raise refused_attention(node, "it drops probabilities")
        q, k, v = (arguments[name] for name in ("query", "key", "value"))
        scale = arguments.get("scale") or q.meta["val"].shape[-1] ** -0.5
        mask, is_causal = arguments.get("attn_mask"), bool(arguments.get("is_causal"))
        if (mask is None) != is_causal:
            raise refused_attention(node, "its mask is neither causal nor a causal window")
        window = chunk = 0
        slopes: tuple[float, ...] = ()
        if mask is not None:
            window, chunk, slopes, _ = self._prove(node, mask, None)
        return ScoreAttention(q, k, v, float(scale), window, chunk, slopes)

    def written_out(self, node: Node, softmax: Node) -> ScoreAttention:
        product = _score_product(softmax)
        q, k = product.args[1:3] if product.target is ADDED else product.args[:2]
        *seen, scale = self._prove(softmax, softmax.args[0], product)  # type: ignore[arg-type]
        arguments: Any = (q, k, node.args[1], scale, *seen)
        return ScoreAttention(*arguments)

    def _prove(self, node: Node, root: Node, product: Node | None) -> _Seen:
        """Return the value added to the scores of an attention node."""
        if (root, product) not in self._proved:
            self._proved[root, product] = self._prove_anew(node, root, product)
        return self._proved[root, product]

    def _prove_anew(self, node: Node, root: Node, product: Node | None) -> _Seen:
        subgraph = Subgraph(self._graph, node, root, product)
        first = Evaluation(subgraph, 17, range(17))
        first.bias()
        corners = set(first.corners)
        if len(first.conditions) > 1:  # their corners may add up
            corners |= {*map(sum, itertools.product(first.corners, repeat=2))}
        if len(corners) > _MOST_CORNERS:
            raise refused_attention(node, f"its mask may turn at {len(corners)} positions")
        # Rotary positions continue beyond those of the model's training.
        most = max(self._positions or 0, _LONG, 2 * max(corners, default=0) + 8)
        most = min([most, *first.tables])
        lengths = {n for c in corners for n in (c - 1, c, c + 1)} | {*_LENGTHS, most}
        beside = {c + near for c in (0, *corners) for near in range(-2, 6)} | {*range(10)}
        evaluated = sorted((n for n in lengths if 2 <= n <= most), reverse=True)
        whole: _Seen | None = None
        for tokens in evaluated:
            from_end = {tokens - 1 - p for p in beside}
            chosen = {p for p in beside | from_end if 0 <= p < tokens}
            evaluation = Evaluation(subgraph, tokens, sorted(chosen))
            seen = _seen(node, evaluation)
            whole = whole or seen
            if not _agree(whole, seen, tokens):
                raise refused_attention(
                    node, f"its scores change with the number of tokens, as at {tokens} tokens"
                )
        assert whole is not None
        return whole


def _agree(whole: _Seen, seen: _Seen, tokens: int) -> bool:
    window = whole[0] if whole[0] < tokens else 0
    pairs = zip((whole[3], *whole[2]), (seen[3], *seen[2]), strict=False)
    is_close = all(abs(a - b) <= 1e-5 * max(1e-4, abs(a)) for a, b in pairs)
    same = (window, whole[1], len(whole[2])) == (seen[0], seen[1], len(seen[2]))
    return same and is_close


def _seen(node: Node, evaluation: Evaluation) -> _Seen:
    zeros, ones = evaluation.bias()
    at = evaluation.positions
    row, column = at[:, None], at[None, :]
    distance = row - column
    # The difference to a zero is exact: BLOOM counts from the first key, MPT from the last.
    first, last = zeros[:, 1, 1] - zeros[:, 1, 0], zeros[:, -1, -1] - zeros[:, -1, -2]
    slopes = torch.where(zeros[:, -1, -1] == 0, last, first)
    slopes = torch.where(slopes.abs() < -_HIDDEN, slopes, 0.0)  # the last token only sees itself
    line = -slopes[:, None, None] * distance
    rows = zeros - zeros.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    off = rows - line
    tolerance = 1e-4 + 1e-6 * zeros.abs().clamp(max=1e6)
    visible = off.abs() <= tolerance
    if not (visible | (off < _HIDDEN)).all():
        raise refused_attention(node, "what is added to its scores is not linear in the key")
    if not (visible == visible[0]).all():
        raise refused_attention(node, "its mask differs between heads")
    window, chunk, expected = 0, evaluation.chunk, distance >= 0
    if chunk:
        expected &= row // chunk == column // chunk
    else:
        hidden = distance[~visible[0] & expected]
        window = int(hidden.min()) if hidden.numel() else 0
        expected &= (distance < window) | (window == 0)
    if not torch.equal(visible[0], expected):
        raise refused_attention(node, "its mask is neither causal nor a causal window or chunk")
    scales = (ones - zeros)[visible]
    scale = float(ones[0, 0, 0] - zeros[0, 0, 0])
    if (scales - scale).abs().max() > 1e-5 * abs(scale):
        raise refused_attention(node, "its scores are not scaled by one number")
    is_flat = bool((slopes.abs() < 1e-12).all())
    return window, chunk, () if is_flat else tuple(map(float, slopes)), scale
