"""An engine that serves and trains in a process of its own, which somebody may kill.

    python -m tests.support.serving_job PROGRAM CHECKPOINTS SEED

It says each step of the engine, with the steps that the job has done in this process, and that it
waits, which it does before the job's last step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import pcg
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from pcg.runtime.training.options import OnStep, StepRecord

WAITING = "waiting"
VOCABULARY = 100
LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
STEPS = 8
OPTIONS: dict[str, Any] = {
    "max_steps": STEPS, "batch_size": 2, "learning_rate": 0.01, "peft": LORA, "save_every": 1,
    "schedule": "cosine", "optimizer": "nadam", "progress": False,
}  # fmt: skip


def sequences(count: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [
        [random.randrange(2, VOCABULARY - 1) for _ in range(random.randint(4, 20))]
        for _ in range(count)
    ]


DATA = [Example(ids, ids) for ids in sequences(10, 0)]


def co_serve(
    executor: Executor, checkpoints: Path, seed: int, on_step: OnStep | None = None
) -> Engine:
    """Train to the job's end beside requests that differ with the seed."""
    engine = executor.engine(Limits(tokens=24), kv_cache_bytes=2**20)
    options = {**OPTIONS, "checkpoint_dir": checkpoints, "on_step": on_step}
    job = engine.finetune(DATA, "trained", **options)
    prompts, random = sequences(50, seed), Random(seed)
    while not job.is_over:
        if random.random() < 0.2 and engine.submitted < len(prompts):
            prompt = prompts[engine.submitted]
            engine.submit(executor.request(prompt, max_new_tokens=6, ignore_eos=True))
        engine.step()
        print(sum(event.kind is Kind.STEPPED for event in engine.log), flush=True)
    if job.error is not None:
        raise job.error
    return engine


def wait_at_end(record: StepRecord) -> None:
    """Be there to be killed, however slow who kills is."""
    if record.step >= STEPS - 1:
        print(WAITING, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    program, checkpoints, seed = sys.argv[1:]
    co_serve(pcg.load(program), Path(checkpoints), int(seed), wait_at_end)
