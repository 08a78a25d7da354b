"""Training by GRPO on an executor: an adapter learns what reward functions reward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from pcg.errors import FinetuneError, FinetuneInterrupted
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.trainers.async_trainer import AsyncTrainer
from pcg.runtime.executor import Executor
from pcg.train.grpo.checkpoints import GrpoCheckpoints, ResumableOptions
from pcg.train.grpo.loop import GrpoLoop, OnStep, Task
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.prompts import read_prompts
from pcg.train.grpo.result import GrpoResult, Sample
from pcg.train.grpo.rewards import RewardFunction, Rewards
from pcg.units import shown


def train_grpo(
    executor: Executor,
    data: Iterable[Any],
    rewards: RewardFunction | Sequence[RewardFunction],
    options: GrpoOptions | None = None,
    *,
    adapter: str = "policy",
    peft: object = None,
    reward_weights: Sequence[float] | None = None,
    on_step: OnStep | None = None,
) -> GrpoResult:
    """Train an adapter by GRPO; it is served from then on, and `save_adapter` saves it.

    Where an engine of the executor runs on a thread, rollouts and updates share its steps with
    whatever else it serves; else one runs until the end.

    Args:
        data: rows: each a prompt, or a mapping with "prompt" and columns that rewards get. A prompt
            is a text, a list of messages, or tokens.
        rewards: functions `reward(prompts, completions, completion_ids, **columns)` that return a
            number or None for each completion.
        options: the options; those of `GrpoOptions()` by default. `ResumableOptions` of
            `pcg.train.grpo.checkpoints` save checkpoints, too.
        adapter: the adapter's name. One of that name is trained further, and is the reference of
            the KL divergence; else one is made, and the reference is the base.
        peft: the recipe of a new adapter, as `add_adapter` takes it.
        reward_weights: the weight of each function; 1 by default.
        on_step: called after each update; see `pcg.train.grpo.loop.Task`.
    Raises:
        AdapterConflictError: something trains an adapter of that name.
        DataError: a row is no prompt.
        FinetuneError: bad options, a reward function failed, or a loss is not finite; or a
            checkpoint that cannot be saved or is of another run.
        FinetuneInterrupted: Ctrl-C, with checkpoints; the same call goes on from the latest.
    """
    options = GrpoOptions() if options is None else options
    if not isinstance(options, GrpoOptions):
        raise FinetuneError(f"options={shown(options)}; use GrpoOptions(…)")
    prompts = read_prompts(data, executor.tokenizer)
    scored = Rewards(rewards, reward_weights)
    task = Task(prompts, scored, executor.adapters.get(adapter), on_step)
    kept = None
    if isinstance(options, ResumableOptions) and options.checkpoint_dir is not None:
        kept = GrpoCheckpoints(executor, prompts, options)
    with _engine(executor) as running:
        trainer = running.trainer(
            adapter,
            peft=peft,
            seed=options.seed,
            batch_size=options.batch_size,
            dropout=False,
            max_tokens=options.max_tokens_per_pass,
        )
        with trainer:
            trainer.created.wait()
            if kept is None:
                return GrpoLoop(running, trainer, task, options).run()
            return _resumable(running, trainer, task, options, kept)


def _resumable(
    running: AsyncEngine,
    trainer: AsyncTrainer,
    task: Task,
    options: GrpoOptions,
    kept: GrpoCheckpoints,
) -> GrpoResult:
    """Run with checkpoints, from the latest one on."""

    def on_step(step: int, numbers: Mapping[str, float], samples: Sequence[Sample]) -> None:
        kept.stepped(trainer, step, numbers)
        if task.on_step is not None:
            task.on_step(step, numbers, samples)

    kept.begin(trainer)
    try:
        tokens = int(kept.history[-1]["num_tokens"]) if kept.step else 0
        rest = replace(task, on_step=on_step, updates=kept.step, tokens=tokens)
        done = GrpoLoop(running, trainer, rest, options).run()
        return replace(done, history=kept.history)
    except KeyboardInterrupt as interrupt:
        left = "no checkpoint was written yet"
        if kept.latest is not None:
            left = f"run the same again to go on from {kept.latest}"
        raise FinetuneInterrupted(
            f"training {trainer.name!r} by GRPO was interrupted after update {len(kept.history)}; "
            f"{left}",
            len(kept.history),
            kept.latest,
        ) from interrupt
    finally:
        kept.end()


@contextmanager
def _engine(executor: Executor) -> Iterator[AsyncEngine]:
    """Return the engine that runs on a thread, or one until the end."""
    running = cast("AsyncEngine | None", executor.state.engine_thread)
    if running is not None:
        yield running
        return
    with executor.engine().start() as started:
        yield started
