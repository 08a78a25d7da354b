"""Operators of virtual tokens: rows of a batch that stand for no token of the vocabulary.

The batch says which rows are virtual, and which virtual token of its adapter each one is.
"""

from __future__ import annotations

from math import prod

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.operators.base import Attributes, Gradient, Operator, Types


class VirtualTokens(Operator):
    """x, with its adapter's own in each virtual row: embeddings, or a layer's keys or values.

    `x: [T, …]`, `prompt: [n, h]` with h the features of x, which keeps the rows of an adapter
    without a prompt here.
    """

    name = "virtual_tokens"
    template = "K.{name}(batch, {inputs})"
    sees_rows = True
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, prompt = types
        if not x.is_token_wise or len(prompt.dims) != 2 or prompt.shape[1] != prod(x.features):
            raise TypeCheckError(f"virtual_tokens of {x} with {prompt}; expected [n, features]")
        return (x,)

    def gradient(self, context: Gradient) -> list[str | None]:
        dx = dprompt = None
        if context.needs[0]:
            dx = context.add("without_virtual", context.incoming)
        if context.needs[1]:
            dprompt = context.add("virtual_tokens_backward", context.incoming, context.input(1))
        return [dx, dprompt]


class WithoutVirtual(Operator):
    """x with zeros in each virtual row: the gradient of what a prompt replaced."""

    name = adjoint = "without_virtual"
    template = "K.{name}(batch, {inputs})"
    sees_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if not types[0].is_token_wise:
            raise TypeCheckError(f"without_virtual of {types[0]}, which has no tokens")
        return (types[0],)


class VirtualTokensBackward(Operator):
    """dprompt: for each virtual token, the sum of dy over the rows that it stands in.

    `dy: [T, …]`, `prompt: [n, h]` give `[n, h]` in the prompt's dtype.
    """

    name = "virtual_tokens_backward"
    template = "K.{name}(batch, {inputs})"
    sees_rows = True
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        VirtualTokens().infer(types, attributes)
        return (types[1],)

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        prompt = inputs[1]
        rows = sympy.Min(inputs[0].shape[0], prompt.shape[0])  # of one sequence
        row_bytes = inputs[0].size_bytes / inputs[0].shape[0]
        return rows * row_bytes + 2 * outputs[0].size_bytes
