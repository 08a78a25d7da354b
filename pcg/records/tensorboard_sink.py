"""TensorBoard's event files, in the folder `tensorboard` of a record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pcg.records.run_files import TENSORBOARD
from pcg.records.sink import Sink


class TensorBoardSink(Sink):
    """Writes scalars under their names; those behind the steps that are done are purged."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        import tensorboard  # noqa: F401  torch's writer is made of it
        from torch.utils.tensorboard import SummaryWriter

        place = str(folder / TENSORBOARD)
        self._writer: Any = SummaryWriter(place, purge_step=done + 1 if done else 0)
        if not done:
            text = json.dumps(config, indent=1)
            indented = "".join(f"    {line}\n" for line in text.splitlines())  # code in Markdown
            self._writer.add_text("config", indented, 0)

    def log(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        for name, value in numbers.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def end(self, *, is_completed: bool) -> None:
        self._writer.close()
