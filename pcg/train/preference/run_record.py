"""The record of a run on preferences: its configuration, and the numbers of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pcg.records.record import RunRecord
from pcg.runtime.executor import Executor
from pcg.runtime.training.reports import memory_bytes
from pcg.train.preference.options import DpoArguments
from pcg.train.preference.records import Metrics, PreferenceStep


class PreferenceRecord:
    """The record of a run, in the folder that its option `record` names; nothing without one."""

    def __init__(
        self, given: DpoArguments, executor: Executor, trajectory: Mapping[str, Any]
    ) -> None:
        self._given = given
        self._device = executor.device
        self._config = {
            "adapter": given.adapter,
            "model": executor.program.name,
            "device": str(executor.device),
            "peft": given.peft,
            **trajectory,
        }
        self._record: RunRecord | None = None

    @contextmanager
    def opened(
        self, history: Sequence[Metrics], evaluations: Sequence[tuple[int, Metrics]]
    ) -> Iterator[None]:
        """Open the record for a block, and add the steps before it that the record does not have.

        Args:
            history: the metrics of each step that is done.
            evaluations: the steps that were evaluated, and their metrics.
        Raises:
            RecordError: it cannot be written.
        """
        folder = self._given.record
        if folder is None:
            yield
            return
        named, done = self._given.adapter, len(history)
        to = self._given.report_to
        with RunRecord(
            folder, self._config, name=named, kind="dpo", done=done, report_to=to
        ) as record:
            self._record = record
            evaluated = dict(evaluations)
            for step in range(record.last_step + 1, done + 1):
                record.log(step, **history[step - 1], **_of_evaluation(evaluated.get(step)))
            yield

    def started(self, evaluation: Metrics) -> None:
        """Add an evaluation before the first step."""
        if self._record is not None and "eval_loss" not in self._record.names_of_last:
            self._record.log(0, **_of_evaluation(evaluation))

    def add(self, done: PreferenceStep) -> None:
        """Add a step. RecordError: it cannot be written."""
        if self._record is None:
            return
        self._record.log(
            done.step,
            epoch=done.epoch,
            loss=done.loss,
            **done.metrics,
            **_of_evaluation(done.evaluation),
            learning_rate=done.learning_rate,
            gradient_norm=done.gradient_norm,
            tokens=done.tokens,
            tokens_per_second=round(done.tokens_per_second, 3),
            memory_bytes=memory_bytes(self._device),
        )


def _of_evaluation(found: Metrics | None) -> dict[str, float]:
    return {f"eval_{name}": value for name, value in (found or {}).items()}
