"""A rank's part of a model at a degree and a dtype: the memory and the times of its steps."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from pcg.errors import UnsupportedError
from pcg.explain.base_memory import formats_of, layer_bytes
from pcg.explain.planned_model import PlannedModel, Setup, fused_serving, graph_costs, plan_model
from pcg.explain.report.report_data import KINDS
from pcg.explain.step_memory import memory_bytes
from pcg.ir.graph import Graph, Parameter
from pcg.ir.program.layer_order import gathers_of_step, layers_of_pass
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import DTYPE_BYTES
from pcg.options import CompileOptions
from pcg.parallel.costs.cost_model import CostModel
from pcg.parallel.costs.step_costs import GraphCosts
from pcg.passes.memory.plan import Frontiers, MemoryPlan
from pcg.peft.registry import parameter_kind
from pcg.runtime.adapters.served_bytes import bytes_in_pages
from pcg.runtime.memory.kv_cache import bytes_of_token
from pcg.runtime.memory.recurrent_states import bytes_of_states


@dataclass(frozen=True)
class TrainingChoice:
    """The execution of an optimizer step: batch, accumulated batches and memory budget."""

    batch: int
    accumulation: int
    budget: float


class RankPlan:
    """A model planned over ranks, for any batch, budget and number of served tokens.

    Args:
        setup: the model and the step; its batch is the largest requested batch.
        trains: False for a machine that only serves.
        adapters: the number of adapters that requests use.
    Raises:
        ParallelError: the degree does not divide the model.
        UnsupportedError: pcg cannot train the model.
    """

    def __init__(self, setup: Setup, trains: bool, adapters: int) -> None:
        self.tp = setup.options.tp
        self.planned = plan_model(setup)
        self._trains = trains
        self._adapters = adapters
        if trains and self.planned.trained is None:
            raise UnsupportedError(f"pcg does not finetune it: {self.planned.refusal}")
        self._frontiers: dict[int, Frontiers] = {}
        self._plans: dict[tuple[int, float], MemoryPlan] = {}
        self._memory: dict[TrainingChoice | None, Mapping[str, int]] = {}
        self._replanned: dict[TrainingChoice | None, PlannedModel] = {None: self.planned}
        self._costs: dict[tuple[object, float | None], GraphCosts] = {}

    @property
    def parts(self) -> int:
        """The number of replicas that shard the layers; 1 for whole layers."""
        return self.planned.setup.parts

    @property
    def is_quantized(self) -> bool:
        """True if the layers' weights have a weight format, so that replicas hold them whole."""
        return formats_of(self.planned.base) is not None

    def in_parts(self, replicas: int) -> RankPlan:
        """Return the plan of a rank if this many replicas shard the layers."""
        parted = copy.copy(self)
        setup = dataclasses.replace(self.planned.setup, parts=replicas)
        parted.planned = dataclasses.replace(self.planned, setup=setup)
        parted._memory, parted._replanned = {}, {None: parted.planned}
        return parted

    def gathers(self, model: CostModel, choice: TrainingChoice) -> list[float]:
        """Return the seconds of each layer gather in a batch's step, in order."""
        planned = self._at(choice)
        sizes = layer_bytes(planned.base)
        order = layers_of_pass(planned.training.plan, trains=True)
        return [
            model.collective_seconds("all_gather", sizes[layer], self.parts)
            for layer in gathers_of_step([order])
        ]

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values on the rank.

        Raises:
            UnsupportedError: the model has recurrent states.
        """
        if bytes_of_states(self.planned.base):
            raise UnsupportedError(
                "pcg plan counts what requests hold by the token, and this model has recurrent "
                "states, which a sequence has once; see kv_cache of pcg explain --serve-tokens"
            )
        return bytes_of_token(self.planned.serving)

    def memory(self, choice: TrainingChoice | None, served_tokens: int = 0) -> dict[str, int]:
        """Return the bytes of each kind of memory, and their total.

        Args:
            choice: the execution of optimizer steps; None without training.
            served_tokens: tokens of requests in the KV cache.
        """
        if choice not in self._memory:
            self._memory[choice] = memory_bytes(self._at(choice))
        sizes = dict(self._memory[choice])
        if self._adapters:
            sizes["served_adapters"] = self._adapters * self._adapter_bytes
        if choice is None:
            sizes |= dict.fromkeys(("adapters", "gradients", "optimizer"), 0)
        sizes["kv_cache"] = self.kv_bytes * served_tokens if served_tokens else 0
        kinds = {kind: sizes[kind] for kind in KINDS}
        return {**kinds, "total": sum(kinds.values())}

    def costs(self, model: CostModel, choice: TrainingChoice | None) -> GraphCosts:
        """Return the seconds of steps on a device.

        Raises:
            CostModelError: an operator has no cost on the device.
        """
        budget = None if choice is None else choice.budget
        key = (id(model), budget)
        if key not in self._costs:
            same = next((costs for (_, at), costs in self._costs.items() if at == budget), None)
            if same is None:
                planned = self._at(choice)
                trained = planned.trained if self._trains else None
                # The trained adapter's fp32 windows are few compared with requests' adapters.
                serving = served_in_base(planned) if self._adapters else planned.serving
                self._costs[key] = graph_costs(
                    model, self.tp, serving, trained, host_bytes_per_s=1.0
                )
            else:
                self._costs[key] = same.on(model)
        return self._costs[key]

    @cached_property
    def _adapter_bytes(self) -> int:
        """Bytes of an adapter's pages on the rank, in the served dtype."""
        setup = self.planned.setup
        serving, whole = fused_serving(self.planned.serving), setup.folded.model
        serves = CompileOptions(backend="triton", tp=self.tp)
        pages = partial(bytes_in_pages, options=serves, device=torch.device("cuda"))
        return sum(pages(serving, whole, adapter) for adapter in setup.shaped_adapters())

    def _at(self, choice: TrainingChoice | None) -> PlannedModel:
        if choice not in self._replanned:
            assert choice is not None
            setup = self.planned.setup.having(batch=choice.batch, memory_budget=choice.budget)
            if setup.options.budget == self.planned.setup.options.budget:
                return self.planned
            frontiers = self._frontiers_at(choice.batch)
            key = (choice.batch, choice.budget)
            if key not in self._plans:
                self._plans[key] = frontiers.plan(setup.options.budget)
            self._replanned[choice] = self.planned.replanned(setup, frontiers, self._plans[key])
        return self._replanned[choice]

    def _frontiers_at(self, batch: int) -> Frontiers:
        if batch not in self._frontiers:
            seq = self.planned.setup.options.seq
            self._frontiers[batch] = self.planned.training.frontiers.at(batch, seq)
        return self._frontiers[batch]


def served_in_base(planned: PlannedModel) -> ModelGraph:
    """Return the serving model with LoRA factors in a 16-bit base's dtype, as on Triton."""
    dtype = planned.base.dtype

    def copied(graph: Graph) -> Graph:
        parameters = [
            replace(
                parameter, value=replace(parameter.value, type=replace(parameter.type, dtype=dtype))
            )
            if is_copied(parameter)
            else parameter
            for parameter in graph.parameters
        ]
        return graph.replace(parameters=tuple(parameters))

    def is_copied(parameter: Parameter) -> bool:
        return parameter.role == "adapter" and parameter_kind(parameter.source).is_factor

    return planned.serving.map(copied) if DTYPE_BYTES[dtype] == 2 else planned.serving


def check_trained(setup: Setup) -> None:
    """Refuse a model that pcg cannot finetune at any number of ranks.

    Raises:
        UnsupportedError: says why.
    """
    passes, _, attached = setup.attached()
    try:
        passes.differentiate.run(attached)
    except UnsupportedError as error:
        raise UnsupportedError(f"pcg does not finetune it: {error}") from error


def without_training(setup: Setup) -> Setup:
    """Return a setup of a model that only serves."""
    return dataclasses.replace(setup, settings=dataclasses.replace(setup.settings, trains=False))
