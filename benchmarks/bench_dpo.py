"""Direct preference optimization learns: curves of margins and accuracies on held-out functions.

Source: python benchmarks/bench_dpo.py

The shipped model is to prefer a signature with types to the same one without, and is measured on
functions whose names it was never trained on. The reference is the base without the adapter.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from measure import write
from signature_tasks import examples

import pcg
from pcg.runtime.training.options import StepRecord
from pcg.train.preference.dpo import dpo
from pcg.train.preference.options import DpoArguments

CHECKPOINT = Path(__file__).parents[1] / "examples" / "checkpoint"
TRAINED, HELD_OUT, BATCH, STEPS, EVERY = 256, 48, 8, 48, 8
PEFT = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
BETA, RATE = 0.1, 5e-4


def pairs(count: int, *, held_out: bool) -> list[dict[str, str]]:
    """Return pairs of a signature with types and the same one without."""
    found = []
    for row in examples("typed", 2 * count, held_out=held_out):
        plain = "\n" + row["prompt"]
        if row["completion"] != plain:  # one without defaults has no types
            found.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": plain})
    return found[:count]


def main() -> None:
    """Train, and write the curves."""
    executor = pcg.compile(CHECKPOINT, dtype="float32")
    steps: list[StepRecord] = []

    def on_step(record: StepRecord) -> None:
        steps.append(record)
        margin = record.metrics["rewards/margins"]
        print(f"  step {record.step}: loss {record.loss:.4f}, margin {margin:.3f}", file=sys.stderr)

    begun = time.process_time()
    result = dpo(
        executor,
        DpoArguments(
            pairs(TRAINED, held_out=False),
            adapter="typed",
            peft=PEFT,
            eval_data=pairs(HELD_OUT, held_out=True),
            eval_at_start=True,
            eval_every=EVERY,
            batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=RATE,
            beta=BETA,
            on_step=on_step,
        ),
    )
    names = ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")

    def rounded(metrics: Any) -> dict[str, float]:
        return {name: round(metrics[name], 4) for name in names}

    write(
        "dpo",
        {
            "model": "examples/checkpoint",
            "peft": PEFT,
            "pairs": TRAINED,
            "held_out_pairs": HELD_OUT,
            "batch_size": BATCH,
            "beta": BETA,
            "learning_rate": RATE,
            "processor_seconds": round(time.process_time() - begun, 1),
            "held_out": {str(step): rounded(found) for step, found in result.evaluations},
            "train": {str(one.step): rounded({"loss": one.loss, **one.metrics}) for one in steps},
        },
    )


if __name__ == "__main__":
    main()
