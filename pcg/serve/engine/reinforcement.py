"""Reinforcement fine-tuning in the engine: rollouts and updates by `pcg.train.grpo`.

A run has its own thread; its rollouts and updates share the engine's steps with other requests and
jobs. The run sends completions as events and waits for their grades.

A checkpoint is a folder with the adapter, which can be served, the trainer's state, and the numbers
of the last steps. Its name appears when the folder is complete. A resumed run uses the prompts and
seeds that an uninterrupted run would have used.

The run's record has the numbers of its steps and some of its completions.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, cast

import msgspec

from pcg.errors import (
    DataError,
    EngineError,
    FinetuneError,
    FinetuneInterrupted,
    PcgError,
    QueueFullError,
    as_pcg_error,
)
from pcg.files import SUMS, is_file, seal, sync_names
from pcg.kernels.devices import device_thread
from pcg.peft.adapter import Adapter
from pcg.peft.adapter_files import write_adapter, write_adapter_files
from pcg.records.record import RunRecord
from pcg.records.run_files import Status
from pcg.runtime.data.dataset import converted
from pcg.runtime.data.sources import read_rows
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.trainers import AsyncTrainer
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion
from pcg.runtime.requests.stream import Stream
from pcg.runtime.training.checkpoints import STATE, TRAINER, check_checkpoint, last_good
from pcg.runtime.training.training_data import with_own_template
from pcg.runtime.training.work_units import run_to_end
from pcg.serve.engine.messages import (
    TRAIN_REWARD,
    VALID_REWARD,
    Emit,
    JobEnd,
    JobOrder,
    JobSamples,
    JobStep,
    start_of,
)
from pcg.train.grpo.loop import Sample, Task, grpo_run
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.rollouts import Prompt, Rewards

# ----------------------------------------------------------------------------- reinforcement record


_RENAMED = (TRAIN_REWARD, VALID_REWARD)
"""Metrics that the record stores under other names."""
_SAMPLED, _LONGEST = 200, 2000
"""Steps of a run with samples (at most twice as many), and the characters of a sample's text. The
page of a run reads all of them, so both are bounded."""


@contextmanager
def opened(
    folder: str, config: Mapping[str, Any], name: str, steps: Sequence[JobStep]
) -> Iterator[RunRecord]:
    """Open the record of a run within a `with`, and add the steps of its checkpoint.

    Args:
        steps: the last steps in the checkpoint.
    Raises:
        RecordError: the record cannot be written.
    """
    last = steps[-1].step if steps else 0
    with RunRecord(
        folder, config, name=name, kind="grpo", done=last, waits_for_page=False
    ) as record:
        for event in steps:
            if event.step > record.last_step:
                add_step(record, event)
        yield record


def add_step(record: RunRecord, event: JobStep, samples: Sequence[Sample] = ()) -> None:
    """Add a step and some of its completions. RecordError: the record cannot be written."""
    more = {name: value for name, value in event.more.items() if name not in _RENAMED}
    if VALID_REWARD in event.more:
        more["eval_reward"] = event.more[VALID_REWARD]
    record.log(
        event.step,
        loss=event.loss,
        **more,
        learning_rate=event.learning_rate,
        gradient_norm=event.gradient_norm,
        tokens=event.tokens,
        tokens_per_second=round(event.tokens_per_second, 3),
    )
    if samples and event.step % max(1, event.total_steps // _SAMPLED) == 0:
        record.samples(event.step, [_short(sample.row) for sample in samples])


def _short(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row of samples with truncated texts."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in row.items()
        if name in ("prompt", "completion")
    }
    return {**row, **{name: text[:_LONGEST] for name, text in texts.items()}}


def end_cancelled(record: RunRecord) -> None:
    """End the record of a cancelled run."""
    record.end(Status.CANCELLED)


# ----------------------------------------------------------------------------------------- rollouts


_MOST = 256
"""Most sequences of a job in the engine, to leave queue room for the tenant's other requests."""
_AGAIN_S = 0.1
"""Time before a request is submitted again to an engine with a full queue, seconds."""


class Rollout:
    """A request of a job; it is submitted again while the engine's queue is full."""

    def __init__(self, ask: Callable[[], Stream], width: int) -> None:
        self.width = width
        self.is_taken = False
        self._ask = ask
        self._stream = ask()

    @property
    def is_over(self) -> bool:
        return self._stream.is_over

    def wait_all(self) -> list[Completion]:
        """Wait for all completions. Raises the errors of `Stream`, or that the job has ended."""
        while True:
            try:
                completions = self._stream.wait_all()
            except QueueFullError:
                time.sleep(_AGAIN_S)
                self._stream = self._ask()
            else:
                self.is_taken = True
                return completions

    def cancel(self) -> None:
        """End the request."""
        self._stream.cancel()


class Rollouts:
    """The engine interface of a job's loop, for the job's thread.

    Args:
        tenant: owner of the requests.
        queue: the most waiting sequences of a tenant; None for no bound.
    Attributes:
        has_ended: True once no further requests are accepted.
    """

    def __init__(self, engine: AsyncEngine, tenant: str, queue: int | None) -> None:
        self._engine = engine
        self._most = _MOST if queue is None else min(_MOST, queue)
        self._tenant = tenant
        self._unread: list[Rollout] = []
        self._running: list[Rollout] = []
        self.has_ended = False

    def submit(self, *args: Any, **fields: object) -> Rollout:
        """Submit a prompt, after waiting for room among the submitted prompts."""

        def ask() -> Stream:
            if self.has_ended:
                raise FinetuneError("the job was cancelled")
            return self._engine.submit(*args, **fields, tenant=self._tenant)  # type: ignore[arg-type]

        width = cast(int, fields.get("n", 1))
        while (
            self._running and sum(rollout.width for rollout in self._running) + width > self._most
        ):
            with suppress(PcgError):  # the caller that reads its completions gets the error
                self._running[0].wait_all()
            self._running = [rollout for rollout in self._running if not rollout.is_over]
        rollout = Rollout(ask, width)
        self._running.append(rollout)
        self._unread = [*(each for each in self._unread if not each.is_taken), rollout]
        if self.has_ended:  # another thread called `end`
            rollout.cancel()
        return rollout

    def end(self) -> None:
        """End all requests and accept no more, from any thread."""
        self.has_ended = True
        for rollout in list(self._unread):
            rollout.cancel()


# ------------------------------------------------------------------------------------ reinforcement


_LOG = logging.getLogger("pcg.serve")
_KEPT_STEPS = 1024
"""Steps whose numbers a checkpoint has. Rows of earlier steps are already in the record, and a long
job would write all of them again with each checkpoint."""
_TOGETHER = 256
"""Completions graded together; with their rows, a message of about 16 MiB."""


class ReinforcementRun:
    """A run of a job, until its end or its interruption."""

    def __init__(
        self, executor: Executor, engine: AsyncEngine, order: JobOrder, emit: Emit
    ) -> None:
        self._executor = executor
        self._engine = engine
        self._order = order
        self._emit = emit
        self._settings = order.options
        queue = engine.engine.scheduler.backlog.limits.tenant_requests
        self._rollouts = Rollouts(engine, order.tenant, queue)
        self._grades: SimpleQueue[tuple[Sequence[float], str | None] | None] = SimpleQueue()
        self._interrupts = Event()
        self._steps: deque[JobStep] = deque(maxlen=_KEPT_STEPS)
        self._record: RunRecord
        self._samples: Sequence[Sample] = ()
        self._tokens = self._counted = 0
        self._at_s = 0.0

    def begin(self, ended: Callable[[], None]) -> None:
        """Start a thread; `ended` is called before the end event is sent."""
        act = partial(self._run, ended)
        device_thread(self._executor.device, act, "pcg reinforcement").start()

    def interrupt(self) -> None:
        """End after the present step, with a checkpoint."""
        self._interrupts.set()

    def cancel(self) -> None:
        """End now."""
        self._interrupts.set()
        self._rollouts.end()
        self._grades.put(None)

    def put_grades(self, rewards: Sequence[float], error: str | None) -> None:
        """Deliver the grades of the last completions, or the grader's error."""
        self._grades.put((rewards, error))

    # ------------------------------------------------------------------------------- the thread

    def _run(self, ended: Callable[[], None]) -> None:
        try:
            adapter = self._trained()
            write_adapter(adapter, self._order.output)
            end = JobEnd("succeeded", is_final=True, tokens=self._tokens)
        except Exception as error:
            end = self._end_of(error)
            with suppress(PcgError):  # the published adapter is unfinished
                self._engine.remove_adapter(self._order.adapter).result()
        ended()
        self._emit(end)

    def _end_of(self, error: Exception) -> JobEnd:
        if self._rollouts.has_ended:
            return JobEnd("cancelled", is_final=False)
        known = as_pcg_error(error, "the job", FinetuneError)
        if known is not error:
            _LOG.error("a job failed by an internal error", exc_info=error)
        resumes = isinstance(known, FinetuneInterrupted | EngineError)
        state = "interrupted" if resumes else "failed"
        return JobEnd(state, is_final=not resumes, kind=type(known).__name__, text=str(known))

    def _trained(self) -> Adapter:
        order, settings = self._order, self._settings
        options = with_own_template(
            GrpoOptions(**settings["grpo"]), self._executor.state, order.adapter, start_of(order)
        )
        prompts = self._prompts(order.data, options)
        tests = [] if order.eval_data is None else self._prompts(str(order.eval_data), options)
        is_there = order.adapter in self._executor.adapters
        trainer = self._engine.trainer(
            order.adapter,
            peft=None if is_there else start_of(order),
            seed=options.seed,
            batch_size=options.batch_size,
            temperature=options.temperature,
            dropout=False,
            max_tokens=options.max_tokens_per_pass,
            chat_template=options.template(),
            tenant=order.tenant,
        )
        with trainer:
            trainer.created.wait()
            begun = self._resume(trainer)

            def on_step(step: int, numbers: Mapping[str, float], some: Sequence[Sample]) -> None:
                self._samples = some
                self._stepped(trainer, tests, step, numbers)

            def grader(completions: Sequence[Any], item: Sequence[Any], **_: object) -> Any:
                texts = [
                    text if isinstance(text, str) else text[0]["content"] for text in completions
                ]
                return self._graded(texts, list(item))

            task = Task(prompts, Rewards(grader), None, on_step, updates=begun)
            self._at_s = time.monotonic()
            running = cast(AsyncEngine, self._rollouts)
            config = {"adapter": order.adapter, "peft": order.peft, **settings}
            with opened(
                settings["record"], config, order.adapter, list(self._steps)
            ) as self._record:
                try:
                    run = grpo_run(running, trainer, task, options)
                    return run_to_end(run.work()).snapshot.adapter
                except PcgError:
                    if self._rollouts.has_ended:
                        end_cancelled(self._record)
                    raise

    def _prompts(self, path: str, options: GrpoOptions) -> list[Prompt]:
        """Read the rows of a file: a chat or a text, and columns for the grader."""
        tokenizer = self._executor.tokenizer
        if tokenizer is None:
            raise DataError("the model has no tokenizer, and prompts are texts")
        effort = self._settings["reasoning_effort"]
        variables = options.variables() | ({} if effort is None else {"reasoning_effort": effort})
        if (template := options.template()) is not None:
            tokenizer = replace(tokenizer, chat_template=template)
        room, prompts = self._settings["prompt_tokens"], []
        for line in read_rows((Path(path),)):
            row = converted(line.value, line.where, options.columns)
            name = line.where.removeprefix(f"{Path(path).parent}/")
            prompt = row.pop("messages", None)
            if prompt is None:
                prompt = row.pop("prompt")
                ids = tokenizer.encode(prompt)
            else:
                ids = tokenizer.encode_chat(prompt, **variables)
            if not 0 < len(ids) <= room:
                raise DataError(
                    f"{name}: the prompt has {len(ids)} tokens, and beside the completion there is "
                    f"room for {room}; shorten it, or use a smaller pcg.max_completion_length"
                )
            prompts.append(Prompt(prompt, tuple(ids), {"item": row}))
        return prompts

    def _resume(self, trainer: AsyncTrainer) -> int:
        """Load the last intact checkpoint and return its number of updates."""
        folder = Path(self._order.checkpoints)
        folders = folder.glob("step-*")
        saved = sorted(path for path in folders if is_file(path / STATE) or is_file(path / SUMS))
        for unfinished in folder.glob(".step-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if not saved:
            return 0
        path, _ = last_good(saved[::-1], check_checkpoint)
        trainer.load_state(path / TRAINER).wait()
        state = json.loads((path / STATE).read_text(encoding="utf-8"))["state"]
        self._steps += msgspec.convert(state["told"], list[JobStep])
        self._tokens = self._steps[-1].tokens
        return self._steps[-1].step

    # ------------------------------------------------------------------------------- steps

    def _graded(self, texts: list[str], items: list[Any]) -> Sequence[float]:
        """Return the rewards of completions, each graded with its row.

        Completions of a part that cannot be graded get a reward of 0.

        Raises:
            FinetuneError: no part can be graded; the text is the first part's error.
        """
        rewards, errors = list[float](), list[str]()
        for begin in range(0, len(texts), _TOGETHER):
            part = slice(begin, begin + _TOGETHER)
            self._emit(JobSamples(texts[part], items[part]))
            grades = self._grades.get()
            if grades is None:
                raise FinetuneError("the job was cancelled")
            error = grades[1]
            rewards += grades[0] if error is None else [0.0] * len(texts[part])
            errors += [] if error is None else [error]
        if len(errors) * _TOGETHER >= len(texts):
            raise FinetuneError(errors[0])
        return rewards

    def _evaluated(self, trainer: AsyncTrainer, tests: Sequence[Prompt], step: int) -> float:
        """Return the mean reward of completions of the test prompts."""
        count = int(self._settings["eval_samples"])
        options = GrpoOptions(**self._settings["grpo"])
        fields = {**options.sampling(), "n": count, "logprobs": None, "seed": options.seed + step}
        adapter = trainer.snapshot().wait().adapter
        streams = [self._rollouts.submit(prompt.ids, adapter, **fields) for prompt in tests]
        texts = [completion.text for stream in streams for completion in stream.wait_all()]
        items = [prompt.columns["item"] for prompt in tests for _ in range(count)]
        return statistics.fmean(self._graded(texts, items))

    def _stepped(
        self,
        trainer: AsyncTrainer,
        tests: Sequence[Prompt],
        step: int,
        numbers: Mapping[str, float],
    ) -> None:
        """Report an update; save a checkpoint and evaluate where they are due."""
        settings = self._settings
        total = int(settings["grpo"]["max_steps"])
        shown = {TRAIN_REWARD: numbers["reward"], **numbers}
        if tests and (step % settings["eval_interval"] == 0 or step == total):
            shown[VALID_REWARD] = self._evaluated(trainer, tests, step)
        now_s = time.monotonic()
        before = self._steps[-1].tokens if self._steps else 0
        self._tokens = before + int(numbers["num_tokens"]) - self._counted
        self._counted = int(numbers["num_tokens"])
        rate = (self._tokens - before) / max(now_s - self._at_s, 1e-9)
        self._at_s = now_s
        is_saved = step % settings["save_every"] == 0 or step == total or self._interrupts.is_set()
        event = JobStep(
            step,
            total,
            numbers["loss"],
            None,
            numbers["learning_rate"],
            numbers["grad_norm"],
            self._tokens,
            rate,
            f"step-{step:08d}" if is_saved else None,
            {name: value for name, value in shown.items() if name not in _KNOWN},
        )
        self._steps.append(event)
        add_step(self._record, event, self._samples)
        if is_saved and not self._rollouts.has_ended:
            self._save(trainer, step)
        self._emit(event)
        if self._interrupts.is_set() and step < total:
            raise FinetuneInterrupted("the job was interrupted", step)

    def _save(self, trainer: AsyncTrainer, step: int) -> None:
        folder = Path(self._order.checkpoints)
        folder.mkdir(parents=True, exist_ok=True)
        target, unfinished = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
        adapter = trainer.snapshot().wait().adapter
        write_adapter_files(adapter, unfinished)
        trainer.save_state(unfinished / TRAINER).wait()
        (unfinished / STATE).write_bytes(
            msgspec.json.encode({"state": {"told": list(self._steps)}})
        )
        seal(unfinished)
        os.replace(unfinished, target)
        sync_names(folder)


_KNOWN = ("loss", "learning_rate", "grad_norm", "num_tokens")
"""Numbers that have fields in `JobStep`."""
