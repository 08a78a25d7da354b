"""Reports of training on standard error: losses, margins or rewards, and how an adapter is used."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pcg.units import counted, duration_text

from ..options.console import err, print_json

if TYPE_CHECKING:
    from pcg.runtime.training.options import FinetuneResult
    from pcg.train.grpo.loop import GrpoResult, Sample
    from pcg.train.preference.run import PreferenceResult


def print_result(
    result: FinetuneResult, program: str, output: Path, *, as_json: bool, replaces: bool
) -> None:
    """Print the losses of a job on standard error, or all of its result as one object.

    Args:
        program: the model or the program's folder, as the user named it.
        output: the directory that the adapter is saved in.
        replaces: True if one was there before.
    """
    if as_json:
        summary = {**dataclasses.asdict(result), "output": str(output)}
        del summary["checkpoint"]
        print_json(summary)
    else:
        _print(result, program, output, replaces)


def print_preferences(result: PreferenceResult, output: Path, *, as_json: bool) -> None:
    """Print the margins of a run on standard error, or all of its result as one object."""
    if as_json:
        summary = {**dataclasses.asdict(result), "output": str(output)}
        del summary["checkpoint"]
        print_json(summary)
        return
    resumed = "" if result.resumed_from is None else f", resumed from step {result.resumed_from}"
    steps = counted(result.steps, "step")
    lines = [f"{result.adapter}: {steps} in {duration_text(result.seconds)}{resumed}"]
    named = [("steps", result.history), ("evaluations", [each for _, each in result.evaluations])]
    words = {"loss": "loss", "margin": "rewards/margins", "accuracy": "rewards/accuracies"}
    for name, history in named:
        if history:
            first, last = history[0], history[-1]
            changes = [f"{word} {first[key]:.4f} → {last[key]:.4f}" for word, key in words.items()]
            lines.append(f"{', '.join(changes)}, of the first and the last of the {name}")
    lines.append(f"saved in {output}")
    err().print("\n".join(lines), soft_wrap=True)


def _print(result: FinetuneResult, program: str, output: Path, replaces: bool) -> None:
    from pcg.runtime.training.options import LossChange

    console = err()
    steps = counted(result.steps, "step")
    resumed = "" if result.resumed_from is None else f", resumed from step {result.resumed_from}"
    speed = f"{result.tokens / max(result.seconds, 1e-9):,.0f} tokens/s"
    lines = [f"{result.adapter}: {steps} in {duration_text(result.seconds)}, {speed}{resumed}"]
    change = LossChange.of(result.losses)
    if result.steps == 1:
        lines.append(f"loss {change.first:.4f}")
    else:
        lines.append(f"loss {change.first:.4f} → {change.last:.4f}, {_ends(change.steps)}")
    if result.first_data is not None:
        before, after = result.first_data
        lines.append(f"loss of the first step's data {before:.4f} → {after:.4f}, before and after")
    if result.eval_losses:
        ends = dict.fromkeys((result.eval_losses[0], result.eval_losses[-1]))
        losses = " → ".join(f"{loss:.4f} at step {step}" for step, loss in ends)
        lines.append(
            f"evaluation loss {losses}, best {result.best_loss:.4f} at step {result.best_step}"
        )
    if result.stopped == "early":
        lines.append(f"stopped early, at step {result.steps} of {result.total_steps}")
    if result.restored:
        lines.append(f"the adapter is that of step {result.best_step}")
    lines.append(f"saved in {output}{', in place of the adapter there' if replaces else ''}")
    console.print("\n".join(lines), soft_wrap=True)
    console.print(
        f"use it: pcg run {shlex.quote(str(program))} "
        f'--adapter {shlex.quote(f"{result.adapter}={output}")} --prompt "…"',
        style="dim",
        soft_wrap=True,
    )


def _ends(steps: int) -> str:
    return "of the first and the last step" if steps == 1 else f"means of {steps} steps each"


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
