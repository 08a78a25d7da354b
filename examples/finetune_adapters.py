"""Finetune the adapters that ship beside the checkpoint, one for each slice of the stdlib.

    python examples/finetune_adapters.py [--out examples/adapters] [--steps 150] [--only unittest]

Each is written in peft's format to `<out>/<slice>`; `<out>/results.json` records the held-out loss
of its slice before and after.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import pcg

HERE = Path(__file__).parent
SLICES = ("unittest", "docstrings", "asyncio")
RECIPE = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}


def held_out_loss(executor: pcg.Executor, data: Path, adapter: str) -> float:
    """Mean loss of the slice's held-out tokens, in nats."""
    from pcg.runtime.training.data import load_examples

    assert executor.tokenizer is not None
    examples = load_examples(data, executor.tokenizer, max_length=512)
    runner = executor.training_runner(adapter)
    loss, targets = 0.0, 0
    for start in range(0, len(examples), 8):
        part, count = runner.evaluate(examples[start : start + 8])
        loss, targets = loss + part, targets + count
    return loss / targets


def main() -> None:
    """Finetune the adapters and write them with their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "adapters")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", choices=SLICES, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    executor = pcg.compile(HERE / "checkpoint", dtype="float32")
    path = arguments.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        script = str(HERE / "slices.py")
        subprocess.run([sys.executable, script, "--out", folder, "--limit", "4000"], check=True)
        for name in arguments.only or SLICES:
            train, held_out = (
                Path(folder) / f"{name}.{part}.jsonl" for part in ("train", "held_out")
            )
            executor.add_adapter(name, RECIPE)
            before = held_out_loss(executor, held_out, name)  # B is zero: the base itself
            result = executor.finetune(
                train,
                adapter=name,
                max_steps=arguments.steps,
                batch_size=8,
                max_length=512,
                learning_rate=2e-3,
                schedule="cosine",
                warmup_ratio=0.05,
            )
            after = held_out_loss(executor, held_out, name)
            executor.save_adapter(name, arguments.out / name)
            results[name] = {
                "held_out_loss_base": round(before, 4),
                "held_out_loss_adapter": round(after, 4),
                "steps": result.steps,
                "tokens": result.tokens,
            }
            print(f"{name}: held-out loss {before:.3f} -> {after:.3f}, {result.seconds:.0f} s")
            path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
