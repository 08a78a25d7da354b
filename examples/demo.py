"""The main job on real input: one base model, several adapters, served and finetuned together.

    make demo

It explains what finetuning the shipped model keeps in memory, compiles it, continues one prompt
with the base and with each shipped adapter in one batch, finetunes a fresh adapter for a few steps,
saves it in peft's format, loads it back, and serves it beside the others.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import pcg

HERE = Path(__file__).parent
ADAPTERS = HERE / "adapters"
PROMPT = "class TestQueue(unittest.TestCase):\n    def test_"


def heading(text: str) -> None:
    """Print the heading of a step."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}")


def shown(text: str) -> str:
    """The first lines of a text, indented."""
    return "\n".join(f"    {line}" for line in text.splitlines()[:7])


def main() -> None:
    """Run the demo from the first step to the last."""
    torch.set_num_threads(1)
    heading("1. explain: what finetuning the shipped model takes")
    print(
        pcg.explain(HERE / "checkpoint", peft="lora", batch=8, seq=256, dtype="float32").to_text()
    )

    heading("2. compile, from trace to emit; then load weights")
    names = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
    started = time.perf_counter()
    executor = pcg.compile(
        HERE / "checkpoint", {name: ADAPTERS / name for name in names}, dtype="float32"
    )
    print(f"    {time.perf_counter() - started:.1f} s; adapters: {', '.join(names)}")

    heading("3. generate: one batch, each prompt with its own adapter")
    started = time.perf_counter()
    completions = executor.generate(
        [PROMPT] * (1 + len(names)),
        [None, *names],
        max_new_tokens=60,
        temperature=0.5,
        top_p=0.9,
        seed=1,
    )
    seconds = time.perf_counter() - started
    for completion in completions:
        print(f"  {completion.adapter or 'base'}:\n{shown(PROMPT + completion.text)}")
    tokens = sum(len(completion.token_ids) for completion in completions)
    print(f"    {tokens} tokens in {seconds:.1f} s")

    heading("4. finetune: a fresh LoRA adapter on docstrings, 20 steps")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "slices"
        script = [sys.executable, str(HERE / "slices.py"), "--out", str(data), "--limit", "200"]
        subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
        held_out = (data / "docstrings.held_out.jsonl").read_text().splitlines()[:24]
        result = executor.finetune(
            data / "docstrings.train.jsonl",
            adapter="mine",
            peft={"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
            max_steps=20,
            batch_size=4,
            max_length=256,
            learning_rate=2e-3,
            eval_data=[json.loads(line) for line in held_out],
            eval_at_start=True,
        )
        before, after = result.eval_losses[0][1], result.eval_losses[-1][1]
        print(f"    held-out loss {before:.3f} -> {after:.3f}, {result.seconds:.1f} s")

        heading("5. save in peft's format, load back, serve beside the others")
        executor.save_adapter("mine", Path(folder) / "mine")
        print(f"    {', '.join(sorted(path.name for path in (Path(folder) / 'mine').iterdir()))}")
        executor.remove_adapter("mine")
        executor.add_adapter("mine", Path(folder) / "mine")
        completion = executor.generate("def read_file(path):\n", "mine", max_new_tokens=40)
        print(f"  mine:\n{shown('def read_file(path):' + chr(10) + completion.text)}")

    losses = json.loads((ADAPTERS / "results.json").read_text())
    heading("The shipped adapters, held-out loss of their slice (nats per token)")
    for name, row in losses.items():
        base, adapted = row["held_out_loss_base"], row["held_out_loss_adapter"]
        print(f"    {name:<12} base {base:.3f}   adapter {adapted:.3f}")


if __name__ == "__main__":
    main()
