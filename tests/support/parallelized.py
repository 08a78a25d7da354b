"""Models with adapters, parallelized over ranks by a plan."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pcg.passes.pipeline as pipeline
from pcg.ir.graph import Graph
from pcg.ir.operators import operator
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TOKENS
from pcg.parallel.costs.layer_costs import DeviceCosts, ring_bytes, size_bytes
from pcg.passes.bypasses import Bypasses
from pcg.passes.sharding.parallelize import Sharded, parallelize
from tests.support.families import BY_NAME
from tests.support.sharded import LENGTHS

RANK = 4


@cache
def attached(name: str, dtype: str = "float32") -> pipeline.Compilation:
    """A family's model of two layers with LoRA on every linear of them."""

    def bypasses(base: ModelGraph) -> Bypasses:
        sites = (site for site in base.linear_sites() if "{layer}" in site)
        return Bypasses(dict.fromkeys(sites, RANK), dtype="f64" if dtype == "float64" else "f32")

    state = pipeline.Compilation(name, BY_NAME[name].config(2), bypasses, dtype)
    return pipeline.run_passes(state, last="attach")


def sharded(name: str, degree: int) -> Sharded:
    state = attached(name)
    assert state.training_model is not None
    assert state.base is not None
    return parallelize(state.training_model, state.base, degree)


def transitions(graph: Graph) -> Counter[str]:
    found = Counter(node.op for node in graph.nodes)
    kinds = ("combine", "partition", "place", "reduce", "take")
    return Counter({op: found[op] for op in kinds if found[op]})


PLAN = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "self_attn.o_proj": "rowwise",
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise"),
    "mlp.down_proj": "rowwise",
}


class Machine:
    """Rooflines of a machine that there is not."""

    def __init__(self, alpha: float = 1e-6, link: float = 1e11) -> None:
        self.alpha = alpha
        self.link = link

    def operator_seconds(
        self, op: str, ins: Any, outs: Any, attributes: Any, tokens: int, context: int
    ) -> float:
        flops = operator(op).flops(ins, outs, attributes)
        free = getattr(flops, "free_symbols", ())
        flops = float(flops.subs({s: tokens if s == TOKENS else context for s in free}))
        moved = sum(size_bytes(type_, tokens) for type_ in (*ins, *outs))
        return max(flops / 1e14, moved / 1e12)

    def collective_seconds(self, kind: str, size: int, degree: int) -> float:
        messages = degree - 1 if kind == "all_gather" else 2 * (degree - 1)
        return messages * self.alpha + ring_bytes(kind, size, degree) / self.link


def costs(degree: int, tokens: int = sum(LENGTHS), **options: Any) -> DeviceCosts:
    return DeviceCosts(Machine(), degree, tokens, 1024, **options)
