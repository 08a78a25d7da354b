"""A training run: steps of an objective, evaluations, checkpoints, exact resume, and reports.

    while steps are left:
        gradients    forward and backward of the objective's next batches
        update       the optimizer's step
        evaluate     every `eval_every` steps, and after the last step
        save         every `save_every` steps, and after the last step; each state once
        report       the bar, the log, the record, and the caller's `on_step`

Supervised finetuning (`finetuning.py`), DPO (`pcg.train.preference.run`) and GRPO
(`pcg.train.grpo.loop`) are objectives. Between two steps, the state of a run consists of the
objective's state (an adapter and its optimizer) and a `TrainerState`. The order of the data is a
function of seed and epoch, and dropout of seed, step and batch, so that a resumed run and an
uninterrupted run have equal bits. An interrupt never leaves a step half done.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch

from pcg.errors import FinetuneError, FinetuneInterrupted, RecordError
from pcg.files import check_writable, expanded
from pcg.ranks.group import SINGLE_RANK, Ranks, run_on_first
from pcg.records.record import RunRecord
from pcg.runtime.training.callbacks import Callbacks, Listeners, check_callbacks
from pcg.runtime.training.checkpoints import CheckpointStore, Resumable, TrainerState
from pcg.runtime.training.options import Numbers, RunOptions, StepRecord
from pcg.runtime.training.work_units import Work, deferred_interrupts

Result = TypeVar("Result")
Find = Callable[[], tuple[Path, Any] | None]
"""Returns the checkpoint to resume from, and its contents; None to start at step 0."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step, as in `StepRecord`; `targets` counts its target tokens."""

    epoch: int
    loss: float
    gradient_norm: float
    tokens: int
    targets: int = 0
    metrics: Numbers = field(default_factory=dict)


class Objective(ABC, Generic[Result]):
    """The part of a run that has the data, the loss, the adapter and the optimizer.

    Attributes:
        doing: description of the run in messages, such as "finetuning 'a'".
        ranks: the processes of the run; rank 0 writes files.
        evaluates: True if the run has evaluation data.
        saves_interrupted: True if the state after every step can be saved.
        waits_for_page: False to write the record's page on another thread at the end.
    """

    name: str
    doing: str
    kind: str
    ranks: Ranks = SINGLE_RANK
    device = torch.device("cpu")
    evaluates = False
    saves_interrupted = True
    waits_for_page = True

    @abstractmethod
    def read(self, path: Path) -> Resumable:
        """Read a checkpoint. FinetuneError: the checkpoint is damaged."""

    @abstractmethod
    def start(self, find: Find) -> None:
        """Create the adapter and its optimizer, or load them from the checkpoint of `find`."""

    @abstractmethod
    def undo(self) -> None:
        """Undo `start`, as the run cannot start."""

    @abstractmethod
    def gradients(self, step: int, rate: float) -> Work[None]:
        """Compute the gradients of the next batches, after `step` steps."""

    @abstractmethod
    def update(self, step: int, rate: float) -> StepNumbers:
        """Update the adapter by these gradients."""

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Return the position in the data, as JSON values; `index` is 0 between two epochs."""

    def evaluate(self, step: int) -> Work[Numbers]:
        """Return the `loss` of the evaluation data, and other numbers."""
        raise NotImplementedError

    def keep_best(self) -> None:
        """Keep a copy of the current adapter, which had the best evaluation."""

    @abstractmethod
    def save(
        self, store: CheckpointStore, state: TrainerState, trajectory: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint."""

    def is_interrupted(self, is_done: bool) -> bool:
        """Return True if the run has to end after this step."""
        return False

    @abstractmethod
    def finish(self, run: Run[Result]) -> Work[Result]:
        """Serve the adapter after the last step, and return the result."""

    @abstractmethod
    def end(self) -> None:
        """Free all resources, after any end of the run."""

    # Reports

    def recorded(self, record: StepRecord) -> Numbers:
        """Return the numbers of a step for the record."""
        return {
            "epoch": record.epoch,
            "loss": record.loss,
            **record.metrics,
            **of_evaluation(record.evaluation),
            "learning_rate": record.learning_rate,
            "gradient_norm": record.gradient_norm,
            "tokens": record.tokens,
            "tokens_per_second": round(record.tokens_per_second, 3),
            "memory_bytes": memory_bytes(self.device),
        }

    def recorded_before(self, step: int, state: TrainerState) -> Numbers:
        """Return a checkpoint's numbers of an earlier step."""
        losses = [{"eval_loss": loss} for at, loss in state.eval_losses if at == step]
        return {"loss": state.losses[step - 1], **(losses[-1] if losses else {})}

    def samples(self) -> Sequence[Mapping[str, object]]:
        """Return this step's new rows of the record's table of samples."""
        return ()

    def shown(self, record: StepRecord) -> str:
        """Return a step's metrics as text for the log."""
        return ""


class Run(Generic[Result]):
    """A training run; `work` may run once.

    Attributes:
        checkpoint: the last checkpoint, or None.
        resumed_from: the step of the checkpoint that the run continued from, or None.
    """

    def __init__(
        self,
        objective: Objective[Result],
        options: RunOptions,
        *,
        total: int,
        rate: Callable[[int], float],
        trajectory: Mapping[str, Any],
        config: Callable[[], Mapping[str, Any]],
        listeners: Listeners,
        begun: TrainerState | None = None,
    ) -> None:
        """Find the checkpoint to resume from, and create the adapter and its optimizer.

        Args:
            trajectory: all values that the resulting weights depend on, as JSON; equal in a run
                and its resumed run.
            listeners: the caller's functions and objects.
            begun: the initial state without a checkpoint; by default the state before step 1.
        """
        self.objective, self.options, self.total = objective, options, total
        self._rate, self._trajectory, self._config = rate, trajectory, config
        self._on_step = listeners.on_step
        check_callbacks(listeners.callbacks)
        self._store: CheckpointStore | None = None
        ranks = objective.ranks
        if options.checkpoint_dir is not None:
            self._store = CheckpointStore(options.checkpoint_dir, options.keep_last)
            run_on_first(ranks, self._store.check_writable)
        if options.record is not None:
            folder = expanded(options.record)
            run_on_first(ranks, lambda: check_writable(folder, "the record", RecordError))
        self.state = TrainerState(position=objective.position()) if begun is None else begun
        self.checkpoint: Path | None = None
        self.resumed_from: int | None = None
        self._saved: tuple[int, int] | None = None
        objective.start(self._find)
        try:
            if self._store is not None:
                run_on_first(ranks, self._store.lock)
        except BaseException:
            objective.undo()
            raise
        facts = {"step": self.state.step, "total": total}
        args = options if listeners.options is None else listeners.options
        self._callbacks = Callbacks(listeners.callbacks, args, **facts, is_first=not ranks.rank)
        self._started = time.monotonic()
        self._seconds_before, self._tokens_before = self.state.seconds, self.state.tokens

    def _find(self) -> tuple[Path, Any] | None:
        if self._store is None:
            return None
        checkpoint = self._store.resumable(
            self.options.resume, self.objective.read, self._trajectory, self.total
        )
        if checkpoint is not None:
            self.checkpoint, contents = checkpoint
            self.state = contents.state
            self.resumed_from = self.state.step
            self._drop_last_evaluation(self.checkpoint)
            self._saved = self._mark
        return checkpoint

    def _drop_last_evaluation(self, path: Path) -> None:
        """Drop the evaluation that ended a shorter run, if early stopping would count it.

        Raises:
            FinetuneError: it was the best evaluation, so that the one before it is lost.
        """
        state, options = self.state, self.options
        counts = options.patience is not None or options.restores_best
        if not counts or state.step >= self.total or not (state.step and state.evaluated):
            return
        stopped, state.stopped = state.stopped, False
        if self._is_due(options.eval_every):
            state.stopped = stopped
            return
        if state.best_step == state.step:
            raise FinetuneError(
                f"{path} ended a run of {state.step} steps with its best evaluation, which a run "
                f"of {self.total} steps does not make; evaluate every few steps that divide "
                f"{state.step} (eval_every), or start at step 0 with resume=False"
            )
        state.eval_losses.pop()
        state.stale -= 1

    @property
    def _mark(self) -> tuple[int, int]:
        """The numbers of steps and evaluations, which identify a state for saving it once."""
        return self.state.step, len(self.state.eval_losses)

    @property
    def is_done(self) -> bool:
        return self.state.stopped or self.state.step >= self.total

    @property
    def seconds(self) -> float:
        """The time of the run, including the part before a resume."""
        return self._seconds_before + time.monotonic() - self._started

    # ------------------------------------------------------------------------------- the loop

    def work(self) -> Work[Result]:
        """Yield the units of all steps, until an interrupt.

        Raises:
            FinetuneInterrupted: Ctrl-C, or an interrupt of the objective.
            FinetuneError: a number is not finite, or a checkpoint cannot be saved.
            RecordError: the record cannot be written.
        """
        objective = self.objective
        try:
            with Reports(self, self._config).opened() as reports:
                self._tell("train_begin")
                reports.evaluated((yield from self._settle()))
                while not self.is_done:
                    record = yield from self._step()
                    reports.step(record)
                    if self._on_step is not None:
                        self._on_step(record)
                    if objective.is_interrupted(self.is_done):
                        raise KeyboardInterrupt
                result = yield from objective.finish(self)
                self._tell("train_end")
                return result
        except KeyboardInterrupt as interrupt:
            self._interrupted(interrupt)
        finally:
            if self._store is not None:
                self._store.unlock()
            objective.end()

    def _step(self) -> Work[StepRecord]:
        state = self.state
        rate = self._rate(state.step)
        yield from self.objective.gradients(state.step, rate)
        with deferred_interrupts():
            numbers = self.objective.update(state.step, rate)
            state.step += 1
            state.losses.append(numbers.loss)
            state.tokens += numbers.tokens
            state.targets += numbers.targets
            state.position = self.objective.position()
        self._tell_step(numbers, rate)
        evaluation = yield from self._settle()
        seconds = self.seconds - self._seconds_before
        return StepRecord(
            step=state.step,
            total_steps=self.total,
            epoch=numbers.epoch,
            loss=numbers.loss,
            eval_loss=None if evaluation is None else evaluation["loss"],
            learning_rate=rate,
            gradient_norm=numbers.gradient_norm,
            tokens=numbers.tokens,
            tokens_per_second=(state.tokens - self._tokens_before) / max(seconds, 1e-9),
            checkpoint=self.checkpoint,
            metrics=numbers.metrics,
            evaluation=evaluation,
        )

    def _settle(self) -> Work[Numbers | None]:
        """Evaluate and save if due after the last step, unless done before a resume."""
        options, state = self.options, self.state
        evaluation: Numbers | None = None
        is_due = self._is_due(options.eval_every) if state.step else options.eval_at_start
        if self.objective.evaluates and is_due and not state.evaluated:
            evaluation = yield from self._evaluate()
            self._tell("evaluate", metrics=of_evaluation(evaluation))
            self._obey()
        if state.step and self._is_due(options.save_every):
            self._save()
        return evaluation

    def _is_due(self, every: int | None) -> bool:
        """Return True at the last and each `every`-th step; for None, at the end of each epoch."""
        if every is None or self.is_done:
            return self.is_done or self.state.position.get("index") == 0
        return self.state.step % every == 0

    def _evaluate(self) -> Work[Numbers]:
        state, options = self.state, self.options
        numbers = yield from self.objective.evaluate(state.step)
        loss, sign = numbers["loss"], options.metric_sign
        for name in ("loss", options.best_metric):
            if not math.isfinite(numbers[name]):
                raise FinetuneError(
                    f"the evaluation {name} after step {state.step} is {numbers[name]:g}; lower "
                    "the learning rate, or look at the evaluation data"
                )
        value = numbers[options.best_metric]
        with deferred_interrupts():
            state.eval_losses.append((state.step, loss))
            best = math.inf if state.best_loss is None else sign * state.best_loss
            if sign * value < best - options.min_delta:
                state.best_step, state.best_loss, state.stale = state.step, value, 0
                if options.restores_best:
                    self.objective.keep_best()
            else:
                state.stale += 1
            state.stopped = options.patience is not None and state.stale >= options.patience
        return numbers

    def _save(self) -> None:
        """Write a checkpoint, unless this state is already saved."""
        if self._store is None or self._saved == self._mark:
            return
        with deferred_interrupts():
            self.state.seconds = self.seconds
            self.checkpoint = self.objective.save(self._store, self.state, self._trajectory)
            self._saved = self._mark
        self._tell("save")

    # ------------------------------------------------------------------------------- callbacks

    def _tell(self, event: str, **facts: Numbers) -> None:
        self._callbacks.tell(event, self.state.step, self.state.best_loss, **facts)

    def _tell_step(self, numbers: StepNumbers, rate: float) -> None:
        if not self._callbacks:
            return
        evaluation = {k: x for k, x in numbers.metrics.items() if k.startswith("eval_")}  # of GRPO
        if self.state.step % (self.options.log_every or 1) == 0:
            logs = {
                "loss": numbers.loss,
                "grad_norm": numbers.gradient_norm,
                "learning_rate": rate,
                "epoch": float(numbers.epoch),
                **{name: x for name, x in numbers.metrics.items() if name not in evaluation},
            }
            self._tell("log", logs=logs)
        self._tell("step_end")
        if evaluation:
            self._tell("evaluate", metrics=evaluation)
        self._obey()

    def _obey(self) -> None:
        """End the run after this step if a callback of any rank asks for it."""
        if not self._callbacks:
            return
        ranks, asks = self.objective.ranks, float(self._callbacks.asks_to_stop)
        if ranks.size > 1:
            asks = float(ranks.all_reduce(torch.tensor(asks, device=ranks.device)))
        self.state.stopped = self.state.stopped or bool(asks)

    def _interrupted(self, interrupt: KeyboardInterrupt) -> NoReturn:
        step = self.state.step
        if self.objective.saves_interrupted:
            self._save()
        left = "the adapter is as after that step. Give checkpoint_dir to be able to resume"
        if self.checkpoint is not None:
            left = f"run the same call again to go on from {self.checkpoint}"
        elif self._store is not None:
            left = "no checkpoint was written yet"
        raise FinetuneInterrupted(
            f"{self.objective.doing} was interrupted after step {step} of {self.total}; {left}",
            step,
            self.checkpoint,
        ) from interrupt


_LOG = logging.getLogger("pcg.finetuning")
_LINE_S = 5.0
"""Time between lines of the log without a progress bar, seconds."""


class Reports:
    """The bar, the log and the record of a run, on rank 0."""

    def __init__(self, run: Run[Any], config: Callable[[], Mapping[str, Any]]) -> None:
        self._run, self._config = run, config
        self._objective, self._options = run.objective, run.options
        self._is_first = run.objective.ranks.rank == 0
        self._logged = run.state.step
        self._next_line_s = 0.0
        self._has_bar = run.options.progress and self._is_first and sys.stderr.isatty()
        self._record: RunRecord | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Reports]:
        """Open the record and the bar for a block. RecordError: the record cannot be written."""
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]}"),
            progress.TextColumn("lr {task.fields[rate]}"),
            progress.TextColumn("{task.fields[speed]} tok/s"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self._has_bar,
        )
        name, steps = self._objective.name, self._run.state.step
        self._task = self._bar.add_task(
            name, total=self._run.total, completed=steps, loss="-", rate="-", speed="-"
        )
        with contextlib.ExitStack() as stack:
            if self._options.record is not None and self._is_first:
                self._record = stack.enter_context(self._opened_record(self._options.record))
            stack.enter_context(self._bar)
            yield self

    def _opened_record(self, folder: str | Path) -> RunRecord:
        """Open the record, and add the checkpoint's steps that the record lacks."""
        objective, state = self._objective, self._run.state
        record = RunRecord(
            folder,
            self._config(),
            name=objective.name,
            kind=objective.kind,
            done=state.step,
            report_to=self._options.report_to,
            waits_for_page=objective.waits_for_page,
        )
        for step in range(record.last_step + 1, state.step + 1):
            record.log(step, **objective.recorded_before(step, state))
        return record

    def evaluated(self, evaluation: Numbers | None) -> None:
        """Report an evaluation outside the steps of this run."""
        state, record = self._run.state, self._record
        if not state.evaluated:
            return
        step, loss = state.eval_losses[-1]
        if record is not None and "eval_loss" not in record.names_of_last:
            record.log(step, **of_evaluation(evaluation or {"loss": loss}))
            if samples := self._objective.samples():
                record.samples(step, samples)
        if self._is_first and self._options.progress and not self._has_bar and not step:
            _LOG.info("%s before the first step: eval loss %.4f", self._objective.name, loss)

    def step(self, record: StepRecord) -> None:
        """Report a step, after evaluation and saving."""
        if not self._is_first:
            return
        self._log(record)
        evaluated = "" if record.eval_loss is None else f" (eval {record.eval_loss:.4f})"
        self._bar.update(
            self._task,
            completed=record.step,
            loss=f"{record.loss:.4f}{evaluated}",
            rate=f"{record.learning_rate:.2e}",
            speed=f"{record.tokens_per_second:,.0f}",
        )
        if self._record is not None:
            self._record.log(record.step, **self._objective.recorded(record))
            if samples := self._objective.samples():
                self._record.samples(record.step, samples)

    def _log(self, record: StepRecord) -> None:
        if not self._is_due(record):
            return
        recent = self._run.state.losses[-max(1, record.step - self._logged) :]
        self._logged = record.step
        evaluated = "".join(
            f", eval {name.replace('_', ' ')} {value:.4f}"
            for name, value in (record.evaluation or {}).items()
            if name.endswith("loss")
        )
        _LOG.info(
            "%s step %d/%d: loss %.4f%s%s, lr %.3g, gradient norm %.3g, %.0f tokens/s",
            self._objective.name,
            record.step,
            record.total_steps,
            sum(recent) / len(recent),
            self._objective.shown(record),
            evaluated,
            record.learning_rate,
            record.gradient_norm,
            record.tokens_per_second,
        )

    def _is_due(self, record: StepRecord) -> bool:
        """Return True if a step is logged: by its number or, without a bar, by time."""
        is_last = self._run.is_done
        every = self._options.log_every
        if every is not None:
            return is_last or not record.step % every
        if not self._options.progress or self._has_bar:
            return False
        now = time.monotonic()
        if not is_last and record.eval_loss is None and now < self._next_line_s:
            return False
        self._next_line_s = now + _LINE_S
        return True


def of_evaluation(evaluation: Numbers | None) -> Numbers:
    """Return the numbers of an evaluation by their names in the record."""
    return {f"eval_{name}": value for name, value in (evaluation or {}).items()}


def memory_bytes(device: torch.device) -> int:
    """Return torch's peak memory on a GPU, or the resident set of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
