"""Operators of bypass networks beside LoRA's products, which stand in `linear`.

Like those they take *adapter* parameters, and in a batch of many adapters each token is treated by
its own adapter; a token whose adapter has no parameter at the site passes unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from pcg.errors import TypeCheckError
from pcg.ir.operators.operator import Attributes, Gradient, Operator, Types
from pcg.ir.types import TORCH_NAMES


class Dropout(Operator):
    """y = x · mask / (1 - p): each element is dropped with probability p, in training alone.

    The mask is drawn from a generator seeded by the step's batch, the layer and `key`, which no
    other dropout of the layer has. So backward draws it again, and neither it nor y is kept; the
    gradient is the operator itself with the same key. `dtype` is y's, where it is not x's.
    """

    name = "dropout"
    is_random = True
    is_replayed = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if not types[0].is_token_wise:
            raise TypeCheckError(f"dropout of {types[0]}, which has no tokens")
        if not 0.0 < float(attributes["p"]) <= 1.0:  # type: ignore[arg-type]
            raise TypeCheckError(f"dropout with p={attributes['p']}; expected 0 < p <= 1")
        return (types[0].with_dtype(str(attributes.get("dtype", types[0].dtype))),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        x = inputs[0]
        if "dtype" in attributes:
            x = f"{x}.to(torch.{TORCH_NAMES[str(attributes['dtype'])]})"
        return f"K.dropout(batch, {x}, {attributes['p']}, {attributes['key']})"

    def gradient(self, context: Gradient) -> list[str | None]:
        attributes = {name: context.attributes[name] for name in ("p", "key")}
        dx = context.add("dropout", context.incoming, **attributes)
        return [context.cast(dx, context.input_type(0).dtype)]


class Scale(Operator):
    """z = l ⊙ y, in y's dtype: `y: [T, n]`, `l: [n]`, each token by its own adapter's l."""

    name = "scale"
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, vector = types
        if len(y.dims) != 2 or vector.shape != y.shape[1:]:
            raise TypeCheckError(f"scale of {y} by {vector}; expected [{y.shape[-1]}]")
        return (y,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.scale({', '.join(inputs)})"

    def gradient(self, context: Gradient) -> list[str | None]:
        dy = dvector = None
        if context.needs[0]:
            dy = context.add("scale", context.incoming, context.input(1))
        if context.needs[1]:
            dtype = context.input_type(1).dtype
            dvector = context.add("inner", context.incoming, context.input(0), dtype=dtype)
        return [dy, dvector]


class Inner(Operator):
    """dl = Σ dz ⊙ y over the adapter's tokens: `dz: [T, n]`, `y: [T, n]` give `[n]`."""

    name = "inner"
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        left, right = types
        if left.shape != right.shape or len(left.dims) != 2:
            raise TypeCheckError(f"inner of {left} and {right}")
        return (left.with_shape(left.shape[1:]).with_dtype(str(attributes["dtype"])),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        dtype = TORCH_NAMES[str(attributes["dtype"])]
        return f"K.inner({', '.join(inputs)}).to(torch.{dtype})"


OPERATORS: tuple[Operator, ...] = (Dropout(), Inner(), Scale())
