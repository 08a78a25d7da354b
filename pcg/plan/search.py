"""The search: each GPU with each degree, dtype and number of replicas.

A model is traced once for each dtype and planned once for each degree of tensor parallelism; each
GPU's costs are of the same graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcg.errors import FinetuneError, ParallelError, PcgError, UnsupportedError
from pcg.explain.base_memory import base_bytes
from pcg.explain.planned_model import Setup
from pcg.given_module import source_of
from pcg.ir.types import TORCH_NAMES
from pcg.options import PlanOptions
from pcg.parallel.costs.accelerators import Accelerator
from pcg.parallel.costs.cost_model import CostModel
from pcg.passes.pipeline import Settings, pipeline
from pcg.peft.recipe import Recipe
from pcg.plan.candidate import Candidate, Machine
from pcg.plan.evaluate import Replica, Wanted, sharing, too_large
from pcg.plan.options import MachineOptions
from pcg.plan.rank_plan import RankPlan, check_trained, without_training
from pcg.runtime.training.torch_optimizers import Optimizer


@dataclass(frozen=True)
class Device:
    """A GPU with the bytes that are not left free, and its costs."""

    gpu: Accelerator
    usable_bytes: int
    model: CostModel


class Search:
    """The search for one model and workload.

    Attributes:
        name: the model's name.
        refused: the errors of degrees that cannot be.
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
        self._recipes = recipes
        self._wanted = wanted
        self._devices = devices
        self._options = options
        self._optimizer = Optimizer.of(
            options.optimizer, options.optimizer_options, options.offload_optimizer
        )

    @property
    def planned_for(self) -> str | None:
        """The name or file of the costs by which adapters lie on ranks; None if none do."""
        if max(self._options.degrees) == 1 or not self._recipes:
            return None
        costs = self._options.costs
        return self._devices[0].gpu.name if costs is None else str(costs)

    def candidates(self) -> Iterator[Candidate]:
        """Yield every machine, whether it keeps the promises or not.

        Raises:
            UnsupportedError: the model has too few positions, or pcg cannot train it.
        """
        for dtype in dict.fromkeys(self._options.dtypes) or (None,):
            setup = self._setup(dtype)
            self._check_positions(setup)
            weights = base_bytes(setup.folded.model)
            name = TORCH_NAMES[setup.folded.model.dtype]
            is_checked = self._wanted.workload.training is None
            for degree in self._options.degrees:
                # A rank has its part of the weights at least.
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
        """Return the most replicas of a degree that may have parts of the layers."""
        workload = self._wanted.workload
        if workload.serving is not None or workload.training is None:
            return 1
        return sharing(workload.training, self._options.max_gpus // degree)[-1]

    def _over_ranks(
        self, setup: Setup, degree: int, dtype: str, devices: Sequence[Device]
    ) -> list[Candidate]:
        """Return the machines of a degree; none, and the reason, if it cannot be."""
        trains = self._wanted.workload.training is not None
        found: list[Candidate] = []
        try:
            setup.optimizer.check_parted(degree)
            if degree > 1:
                settings = dataclasses.replace(setup.settings, costs=self._devices[0].model)
                setup = dataclasses.replace(setup, settings=settings).having(tp=degree)
            plan = RankPlan(setup, trains, self._options.adapters)
            for device in devices:
                place = (device.gpu.name, device.usable_bytes, device.model)
                replica = Replica(*place, dtype, plan, self._wanted)
                found += replica.candidates(self._options.max_gpus)
        except (FinetuneError, ParallelError, UnsupportedError) as error:
            if degree == 1:
                raise
            self.refused[degree] = error
            return []
        return found

    def _setup(self, dtype: str | None) -> Setup:
        """Return the model, traced in a dtype, and the step that is planned."""
        training = self._wanted.workload.training
        if training is not None:
            batch, seq = training.batch, training.seq
        else:
            assert self._wanted.served is not None
            batch = self._wanted.served.most_running
            seq = max(1, self._wanted.served.most_tokens // batch)
        options = PlanOptions(dtype=dtype, batch=batch, seq=seq)
        settings = Settings(options, self.name)
        passes = pipeline(settings)
        traced = passes.trace.run(self._to_trace)
        folded = passes.fold.run(traced)
        model = (self._source.config, self._to_trace, settings, traced, folded)
        setup = Setup(*model, self._recipes, self._optimizer)
        return setup if training is not None else without_training(setup)

    def _check_positions(self, setup: Setup) -> None:
        """Refuse sequences that the model has no positions for."""
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
