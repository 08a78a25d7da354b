"""A machine for a workload: GPUs, the model's placement, and predicted performance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcg.plan.loads import Load
from pcg.plan.rank_plan import TrainingChoice


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, and the placement of a model: replicas of `tp` ranks each.

    Attributes:
        shard_base: True if the replicas shard the layers' weights.
    """

    gpu: str
    tp: int
    replicas: int
    dtype: str
    shard_base: bool = False

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.tp * self.replicas

    def __str__(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        parts = " with parts of the base" if self.shard_base else ""
        return f"{self.gpus}×{self.gpu} tp={self.tp}{replicas}{parts}"


@dataclass(frozen=True)
class Promise:
    """A promised and a predicted number, in the same unit.

    Attributes:
        name: memory (GiB a rank), rate (requests/s), finetuning (tokens/s), ttft or tpot (ms).
    """

    name: str
    promised: float
    predicted: float

    @property
    def is_kept(self) -> bool:
        return self.excess <= 1.0

    @property
    def excess(self) -> float:
        """The predicted number relative to the allowed number; above 1 the promise is broken."""
        ratio = self.predicted / self.promised
        return 1 / max(ratio, 1e-12) if self._is_least else ratio

    @property
    def _is_least(self) -> bool:
        """True if the promise is a minimum."""
        return self.name in ("rate", "finetuning")

    def __str__(self) -> str:
        units = {"memory": "GiB a rank", "rate": "requests/s", "finetuning": "tokens/s"}
        unit = units.get(self.name, "ms")
        name = {"ttft": "time to the first token", "tpot": "time per output token"}.get(
            self.name, self.name
        )
        word = "at least" if self._is_least else "at most"
        return f"{name} {self.predicted:,.4g} {unit}, {word} {self.promised:,.4g} wanted"


@dataclass(frozen=True)
class Candidate:
    """A machine with its memory, times, promises and price for the workload.

    Attributes:
        choice: the execution of optimizer steps; None without training.
        memory_bytes: bytes of a rank by kind, and their total.
        usable_bytes: bytes of a GPU without the reserve.
        step_s: seconds of an optimizer step; None without training.
        finetuning_tokens_per_s: trained tokens per second, of all replicas.
        load: the steady state of a replica; None without requests or without a steady state.
        sustained_per_s: the highest rate at which all replicas keep the promises, without
            finetuning; None without requests.
        output_tokens_per_s: generated tokens per second, of all replicas, at the workload's rate.
        promises: the promises with the predicted numbers.
        dollars_per_hour: the price of all GPUs; None if unknown.
    """

    machine: Machine
    choice: TrainingChoice | None
    memory_bytes: Mapping[str, int]
    usable_bytes: int
    step_s: float | None = None
    finetuning_tokens_per_s: float | None = None
    load: Load | None = None
    sustained_per_s: float | None = None
    output_tokens_per_s: float | None = None
    promises: tuple[Promise, ...] = ()
    dollars_per_hour: float | None = None

    @property
    def is_kept(self) -> bool:
        """True if all promises are kept."""
        return all(promise.is_kept for promise in self.promises)

    @property
    def shortfall(self) -> tuple[bool, float]:
        """The key of the distance from the promises: memory too small, then the largest excess."""
        memory = self.memory_bytes["total"] > self.usable_bytes
        return memory, max(promise.excess for promise in self.promises)

    @property
    def throughput(self) -> float:
        """The finetuned tokens a second (more is better); 0 without training."""
        return self.finetuning_tokens_per_s or 0.0

    @property
    def latency_s(self) -> float:
        """The time per output token, or of an optimizer step (less is better)."""
        return self.load.tpot_s if self.load is not None else self.step_s or 0.0

    def dollars_per_million(self, tokens_per_s: float | None) -> float | None:
        """Return the price of a million tokens on the whole machine, in dollars."""
        if self.dollars_per_hour is None or not tokens_per_s:
            return None
        return self.dollars_per_hour / (tokens_per_s * 3600 / 1e6)

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as JSON; times in seconds, sizes in bytes."""
        machine, choice, load = self.machine, self.choice, self.load
        return {
            "gpu": machine.gpu,
            "gpus": machine.gpus,
            "tp": machine.tp,
            "replicas": machine.replicas,
            "shard_base": machine.shard_base,
            "dtype": machine.dtype,
            "batch": None if choice is None else choice.batch,
            "gradient_accumulation_steps": None if choice is None else choice.accumulation,
            "memory_budget": None if choice is None else choice.budget,
            "memory_bytes": dict(self.memory_bytes),
            "usable_bytes": self.usable_bytes,
            "step_s": self.step_s,
            "finetuning_tokens_per_s": self.finetuning_tokens_per_s,
            "running_requests": None if load is None else load.running,
            "tpot_s": None if load is None else load.tpot_s,
            "ttft_s": None if load is None else load.ttft_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "sustained_requests_per_s": self.sustained_per_s,
            "promises": [
                {
                    "name": promise.name,
                    "promised": promise.promised,
                    "found": promise.predicted,
                    "kept": promise.is_kept,
                }
                for promise in self.promises
            ],
            "dollars_per_hour": self.dollars_per_hour,
            "dollars_per_million_finetuned_tokens": self.dollars_per_million(
                self.finetuning_tokens_per_s
            ),
            "dollars_per_million_output_tokens": self.dollars_per_million(self.output_tokens_per_s),
        }


# -------------------------------------------------------------------------------------------- front


def pareto_front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that no other candidate dominates, in order of cost.

    A candidate dominates another if it costs no more, trains no fewer tokens a second and takes no
    longer, and is better in at least one of these. Costs are dollars if both candidates have a
    price. Otherwise costs are numbers of GPUs, and GPUs of different kinds are not compared. Of
    equal candidates the first stays.
    """
    ordered = sorted(candidates, key=_order)
    front: list[Candidate] = []
    for candidate in ordered:
        if not any(_dominates(other, candidate) for other in front):
            front = [other for other in front if not _dominates(candidate, other)] + [candidate]
    return tuple(front)


def cheapest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the cheapest candidate (by dollars, else GPUs), the best of equal cost; or None."""
    return min(candidates, key=_order, default=None)


def _dominates(candidate: Candidate, other: Candidate) -> bool:
    """Return whether a candidate is at least as good as another in every respect."""
    costs = _costs(candidate, other)
    return (
        costs is not None
        and costs[0] <= costs[1]
        and candidate.throughput >= other.throughput
        and candidate.latency_s <= other.latency_s
    )


def _costs(candidate: Candidate, other: Candidate) -> tuple[float, float] | None:
    """Return two comparable costs, or None."""
    if candidate.dollars_per_hour is not None and other.dollars_per_hour is not None:
        return candidate.dollars_per_hour, other.dollars_per_hour
    if candidate.machine.gpu == other.machine.gpu:
        return candidate.machine.gpus, other.machine.gpus
    return None


def _order(candidate: Candidate) -> tuple[object, ...]:
    """Return a key that sorts by cost, priced candidates first, and by quality at equal cost."""
    machine, dollars = candidate.machine, candidate.dollars_per_hour
    cost = (1, machine.gpus) if dollars is None else (0, dollars)
    place = (machine.gpu, machine.gpus, machine.tp, machine.dtype, machine.shard_base)
    return (*cost, -candidate.throughput, candidate.latency_s, *place)
