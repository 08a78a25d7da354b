"""The record of a model's training: a row for each update, as jobs and runs of the library have it.

A record that cannot be written is no reason to train no further: the log says why, once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pcg.errors import RecordError
from pcg.records.record import RunRecord
from pcg.records.run_files import Status
from pcg.serve.errors import LOG
from pcg.serve.tinker.model_records import ModelRecord

MOST_ROWS = 2**17
"""The most updates of a model that have rows."""


class ModelRun:
    """Writes the record of a model, from its first update on; one call at a time."""

    def __init__(self, model: ModelRecord) -> None:
        self._model = model
        self._record: RunRecord | None = None
        self._is_broken = False

    async def add(self, folder: Path, numbers: Mapping[str, float]) -> None:
        """Add an update. One that was done before, as behind an older state, takes its place.

        Args:
            folder: that of the record.
            numbers: those of the update, and as `step` its own.
        """
        rest = dict(numbers)
        step = int(rest.pop("step"))
        if not self._is_broken and step <= MOST_ROWS:
            await asyncio.to_thread(self._told, lambda: self._add(folder, step, rest))

    def _add(self, folder: Path, step: int, numbers: Mapping[str, float]) -> None:
        if self._record is not None and step <= self._record.last_step:
            self._record.end(Status.INTERRUPTED)
            self._record = None
        if self._record is None:
            model = self._model
            config = {
                "model": model.base_model,
                "tenant": model.tenant,
                "session": model.session,
                "lora": json.loads(model.lora),
                "user_metadata": json.loads(model.user_metadata or "null"),
            }
            self._record = RunRecord(
                folder, config, name=model.id, kind="tinker", done=step - 1,
                waits_for_page=False,
            )  # fmt: skip
        self._record.log(step, **numbers)

    def end(self, *, is_whole: bool) -> None:
        """End the record, if there is one: of a model that is closed, or as the server ends."""
        record, self._record = self._record, None
        if record is not None:
            status = Status.COMPLETED if is_whole else Status.INTERRUPTED
            self._told(lambda: record.end(status))

    def _told(self, act: Callable[[], None]) -> None:
        try:
            act()
        except RecordError as error:
            self._is_broken = True
            LOG.error("the record of %s cannot be written: %s", self._model.id, error)
