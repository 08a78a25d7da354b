"""`pcg.plan`: search for machines that run a workload, without weights and without a GPU.

The search covers each GPU with each degree, dtype and number of replicas. A model is traced once
per dtype and planned once per tensor-parallel degree; all GPUs cost the same graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcg.errors import CostModelError, FinetuneError, ParallelError, PcgError, UnsupportedError
from pcg.explain.base_memory import base_bytes
from pcg.explain.capacity import usable_bytes
from pcg.explain.planned_model import Setup
from pcg.explain.report_builder import recipes_text
from pcg.given_module import source_of
from pcg.ir.program.program import is_classifier
from pcg.ir.types import TORCH_NAMES
from pcg.keywords import takes
from pcg.options import PlanOptions
from pcg.parallel.base_plan import check_experts
from pcg.parallel.costs.accelerators import Accelerator, find_accelerator, known_name
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.cost_model import CostModel, SheetModel
from pcg.passes.pipeline import Settings, pipeline
from pcg.peft.adapter_files import recipes_of
from pcg.peft.recipe import Recipe
from pcg.peft.registry import learning_labels
from pcg.plan.candidate import Candidate, Machine, cheapest, pareto_front
from pcg.plan.evaluate import Replica, Wanted, sharing, too_large
from pcg.plan.loads import Served
from pcg.plan.machine_plan import MachinePlan
from pcg.plan.rank_plan import RankPlan, check_trained, without_training
from pcg.plan.workload import MachineOptions, MachineWorkload, parse_workload
from pcg.runtime.admission.limits import Limits
from pcg.runtime.training.torch_optimizers import FIELDS, Optimizer


@dataclass(frozen=True)
class Device:
    """A GPU with its usable memory and its costs."""

    gpu: Accelerator
    usable_bytes: int
    model: CostModel


class Search:
    """The search for a model and a workload.

    Attributes:
        name: the model's name.
        refused: the errors of impossible degrees.
    """

    def __init__(
        self,
        model: Any,
        recipes: Mapping[str, Recipe],
        wanted: Wanted,
        devices: Sequence[Device],
        options: MachineOptions,
    ) -> None:
        self.refused: dict[int, PcgError] = {}
        self._source, self._to_trace = source_of(model)
        self.name = self._source.name
        if is_classifier(self._source.config):
            recipes = {name: learning_labels(recipe) for name, recipe in recipes.items()}
        self._recipes = recipes
        self._wanted = wanted
        self._devices = devices
        self._options = options
        self._optimizer = Optimizer.of(
            options.optimizer, options.optimizer_options, options.offload_optimizer
        )

    @property
    def planned_for(self) -> str | None:
        """The costs that place adapters on ranks; None for tp=1 or without adapters."""
        if max(self._options.degrees) == 1 or not self._recipes:
            return None
        costs = self._options.costs
        return self._devices[0].gpu.name if costs is None else str(costs)

    def candidates(self) -> Iterator[Candidate]:
        """Yield every machine, including those that break promises.

        Raises:
            UnsupportedError: the model has too few positions, or pcg cannot train it.
            ParallelError: `ep` is set without experts.
        """
        for dtype in dict.fromkeys(self._options.dtypes) or (None,):
            setup = self._setup(dtype)
            self._check_positions(setup)
            check_experts(setup.folded.model.blocks, self._options.ep)
            weights = base_bytes(setup.folded.model)
            name = TORCH_NAMES[setup.folded.model.dtype]
            is_checked = self._wanted.workload.training is None
            for degree in self._options.degrees:
                # A rank holds at least its part of the weights.
                least = -(-weights // (degree * self._most_parts(degree)))
                holding = [device for device in self._devices if device.usable_bytes >= least]
                if holding and not is_checked:
                    is_checked = True
                    if degree > 1:
                        check_trained(setup)
                for device in self._devices:
                    if device not in holding:
                        machine = Machine(device.gpu.name, degree, 1, name)
                        yield too_large(machine, least, device.usable_bytes)
                yield from self._over_ranks(setup, degree, name, holding) if holding else ()

    def _most_parts(self, degree: int) -> int:
        """Return the maximum number of replicas of a degree that can shard the layers."""
        workload = self._wanted.workload
        is_whole = workload.serving is not None or self._options.quantization is not None
        if is_whole or workload.training is None:
            return 1
        return sharing(workload.training, self._options.max_gpus // degree)[-1]

    def _over_ranks(
        self, setup: Setup, degree: int, dtype: str, devices: Sequence[Device]
    ) -> list[Candidate]:
        """Return the machines of a degree; if the degree is impossible, record the reason."""
        trains = self._wanted.workload.training is not None
        candidates: list[Candidate] = []
        try:
            setup.optimizer.check_parted(degree)
            setup = setup.having(tp=degree, ep=self._options.ep)
            if degree > 1:
                settings = dataclasses.replace(setup.settings, costs=self._devices[0].model)
                setup = dataclasses.replace(setup, settings=settings)
            plan = RankPlan(setup, trains, self._options.adapters)
            for device in devices:
                place = (device.gpu.name, device.usable_bytes, device.model)
                replica = Replica(*place, dtype, plan, self._wanted)
                candidates += replica.candidates(self._options.max_gpus)
        except (FinetuneError, ParallelError, UnsupportedError) as error:
            if degree == 1 and self._options.ep is None:
                raise
            self.refused[degree] = error
            return []
        return candidates

    def _setup(self, dtype: str | None) -> Setup:
        training = self._wanted.workload.training
        if training is not None:
            batch, seq = training.batch, training.seq
        else:
            assert self._wanted.served is not None
            batch = self._wanted.served.most_running
            seq = max(1, self._wanted.served.most_tokens // batch)
        options = PlanOptions(
            dtype=dtype, quantization=self._options.quantization, batch=batch, seq=seq
        )
        settings = Settings(options, self.name)
        passes = pipeline(settings)
        traced = passes.trace.run(self._to_trace)
        folded = passes.fold.run(traced)
        model = (self._source.config, self._to_trace, settings, traced, folded)
        setup = Setup(*model, self._recipes, self._optimizer)
        return setup if training is not None else without_training(setup)

    def _check_positions(self, setup: Setup) -> None:
        workload, positions = self._wanted.workload, setup.positions
        lengths = {
            "train": 0 if workload.training is None else workload.training.seq,
            "serve": 0 if workload.serving is None else workload.serving.tokens,
        }
        for kind, length in lengths.items():
            if positions is not None and length > positions:
                raise UnsupportedError(
                    f"{kind}: sequences of {length:,} tokens are beyond the {positions:,} "
                    f"positions of {self.name}; use {positions:,} at most"
                )


_USUAL_GPUS = ("A10G", "A100-40", "A100-80", "H100", "H200", "L40S")
"""Default GPUs of the search."""


@dataclass(frozen=True)
class PlanArguments(MachineOptions):
    """Arguments of `plan`.

    Attributes:
        model: a directory, a hub id, an id that ships with pcg, a config, or a transformers model;
            no weights are needed.
        peft: None, "lora" or another word of `pcg.peft.registry.SHORTHANDS`, a peft configuration,
            an adapter directory, or {name: any of these except None}.
    """

    model: Any
    peft: object = "lora"


@takes(PlanArguments)
def plan(arguments: PlanArguments) -> MachinePlan:
    """Find machines for a workload: their memory, times, promises and prices, and the cheapest.

    Raises:
        PcgError: the model or method cannot be read, traced, attached, sharded or costed.
    """
    workload = parse_workload(arguments.workload)
    _check_options(arguments)
    devices = _devices(arguments)
    price = _prices(arguments.price or {}, devices)
    recipes = _recipes(arguments, workload)
    rank = max((recipe.rank or 0 for recipe in recipes.values()), default=0)
    wanted = Wanted(
        workload,
        _served(arguments, workload, rank),
        rank,
        None if arguments.tpot_slo_ms is None else arguments.tpot_slo_ms / 1e3,
        None if arguments.ttft_slo_ms is None else arguments.ttft_slo_ms / 1e3,
        arguments.finetuning_tokens_per_s,
        price,
    )
    search = Search(arguments.model, recipes, wanted, devices, arguments)
    candidates = list(search.candidates())
    if not candidates:
        raise next(iter(search.refused.values()))
    kept = [candidate for candidate in candidates if candidate.is_kept]
    words = arguments.peft if recipes else "none"
    return MachinePlan(
        model=search.name,
        method=recipes_text(recipes),
        method_options=("--peft", words) if isinstance(words, str) else None,
        optimizer_options=arguments.optimizer_words,
        quantization=arguments.quantization,
        ep=arguments.ep,
        workload=workload,
        costs={device.gpu.name: _source(device.model, arguments.costs) for device in devices},
        planned_for=search.planned_for,
        tpot_slo_s=wanted.tpot_slo_s,
        own_costs=None if arguments.costs is None else str(arguments.costs),
        candidates=len(candidates),
        kept=len(kept),
        front=pareto_front(kept),
        chosen=cheapest(kept),
        closest=None
        if kept
        else min(candidates, key=lambda candidate: (candidate.shortfall, candidate.machine.gpus)),
        refused={degree: str(error) for degree, error in search.refused.items()},
    )


def _check_options(options: MachineOptions) -> None:
    """Refuse optimizer options that a job has as separate fields."""
    for name in FIELDS:
        if name in (options.optimizer_options or {}):
            raise UnsupportedError(
                f"optimizer_options has {name!r}, which changes neither memory nor time; leave it "
                f"out, and give {name}= to the job"
            )


def _devices(options: MachineOptions) -> tuple[Device, ...]:
    names = options.gpu_names or _USUAL_GPUS
    gpus = [find_accelerator(name) for name in names]
    if options.costs is not None and len(gpus) != 1:
        raise CostModelError(
            f"costs={str(options.costs)!r} are of one device, and {len(gpus)} GPUs are to choose "
            "from; name the one that was measured, as --gpus H100"
        )
    return tuple(
        Device(gpu, usable_bytes(gpu), find_cost_model(options.costs or gpu.name)) for gpu in gpus
    )


def _prices(price: Mapping[str, float], devices: tuple[Device, ...]) -> dict[str, float]:
    names = [device.gpu.name for device in devices]
    prices = {}
    for gpu, dollars in price.items():
        name = known_name(gpu, names)
        if name is None:
            raise UnsupportedError(
                f"price {gpu}={dollars:g} is of no GPU to choose from; these are {', '.join(names)}"
            )
        prices[name] = dollars
    return prices


def _recipes(arguments: PlanArguments, workload: MachineWorkload) -> Mapping[str, Recipe]:
    recipes = recipes_of(arguments.peft)
    if not recipes and (workload.training is not None or arguments.adapters):
        raise UnsupportedError(
            f"workload {arguments.workload!r} with {arguments.adapters} served adapters needs a "
            "method, and there is none; name one (--peft lora), or let the base serve alone"
        )
    return recipes if workload.training is not None or arguments.adapters else {}


def _served(options: MachineOptions, workload: MachineWorkload, rank: int) -> Served | None:
    if workload.training is None and options.finetuning_tokens_per_s is not None:
        raise UnsupportedError(
            f"finetuning_tokens_per_s={options.finetuning_tokens_per_s:g} is promised, and "
            f"workload {options.workload!r} trains nothing; add train:BATCHxTOKENS, or leave it out"
        )
    if workload.serving is not None:
        most_tokens = Limits(running=options.max_num_seqs).tokens
        return Served(workload.serving, options.adapters, rank, options.max_num_seqs, most_tokens)
    if options.adapters:
        raise UnsupportedError(
            f"adapters={options.adapters} are used by requests, and workload "
            f"{options.workload!r} has none; add serve:RATEreq/s, or leave adapters out"
        )
    return None


def _source(model: CostModel, costs: object) -> str:
    if not isinstance(model, SheetModel):
        return f"measured on {model.name} by pcg profile ({costs})"
    share = model.achieved
    return (
        f"data sheets, not measured; products reach {share.product:.0%} of their peak, and memory "
        f"{share.memory:.0%} and links {share.link:.0%} of their bandwidth"
    )
