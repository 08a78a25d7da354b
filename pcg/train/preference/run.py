"""A run on preferences: steps over pairs, evaluations, checkpoints, exact resume.

A step goes forward and back over its pairs by the loss `preference` of a trainer, and updates the
adapter. While an engine runs on a thread, the trainer's work and the reference's run beside its
requests; else nothing runs beside them. Between two steps the whole state is the trainer's and a
few numbers, so a run that is resumed ends with the same bits.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

from pcg.errors import FinetuneError, FinetuneInterrupted
from pcg.files import damage_of
from pcg.peft.registry import is_shorthand
from pcg.runtime.data.limits import UNLIMITED, DataLimits
from pcg.runtime.data.order import Batches
from pcg.runtime.data.sources import choose_splits
from pcg.runtime.executor import Executor
from pcg.runtime.model.weight_digests import base_digest
from pcg.runtime.training.torch_optimizers import FIELDS, Optimizer
from pcg.runtime.training.trainer.trainer import Trainer
from pcg.runtime.training.training_data import Load, training_data
from pcg.runtime.training.work_units import deferred_interrupts
from pcg.train.preference.options import DpoArguments
from pcg.train.preference.pairs import Pair, data_of, pairs_of, target_sums
from pcg.train.preference.records import Metrics, PreferenceResult, PreferenceStep, metrics_of
from pcg.train.preference.references import References, ServedReferences, StartReferences
from pcg.train.preference.run_record import PreferenceRecord
from pcg.train.run_states import RunStates

_LOG = logging.getLogger("pcg.finetuning")
_EVALUATED = 64
"""Pairs that are evaluated at once."""


class PreferenceRun:
    """A run; it trains once. `stop` and `cancel` are for other threads."""

    def __init__(
        self,
        executor: Executor,
        given: DpoArguments,
        load: Load | None = None,
        limits: DataLimits = UNLIMITED,
    ) -> None:
        """Read the data, make the trainer, and go on from a checkpoint if there is one.

        Args:
            load: makes examples of files and rows; this process by default.
            limits: the most that is read.
        Raises:
            PcgError: as of `dpo`.
        """
        self._executor, self._given = executor, given
        splits = choose_splits(given.data, given.eval_data, given.most_rows)
        if splits.chosen:
            _LOG.warning("%s: %s", given.adapter, splits.chosen)
        state = executor.state
        data = training_data(splits.train, given, state, load, limits, pairs=True)
        pairs = pairs_of(data)
        self._eval: list[Pair] = []
        if splits.evaluation is not None:
            self._eval = pairs_of(
                training_data(splits.evaluation, given, state, load, limits, pairs=True)
            )
        self._batches = Batches(pairs, **given.batch_bounds, seed=given.seed, shuffle=given.shuffle)
        self._total = _total_steps(self._batches, given)
        self._reference = given.reference
        if given.reference is None:
            is_saved = isinstance(given.peft, str | os.PathLike) and not is_shorthand(given.peft)
            is_trained = is_saved or given.adapter in executor.adapters
            self._reference = "start" if is_trained else "base"
        self._schedule = given.make_schedule(self._total)
        self._trajectory = self._make_trajectory()
        self._step = 0
        self._history: list[Metrics] = []
        self._evaluations: list[tuple[int, Metrics]] = []
        self._tokens = self._tokens_before = 0
        self._seconds_before = 0.0
        self._resumed_from: int | None = None
        self._checkpoint: Path | None = None
        self._saved: tuple[int, int] | None = None
        self._stops, self._cancels = Event(), Event()
        self._states: RunStates | None = None
        found: Path | None = None
        if given.checkpoint_dir is not None:
            self._states = RunStates(
                given.checkpoint_dir, given.keep_last, "training on preferences"
            )
            found = self._states.resumable(given.resume, self._trajectory, self._total)
            self._states.lock()
        try:
            self._trainer = self._make_trainer()
        except BaseException:
            self._unlock()
            raise
        try:
            self._references = self._make_references(pairs), self._make_references(self._eval)
            if found is not None:
                self._resume(found)
        except BaseException:
            self._end()
            raise
        self._started = time.monotonic()

    def _make_trainer(self) -> Trainer:
        given = self._given
        bounds = given.batch_bounds
        size = bounds["batch_size"]
        return self._executor.trainer(
            given.adapter,
            peft=given.peft,
            seed=given.seed,
            batch_size=2 * (size if size is not None else max(1, len(self._batches))),
            max_tokens=bounds["max_tokens"],
            total_steps=self._total,
            optimizer=given.optimizer,
            optimizer_options=given.optimizer_options,
            offload_optimizer=given.offload_optimizer,
        )

    def _make_references(self, pairs: Sequence[Pair]) -> References:
        name = self._reference
        if name == "start":
            return StartReferences(self._trainer, pairs)
        return ServedReferences(self._executor, None if name == "base" else name, self._check)

    def _check(self) -> None:
        """Raise a FinetuneError if the run was cancelled."""
        if self._cancels.is_set():
            raise FinetuneError(f"job {self._given.adapter!r} was cancelled")

    # ------------------------------------------------------------------------------- the loop

    def run(self) -> PreferenceResult:
        """Run all steps; at the end the adapter is served.

        Raises:
            FinetuneInterrupted: Ctrl-C, or `stop`.
            FinetuneError: it was cancelled, or numbers are not finite.
            RecordError: the record cannot be written.
        """
        record = PreferenceRecord(self._given, self._executor, self._trajectory)
        try:
            with record.opened(self._history, self._evaluations):
                return self._run(record)
        finally:
            self._end()

    def _run(self, kept: PreferenceRecord) -> PreferenceResult:
        given = self._given
        try:
            self._settle()
            if self._evaluations and not self._step:
                kept.started(self._evaluations[0][1])
            while self._step < self._total:
                record = self._train()
                kept.add(record)
                self._log(record)
                if given.on_step is not None:
                    given.on_step(record)
                if self._stops.is_set() and self._step < self._total:
                    raise KeyboardInterrupt
            self._trainer.snapshot()
            return PreferenceResult(
                adapter=given.adapter,
                history=tuple(self._history),
                evaluations=tuple(self._evaluations),
                steps=self._step,
                total_steps=self._total,
                tokens=self._tokens,
                seconds=self._seconds,
                resumed_from=self._resumed_from,
                checkpoint=self._checkpoint,
            )
        except KeyboardInterrupt as interrupt:
            self._interrupted(interrupt)
        except Exception as error:
            if self._cancels.is_set():
                raise FinetuneError(f"job {given.adapter!r} was cancelled") from error
            raise

    def stop(self) -> None:
        """End after the step under way, with a checkpoint where these are kept."""
        self._stops.set()

    def cancel(self) -> None:
        """End now; the adapter is not served."""
        self._cancels.set()
        self._trainer.close()

    def _train(self) -> PreferenceStep:
        """Run one step; an interrupt leaves all of it undone or all of it done."""
        given, rate = self._given, self._given.learning_rate * self._schedule(self._step)
        epoch = self._batches.epoch
        position = self._batches.state_dict()
        try:
            group = [*islice(self._batches, given.gradient_accumulation_steps)]
            pairs = [pair for batch in group for pair in batch if isinstance(pair, Pair)]
            references = self._references[0].of(pairs)
            options = given.loss_options(len(pairs), _chosen_targets(pairs))
            scored = self._trainer.forward_backward(
                data_of(pairs, references), "preference", loss_options=options
            )
        except BaseException:
            self._batches.load_state_dict(position)
            raise
        with deferred_interrupts():
            stepped = self._trainer.optim_step(
                learning_rate=rate, grad_clip_norm=given.max_grad_norm, **self._fields
            )
            self._step += 1
            self._tokens += stepped.tokens
            policy = target_sums(pairs, [one.tolist() for one in scored.logprobs])
            metrics = metrics_of(policy, target_sums(pairs, references), given.beta)
            self._history.append({"loss": scored.loss, **metrics})
        self._settle()
        evaluated = self._evaluations[-1:]
        is_new = bool(evaluated) and evaluated[0][0] == self._step
        return PreferenceStep(
            step=self._step,
            total_steps=self._total,
            epoch=epoch,
            loss=scored.loss,
            metrics=metrics,
            evaluation=evaluated[0][1] if is_new else None,
            learning_rate=rate,
            gradient_norm=stepped.gradient_norm,
            tokens=stepped.tokens,
            tokens_per_second=(self._tokens - self._tokens_before)
            / max(time.monotonic() - self._started, 1e-9),
            checkpoint=self._checkpoint,
        )

    @property
    def _fields(self) -> dict[str, Any]:
        """The optimizer's options of an update that are given."""
        given = self._given
        takes = Optimizer.of(given.optimizer).fields
        return {
            name: getattr(given, name) for name in FIELDS if name in takes and getattr(given, name)
        }

    # ------------------------------------------------------------------------------- between steps

    def _settle(self) -> None:
        """Evaluate and save if it is time after the last step; not twice when resumed there."""
        given = self._given
        evaluated = bool(self._evaluations) and self._evaluations[-1][0] == self._step
        is_due = self._is_due(given.eval_every) if self._step else given.eval_at_start
        if self._eval and is_due and not evaluated:
            self._evaluate()
        if self._step and self._is_due(given.save_every):
            self._save()

    def _is_due(self, every: int | None) -> bool:
        """Return True for the last step, each `every`-th one, and the end of each epoch if None."""
        if self._step >= self._total:
            return True
        return self._batches.index == 0 if every is None else self._step % every == 0

    def _evaluate(self) -> None:
        """Measure the loss and the metrics of the evaluation data, without dropout."""
        given, pairs = self._given, self._eval
        options = given.loss_options(len(pairs), _chosen_targets(pairs))
        loss, policy, by_reference = 0.0, list[float](), list[float]()
        for begin in range(0, len(pairs), _EVALUATED):
            lot = pairs[begin : begin + _EVALUATED]
            references = self._references[1].of(lot)
            data = data_of(lot, references)
            scored = self._trainer.forward(data, "preference", loss_options=options)
            loss += scored.loss
            policy += target_sums(lot, [one.tolist() for one in scored.logprobs])
            by_reference += target_sums(lot, references)
        found = {"loss": loss, **metrics_of(policy, by_reference, given.beta)}
        self._evaluations.append((self._step, found))

    def _save(self) -> None:
        """Write a checkpoint, unless this state has one."""
        mark = (self._step, len(self._evaluations))
        if self._states is None or self._saved == mark:
            return
        notes = {
            "trajectory": self._trajectory,
            "position": self._batches.state_dict(),
            "step": self._step,
            "history": self._history,
            "evaluations": self._evaluations,
            "tokens": self._tokens,
            "seconds": self._seconds,
        }
        with deferred_interrupts():
            self._checkpoint = self._states.save(self._trainer.save_state, self._step, notes)
            self._saved = mark

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _log(self, record: PreferenceStep) -> None:
        every = self._given.log_every
        if every is None or (record.step % every and record.step < record.total_steps):
            return
        shown = record.metrics
        evaluated = (
            "" if record.evaluation is None else f", eval loss {record.evaluation['loss']:.4f}"
        )
        _LOG.info(
            "%s step %d/%d: loss %.4f, margin %.4f, accuracy %.2f%s, lr %.3g, %.0f tokens/s",
            self._given.adapter,
            record.step,
            record.total_steps,
            record.loss,
            shown["rewards/margins"],
            shown["rewards/accuracies"],
            evaluated,
            record.learning_rate,
            record.tokens_per_second,
        )

    # ------------------------------------------------------------------------------- resuming

    def _make_trajectory(self) -> dict[str, Any]:
        """Return all that the resulting weights depend on; it is compared when a run is resumed."""
        position, model = self._batches.state_dict(), self._executor.state
        found = self._given.trajectory(self._total)
        for key in ("batch_size", "max_tokens", "seed", "shuffle", "examples"):
            found[key] = position[key]
        found["reference"] = self._reference
        found["data_checksum"] = position["fingerprint"]
        found["base_dtype"] = model.program.dtype
        found["base_weights_checksum"] = base_digest(model.weight_store)
        return found

    def _resume(self, path: Path) -> None:
        notes: Mapping[str, Any] = self._trainer.load_state(path).notes
        fix = "; use an older one, or start anew with resume=False"
        with damage_of(f"the checkpoint {path}", FinetuneError, fix):
            self._batches.load_state_dict(notes["position"])
            self._step = self._resumed_from = int(notes["step"])
            self._history = [dict(one) for one in notes["history"]]
            self._evaluations = [(int(step), dict(found)) for step, found in notes["evaluations"]]
            self._tokens = self._tokens_before = int(notes["tokens"])
            self._seconds_before = float(notes["seconds"])
        self._checkpoint = path
        self._saved = (self._step, len(self._evaluations))

    def _interrupted(self, interrupt: KeyboardInterrupt) -> NoReturn:
        self._save()
        name = self._given.adapter
        left = "give checkpoint_dir to be able to resume"
        if self._checkpoint is not None:
            left = f"run the same again to go on from {self._checkpoint}"
        raise FinetuneInterrupted(
            f"training {name!r} on preferences was interrupted after step {self._step} of "
            f"{self._total}; {left}",
            self._step,
            self._checkpoint,
        ) from interrupt

    def _end(self) -> None:
        self._trainer.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._states is not None:
            self._states.unlock()


def _chosen_targets(pairs: Sequence[Pair]) -> int:
    return sum(pair.chosen.targets for pair in pairs)


def _total_steps(batches: Batches, given: DpoArguments) -> int:
    """Count the steps of the run; the last one of an epoch may have fewer batches."""
    if given.max_steps is not None:
        return given.max_steps
    size = given.gradient_accumulation_steps
    epochs = range(given.epochs or 1)
    return sum(math.ceil(len(batches.plan(epoch)) / size) for epoch in epochs)
