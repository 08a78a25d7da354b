"""The Pareto front: candidates that none other beats at no higher cost."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.plan.candidate import Candidate


def pareto_front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that no other dominates, in order of cost.

    One dominates another if it costs no more, trains on no fewer tokens a second and takes no
    longer, and is better in one of these. Costs are dollars where both have a price. Without, they
    are numbers of GPUs, and GPUs of different kinds are not compared. Of equals the first stays.
    """
    ordered = sorted(candidates, key=_order)
    front: list[Candidate] = []
    for one in ordered:
        if not any(_dominates(other, one) for other in front):
            front = [other for other in front if not _dominates(one, other)] + [one]
    return tuple(front)


def cheapest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate of the fewest dollars, or else GPUs, and of these the best; or None."""
    return min(candidates, key=_order, default=None)


def _dominates(one: Candidate, other: Candidate) -> bool:
    """Return whether a candidate is as good as another in everything; also of equals."""
    costs = _costs(one, other)
    return (
        costs is not None
        and costs[0] <= costs[1]
        and one.throughput >= other.throughput
        and one.latency_s <= other.latency_s
    )


def _costs(one: Candidate, other: Candidate) -> tuple[float, float] | None:
    """Return what can be compared of two costs; None if nothing can."""
    if one.dollars_per_hour is not None and other.dollars_per_hour is not None:
        return one.dollars_per_hour, other.dollars_per_hour
    if one.machine.gpu == other.machine.gpu:
        return one.machine.gpus, other.machine.gpus
    return None


def _order(one: Candidate) -> tuple[object, ...]:
    """Return a key that sorts by cost; those with a price first, and the better of equal costs."""
    machine, dollars = one.machine, one.dollars_per_hour
    cost = (1, machine.gpus) if dollars is None else (0, dollars)
    place = (machine.gpu, machine.gpus, machine.tp, machine.dtype, machine.shard_base)
    return (*cost, -one.throughput, one.latency_s, *place)
