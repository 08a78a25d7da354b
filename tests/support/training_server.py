"""A server with a job beside its requests, in a process that somebody may end or kill.

    python -m tests.support.training_server MODEL CHECKPOINTS PORT

It stands for a job that came over HTTP: `training` is begun in the server's process, by the engine.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pcg.runtime.training.options import StepRecord
from pcg.serve.engine.client import LocalClient, local_client
from pcg.serve.engine.options import ServeOptions
from pcg.serve.server import Server, serve
from tests.support import serving
from tests.support.serving_job import DATA
from tests.support.waiting import until

JOB = "trained"
STEPS = 120
OPTIONS: dict[str, Any] = {
    "max_steps": STEPS, "batch_size": 2, "learning_rate": 0.01, "peft": serving.LORA,
    "save_every": 1, "progress": False,
}  # fmt: skip
HOLD, HELD = "hold", "held"
"""Files beside the checkpoints: while the first is there, the job stands behind a step, and the

engine with it; the second says that it does.
"""
_STEP_S = 0.1
"""The least time of a step, so that the job is there for a while."""


def rest(checkpoints: Path, _: StepRecord) -> None:
    """Rest behind a step, for as long as somebody holds the job."""
    time.sleep(_STEP_S)
    if (checkpoints / HOLD).exists():
        (checkpoints / HELD).touch()
        until(lambda: not (checkpoints / HOLD).exists())


def main(model: str, checkpoints: str, port: str) -> bool:
    """Serve and train until a signal."""
    asked = ServeOptions(**{**serving.OPTIONS, "port": int(port), "kv_cache_gib": 0.1})

    def train(server: Server) -> None:
        client = server.service.client
        assert isinstance(client, LocalClient)
        options = {
            **OPTIONS,
            "checkpoint_dir": Path(checkpoints),
            "on_step": partial(rest, Path(checkpoints)),
        }
        client.engine.finetune(DATA, JOB, **options)

    load = partial(serving.make_executor, adapters=0, directory=Path(model))
    return serve(asked, partial(local_client, load), partial(print, file=sys.stderr), train)


if __name__ == "__main__":
    sys.exit(0 if main(*sys.argv[1:]) else 1)
