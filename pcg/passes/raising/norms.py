"""Rules that raise norms: RMS norm with its roundings and offset, and layer norm written out."""

from __future__ import annotations

from typing import cast

from pcg.ir.graph import Node
from pcg.passes.raising.rewriter import NewName, Rewriter, orders


def _normalised(rewriter: Rewriter, name: str) -> tuple[str, float] | None:
    """The x before its cast to fp32, and eps, where the value is x / sqrt(mean(x²) + eps)."""
    for wide, scale in orders(rewriter.producer(name, "mul")):
        eps = _inverse_root_mean_square(rewriter, scale, wide)
        if eps is not None:
            return _before_widening(rewriter, wide), eps
    return None


def _inverse_root_mean_square(rewriter: Rewriter, name: str, wide: str) -> float | None:
    """eps, where the value is rsqrt(mean(wide²) + eps)."""
    root = rewriter.producer(name, "rsqrt")
    total = root and rewriter.producer(root.inputs[0], "add")
    mean = total and rewriter.producer(total.inputs[0], "mean")
    if not (total and mean) or len(total.inputs) != 1 or mean.get("dim") != -1:
        return None
    square = rewriter.producer(mean.inputs[0], "pow", "mul")
    if square is None or any(name != wide for name in square.inputs):
        return None
    if square.op == "pow" and square.get("exponent") != 2.0:
        return None
    return float(cast("float", total.attribute("scalar")))


def _before_widening(rewriter: Rewriter, name: str) -> str:
    node = rewriter.producer(name, "cast")
    return node.inputs[0] if node and node.get("dtype") == "f32" else name


def rms_norm(rewriter: Rewriter, node: Node) -> NewName | None:
    """W · normalised(x), whatever is rounded when."""
    types = rewriter.graph.types
    for weight, value in _factors(rewriter, node):
        rounding = rewriter.producer(value, "cast")
        found = _normalised(rewriter, rounding.inputs[0] if rounding else value)
        scale = _norm_weight(rewriter, weight)
        if found is None or scale is None:
            continue
        (x, eps), (parameter, offset) = found, scale
        if types[x] != node.output.type or types[parameter].shape != types[x].shape[-1:]:
            return None
        # Without a cast in between nothing is rounded, so either order is the same.
        first = rounding is not None or (node.op == "mul" and node.output.type.dtype == "f32")
        return rewriter.add("rms_norm", x, parameter, eps=eps, offset=offset, round_first=first)
    return None


def _factors(rewriter: Rewriter, node: Node) -> tuple[tuple[str, str], ...]:
    """The factors of a product, cast or not, in both orders."""
    return orders(rewriter.producer(node.inputs[0] if node.op == "cast" else node.name, "mul"))


def _norm_weight(rewriter: Rewriter, name: str) -> tuple[str, float] | None:
    """The parameter and the offset of w or (offset + w), cast or not."""
    offset = 0.0
    if (shifted := rewriter.producer(name, "add")) and len(shifted.inputs) == 1:
        offset, name = float(cast("float", shifted.attribute("scalar"))), shifted.inputs[0]
    name = rewriter.through(name, "cast")
    return (name, offset) if rewriter.is_parameter(name) else None


def plain_rms_norm(rewriter: Rewriter, node: Node) -> NewName | None:
    """normalised(x) that no weight follows."""
    name = node.inputs[0] if node.op == "cast" else node.name
    found = _normalised(rewriter, name)
    if found is None or rewriter.graph.types[found[0]] != node.output.type:
        return None
    return rewriter.add("rms_norm", found[0], eps=found[1], offset=0.0, round_first=True)


def layer_norm(rewriter: Rewriter, node: Node) -> NewName | None:
    """W · (x - mean(x)) · rsqrt(mean((x - mean(x))²) + eps), as Cohere writes it out."""
    for weight, value in _factors(rewriter, node):
        parameter = rewriter.through(weight, "cast")
        if not rewriter.is_parameter(parameter):
            continue
        for centred, scale in orders(rewriter.producer(value, "mul")):
            eps = _inverse_root_mean_square(rewriter, scale, centred)
            wide = _centred(rewriter, centred)
            if eps is None or wide is None:
                continue
            x = _before_widening(rewriter, wide)
            if rewriter.graph.types[x] == node.output.type:
                return rewriter.add("layer_norm", x, parameter, eps=eps, weight=True, bias=False)
    return None


def _centred(rewriter: Rewriter, name: str) -> str | None:
    """x, where the value is x - mean(x)."""
    node = rewriter.producer(name, "sub")
    mean = node and len(node.inputs) == 2 and rewriter.producer(node.inputs[1], "mean")
    if node and mean and mean.inputs[0] == node.inputs[0] and mean.get("dim") == -1:
        return node.inputs[0]
    return None
