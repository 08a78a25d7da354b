"""Models with adapters, parallelized over ranks by a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pcg.ir.graph import Graph
from pcg.ir.operators import operator
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TOKENS
from pcg.options import PlanOptions
from pcg.parallel.costs.layer_costs import DeviceCosts, LayerCosts, ring_bytes, size_bytes
from pcg.parallel.search import Search
from pcg.passes.attach import Bypasses
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.shard import Shard
from pcg.passes.stages import Attached, Sharded
from tests.support.bypasses import lora
from tests.support.families import BY_NAME
from tests.support.sharded import LENGTHS

RANK = 4


@cache
def attached(name: str, dtype: str = "float32") -> Attached:
    """A family's model of two layers with LoRA on every linear of them."""

    def bypasses(base: ModelGraph) -> Bypasses:
        sites = (site for site in base.linear_sites() if "{layer}" in site)
        return lora(dict.fromkeys(sites, RANK), dtype="f64" if dtype == "float64" else "f32")

    return attached_to(BY_NAME[name].config(2), bypasses, dtype)


def attached_to(
    config: Mapping[str, Any], bypasses: Callable[[ModelGraph], Bypasses], dtype: str = "float32"
) -> Attached:
    """The model of a config with some bypass networks."""
    passes = pipeline(Settings(PlanOptions(dtype=dtype), bypasses=bypasses))
    return passes.attach.run(passes.base(config))


def parallelized(model: Attached, degree: int, **options: Any) -> Sharded:
    """A model over so many ranks; its training graphs are those of one rank."""
    found = pipeline(Settings(PlanOptions(tp=degree, **options))).parallelize.run(model)
    assert isinstance(found, Sharded)
    return found


def base_over_ranks(base: ModelGraph, degree: int, **options: Any) -> Sharded:
    """A model without bypass networks over so many ranks."""
    return parallelized(Attached(base, base, base), degree, **options)


def sharded(name: str, degree: int, **options: Any) -> Sharded:
    return parallelized(attached(name), degree, **options)


def search_layer(
    block: Graph,
    plain: Graph,
    degree: int,
    costs: LayerCosts,
    trains: bool = True,
    sequence_parallel: bool = False,
) -> Search:
    """The search over one layer, with its bypass networks and without."""
    models = [ModelGraph(graph, (graph,), (0,), graph) for graph in (plain, block, block)]
    passes = pipeline(Settings(PlanOptions(tp=degree))).parallelize.until(Shard)
    prepared: Any = Attached(*models)
    for one, _ in passes.flat():  # one by one, as a layer alone has no interfaces to verify
        prepared = one.run(prepared)
    sharding = Shard(degree, costs, sequence_parallel)
    return sharding.searches(prepared.serving, prepared, trains)[0]


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
