"""`pcg simulate`: a model on a machine, as costs and a pool of pages, without weights or device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pcg.errors import CostModelError, OutOfMemoryError
from pcg.explain.step_memory import bytes_at
from pcg.ir.analysis.saved_memory import saved_memory
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import CONTEXT
from pcg.options import PlanOptions
from pcg.parallel.costs.accelerators import find_accelerator
from pcg.parallel.costs.catalog import SheetModel, find_cost_model
from pcg.parallel.costs.step_costs import GraphCosts, SequenceChunk, StepShape
from pcg.passes.bypasses import Bypasses
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.sites import bypasses_of
from pcg.peft.lora import LoraRecipe
from pcg.runtime.engine.calibration import fitted_latencies
from pcg.runtime.engine.events import EventLog
from pcg.runtime.engine.latency import Latencies
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.policies import Policy
from pcg.runtime.engine.sharing import Sharing
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.simulate.device import SimulatedAdapter
from pcg.simulate.engine import SimulatedEngine
from pcg.source import resolve

USED_MEMORY = 0.9
"""Of a device's memory, as vLLM's gpu_memory_utilization; the rest is for workspaces."""


@dataclass(frozen=True)
class SimulatedProgram:
    """A model on a machine.

    Attributes:
        name: of the model.
        device: that each rank has.
        tp: number of ranks.
        costs: seconds of its steps.
        page_bytes: of a page, on one rank.
        pages: that fit beside weights and what finetuning keeps.
        weights_bytes: of the base, on one rank.
        kept_bytes: that a pass of finetuning keeps for backward, on one rank.
        shapes: (out, in) of the linear modules that adapters are at, of all layers.
    """

    name: str
    device: str
    tp: int
    costs: GraphCosts
    page_bytes: int
    pages: int
    weights_bytes: int
    kept_bytes: int
    shapes: tuple[tuple[int, int], ...]

    def latencies(self) -> Latencies:
        """What an engine begins to plan by: five steps, as it measures them on a machine."""

        def seconds(tokens: int, context: int, rows: int) -> float:
            shape = StepShape.of([SequenceChunk(tokens, context)])
            return self.costs.step_seconds(replace(shape, sampled=rows))

        return fitted_latencies(seconds, self.costs.layers)

    def adapter(self, name: str, rank: int) -> SimulatedAdapter:
        """A LoRA adapter in half precision; each rank holds an equal share of it."""
        size = sum(2 * rank * (out + in_) for out, in_ in self.shapes)
        return SimulatedAdapter(name, -(-size // self.tp), rank)

    def engine(
        self,
        limits: Limits,
        policy: Policy | None = None,
        log: EventLog | None = None,
        sharing: Sharing | None = None,
    ) -> SimulatedEngine:
        """An engine of it, at 0 s; `SimulatedEngine` says what the options are."""
        return SimulatedEngine(
            self.costs,
            self.pages,
            self.page_bytes,
            limits,
            policy=policy,
            latencies=self.latencies(),
            log=log,
            sharing=sharing,
        )


def simulated_program(
    model: str,
    device: str,
    *,
    tp: int = 1,
    targets: Sequence[str] | str = "all-linear",
    rank: int = 16,
    finetuning_tokens: int = 0,
    product_share: float | None = None,
) -> SimulatedProgram:
    """Compile a model for a machine, without weights.

    Args:
        model: as `pcg.explain` takes it.
        device: with a sheet, as A100-80.
        tp: tensor-parallel degree.
        targets: modules that LoRA adapters are at; those that serve have any rank. They are in the
            base's precision, as the papers have them.
        rank: of what is trained.
        finetuning_tokens: of the longest mini-batch that is trained; 0 where nothing is.
        product_share: of the device's peak, that large matrix products reach; the cost model's own
            by default.
    Raises:
        CostModelError: the device has no sheet, or an operator no cost.
        OutOfMemoryError: the device cannot hold the model.
    """
    options = PlanOptions(tp=tp, seq=max(1, finetuning_tokens or 1024))
    memory, costs = find_accelerator(device), find_cost_model(device)
    if not isinstance(costs, SheetModel):
        raise CostModelError(f"{device} is no device with a data sheet")
    if product_share is not None:
        achieved = replace(costs.achieved, product=product_share)
        costs = SheetModel(costs.name, costs.sheet, costs.link_name, achieved)
    source = resolve(model)
    recipe = LoraRecipe(
        rank=rank,
        alpha=2 * rank,
        target_modules=targets if isinstance(targets, str) else tuple(targets),
    )
    model_type = str(source.config["model_type"])

    def bypasses(base: ModelGraph) -> Bypasses:
        return bypasses_of(base, [recipe], model_type, base.dtype)

    settings = Settings(
        options,
        source.name,
        bypasses,
        costs if tp > 1 else None,
        trains=bool(finetuning_tokens),
    )
    passes = pipeline(settings)
    base = passes.base(source.config)
    graphs = passes.trained(passes.attach.run(base))
    serving = graphs.serving
    kept_bytes = 0
    training: dict[str, Any] = {}
    if graphs.training is not None:
        plan = graphs.training.plan
        kept = saved_memory(graphs.training.model, plan)
        kept_bytes = bytes_at(kept.total, {SEQUENCES: options.batch, CONTEXT: options.seq})
        training = {
            "backward": [plan.plans[index].backward for index in plan.layers],
            "loss": graphs.training.epilogue,
            "trained": sum(
                _trained(plan.plans[index].backward, plan.plans[index].trained)
                for index in plan.layers
            ),
        }
    sheet = costs.sheet
    host = next((link for name, link in sheet.links.items() if name.startswith("PCIe")), None)
    if host is None:
        raise CostModelError(f"{device} has no link to its host; sheets of GPUs have")
    found = GraphCosts(
        costs,
        tp,
        serving,
        host_bytes_per_s=host.bytes_per_s * costs.achieved.link,
        **training,
    )
    weights = sum(_weights(graph) for graph in (serving.prologue, serving.epilogue))
    weights += sum(_weights(serving.blocks[index]) for index in serving.layers)
    page_bytes = bytes_of_page(kv_types(serving))
    free = int(USED_MEMORY * memory.memory_bytes) - weights - kept_bytes
    if free < page_bytes:
        raise OutOfMemoryError(
            f"{source.name} needs {(weights + kept_bytes) / 2**30:.1f} GiB a rank for weights and "
            f"what backward reads; {device} has {memory.memory_bytes / 2**30:.1f}. Use a higher tp"
        )
    return SimulatedProgram(
        source.name,
        device,
        tp,
        found,
        page_bytes,
        free // page_bytes,
        weights,
        kept_bytes,
        tuple(_adapted(base.model, bypasses(base.model).ranks)),
    )


def _weights(graph: Graph) -> int:
    """Bytes of a graph's frozen parameters."""
    return sum(int(p.type.size_bytes) for p in graph.parameters if p.role == "frozen")


def _trained(backward: Graph | None, names: Sequence[str]) -> int:
    """Numbers that a layer trains on one rank."""
    if backward is None:
        return 0
    return sum(int(backward.types[name].elements) for name in backward.outputs[-len(names) :])


def _adapted(base: ModelGraph, ranks: Iterable[str]) -> Iterable[tuple[int, int]]:
    """(out, in) of the modules at some sites, in all layers."""
    sites = base.linear_sites()
    for site in ranks:
        for _ in base.layers if "{layer}" in site else (0,):
            yield sites[site]
