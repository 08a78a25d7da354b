"""Learning-rate schedules: functions from an optimizer step to a multiplier of the base rate.

With w warmup steps, n total steps, r = `min_lr_ratio` and p = (step - w) / (n - w):

    warmup                 step / w                              for step < w, all but `constant`
    constant[_with_warmup] 1
    linear                 r + (1 - r) (1 - p)
    cosine                 r + (1 - r) (1 + cos(pi p)) / 2
    cosine_with_restarts   r + (1 - r) (1 + cos(pi (cycles p mod 1))) / 2
    polynomial             r + (1 - r) (1 - p) ** power

and r (for the last four) from step n on. Steps count from 0, as in `torch.optim.lr_scheduler`: the
first optimizer step takes the multiplier of step 0, which is 0 under warmup. Ours and not torch's,
as a schedule is a pure function of the step: a resumed job needs no state but the step.
Source: the schedules of `transformers.get_scheduler`, which the tests compare against.
"""

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
    """Make the schedule of a name: a function from the step, from 0, to the multiplier in [0, 1].

    Args:
        total_steps: optimizer steps of the whole job; the constant schedules do without.
        warmup_steps: steps of linear warmup; None is 0.
        warmup_ratio: warmup as a part of `total_steps`, rounded up; instead of `warmup_steps`.
        min_lr_ratio: the end of a decay, as a part of the base rate, in [0, 1].
        cycles: cosine waves of `cosine_with_restarts`.
        power: exponent of `polynomial`.
    Raises:
        FinetuneError: an unknown name, a number out of range, or an option that the named schedule
            does not take.
    """
    if name not in SCHEDULES:
        raise FinetuneError(f"unknown schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    if total_steps is not None and total_steps < 1:
        raise FinetuneError(f"total_steps={total_steps}; a schedule needs at least 1 step")
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise FinetuneError(f"min_lr_ratio={min_lr_ratio} is outside [0, 1]")
    if cycles < 1:
        raise FinetuneError(f"cycles={cycles}; cosine_with_restarts needs at least 1")
    if not power > 0.0:
        raise FinetuneError(f"power={power}; polynomial needs a power above 0")
    if name == "constant" and (warmup_steps or warmup_ratio):
        raise FinetuneError("schedule 'constant' has no warmup; use 'constant_with_warmup'")
    if name.startswith("constant") and min_lr_ratio:
        raise FinetuneError(
            f"schedule {name!r} never decays, so min_lr_ratio={min_lr_ratio} has no effect; "
            "use 'linear' or 'cosine'"
        )
    if name != "cosine_with_restarts" and cycles != 1:
        raise FinetuneError(f"cycles={cycles} has no effect on {name!r}; use cosine_with_restarts")
    if name != "polynomial" and power != 1.0:
        raise FinetuneError(f"power={power} has no effect on {name!r}; use 'polynomial'")
    warmup = _warmup_steps(name, total_steps, warmup_steps, warmup_ratio)
    if name.startswith("constant"):
        return lambda step: step / warmup if step < warmup else 1.0
    if total_steps is None:
        raise FinetuneError(f"schedule {name!r} needs total_steps, the optimizer steps of the job")

    def cosine(progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0)))

    def polynomial(progress: float) -> float:
        return math.pow(1.0 - progress, power)

    decay = cosine if name.startswith("cosine") else polynomial
    return _warmup_then(decay, warmup, total_steps, min_lr_ratio)


def _warmup_then(
    decay: Callable[[float], float], warmup: int, total: int, floor: float
) -> Schedule:
    def multiplier(step: int) -> float:
        if step < warmup:
            return step / warmup
        if step >= total:
            return floor
        return floor + (1.0 - floor) * decay((step - warmup) / (total - warmup))

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
