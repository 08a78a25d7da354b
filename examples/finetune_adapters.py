"""Finetune the adapters that ship beside the checkpoint, one for each of three tasks.

    python examples/finetune_adapters.py [--out examples/adapters] [--only typed]

Each is written in peft's format to `<out>/<task>`. `<out>/results.json` records how many held-out
signatures of `signature_tasks.py` the base alone and the adapter answer exactly.
"""

import argparse
import json
from pathlib import Path

import torch
from signature_tasks import answered_right, examples

import pcg

HERE = Path(__file__).parent
RECIPES = {
    "docstring": pcg.AdaLoraConfig(
        init_r=12,
        target_r=8,
        lora_alpha=16,
        tinit=200,
        tfinal=400,
        deltaT=10,
        target_modules="all-linear",
    ),
    "javascript": pcg.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    "typed": pcg.LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules="all-linear"),
}
STEPS = {"docstring": 1000, "javascript": 1600, "typed": 1000}
BATCH_SIZE = 32
HELD_OUT = 200


def main() -> None:
    """Finetune the adapters and write them with their results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "adapters", help="folder of adapters")
    parser.add_argument("--only", choices=RECIPES, action="append", help="a task; all by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    executor = pcg.compile(HERE / "checkpoint", dtype="float32")
    path = arguments.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for task in arguments.only or RECIPES:
        held_out = examples(task, HELD_OUT, held_out=True)
        base = answered_right(executor, held_out, None)
        steps = STEPS[task]
        result = executor.finetune(
            examples(task, steps * BATCH_SIZE),
            adapter=task,
            peft=RECIPES[task],
            max_steps=steps,
            batch_size=BATCH_SIZE,
            learning_rate=5e-3,
            schedule="cosine",
            warmup_ratio=0.05,
            eval_data=held_out,
            eval_every=steps // 10,
        )
        right = answered_right(executor, held_out, task)
        executor.save_adapter(task, arguments.out / task)
        results[task] = {
            "held_out": HELD_OUT,
            "right_base": base,
            "right_adapter": right,
            "held_out_loss": round(result.eval_losses[-1][1], 4),
            "steps": result.steps,
            "tokens": result.tokens,
        }
        print(f"{task}: {base} -> {right} of {HELD_OUT} right, {result.seconds:.0f} s", flush=True)
        path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
