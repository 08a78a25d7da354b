"""Recognise attention written out as matmul, softmax, matmul, and what is added to its scores.

Some architectures (Falcon, GPT-J, BLOOM, MPT) keep an attention of their own. In their exported
graph the probabilities are `softmax(scale · q kᵀ + bias)`, or the whole is one
scaled_dot_product_attention with that bias as its mask. The bias depends on positions alone. It is
evaluated, at two lengths, with ordinary PyTorch, and must be

    bias[h, i, j] = slope[h] · j + constant of the row   for visible j, hidden otherwise

with visible j ≤ i, or i - window < j ≤ i. What is not of that form is refused.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from pcg.errors import TraceError

_aten = torch.ops.aten
_SOFTMAX = {_aten.softmax.int, _aten._softmax.default}
_PRODUCT = {_aten.matmul.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mm.default}
_CALL = _aten.scaled_dot_product_attention.default
_VIEWS = ("dropout", "view", "reshape", "type_as", "contiguous", "clone", "_to_copy")
_TRANSPARENT = {_aten.to.dtype, *(getattr(_aten, name).default for name in _VIEWS)}
_HIDDEN = -1e4
_HALF = (torch.bfloat16, torch.float16)
_LENGTHS = (6, 9)


@dataclass(frozen=True)
class ScoreAttention:
    """An attention found in a graph.

    Attributes:
        q, k, v: the nodes of the queries, the keys (transposed or not) and the values.
        scale: the factor on the scores.
        window: the number of tokens that a token attends to; 0 for all.
        slopes: the ALiBi slope of each head; empty for none.
    """

    q: Node
    k: Node
    v: Node
    scale: float
    window: int
    slopes: tuple[float, ...]


_Measured = tuple[float, int, tuple[float, ...]]
"""Scale, window and slopes."""


def find_scores(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]
) -> dict[Node, ScoreAttention]:
    """The attentions of an exported graph, by the node that multiplies probabilities and values.

    Args:
        graph: a graph whose token dims are symbolic.
        constants: the values of constant placeholders, by name.
    Raises:
        TraceError: there are probabilities over tokens that are not causal attention.
    """
    found: dict[Node, ScoreAttention] = {}
    for node in graph.nodes:
        if node.target is _CALL:
            found[node] = _recognise_call(node, constants)
        elif node.target in _PRODUCT and node.target is not _aten.baddbmm.default:
            softmax = _probabilities(node.args[0])
            if softmax is not None:
                found[node] = _recognise(node, softmax, constants)
    return found


def _probabilities(node: Node) -> Node | None:
    """The softmax over keys that a node's value is, up to casts, views and inactive dropout."""
    while node.target in _TRANSPARENT:
        node = node.args[0]  # type: ignore[assignment]
    value = node.meta.get("val")
    if node.target in _SOFTMAX and not isinstance(value.shape[-1], int):  # type: ignore[union-attr]
        return node
    return None


def _recognise(node: Node, softmax: Node, constants: Mapping[str, torch.Tensor]) -> ScoreAttention:
    product = _score_product(softmax)
    q, k = product.args[1:3] if product.target is _aten.baddbmm.default else product.args[:2]
    root: Any = softmax.args[0]
    measured = []
    for tokens in _LENGTHS:
        scores = (_evaluate(root, product, constants, tokens, fill) for fill in (0.0, 1.0))
        shaped = (x.to(torch.float64).reshape(-1, tokens, tokens) for x in scores)
        measured.append(_measure(softmax, *shaped))
    return ScoreAttention(q, k, node.args[1], *_agreed(softmax, measured))  # type: ignore[arg-type]


def _recognise_call(node: Node, constants: Mapping[str, torch.Tensor]) -> ScoreAttention:
    names = [argument.name for argument in _CALL._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("dropout_p"):
        raise _refusal(node, "it drops probabilities")
    q, k, v = (given[name] for name in ("query", "key", "value"))
    scale: Any = given.get("scale") or q.meta["val"].shape[-1] ** -0.5  # type: ignore[union-attr]
    measured = []
    for tokens in _LENGTHS:
        bias = torch.zeros(1, tokens, tokens, dtype=torch.float64)
        if given.get("is_causal"):
            bias.masked_fill_(torch.ones(tokens, tokens).triu(1) > 0, -torch.inf)
        mask: Any = given.get("attn_mask")
        if mask is not None:
            bias = _evaluate(mask, None, constants, tokens, 0.0)
            if bias.dtype == torch.bool:
                bias = torch.zeros(bias.shape).masked_fill_(~bias, -torch.inf)
            bias = bias.to(torch.float64).broadcast_to(*bias.shape[:-2], tokens, tokens)
        bias = bias.reshape(-1, tokens, tokens)
        measured.append(_measure(node, bias, bias + scale))
    return ScoreAttention(q, k, v, *_agreed(node, measured))  # type: ignore[arg-type]


def _agreed(node: Node, measured: list[_Measured]) -> _Measured:
    """The measurement that all lengths agree on. TraceError: they do not."""
    numbers = ((scale, window, *slopes) for scale, window, slopes in measured)
    if any(abs(a - b) > 1e-6 for a, b in zip(*numbers, strict=True)):
        raise _refusal(node, f"its scores change with the length: {measured[0]}, {measured[1]}")
    return measured[0]


def _score_product(softmax: Node) -> Node:
    """The one product of activations that the scores come from."""
    queue, seen, products = [softmax.args[0]], set(), []
    while queue:
        node = queue.pop()
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if node.target in _PRODUCT and _is_square(node):
            products.append(node)
            if node.target is _aten.baddbmm.default:
                queue.append(node.args[0])
        else:
            queue.extend(node.all_input_nodes)
    if len(products) != 1:
        raise _refusal(softmax, f"its scores come from {len(products)} products, not one")
    return products[0]


def _is_square(node: Node) -> bool:
    shape = node.meta["val"].shape
    return len(shape) >= 2 and not isinstance(shape[-1], int) and not isinstance(shape[-2], int)


def _measure(softmax: Node, zeros: torch.Tensor, ones: torch.Tensor) -> _Measured:
    """The measurement of the scores [heads, n, n] where q kᵀ is all 0, and where it is all 1."""
    tokens = zeros.shape[-1]
    visible = zeros > _HIDDEN
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    if not (visible == visible[0]).all():
        raise _refusal(softmax, "its mask differs between heads")
    window = int(visible[0].sum(-1).max())
    expected = (column <= row) & (column > row - window)
    if not torch.equal(visible[0], expected):
        raise _refusal(softmax, "its mask is neither causal nor a causal window")
    window = 0 if window == tokens else window
    scales = (ones - zeros)[visible]
    if (scales - scales[0]).abs().max() > 1e-5 * scales[0].abs():
        raise _refusal(softmax, "its scores are not scaled by one number")
    # The difference to a zero is exact: BLOOM counts from the first key, MPT from the last.
    first, last = zeros[:, 1, 1] - zeros[:, 1, 0], zeros[:, -1, -1] - zeros[:, -1, -2]
    slopes = torch.where(zeros[:, -1, -1] == 0, last, first)
    line = slopes[:, None, None] * (column - row)
    rows = zeros - zeros.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    if (rows - line)[visible].abs().max() > 1e-4:
        raise _refusal(softmax, "what is added to its scores is not linear in the key's position")
    no_slopes = bool((slopes.abs() < 1e-12).all())
    scale = float(ones[0, 0, 0] - zeros[0, 0, 0])
    return scale, window, () if no_slopes else tuple(map(float, slopes))


def _evaluate(
    root: Node,
    product: Node | None,
    constants: Mapping[str, torch.Tensor],
    tokens: int,
    fill: float,
) -> torch.Tensor:
    """The value of a node on the CPU, with the product's entries all set to `fill`.

    Half-precision values are widened once made: a bias rounded to bf16 is not linear any more.
    """
    values: dict[Node, Any] = {}

    def size(x: Any) -> int:
        return x if isinstance(x, int) else tokens

    def value(node: Any) -> Any:
        if isinstance(node, Node):
            if node not in values:
                made = compute(node)
                is_half = isinstance(made, torch.Tensor) and made.dtype in _HALF
                values[node] = made.to(torch.float32) if is_half else made
            return values[node]
        if isinstance(node, list | tuple):
            return type(node)(value(item) for item in node)
        return torch.device("cpu") if isinstance(node, torch.device) else node

    def compute(node: Node) -> Any:
        meta = node.meta.get("val")
        if node is product:
            scores = torch.full([size(s) for s in meta.shape], fill, dtype=torch.float64)  # type: ignore[union-attr]
            if node.target is _aten.baddbmm.default:
                bias = value(node.args[0]).to(torch.float64)
                beta, alpha = (node.kwargs.get(name, 1.0) for name in ("beta", "alpha"))
                return beta * bias + alpha * scores  # type: ignore[operator]
            return scores
        if node.op == "placeholder":
            return _evaluate_placeholder(node, constants, tokens)
        if node.op == "get_attr" or not callable(node.target):
            raise _refusal(node, f"its scores depend on {node.op} {node.target}")
        if node.target is _aten.sym_size.int:
            return size(node.args[0].meta["val"].shape[node.args[1]])  # type: ignore[union-attr]
        if node.target is _aten._assert_tensor_metadata.default:
            return None
        arguments = [value(argument) for argument in node.args]
        keywords = {key: value(argument) for key, argument in node.kwargs.items()}
        if node.target is python_operator.getitem:
            return arguments[0][arguments[1]]
        return node.target(*arguments, **keywords)

    return value(root)  # type: ignore[no-any-return]


def _evaluate_placeholder(
    node: Node, constants: Mapping[str, torch.Tensor], tokens: int
) -> torch.Tensor:
    """A constant's value, or 0, 1, … for an integer input such as the positions."""
    if node.name in constants:
        return constants[node.name]
    meta = node.meta.get("val")
    if meta is not None and not meta.is_floating_point():
        return torch.arange(tokens).view(1, -1)
    raise _refusal(node, "its scores depend on a weight")


def _refusal(node: Node, why: str) -> TraceError:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    where = stack[-1][0] if stack else node.name
    return TraceError(
        f"{where} has an attention that pcg cannot raise: {why}. Use an architecture whose "
        "attention goes through transformers' AttentionInterface"
    )
