"""Learning-rate schedules.

Schedules are functions from an optimizer step to a multiplier of the base rate. With w warmup
steps, n total steps, r = `min_lr_ratio` and p = (step - w) / (n - w):

    warmup                 step / w                              for step < w, all but `constant`
    constant[_with_warmup] 1
    linear                 r + (1 - r) (1 - p)
    cosine                 r + (1 - r) (1 + cos(pi p)) / 2
    cosine_with_restarts   r + (1 - r) (1 + cos(pi (cycles p mod 1))) / 2
    polynomial             r + (1 - r) (1 - p) ** power

and r (for the last four) from step n on. Steps count from 0, as in `torch.optim.lr_scheduler`: the
first optimizer step has the multiplier of step 0, which is 0 with warmup. Unlike torch's schedules,
a schedule is a pure function of the step, so that resuming a job needs only the step.
Source: the schedules of `transformers.get_scheduler`, which the tests compare against.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pcg.errors import FinetuneError

Schedule = Callable[[int], float]

SCHEDULES: tuple[str, ...] = (
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_with_restarts",
    "linear",
    "polynomial",
)


def make_schedule(
    name: str,
    *,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
    warmup_ratio: float | None = None,
    min_lr_ratio: float = 0.0,
    cycles: int = 1,
    power: float = 1.0,
) -> Schedule:
    """Return a schedule: a function from the step, counted from 0, to a multiplier in [0, 1].

    Args:
        total_steps: optimizer steps of the whole job; optional for the constant schedules.
        warmup_steps: steps of linear warmup; None is 0.
        warmup_ratio: warmup as a share of `total_steps`, rounded up; instead of `warmup_steps`.
        min_lr_ratio: the final learning rate of a decay, relative to the base rate, in [0, 1].
        cycles: cosine waves of `cosine_with_restarts`.
        power: exponent of `polynomial`.
    Raises:
        FinetuneError: an unknown name, a number out of range, or an option that has no effect on
            the schedule.
    """
    is_constant = name.startswith("constant")
    checks = {
        f"unknown schedule {name!r}; use one of {', '.join(SCHEDULES)}": name not in SCHEDULES,
        f"total_steps={total_steps}; a schedule needs at least 1 step": (
            total_steps is not None and total_steps < 1
        ),
        f"min_lr_ratio={min_lr_ratio} is outside [0, 1]": not 0.0 <= min_lr_ratio <= 1.0,
        f"cycles={cycles}; cosine_with_restarts needs at least 1": cycles < 1,
        f"power={power}; polynomial needs a power above 0": not power > 0.0,
        "schedule 'constant' has no warmup; use 'constant_with_warmup'": (
            name == "constant" and bool(warmup_steps or warmup_ratio)
        ),
        f"schedule {name!r} never decays, so min_lr_ratio={min_lr_ratio} has no effect; "
        "use 'linear' or 'cosine'": is_constant and min_lr_ratio != 0,
        f"cycles={cycles} has no effect on {name!r}; use cosine_with_restarts": (
            name != "cosine_with_restarts" and cycles != 1
        ),
        f"power={power} has no effect on {name!r}; use 'polynomial'": (
            name != "polynomial" and power != 1.0
        ),
    }
    for refusal, applies in checks.items():
        if applies:
            raise FinetuneError(refusal)
    warmup = _warmup_steps(name, total_steps, warmup_steps, warmup_ratio)
    if is_constant:
        return lambda step: step / warmup if step < warmup else 1.0
    if total_steps is None:
        raise FinetuneError(f"schedule {name!r} needs total_steps, the optimizer steps of the job")

    def cosine(progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0)))

    def polynomial(progress: float) -> float:
        return math.pow(1.0 - progress, power)

    decay = cosine if name.startswith("cosine") else polynomial

    def multiplier(step: int) -> float:
        if step < warmup:
            return step / warmup
        if step >= total_steps:
            return min_lr_ratio
        progress = (step - warmup) / (total_steps - warmup)
        return min_lr_ratio + (1.0 - min_lr_ratio) * decay(progress)

    return multiplier


def _warmup_steps(name: str, total: int | None, steps: int | None, ratio: float | None) -> int:
    """Return the number of warmup steps, from either option."""
    if steps is not None and ratio is not None:
        raise FinetuneError(
            f"warmup_steps={steps} and warmup_ratio={ratio} say the same thing; give one of them"
        )
    if ratio is not None:
        if not 0.0 <= ratio <= 1.0:
            raise FinetuneError(f"warmup_ratio={ratio} is outside [0, 1]")
        if ratio and total is None:
            raise FinetuneError("warmup_ratio needs total_steps; give it, or warmup_steps")
        return math.ceil((total or 0) * ratio)
    if steps is not None and steps < 0:
        raise FinetuneError(f"warmup_steps={steps} is below 0")
    if steps is not None and total is not None and steps > total:
        raise FinetuneError(
            f"warmup_steps={steps} exceeds total_steps={total}; {name!r} would never reach its rate"
        )
    return steps or 0
