"""Weigh a base in parts over replicas against matrices in shards, on data sheets.

    python benchmarks/bench_sharded_base.py [--ranks 4] [--seq 1024] [--batches 4 16 64]

Both take the same step of so many sequences on so many ranks: replicas a share of the sequences
each, shards all of them. Times are of all layers, forward and back, without the head. A gather goes
on while the layer before runs, so a layer of replicas takes the longer of the two; a layer of
shards takes what it computes and what it sends.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from measure import write

from pcg.explain.base_memory import layer_bytes
from pcg.explain.planned_model import PlannedModel, Setup, graph_costs, plan_model
from pcg.explain.step_memory import memory_bytes
from pcg.given_module import source_of
from pcg.ir.program.layer_order import gathers_of_step, layers_of_pass
from pcg.options import PlanOptions
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.cost_model import CostModel
from pcg.parallel.costs.step_costs import SequenceChunk, StepShape
from pcg.passes.pipeline import Settings, pipeline
from pcg.peft.adapter_files import recipes_of
from pcg.runtime.training.torch_optimizers import Optimizer

MACHINES = ("A10G", "L40S", "H100")
RECIPE_RANK = 16


def planned(model: str, tp: int, batch: int, seq: int, machine: str, parts: int) -> PlannedModel:
    """Plan a model with LoRA on all linears for one rank's step."""
    source, to_trace = source_of(model)
    costs = find_cost_model(machine) if tp > 1 else None
    options = PlanOptions(tp=tp, batch=batch, seq=seq, costs=machine if tp > 1 else None)
    settings = Settings(options, source.name, costs=costs)
    passes = pipeline(settings)
    traced = passes.trace.run(to_trace)
    of_model = (source.config, to_trace, settings, traced, passes.fold.run(traced))
    setup = Setup(*of_model, recipes_of("lora"), Optimizer.of("adamw"))
    return plan_model(dataclasses.replace(setup, parts=parts))


def layer_seconds(found: PlannedModel, costs: CostModel) -> tuple[list[float], list[float]]:
    """Return the seconds of each layer of a rank, forward and back, with what it sends."""
    options = found.setup.options
    of_graphs = graph_costs(costs, options.tp, found.serving, found.training, host_bytes_per_s=20e9)
    one = SequenceChunk(options.seq, 0, is_trained=True, adapter="a", rank=RECIPE_RANK)
    shape = StepShape.of([one] * options.batch)
    layers = range(of_graphs.layers)
    back = [of_graphs.backward_seconds(layer, shape) for layer in layers]
    return [of_graphs.layer_seconds(layer, shape) for layer in layers], back


def run(model: str, machine: str, ranks: int, batch: int, seq: int) -> dict[str, Any]:
    """Compare both on one machine for one step."""
    costs = find_cost_model(machine)
    shards = planned(model, ranks, batch, seq, machine, 1)
    parts = planned(model, 1, batch // ranks, seq, machine, ranks)
    of_shards = sum(map(sum, layer_seconds(shards, costs)))
    forward, back = layer_seconds(parts, costs)
    sizes = layer_bytes(parts.base)
    order = layers_of_pass(parts.training.plan, trains=True)
    times = [*forward, *back[::-1]]
    gathers = gathers_of_step([order])
    each_s = costs.collective_seconds("all_gather", sizes[0], ranks)
    # The first gather that no layer runs beside comes with the turn of a step.
    of_parts = sum(max(time, each_s) for time in times[: len(gathers)])
    of_parts += sum(times[len(gathers) :])
    return {
        "machine": machine,
        "tokens": batch * seq,
        "shards_ms": round(1e3 * of_shards, 1),
        "parts_ms": round(1e3 * of_parts, 1),
        "gathers_alone_ms": round(1e3 * each_s * len(gathers), 1),
        "shards_gib": round(memory_bytes(shards)["total"] / 2**30, 2),
        "parts_gib": round(memory_bytes(parts)["total"] / 2**30, 2),
    }


def main() -> None:
    """Run the cases and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16, 64])
    given = parser.parse_args()
    rows = []
    for machine in MACHINES:
        for batch in given.batches:
            rows.append(run(given.model, machine, given.ranks, batch, given.seq))
            print(rows[-1], flush=True)
    write("sharded_base", {"model": given.model, "ranks": given.ranks, "rows": rows})


if __name__ == "__main__":
    main()
