"""Candidates of a GPU and a degree: memory, speed and promises."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pcg.errors import CostModelError
from pcg.explain.capacity import largest_between
from pcg.explain.report.report_data import KINDS
from pcg.parallel.costs.cost_model import CostModel
from pcg.parallel.costs.step_costs import GraphCosts, host_seconds
from pcg.plan.candidate import Candidate, Machine, Promise
from pcg.plan.loads import (
    CoServed,
    CoServing,
    Load,
    Served,
    ServingSteps,
    step_seconds,
    waiting_seconds,
)
from pcg.plan.rank_plan import RankPlan, TrainingChoice
from pcg.plan.workload import MachineWorkload, Serving, Training

GIB = 2**30


@dataclass(frozen=True)
class Wanted:
    """The work that candidates are evaluated for, and its promises.

    Attributes:
        served: the work of a serving replica; None without requests.
        rank: the rank of the trained adapter; 0 for a method without ranks.
        tpot_slo_s: promised time per output token, or None.
        ttft_slo_s: promised time to the first token, or None.
        tokens_per_s: promised finetuned tokens per second, or None.
        price: dollars an hour by GPU.
    """

    workload: MachineWorkload
    served: Served | None
    rank: int
    tpot_slo_s: float | None
    ttft_slo_s: float | None
    tokens_per_s: float | None
    price: Mapping[str, float]


@dataclass(frozen=True)
class Replica:
    """A replica: a GPU with its costs, and a model planned over its ranks."""

    gpu: str
    usable_bytes: int
    model: CostModel
    dtype: str
    plan: RankPlan
    wanted: Wanted

    def candidates(self, max_gpus: int) -> Iterator[Candidate]:
        """Yield machines of one or more replicas that share the requests or the sequences."""
        workload, most = self.wanted.workload, max_gpus // self.plan.tp
        if workload.serving is None:
            assert workload.training is not None
            yield self._training_alone(workload.training, 1)
            for replicas in filter(self._has_link, sharing(workload.training, most)[1:]):
                yield self._training_alone(workload.training, replicas)
                if self.plan.is_quantized:
                    continue
                in_parts = dataclasses.replace(self, plan=self.plan.in_parts(replicas))
                yield in_parts._training_alone(workload.training, replicas)
            return
        for replicas in range(1, most + 1):
            yield self._serving(workload.serving, workload.training, replicas)

    def _training_alone(self, training: Training, replicas: int) -> Candidate:
        part = dataclasses.replace(training, batch=training.batch // replicas)
        choice, fits = self._choice(part, 0)
        step_s = tokens_per_s = None
        memory = self.plan.memory(choice)
        if fits:
            costs = self.plan.costs(self.model, choice)
            step_s = step_seconds(costs, part, choice, self.wanted.rank)
            step_s += self.model.collective_seconds("all_reduce", memory["gradients"], replicas)
            if self.plan.parts > 1:
                gathers = self.plan.gathers(self.model, choice)
                step_s += waiting_seconds(costs, part, choice, self.wanted.rank, gathers)
            tokens_per_s = training.tokens / step_s
        return Candidate(
            self._machine(replicas),
            choice,
            memory,
            self.usable_bytes,
            step_s=step_s,
            finetuning_tokens_per_s=tokens_per_s,
            promises=(self._memory_promise(memory), *self._finetuning(tokens_per_s)),
            dollars_per_hour=self._dollars(replicas),
        )

    def _serving(self, serving: Serving, training: Training | None, replicas: int) -> Candidate:
        alone = self._steps.load(serving.rate_per_s / replicas)
        tokens = 0 if alone is None else alone.tokens(serving)
        choice, fits = (None, True) if training is None else self._choice(training, tokens)
        co_served = None
        if training is not None and alone is not None and choice is not None and fits:
            co_served = self._beside(training, choice, alone)
        load = alone if co_served is None else co_served.load
        memory = self.plan.memory(choice, 0 if load is None else load.tokens(serving))
        sustained_per_s = replicas * self._sustained(choice)
        trained = None
        if training is not None:
            trained = 0.0 if co_served is None else replicas * co_served.tokens_per_s
        return Candidate(
            self._machine(replicas),
            choice,
            memory,
            self.usable_bytes,
            step_s=training.tokens * replicas / trained if training and trained else None,
            finetuning_tokens_per_s=trained,
            load=load,
            sustained_per_s=sustained_per_s,
            output_tokens_per_s=None
            if load is None
            else serving.rate_per_s * serving.output_tokens,
            promises=(
                self._memory_promise(memory),
                *self._latencies(load),
                *self._rate_promise(serving, load, sustained_per_s),
                *self._finetuning(trained),
            ),
            dollars_per_hour=self._dollars(replicas),
        )

    def _beside(self, training: Training, choice: TrainingChoice, alone: Load) -> CoServed | None:
        """Return the steady state with finetuning; None if the promises leave no time for it."""
        serving, bound = self._steps.serving, self.wanted.tpot_slo_s
        if bound is not None and alone.tpot_s > bound:
            return None
        resident = self.plan.memory(choice)["total"]

        def fits(load: Load) -> bool:
            late = self.wanted.ttft_slo_s
            pages = self.plan.kv_bytes * load.tokens(serving)
            return resident + pages <= self.usable_bytes and (late is None or load.ttft_s <= late)

        costs = self.plan.costs(self.model, choice)
        return CoServing(self._steps, costs, training).find(alone, bound, fits)

    def _sustained(self, choice: TrainingChoice | None) -> float:
        """Return the highest rate at which a replica keeps all promises, without finetuning."""
        if choice not in self._known_rates:
            resident = self.plan.memory(choice)["total"]
            room = self.usable_bytes - resident

            def keeps(load: Load) -> bool:
                pages = self.plan.kv_bytes * load.tokens(self._steps.serving)
                return pages <= room and all(promise.is_kept for promise in self._latencies(load))

            self._known_rates[choice] = self._steps.most_rate(keeps) if room > 0 else 0.0
        return self._known_rates[choice]

    def _choice(self, training: Training, served_tokens: int) -> tuple[TrainingChoice, bool]:
        """Return the execution of optimizer steps, and whether it fits.

        The choice is the largest batch at memory budget 1 that fits. If none fits, the choice is a
        single sequence at the largest memory budget that fits, in tenths.
        """
        batches = [n for n in range(1, training.batch + 1) if training.batch % n == 0]

        def choice(batch: int, tenths: int = 10) -> TrainingChoice:
            return TrainingChoice(batch, training.batch // batch, tenths / 10)

        def over(option: TrainingChoice) -> int:
            return self.plan.memory(option, served_tokens)["total"] - self.usable_bytes

        if over(choice(batches[-1])) <= 0:
            return choice(batches[-1]), True
        fitting = bisect_right(batches, False, key=lambda batch: over(choice(batch)) > 0)
        if fitting:
            return choice(batches[fitting - 1]), True
        least_over = over(choice(1, 0))
        if least_over > 0:
            return choice(1, 0), False
        ends = (0, least_over), (10, over(choice(1)))
        return choice(1, largest_between(lambda tenths: over(choice(1, tenths)), *ends)), True

    @cached_property
    def _steps(self) -> ServingSteps:
        served = self.wanted.served
        assert served is not None
        costs = self._serving_costs
        host_s = host_seconds(costs.layers) if self.plan.tp > 1 else 0.0
        return ServingSteps(costs, served, host_s)

    @property
    def _serving_costs(self) -> GraphCosts:
        training = self.wanted.workload.training
        choice = None if training is None else TrainingChoice(training.batch, 1, 1.0)
        return self.plan.costs(self.model, choice)

    @cached_property
    def _known_rates(self) -> dict[TrainingChoice | None, float]:
        return {}

    def _has_link(self, replicas: int) -> bool:
        try:
            self.model.collective_seconds("all_gather", 1, replicas)
        except CostModelError:
            return False
        return True

    def _machine(self, replicas: int) -> Machine:
        return Machine(self.gpu, self.plan.tp, replicas, self.dtype, self.plan.parts > 1)

    def _dollars(self, replicas: int) -> float | None:
        price = self.wanted.price.get(self.gpu)
        return None if price is None else price * replicas * self.plan.tp

    def _memory_promise(self, memory: Mapping[str, int]) -> Promise:
        return Promise("memory", self.usable_bytes / GIB, memory["total"] / GIB)

    def _latencies(self, load: Load | None) -> tuple[Promise, ...]:
        if load is None:
            return ()
        wanted = self.wanted
        latencies = (
            ("ttft", wanted.ttft_slo_s, load.ttft_s),
            ("tpot", wanted.tpot_slo_s, load.tpot_s),
        )
        return tuple(
            Promise(name, slo_s * 1e3, seconds * 1e3) for name, slo_s, seconds in latencies if slo_s
        )

    def _finetuning(self, tokens_per_s: float | None) -> tuple[Promise, ...]:
        wanted = self.wanted.tokens_per_s
        return () if wanted is None else (Promise("finetuning", wanted, tokens_per_s or 0.0),)

    def _rate_promise(
        self, serving: Serving, load: Load | None, sustained_per_s: float
    ) -> tuple[Promise, ...]:
        if load is not None:
            return ()
        # Without a steady state there are no latencies to promise.
        most = min(sustained_per_s, serving.rate_per_s * (1 - 1e-9))
        return (Promise("rate", serving.rate_per_s, most),)


def sharing(training: Training, most: int) -> list[int]:
    """Return the numbers of replicas, up to `most`, that divide a step's sequences evenly."""
    powers = (2**power for power in range(most.bit_length()))
    return [count for count in powers if training.batch % count == 0]


def too_large(machine: Machine, weights: int, usable_bytes: int) -> Candidate:
    """Return a candidate without enough memory for its part of the weights."""
    memory = {**dict.fromkeys(KINDS, 0), "weights": weights, "total": weights}
    promise = Promise("memory", usable_bytes / GIB, weights / GIB)
    return Candidate(machine, None, memory, usable_bytes, promises=(promise,))
