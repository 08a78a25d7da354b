"""`pcg.plan`: searches machines for a workload; no weights, and no GPU, are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcg.errors import CostModelError, UnsupportedError
from pcg.explain.capacity import usable_bytes
from pcg.explain.report_builder import recipes_text
from pcg.keywords import takes
from pcg.parallel.costs.accelerators import find_accelerator, known_name
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.cost_model import CostModel, SheetModel
from pcg.peft.adapter_files import recipes_of
from pcg.peft.recipe import Recipe
from pcg.plan.evaluate import Wanted
from pcg.plan.front import cheapest, pareto_front
from pcg.plan.machine_plan import MachinePlan
from pcg.plan.options import MachineOptions
from pcg.plan.search import Device, Search
from pcg.plan.serving_load import Served
from pcg.plan.workload import MachineWorkload, parse_workload
from pcg.runtime.admission.limits import Limits
from pcg.runtime.training.torch_optimizers import FIELDS

_USUAL_GPUS = ("A10G", "A100-40", "A100-80", "H100", "H200", "L40S")
"""The GPUs to choose from where none are named."""


@dataclass(frozen=True)
class PlanArguments(MachineOptions):
    """Arguments of `plan`.

    Attributes:
        model: a directory, a hub id, an id that ships with pcg, a config, or a transformers model;
            no weights are needed.
        peft: None, "lora" or another word of `pcg.peft.registry.SHORTHANDS`, a configuration of
            peft's, or {name: one of these, or an adapter directory}.
    """

    model: Any
    peft: object = "lora"


@takes(PlanArguments)
def plan(given: PlanArguments) -> MachinePlan:
    """Find machines for a workload: their memory, times, promises and prices, and the best.

    Raises:
        PcgError: what cannot be read, traced, attached, divided or costed is named.
    """
    workload = parse_workload(given.workload)
    _check_options(given)
    devices = _devices(given)
    price = _prices(given.price or {}, devices)
    recipes = _recipes(given, workload)
    rank = max((recipe.rank or 0 for recipe in recipes.values()), default=0)
    wanted = Wanted(
        workload,
        _served(given, workload, rank),
        rank,
        None if given.tpot_slo_ms is None else given.tpot_slo_ms / 1e3,
        None if given.ttft_slo_ms is None else given.ttft_slo_ms / 1e3,
        given.finetuning_tokens_per_s,
        price,
    )
    search = Search(given.model, recipes, wanted, devices, given)
    found = list(search.candidates())
    if not found:
        raise next(iter(search.refused.values()))
    kept = [one for one in found if one.is_kept]
    words = given.peft if recipes else "none"
    return MachinePlan(
        model=search.name,
        method=recipes_text(recipes),
        method_options=("--peft", words) if isinstance(words, str) else None,
        optimizer_options=given.optimizer_words,
        workload=workload,
        costs={device.gpu.name: _source(device.model, given.costs) for device in devices},
        planned_for=search.planned_for,
        tpot_slo_s=wanted.tpot_slo_s,
        own_costs=None if given.costs is None else str(given.costs),
        candidates=len(found),
        kept=len(kept),
        front=pareto_front(kept),
        chosen=cheapest(kept),
        closest=None if kept else min(found, key=lambda one: (one.shortfall, one.machine.gpus)),
        refused={degree: str(error) for degree, error in search.refused.items()},
    )


def _check_options(given: MachineOptions) -> None:
    """Refuse options of the optimizer that have a field of their own where it trains."""
    for name in FIELDS:
        if name in (given.optimizer_options or {}):
            raise UnsupportedError(
                f"optimizer_options has {name!r}, which changes neither memory nor time; leave it "
                f"out, and give {name}= to the job"
            )


def _devices(given: MachineOptions) -> tuple[Device, ...]:
    """Return the GPUs to choose from, with their costs."""
    names = given.gpu_names or _USUAL_GPUS
    gpus = [find_accelerator(name) for name in names]
    if given.costs is not None and len(gpus) != 1:
        raise CostModelError(
            f"costs={str(given.costs)!r} are of one device, and {len(gpus)} GPUs are to choose "
            "from; name the one that was measured, as --gpus H100"
        )
    return tuple(
        Device(gpu, usable_bytes(gpu), find_cost_model(given.costs or gpu.name)) for gpu in gpus
    )


def _prices(price: Mapping[str, float], devices: tuple[Device, ...]) -> dict[str, float]:
    """Return the prices by the GPUs' own names."""
    names = [device.gpu.name for device in devices]
    found = {}
    for given, dollars in price.items():
        name = known_name(given, names)
        if name is None:
            raise UnsupportedError(
                f"price {given}={dollars:g} is of no GPU to choose from; these are "
                f"{', '.join(names)}"
            )
        found[name] = dollars
    return found


def _recipes(given: PlanArguments, workload: MachineWorkload) -> Mapping[str, Recipe]:
    """Return the recipes to attach; none where the base alone serves."""
    recipes = recipes_of(given.peft)
    if not recipes and (workload.training is not None or given.adapters):
        raise UnsupportedError(
            f"workload {given.workload!r} with {given.adapters} served adapters needs a method, "
            "and there is none; name one (--peft lora), or let the base serve alone"
        )
    return recipes if workload.training is not None or given.adapters else {}


def _served(given: MachineOptions, workload: MachineWorkload, rank: int) -> Served | None:
    """Return what a replica serves."""
    if workload.training is None and given.finetuning_tokens_per_s is not None:
        raise UnsupportedError(
            f"finetuning_tokens_per_s={given.finetuning_tokens_per_s:g} is promised, and workload "
            f"{given.workload!r} trains nothing; add train:BATCHxTOKENS, or leave it out"
        )
    if workload.serving is not None:
        most_tokens = Limits(running=given.max_num_seqs).tokens
        return Served(workload.serving, given.adapters, rank, given.max_num_seqs, most_tokens)
    if given.adapters:
        raise UnsupportedError(
            f"adapters={given.adapters} are used by requests, and workload {given.workload!r} has "
            "none; add serve:RATEreq/s, or leave adapters out"
        )
    return None


def _source(model: CostModel, costs: object) -> str:
    """Return where a device's times come from."""
    if not isinstance(model, SheetModel):
        return f"measured on {model.name} by pcg profile ({costs})"
    share = model.achieved
    return (
        f"data sheets, not measured; products reach {share.product:.0%} of their peak, and memory "
        f"{share.memory:.0%} and links {share.link:.0%} of their bandwidth"
    )
