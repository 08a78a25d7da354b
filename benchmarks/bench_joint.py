"""Weigh layouts together with what is kept, against one after the other, on data sheets.

    python benchmarks/bench_joint.py [--batch 4] [--seq 1024] [--shares 0.9 0.5 0.2 0.02]

Each case is a model, a recipe, a degree and a machine with a link. Of the bytes between the least
that a rank saves and the most, each share is a budget in bytes. `sequential_ms` are forward and
backward of all layers on a rank where the layouts are chosen by time alone, and what is recomputed
by operations alone; `joint_ms` those of the joint choice; `same_layouts_ms` where the layouts are
the sequential ones and what is recomputed is chosen by time. `graphs` is joint / sequential by the
forward and backward graphs that run, node by node. `bound` is the part of the joint choice's time,
each message by itself, that no layouts are below.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from measure import write
from peft import LoraConfig

from pcg.explain.planned_model import Setup
from pcg.given_module import source_of
from pcg.options import PlanOptions
from pcg.parallel.costs.catalog import find_cost_model
from pcg.passes.memory.joint import Joint, Step
from pcg.passes.memory.plan import MemoryPlan
from pcg.passes.pipeline import Settings, in_order, pipeline
from pcg.passes.stages import Attached, Sharded
from pcg.peft.adapter_files import recipes_of
from pcg.runtime.training.torch_optimizers import Optimizer


class Case(NamedTuple):
    """A model, a recipe, and ranks on a machine; the machine's own link by default."""

    model: str
    recipe: str
    tp: int
    machine: str
    link: str | None = None
    sequence_parallel: bool = False


CASES = (
    Case("meta-llama/Llama-3.1-8B", "lora", 2, "H100"),
    Case("meta-llama/Llama-3.1-8B", "lora", 4, "L40S"),
    Case("meta-llama/Llama-3.1-8B", "lora-128", 4, "A100-80", "PCIe 4"),
    Case("meta-llama/Llama-3.1-8B", "lora", 8, "H100", None, True),
    Case("meta-llama/Llama-3.1-70B", "lora", 8, "H100"),
    Case("Qwen/Qwen2.5-14B", "dora", 4, "A100-80"),
    Case("Qwen/Qwen2.5-32B", "lora", 8, "L40S"),
    Case("facebook/opt-13b", "houlsby", 4, "A100-80", "PCIe 4"),
    Case("google/gemma-2-27b", "lora", 4, "H100", "PCIe 5"),
    Case("tiiuae/falcon-40b", "ia3", 4, "A100-80"),
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECIPES: dict[str, object] = {"lora-128": LoraConfig(r=128, target_modules=PROJECTIONS)}


def graphs_seconds(plan: MemoryPlan, step: Step) -> float:
    """Return the seconds of all layers' forward and backward graphs as they run."""
    costs, found = step.frontiers.costs, step.frontiers
    assert costs is not None
    tokens = found.batch * found.seq
    ordered = in_order(plan)
    seconds = [
        sum(costs.graph_seconds(g, tokens, found.seq) for g in (one.forward, one.backward) if g)
        for one in ordered.plans
    ]
    return sum(seconds[index] for index in ordered.layers)


def compared(case: Case, setup: Setup, attached: Attached, size_bytes: int) -> dict[str, Any]:
    """Return the joint choice at a budget against the sequential one."""
    started = time.process_time()
    budgeted = setup.having(memory_budget=size_bytes)
    sharded = budgeted.attached()[0].parallelize.run(attached)
    took = time.process_time() - started
    budget, joint = budgeted.options.budget, sharded.joint
    result: dict[str, Any] = {"budget_mib": round(size_bytes / 2**20, 1)}
    if joint is None:
        return result | {"ratio": 1.0}
    best, first = joint.best, joint.sequential
    alone = first.frontiers.within(first.frontiers.by_flops, budget)
    chosen = best.frontiers.choices(budget)
    assert alone is not None
    assert chosen is not None
    graphs = [
        graphs_seconds(step.frontiers.planned(choices), step)
        for step, choices in ((best, chosen), (first, alone))
    ]
    return result | {
        "sequential_ms": round(joint.sequential_seconds * 1e3, 3),
        "same_layouts_ms": round(first.seconds * 1e3, 3),
        "joint_ms": round(best.seconds * 1e3, 3),
        "recomputed_ms": round(best.again_seconds * 1e3, 3),
        "ratio": round(best.seconds / joint.sequential_seconds, 4),
        "graphs": round(graphs[0] / graphs[1], 4),
        "same_layouts": best is first,
        "bound": bound_of(joint),
        "search_cpu_seconds": round(took, 2),
    }


def bound_of(joint: Joint) -> float:
    """Return the bound as a part of the least time that was found, each message by itself."""
    return round(
        joint.bound_seconds / min(joint.best.apart_seconds, joint.sequential.apart_seconds), 4
    )


def run(case: Case, batch: int, seq: int, shares: Sequence[float]) -> dict[str, Any]:
    """Return a case's budgets with what was chosen."""
    options = PlanOptions(
        tp=case.tp, batch=batch, seq=seq, sequence_parallel=case.sequence_parallel
    )
    source, to_trace = source_of(case.model)
    settings = Settings(options, source.name, costs=find_cost_model(case.machine, case.link))
    passes = pipeline(settings)
    traced = passes.trace.run(to_trace)
    folded = passes.fold.run(traced)
    recipes = recipes_of(RECIPES.get(case.recipe, case.recipe))
    optimizer = Optimizer.of("adamw", None)
    setup = Setup(source.config, to_trace, settings, traced, folded, recipes, optimizer)
    passes, _, attached = setup.attached()
    sharded = passes.parallelize.run(attached)
    assert isinstance(sharded, Sharded)
    pruned = passes.prune.run(passes.differentiate.run(sharded))
    training = passes.rematerialize.run(passes.compress.run(pruned)).training
    assert training is not None
    points = training.frontiers.points()
    sizes = [size for size, _, restored in points if not restored]
    most, least = max(sizes), min(sizes)
    return {
        "case": case._asdict(),
        "most_mib": round(most / 2**20, 1),
        "least_mib": round(least / 2**20, 1),
        "shares": {
            str(share): compared(case, setup, attached, int(least + share * (most - least)))
            for share in shares
        },
    }


def main() -> None:
    """Run the cases and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.9, 0.5, 0.2, 0.02])
    arguments = parser.parse_args()
    cases = []
    for case in CASES:
        cases.append(run(case, arguments.batch, arguments.seq, arguments.shares))
        print(cases[-1], flush=True)
    ratios = [row["ratio"] for case in cases for row in case["shares"].values()]
    summary = {"least_ratio": min(ratios), "largest_ratio": max(ratios)}
    sizes = {"batch": arguments.batch, "seq": arguments.seq}
    write("joint", {**sizes, **summary, "cases": cases})


if __name__ == "__main__":
    main()
