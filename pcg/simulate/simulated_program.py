"""A model on a simulated machine: costs and a pool of pages, without weights or device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pcg.errors import CostModelError, OutOfMemoryError
from pcg.explain.planned_model import graph_costs, shaped_adapters
from pcg.explain.step_memory import bytes_at
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.ir.program.saved_memory import saved_memory
from pcg.ir.types import CONTEXT, DTYPE_BYTES
from pcg.options import PlanOptions
from pcg.parallel.costs.accelerators import find_accelerator
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.cost_model import SheetModel
from pcg.parallel.costs.step_costs import GraphCosts, SequenceChunk, StepShape
from pcg.passes.attach import Bypasses, bypasses_of
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.stages import TrainedModel
from pcg.peft.lora import LoraConfig
from pcg.runtime.admission.latency import Latencies
from pcg.runtime.admission.limits import Limits
from pcg.runtime.admission.policy import Policy
from pcg.runtime.engine.device.calibration import MANY, fitted_latencies
from pcg.runtime.engine.scheduling.work import Sharing
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import EventLog
from pcg.simulate.simulated_device import SimulatedAdapter
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.source import resolve

_STATE_BYTES = 16
"""Bytes of a trained parameter with its gradient and AdamW's two moments, all in fp32."""
USED_MEMORY = 0.9
"""The used share of a device's memory, like vLLM's gpu_memory_utilization."""


@dataclass(frozen=True)
class SimulatedProgram:
    """A model on a machine.

    Attributes:
        device: the name of each rank's device.
        page_bytes: the bytes of a page on a rank.
        pages: the pages that fit in addition to weights, trained parameters, and values that
            finetuning saves for backward.
        rank_elements: the numbers of an adapter of rank 1, on all ranks together.
        element_bytes: the bytes of an element of the served adapter copies.
    """

    name: str
    device: str
    tp: int
    costs: GraphCosts
    page_bytes: int
    pages: int
    rank_elements: int
    element_bytes: int

    def latencies(self) -> Latencies:
        """Return the initial latencies of an engine: five steps, as measured on a machine."""

        def seconds(tokens: int, context: int, rows: int) -> float:
            shape = StepShape.of([SequenceChunk(tokens, context)])
            return self.costs.step_seconds(replace(shape, sampled=rows))

        return fitted_latencies(seconds, self.costs.layers, many=MANY)

    def adapter(self, name: str, rank: int) -> SimulatedAdapter:
        """Return a LoRA adapter in the base's precision; each rank holds an equal share of it."""
        size = self.element_bytes * rank * self.rank_elements
        return SimulatedAdapter(name, -(-size // self.tp), rank)

    def engine(
        self,
        limits: Limits,
        policy: Policy | None = None,
        log: EventLog | None = None,
        sharing: Sharing | None = None,
        is_ahead: bool = False,
    ) -> SimulatedEngine:
        """Return an engine of the program, at 0 s; see `SimulatedEngine` for the options."""
        return SimulatedEngine(
            self.costs,
            self.pages,
            self.page_bytes,
            limits,
            policy=policy,
            latencies=self.latencies(),
            log=log,
            sharing=sharing,
            is_ahead=is_ahead,
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
        model: a model, as for `pcg.explain`.
        device: the name of a device with a data sheet, such as A100-80.
        targets: the modules with LoRA adapters; served adapters have any rank and the base's
            precision, as in the papers.
        rank: the rank of the trained adapter.
        finetuning_tokens: the tokens of the longest trained mini-batch; 0 for none.
        product_share: the share of the device's peak that large matrix products reach; the cost
            model's own by default.
    Raises:
        CostModelError: the device has no data sheet, or an operator no cost.
        OutOfMemoryError: the device cannot hold the model.
    """
    options = PlanOptions(tp=tp, seq=finetuning_tokens or 1024)
    memory_bytes = find_accelerator(device).memory_bytes
    costs = _sheet_costs(device, product_share)
    source = resolve(model)
    recipe = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
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
    saved_bytes = _saved_bytes(graphs.training, options) if graphs.training else 0
    host_bytes_per_s = _host_bytes_per_s(costs)
    weights = sum(_weights(graph) for graph in (serving.prologue, serving.epilogue))
    weights += sum(_weights(serving.blocks[index]) for index in serving.layers)
    page_bytes = bytes_of_page(kv_types(serving))
    (adapter,) = shaped_adapters(base.model, {source.name: recipe}, model_type)
    steps = graph_costs(costs, tp, serving, graphs.training, host_bytes_per_s=host_bytes_per_s)
    needed = weights + saved_bytes + _STATE_BYTES * steps.trained
    free = int(USED_MEMORY * memory_bytes) - needed
    if free < page_bytes:
        raise OutOfMemoryError(
            f"{source.name} needs {needed / 2**30:.1f} GiB a rank for weights, what is trained and "
            f"what backward reads; {device} has {memory_bytes / 2**30:.1f}. Use a higher tp"
        )
    return SimulatedProgram(
        source.name,
        device,
        tp,
        steps,
        page_bytes,
        free // page_bytes,
        sum(tensor.numel() for tensor in adapter.tensors) // rank,
        DTYPE_BYTES[base.model.dtype],
    )


def _sheet_costs(device: str, product_share: float | None) -> SheetModel:
    costs = find_cost_model(device)
    if not isinstance(costs, SheetModel):
        raise CostModelError(f"{device} is no device with a data sheet")
    if product_share is None:
        return costs
    achieved = replace(costs.achieved, product=product_share)
    return SheetModel(costs.name, costs.sheet, costs.link_name, achieved)


def _host_bytes_per_s(costs: SheetModel) -> float:
    links = costs.sheet.links.items()
    host = next((link for name, link in links if name.startswith("PCIe")), None)
    if host is None:
        raise CostModelError(f"{costs.name} has no link to its host; sheets of GPUs have")
    return host.bytes_per_s * costs.achieved.link


def _saved_bytes(trained: TrainedModel, options: PlanOptions) -> int:
    saved = saved_memory(trained.model, trained.plan)
    return bytes_at(saved.total, {SEQUENCES: options.batch, CONTEXT: options.seq})


def _weights(graph: Graph) -> int:
    return sum(int(p.type.size_bytes) for p in graph.parameters if p.role == "frozen")
