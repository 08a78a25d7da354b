"""The rules for nodes of clients' graphs: attributes, and types that the IR's own rules leave open.

A node's inferred type has to be what its kernel gives, as a request's memory is counted by it, and
a row has to depend on itself alone. The IR's rules trust the compiler in some places: a gradient's
inputs are alike, and a norm's weight is along its last dims. Clients' graphs are checked there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pcg.errors import SplitError
from pcg.ir.graph import Attribute, Node
from pcg.ir.types import TensorType

FLOATS = ("f16", "bf16", "f32", "f64")
"""The dtypes of a piece's values."""
_WORDS = {
    "dtype": FLOATS,
    "approximate": ("none", "tanh"),
    "style": ("half", "interleaved"),
}
"""Attributes that are words. Others are numbers: emitted source has some of them as they are."""
_ALIKE = frozenset(
    f"{name}_backward" for name in ("clamp", "gelu", "relu", "sigmoid", "silu", "tanh")
)
_NORMS = {"rms_norm": 1, "layer_norm": 1, "rms_norm_backward": 2, "layer_norm_backward": 2}
"""The number of inputs before a norm's weights; the last of these is what is normalised."""
_MOST_DIMS = 8


def check_attributes(node: Node) -> None:
    """Check a node's attributes. SplitError: one is neither a number nor a word of its own."""
    for name, value in node.attributes:
        if not _is_plain(name, value):
            raise SplitError(
                f"{node.op[:40]} has {name[:40]}={str(value)[:40]!r}; use numbers or words"
            )


def _is_plain(name: str, value: Attribute) -> bool:
    if isinstance(value, str):
        return value in _WORDS.get(name, ())
    if isinstance(value, tuple):
        return len(value) <= _MOST_DIMS and all(abs(one) < 2**31 for one in value)
    return math.isfinite(value) and abs(value) < 2**63


def check_types(node: Node, types: Mapping[str, TensorType]) -> None:
    """Check what a node reads, after the IR's own rules. SplitError: its result may be another."""
    given = [types[name] for name in node.inputs]
    attributes = dict(node.attributes)
    fits = True
    if node.op in _ALIKE:
        fits = given[0].shape == given[1].shape
    elif node.op in _NORMS:
        fits = _fits_norm(given, _NORMS[node.op])
    elif node.op == "linear_backward":
        fits = len(given[1].dims) == 2
    elif node.op in ("rope", "rope_backward"):
        turned = attributes["rotary_dim"]
        fits = type(turned) is int and turned % 2 == 0 and turned <= given[0].features[-1]
    if not fits:
        shown = ", ".join(map(str, given))
        raise SplitError(f"%{node.name}: {node.op} does not take {shown} in a piece")


def _fits_norm(given: Sequence[TensorType], first: int) -> bool:
    x = given[first - 1]
    if not x.features or any(one.shape != x.shape for one in given[:first]):
        return False
    return all(
        0 < len(weight.dims) <= len(x.features)
        and all(
            size in (1, own)
            for size, own in zip(weight.shape, x.features[-len(weight.dims) :], strict=True)
        )
        for weight in given[first:]
    )
