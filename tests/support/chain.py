"""Chains of operators whose gradients the tests know."""

from __future__ import annotations

from hypothesis import strategies as st

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph, Parameter, Value
from pcg.ir.types import TOKENS, tensor

STEPS = st.lists(
    st.sampled_from(["silu", "gelu", "neg", "linear", "residual", "gate", "slice", "norm"]),
    min_size=1,
    max_size=8,
)


def chain(steps: list[str]) -> Graph:
    """A graph of these steps, each over the value so far, with a bypass on every product."""
    builder = Builder("chain")
    x = builder.input("x", tensor("f64", TOKENS, 4))
    for i, step in enumerate(steps):
        if step == "linear":
            w, a, b = (
                builder.parameter(Parameter(Value(name, tensor("f64", *shape)), role, name))
                for name, role, shape in (
                    (f"w{i}", "frozen", (4, 4)),
                    (f"a{i}", "adapter", (2, 4)),
                    (f"b{i}", "adapter", (4, 2)),
                )
            )
            y = builder.add("linear", [x, w])
            x = builder.add("expand_add", [y, builder.add("shrink", [x, a]), b])
        elif step == "residual":
            x = builder.add("add", [x, builder.add("mul", [x], scalar=0.5)])
        elif step == "gate":
            x = builder.add("mul", [builder.add("sigmoid", [x]), x])
        elif step == "slice":
            parts = [builder.add("slice", [x], dim=-1, start=s, stop=s + 2) for s in (2, 0)]
            x = builder.add("concat", parts, dim=-1)
        elif step == "norm":
            x = builder.add("layer_norm", [x], eps=1e-5, weight=False, bias=False)
        else:
            x = builder.add(step, [x], **({"approximate": "tanh"} if step == "gelu" else {}))
    return builder.build([x])
