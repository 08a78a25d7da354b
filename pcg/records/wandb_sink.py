"""A run of Weights & Biases, in the project of WANDB_PROJECT or `pcg`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pcg.records.run_files import RunFacts
from pcg.records.sink import Sink


class WandbSink(Sink):
    """Logs to a run whose id is that of the record, so that a run that goes on stays one.

    Weights & Biases leave out steps that a run has already. Its own variables hold, as WANDB_MODE.
    """

    def __init__(self, folder: Path, facts: RunFacts, config: Mapping[str, Any]) -> None:
        import wandb

        digest = hashlib.sha256(f"{folder} {facts.begun_s!r}".encode()).hexdigest()
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pcg"),
            name=facts.name,
            id=digest[:16],
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )

    def log(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        given = {name: value for name, value in numbers.items() if value is not None}
        self._run.log(given, step=step)

    def end(self, *, is_completed: bool) -> None:
        self._run.finish(exit_code=0 if is_completed else 1)
