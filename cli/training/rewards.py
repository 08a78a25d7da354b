"""The report of reinforcement learning: a line for each update, and how rewards went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pcg.units import counted, duration_text

from ..options.console import err, print_json

if TYPE_CHECKING:
    from pcg.train.grpo.loop import GrpoResult, Sample

_SHOWN = 60


def print_update(step: int, numbers: Mapping[str, float], samples: Sequence[Sample]) -> None:
    """Print an update on standard error, and a completion with the highest advantage."""
    shown = {
        "reward": numbers.get("reward"),
        "±": numbers.get("reward_std"),
        "length": numbers.get("completions/mean_length"),
        "kl": numbers.get("kl"),
        "loss": numbers.get("loss"),
    }
    parts = [f"{name} {value:.4g}" for name, value in shown.items() if value is not None]
    line = f"step {step}: {', '.join(parts)}"
    if samples:
        best = max(samples, key=lambda sample: sample.advantage)
        text = repr(best.completion)
        line += f"  {text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}"
    err().print(line, soft_wrap=True, markup=False, highlight=False)


def print_rewards(result: GrpoResult, output: Path, *, as_json: bool, replaces: bool) -> None:
    """Print how rewards went on standard error, or all numbers as one object.

    Args:
        output: the directory that the adapter is saved in.
        replaces: True if one was there before.
    """
    if as_json:
        print_json(
            {
                "adapter": result.adapter,
                "steps": result.steps,
                "seconds": result.seconds,
                "history": list(result.history),
                "output": str(output),
            }
        )
        return
    rewards = [numbers["reward"] for numbers in result.history if "reward" in numbers]
    lines = [
        f"{result.adapter}: {counted(result.steps, 'step')} in {duration_text(result.seconds)}",
        f"saved in {output}{', in place of the adapter there' if replaces else ''}",
    ]
    if rewards:
        lines.insert(1, f"reward {rewards[0]:.4g} → {rewards[-1]:.4g}, first and last step")
    err().print("\n".join(lines), soft_wrap=True)
