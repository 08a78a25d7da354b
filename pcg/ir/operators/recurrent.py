"""Operators with a state of each sequence: short convolutions and linear recurrences.

A state is no value of the graph. The batch has the states before its tokens, and takes the states
after them, by the attribute `state`, which numbers the states of a layer. In training, the batch of
a token window also takes and gives the gradients of states (`pcg.kernels.batch`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.graph import Graph
from pcg.ir.operators.base import (
    NATURAL,
    TEXT,
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Types,
    cast_bytes,
    declared,
    optional,
    widened,
)
from pcg.ir.types import DTYPE_BYTES, TensorType, tensor


class Recurrent(Operator):
    """An operator with a state of each sequence, or its gradient."""

    attributes = declared(state=NATURAL, library=optional(TEXT))
    sees_sequences = True
    counts_on_host = True

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        library = attributes.get("library")
        arguments = [*inputs, f"library={library!r}"] if library else inputs
        return f"K.{self.name}(batch, {attributes['state']}, {', '.join(arguments)})"


class ShortConvolution(Recurrent):
    """y_t = Σ_j weight[:, W - 1 - j] x_{t - j} (+ bias) for j < W: each channel by itself.

    `x: [T, C]`, `weight: [C, W]`, `bias: [C]`. The state is the last W - 1 inputs, zeros before the
    first token.
    """

    name = "short_convolution"
    inputs = (2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, weight, *bias = types
        fits = len(x.dims) == len(weight.dims) == 2 and weight.shape[0] == x.shape[1]
        if not fits or any(type_.shape != x.shape[1:] for type_ in bias):
            shown = "".join(f" and bias {type_}" for type_ in bias)
            raise TypeCheckError(f"short_convolution of {x} by weight {weight}{shown}")
        return (x,)

    def state_type(self, types: Types) -> TensorType:
        """Return the type of a sequence's state, from the types of the inputs."""
        x, weight = types[:2]
        return tensor(x.dtype, int(weight.shape[1]) - 1, int(x.shape[1]))

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1, -2, *(-1,) * (len(types) - 2)), (-1,)

    def gradient(self, context: Gradient) -> list[str | None]:
        inputs = context.incoming, context.input(1)
        dx = context.add("short_convolution_backward", *inputs, **context.attributes)
        return [dx, None, None][: len(context.node.inputs)]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * outputs[0].elements * inputs[1].shape[1]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The tokens behind their histories and the sum, in fp32, and a cast copy.
        wide = widened(inputs[0])
        return 2 * wide.size_bytes + cast_bytes(inputs[0], wide.dtype)


class ShortConvolutionBackward(Recurrent):
    """dx of a short convolution, from dy and the weight."""

    name = "short_convolution_backward"
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return _CONVOLUTION.infer(types, attributes)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return _CONVOLUTION.aligned(types, attributes)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return _CONVOLUTION.flops(inputs, outputs, attributes)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return _CONVOLUTION.temporaries(inputs, outputs, attributes)


class Recurrence(Recurrent):
    """A linear recurrence of a matrix S of each head, over the tokens of a sequence.

    S_t = exp(decay_t) S_{t-1} + k_t u_tᵀ,  o_t = S_tᵀ q_t. With `beta`, the gated delta rule
    corrects what S says of k_t: u_t = beta_t (v_t - exp(decay_t) S_{t-1}ᵀ k_t); a decay of each
    channel of k makes it Kimi's. Without beta, u_t = v_t: Mamba-2's state space duality.

    `q, k: [T, G, K]`, `v: [T, H, V]`, `decay: [T, H]` or `[T, H, K]`, `beta: [T, H]`; H / G heads
    share the q and k of a group. The state is S, [H, K, V], in fp32 at least.
    """

    name = "recurrence"
    inputs = (4, 5)
    is_product = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        q, k, v, decay, *beta = types
        fits = len(k.dims) == len(v.dims) == 3 and q.shape == k.shape
        heads = v.shape[:2]
        fits = fits and decay.shape in (heads, (*heads, k.shape[2]))
        if not fits or any(type_.shape != heads for type_ in beta):
            raise TypeCheckError(f"recurrence of {', '.join(map(str, types))}")
        if int(v.shape[1]) % int(k.shape[1]):
            raise TypeCheckError(f"{v.shape[1]} heads are no multiple of {k.shape[1]} groups")
        return (v,)

    def state_type(self, types: Types) -> TensorType:
        """Return the type of a sequence's state, from the types of the inputs."""
        k, v = types[1:3]
        return tensor(widened(v).dtype, int(v.shape[1]), int(k.shape[2]), int(v.shape[2]))

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        """Yield the head dims; the heads of a group stay together."""
        yield (-2, -2, -2, 1 - len(types[3].dims), *(-1,) * (len(types) - 4)), (-2,)

    def gradient(self, context: Gradient) -> list[str | None]:
        inputs = context.incoming, *context.inputs
        return list(context.add_many("recurrence_backward", *inputs, **context.attributes))

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # Products of a token with its head's state: read, update and, with beta, correct.
        return 2 * (len(inputs) - 2) * outputs[0].elements * inputs[1].shape[2]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The outputs of the chunks and of the whole; the scores of a chunk and two states, of one
        # sequence.
        v = inputs[2]
        size, width = _chunk(inputs)
        fixed = 2 * v.shape[1] * size**2 * width + 2 * _state(inputs)
        elements = 2 * v.elements + _repeated(inputs) + fixed
        return elements * DTYPE_BYTES[widened(v).dtype] + _casts(inputs)


class RecurrenceBackward(Recurrent):
    """The gradients of a recurrence's inputs, from do and the inputs."""

    name = "recurrence_backward"
    inputs = (5, 6)
    suffixes = ("", "dk", "dv", "ddecay", "dbeta")
    is_product = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if types[0].shape != types[3].shape:
            raise TypeCheckError(f"gradient {types[0]} does not fit {types[3]}")
        _RECURRENCE.infer(types[1:], attributes)
        return types[1:]

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        ((inputs, outputs),) = _RECURRENCE.aligned(types[1:], attributes)
        yield (*outputs, *inputs), inputs

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 3 * _RECURRENCE.flops(inputs[1:], outputs[2:3], attributes)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # Of each token: what autograd keeps of the chunks, then the gradients.
        _, k, v, _, *beta = inputs[1:]
        size, width = _chunk(inputs[1:])
        keys, values = int(k.shape[2]), int(v.shape[2])
        scores = 3 * size if width == 1 else (2 * width + 1) * size
        kept = scores + 4 * keys + 3 * values + keys * values // size
        if beta:
            kept += (3 * size if width == 1 else (width + 2) * size) + 2 * keys + 2 * values
        elements = v.elements / values * kept
        elements += 2 * _state(inputs[1:]) + _repeated(inputs[1:])
        return elements * DTYPE_BYTES[widened(v).dtype] + _casts(inputs)


CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens of a chunk; with a decay of each channel, whose pairs of tokens have all channels."""


def _chunk(inputs: Types) -> tuple[int, int]:
    """Return the tokens of a chunk, and the entries of a pair of its tokens and a head."""
    decay = inputs[3]
    return (CHUNK, 1) if len(decay.dims) == 2 else (CHANNEL_CHUNK, int(decay.shape[2]))


def _state(inputs: Types) -> int:
    """Return the elements of the state of a sequence."""
    k, v = inputs[1:3]
    return int(v.shape[1]) * int(k.shape[2]) * int(v.shape[2])


def _repeated(inputs: Types) -> sympy.Expr:
    """Return the elements of q and k that are repeated for the heads of a group."""
    k, v = inputs[1:3]
    is_repeated = k.shape[1] != v.shape[1]
    return 2 * v.shape[0] * v.shape[1] * k.shape[2] if is_repeated else sympy.Integer(0)


def _casts(inputs: Types) -> sympy.Expr:
    return sum((cast_bytes(x, widened(x).dtype) for x in inputs), sympy.Integer(0))


_CONVOLUTION, _RECURRENCE = ShortConvolution(), Recurrence()
_FORWARD = {entry.name: entry for entry in (_CONVOLUTION, _RECURRENCE)}


def numbered_states(graph: Graph) -> Graph:
    """Number the recurrent states of a layer, in order."""
    numbers = itertools.count()
    return graph.replace(
        nodes=tuple(
            node.changed(attributes={"state": next(numbers)}) if node.op in _FORWARD else node
            for node in graph.nodes
        )
    )


def state_types(block: Graph) -> tuple[TensorType, ...]:
    """Return the type of each state of a sequence in a layer, by number."""
    by_number = {
        node.attribute("state"): _FORWARD[node.op].state_type(block.types_of(node)[0])
        for node in block.nodes
        if node.op in _FORWARD
    }
    return tuple(by_number[number] for number in range(len(by_number)))


def state_bytes(block: Graph) -> int:
    """Return the bytes of a sequence's states in a layer."""
    types = state_types(block)
    return sum(math.prod(type_.features) * DTYPE_BYTES[type_.dtype] for type_ in types)
