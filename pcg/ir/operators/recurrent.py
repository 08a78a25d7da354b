"""Operators with a state of each sequence: short convolutions and linear recurrences.

A state is no value of the graph. The batch has the states before its tokens, and takes the states
after them, by the attribute `state`, which numbers the states of a layer. In training, the batch of
a token window also takes and gives the gradients of states (`pcg.kernels.states`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.graph import Graph
from pcg.ir.operators.base import (
    NATURAL,
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Types,
    declared,
    widened,
)
from pcg.ir.types import TensorType, tensor


class Recurrent(Operator):
    """An operator with a state of each sequence, or its gradient."""

    attributes = declared(state=NATURAL)
    sees_sequences = True
    counts_on_host = True

    def state_type(self, types: Types) -> TensorType:
        """Return the type of a sequence's state, from the types of the forward's inputs."""
        raise NotImplementedError

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.{self.name}(batch, {attributes['state']}, {', '.join(inputs)})"


class ShortConvolution(Recurrent):
    """y_t = Σ_j weight[:, W - 1 - j] x_{t - j} (+ bias) for j < W: each channel by itself.

    `x: [T, C]`, `weight: [C, W]`, `bias: [C]`. The state is the last W - 1 inputs, zeros before the
    first token.
    """

    name = "short_convolution"
    inputs = (2, 3)
    constant_in = (1, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, weight, *bias = types
        fits = len(x.dims) == len(weight.dims) == 2 and weight.shape[0] == x.shape[1]
        if not fits or any(type_.shape != x.shape[1:] for type_ in bias):
            shown = "".join(f" and bias {type_}" for type_ in bias)
            raise TypeCheckError(f"short_convolution of {x} by weight {weight}{shown}")
        return (x,)

    def state_type(self, types: Types) -> TensorType:
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
        # The tokens behind their histories, the sum and a summand, in fp32.
        return 3 * widened(inputs[0]).size_bytes


class ShortConvolutionBackward(ShortConvolution):
    """dx of a short convolution, from dy and the weight."""

    name = "short_convolution_backward"
    inputs = (2, 2)

    def gradient(self, context: Gradient) -> list[str | None]:
        return Operator.gradient(self, context)


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
        return _CHUNKED * sum(widened(type_).size_bytes for type_ in inputs[:3])


class RecurrenceBackward(Recurrence):
    """The gradients of a recurrence's inputs, from do and the inputs."""

    name = "recurrence_backward"
    inputs = (5, 6)
    suffixes = ("", "dk", "dv", "ddecay", "dbeta")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if types[0].shape != types[3].shape:
            raise TypeCheckError(f"gradient {types[0]} does not fit {types[3]}")
        super().infer(types[1:], attributes)
        return types[1:]

    def gradient(self, context: Gradient) -> list[str | None]:
        return Operator.gradient(self, context)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        ((inputs, outputs),) = super().aligned(types[1:], attributes)
        yield (*outputs, *inputs), inputs

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 3 * super().flops(inputs[1:], outputs[2:3], attributes)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 3 * super().temporaries(inputs[1:], outputs[2:3], attributes)


_CHUNKED = 4
"""Copies of q, k and v that the chunked form holds at its peak, measured at 64 tokens a chunk."""


def state_types(block: Graph) -> tuple[TensorType, ...]:
    """Return the type of each state of a sequence in a layer, by number."""
    entries = {"short_convolution": ShortConvolution(), "recurrence": Recurrence()}
    by_number = {
        int(node.attribute("state")): entries[node.op].state_type(block.types_of(node)[0])
        for node in block.nodes
        if node.op in entries
    }
    return tuple(by_number[number] for number in sorted(by_number))
