"""The finetuning job: steps over one adapter, evaluations, checkpoints, exact resume.

Between two steps the whole state of a job is the adapter, the optimizer's state and a
`TrainerState`. Only the order of the data, a function of seed and epoch, and dropout, a function of
seed, step and batch, are random. So a resumed run ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from pcg.errors import FinetuneError, FinetuneInterrupted, RecordError, UnsupportedError
from pcg.files import check_writable, damage_of, expanded
from pcg.peft.adapter import Adapter
from pcg.ranks.agreement import agreed
from pcg.ranks.group import broadcast_from_first, run_on_first
from pcg.runtime.data.dataset import Dataset
from pcg.runtime.data.order import Batches
from pcg.runtime.model.state import ModelState
from pcg.runtime.model.weight_digests import base_digest
from pcg.runtime.training.checkpoints import Checkpoint, CheckpointStore, TrainerState
from pcg.runtime.training.options import (
    FinetuneArguments,
    FinetuneResult,
    LossChange,
    OnStep,
    StepRecord,
)
from pcg.runtime.training.publishers import (
    InPlacePublisher,
    Publisher,
    overwrite,
    owned,
    start_adapter,
    start_facts,
)
from pcg.runtime.training.reports import JobRecord, Reports, job_config
from pcg.runtime.training.runner import evaluation_pass
from pcg.runtime.training.step import TrainingStep
from pcg.runtime.training.training_data import (
    check_with_prompt,
    job_data,
    total_steps,
    with_planned_batch,
)
from pcg.runtime.training.work_units import (
    Interrupt,
    Reading,
    Work,
    deferred_interrupts,
    noted_interrupts,
    run_to_end,
)

_LOG = logging.getLogger("pcg.finetuning")


def finetune(state: ModelState, given: FinetuneArguments) -> FinetuneResult:
    """Train an adapter; see `Executor.finetune`."""
    name = given.adapter
    is_new = name not in state.adapters
    job = FinetuneJob(InPlacePublisher(state, name), given)
    try:
        return job.run(given.on_step)
    except UnsupportedError:  # at the first step
        if is_new:
            state.remove_adapter(name)
        raise


class FinetuneJob:
    """A finetuning job while it runs."""

    def __init__(self, publisher: Publisher, options: FinetuneArguments) -> None:
        """Read the data, find the checkpoint to go on from, and make the adapter."""
        self._publisher = publisher
        self._model = publisher.state
        self._ranks = publisher.state.world
        self._name = options.adapter
        self._options = options = with_planned_batch(options, self._model)
        self._data, self._eval = job_data(options, self._model)
        self._batches = Batches(
            self._data.examples, **options.batch_bounds, seed=options.seed, shuffle=options.shuffle
        )
        self._total = total_steps(self._batches, options)
        self._schedule = options.make_schedule(self._total)
        self._trajectory = self._make_trajectory()
        self._state = TrainerState(position=self._batches.state_dict())
        self._store: CheckpointStore | None = None
        if options.checkpoint_dir is not None:
            self._store = CheckpointStore(options.checkpoint_dir, options.keep_last)
            run_on_first(self._ranks, self._store.check_writable)
        if options.record is not None:
            place = expanded(options.record)
            run_on_first(self._ranks, lambda: check_writable(place, "the record", RecordError))
        self._best: Adapter | None = None
        self._resumed_from: int | None = None
        self._saved: tuple[int, int] | None = None
        self._checkpoint: Path | None = None
        self._start(options.peft)
        self._started = time.monotonic()
        self._seconds_before = self._state.seconds
        self._tokens_before = self._state.tokens

    def _start(self, peft: object) -> None:
        """Make the adapter to train, and what trains it."""
        model, options = self._model, self._options
        call = f"the start of {self._name!r}"
        checkpoint, made = agreed(self._ranks, call, lambda: self._begin(peft), start_facts)
        self._adapter = self._publisher.start(made)
        try:
            self._runner = self._publisher.runner(self._adapter)
            self._adapter = self._runner.adapter
            sizes, virtual = self._model.mesh.sizes, self._adapter.prompt_tokens
            largest = self._batches.largest(virtual, sizes.dp, sizes.cp)
            self._runner.plan_for(*largest, for_all=model.mesh.shards_base)
            for data in filter(None, (self._data, self._eval)):
                check_with_prompt(data, self._adapter.prompt_tokens, model.max_positions)
            own = (self._runner, self._data, self._batches, options, self._total, model.mesh)
            self._steps = TrainingStep(*own)
            if checkpoint is not None:
                fix = "; use an older one, or start anew with resume=False"
                with damage_of(f"the checkpoint {self._checkpoint}", FinetuneError, fix):
                    self._resume(checkpoint)
            if self._store is not None:
                run_on_first(self._ranks, self._store.lock)
        except BaseException:
            self._publisher.undo()
            raise

    def _begin(self, peft: object) -> tuple[Checkpoint | None, Adapter]:
        """Return the checkpoint to go on from, and the adapter to train."""
        checkpoint = None
        name, options, total = self._name, self._options, self._total
        if self._store is not None:
            found = self._store.resumable(options.resume, name, self._trajectory, total)
            if found is not None:
                self._checkpoint, checkpoint = found
        saved = None if checkpoint is None else checkpoint.adapter
        return checkpoint, start_adapter(self._model, name, peft, options.seed, saved, total)

    # ------------------------------------------------------------------------------- the loop

    def run(self, on_step: OnStep | None) -> FinetuneResult:
        """Run all steps, with nothing beside them.

        Raises:
            FinetuneInterrupted: Ctrl-C.
            FinetuneError: a loss is not finite, or a checkpoint cannot be saved.
        """
        if self._ranks.size == 1:
            return run_to_end(self.work(on_step))
        with noted_interrupts() as interrupts:
            return run_to_end(self.work(on_step, interrupts))

    def work(
        self, on_step: OnStep | None, interrupts: Sequence[Interrupt] = ()
    ) -> Work[FinetuneResult]:
        """Yield the units of all steps, until an interrupt.

        Args:
            on_step: called after each step.
            interrupts: over ranks, the interrupts of this rank; one of any rank ends the job.
        """
        try:
            with self._reports() as reports:
                yield from self._settle()
                reports.evaluated()
                while not self._is_done:
                    record = yield from self._step()
                    reports.step(record, is_last=self._is_done)
                    if on_step is not None:
                        on_step(record)
                    came = torch.tensor(float(len(interrupts)), device=self._ranks.device)
                    if float(self._ranks.all_reduce(came)):
                        raise KeyboardInterrupt
                self._restore_best()
                first_data = yield from self._compare_first_data()
                with deferred_interrupts():
                    return self._finish(first_data)
        except KeyboardInterrupt as interrupt:
            self._interrupted(interrupt)
        finally:
            if self._store is not None:
                self._store.unlock()
            self._steps.drop_gradients()
            self._publisher.changed(self._adapter)
            self._publisher.ended()

    @property
    def _is_done(self) -> bool:
        return self._state.stopped or self._state.step >= self._total

    def _step(self) -> Work[StepRecord]:
        """Run one step; an interrupt leaves all of it undone or all of it done."""
        state = self._state
        rate = self._options.learning_rate * self._schedule(state.step)
        made = yield from self._steps.gradients(state.step, rate)
        with deferred_interrupts():
            self._steps.update(state.step, rate)
            state.step += 1
            state.losses.append(made.loss)
            state.tokens += made.tokens
            state.targets += made.targets
            state.position = self._batches.state_dict()
            self._publisher.changed(self._adapter, self._runner.settle)
        yield from self._settle()
        seconds = self._seconds - self._seconds_before
        return StepRecord(
            step=state.step,
            total_steps=self._total,
            epoch=made.epoch,
            loss=made.loss,
            eval_loss=state.eval_losses[-1][1] if state.evaluated else None,
            learning_rate=rate,
            gradient_norm=made.norm,
            tokens=made.tokens,
            tokens_per_second=(state.tokens - self._tokens_before) / max(seconds, 1e-9),
            checkpoint=self._checkpoint,
        )

    def _restore_best(self) -> None:
        """Make the adapter that of the best evaluation, if that is wanted."""
        if self._best is None:
            return
        with deferred_interrupts():
            overwrite(self._settled(), self._best)
            self._runner.scatter()

    def _compare_first_data(self) -> Work[tuple[float, float] | None]:
        """Return `FinetuneResult.first_data`: batches differ, so a risen loss may be theirs."""
        losses = self._state.losses
        change = LossChange.of(losses)
        if change.last <= min(change.first, losses[0]):
            return None
        plan = self._batches.plan(0)[: self._options.gradient_accumulation_steps]
        after = yield from self._mean_loss(self._data, plan)
        return losses[0], after

    def _finish(self, first_data: tuple[float, float] | None) -> FinetuneResult:
        state = self._state
        adapter = self._settled()
        if self._steps.beside is not None:
            adapter = self._steps.beside.finished(adapter)
        self._publisher.finish(adapter)
        result = FinetuneResult(
            adapter=self._name,
            losses=tuple(state.losses),
            eval_losses=tuple(state.eval_losses),
            steps=state.step,
            total_steps=self._total,
            tokens=state.tokens,
            targets=state.targets,
            seconds=self._seconds,
            stopped="early" if state.stopped else "completed",
            best_step=state.best_step,
            best_loss=state.best_loss,
            restored=self._best is not None,
            resumed_from=self._resumed_from,
            checkpoint=self._checkpoint,
            first_data=first_data,
        )
        if first_data is not None and result.is_collapsed and self._ranks.rank == 0:
            _LOG.warning(
                "%s has collapsed: the loss of the first step's data was %.4f before, and is %.4f; "
                "lower learning_rate=%g, or warm up longer",
                *(self._name, *first_data, self._options.learning_rate),
            )
        return result

    def _settled(self) -> Adapter:
        """Return the adapter as it is now, with whole tensors."""
        self._publisher.settle()
        return self._adapter

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _reports(self) -> Reports:
        """Return what says how the job goes on: a bar, the log, its record."""
        options, total, record = self._options, self._total, None
        if options.record is not None:
            checksum = self._trajectory["data_checksum"]
            counts = {"examples": len(self._data), "total_steps": total}
            facts = {**counts, "data_checksum": checksum}
            config = job_config(options, self._model, self._adapter.recipe, facts)
            record = JobRecord(options, config, str(self._model.device))
        return Reports(options, total, self._state, record, self._ranks.rank == 0)

    # ------------------------------------------------------------------------------- between steps

    def _settle(self) -> Work[None]:
        """Evaluate and save if it is time after the last step; not twice when resumed there."""
        options, state = self._options, self._state
        is_due = self._is_due(options.eval_every) if state.step else options.eval_at_start
        if self._eval is not None and is_due and not state.evaluated:
            yield from self._evaluate(self._eval)
        if state.step and self._is_due(options.save_every):
            self._save()

    def _is_due(self, every: int | None) -> bool:
        """Return True for the last step, each `every`-th one, and the end of each epoch if None."""
        if every is None or self._is_done:
            return self._is_done or self._state.position["index"] == 0
        return self._state.step % every == 0

    def _evaluate(self, data: Dataset) -> Work[None]:
        plan = Batches(data.examples, **self._options.batch_bounds, shuffle=False).plan(0)
        state, mean = self._state, (yield from self._mean_loss(data, plan))
        if not math.isfinite(mean):
            raise FinetuneError(
                f"the evaluation loss after step {state.step} is {mean:g}; lower learning_rate="
                f"{self._options.learning_rate:g}, or look at the evaluation data"
            )
        with deferred_interrupts():
            state.eval_losses.append((state.step, mean))
            best = math.inf if state.best_loss is None else state.best_loss
            if mean < best - self._options.min_delta:
                state.best_step, state.best_loss, state.stale = state.step, mean, 0
                if self._options.restores_best:
                    self._best = owned(self._settled())
            else:
                state.stale += 1
            patience = self._options.patience
            state.stopped = patience is not None and state.stale >= patience

    def _mean_loss(self, data: Dataset, plan: Sequence[Sequence[int]]) -> Work[float]:
        """Return the mean loss of the target tokens of some batches, without dropout."""
        replicas, sums = self._model.mesh.dp, torch.zeros(2, dtype=torch.float64)
        sums = sums.to(self._runner.device)
        for indexes in plan[replicas.rank :: replicas.size]:
            done = yield from evaluation_pass(self._runner, [data.examples[i] for i in indexes])
            sums += torch.stack([done.loss_sum.to(sums), torch.full_like(sums[0], done.targets)])
        if replicas.rank >= len(plan) % replicas.size > 0:
            self._runner.pass_by(trains=False)
        reading = Reading(self._model.mesh.data.all_reduce(sums))
        yield reading
        loss, count = reading.read()
        return float(broadcast_from_first(self._ranks, sums.new_tensor(loss / count)))

    def _save(self) -> None:
        """Write a checkpoint, unless this state has one."""
        state = self._state
        mark = (state.step, len(state.eval_losses))
        if self._store is None or self._saved == mark:
            return
        with deferred_interrupts():
            state.seconds = self._seconds
            optimizer = self._steps.state()
            beside = self._steps.beside
            tensors = {} if beside is None else beside.tensors
            adapter = self._settled()
            made = Checkpoint(state, self._trajectory, adapter, self._best, optimizer, tensors)
            store = self._store
            run_on_first(self._ranks, lambda: store.save(made))
            self._checkpoint = store.latest()
            self._saved = mark

    # ------------------------------------------------------------------------------- resuming

    def _make_trajectory(self) -> dict[str, object]:
        """Return all that the resulting weights depend on; it is compared when a job is resumed."""
        options, model = self._options, self._model
        position = self._batches.state_dict()
        trajectory = options.trajectory(self._total)
        for key in ("batch_size", "max_tokens", "seed", "shuffle", "examples"):
            trajectory[key] = position[key]
        trajectory["data_checksum"] = position["fingerprint"]
        if self._eval is not None and (options.patience or options.restores_best):
            evaluation = Batches(self._eval.examples, batch_size=1)
            trajectory["eval_data_checksum"] = evaluation.state_dict()["fingerprint"]
        trajectory["base_dtype"] = model.program.dtype
        trajectory["base_weights_checksum"] = base_digest(model.weight_store)
        return trajectory

    def _resume(self, checkpoint: Checkpoint) -> None:
        self._state = state = checkpoint.state
        if self._options.restores_best and state.best_step is not None and checkpoint.best is None:
            raise FinetuneError(
                f"{self._checkpoint} is damaged: it has no best/, the adapter of step "
                f"{state.best_step}; use an older one, or start anew with resume=False"
            )
        self._batches.load_state_dict(state.position)
        self._best = checkpoint.best
        if state.step:
            self._steps.load_state(checkpoint.optimizer)
        if self._steps.beside is not None:
            self._steps.beside.load(checkpoint.beside)
        self._resumed_from = state.step
        self._saved = (state.step, len(state.eval_losses))

    def _interrupted(self, interrupt: KeyboardInterrupt) -> NoReturn:
        step = self._state.step
        self._save()
        left = "the adapter is as after that step. Give checkpoint_dir to be able to resume"
        if self._store is not None:
            left = f"run the same call again to go on from {self._checkpoint}"
        raise FinetuneInterrupted(
            f"finetuning {self._name!r} was interrupted after step {step} of {self._total}; {left}",
            step,
            self._checkpoint,
        ) from interrupt
