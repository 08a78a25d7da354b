"""The main job on real input: one base model, several adapters, served and finetuned together.

    make demo

The demo explains what finetuning an 8B model takes, compiles the small Llama that ships, serves
each prompt under every adapter in one batch, and counts right answers about functions whose names
no adapter was trained on. Then an engine trains a fresh adapter and serves the others in the same
steps; the new adapter is saved in peft's format, loaded back, and served beside them. All of it
takes about two minutes on two cores.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from signature_tasks import answered_right, examples

import pcg

HERE = Path(__file__).parent
ADAPTERS = HERE / "adapters"
PROMPTS = (
    'def resize_image(path, width=640, mode="rgb"):',
    "def send_message(user, text, urgent=False):",
)
HELD_OUT = 100
NEW_TASK = "unittest"
RECIPE = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
STEPS, BATCH_SIZE, PUBLISH_EVERY = 150, 32, 30
GIB = 2**30


def main() -> None:
    """Run the demo from the first step to the last."""
    torch.set_num_threads(1)
    heading("1. explain: a LoRA step on Llama-3.1-8B, 4,096 tokens, before any GPU is rented")
    explain()

    heading("2. compile the shipped Llama (3.1 M parameters), load its weights and three adapters")
    started = time.perf_counter()
    names = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
    paths = {name: ADAPTERS / name for name in names}
    executor = pcg.compile(HERE / "checkpoint", paths, dtype="float32")
    print(f"    {time.perf_counter() - started:.1f} s")

    heading("3. generate: one batch, each prompt under the base and under every adapter")
    generate(executor, names)

    heading(f"4. right answers, of {HELD_OUT} about functions that no adapter was trained on")
    for name in names:
        rows = examples(name, HELD_OUT, held_out=True)
        base, adapted = answered_right(executor, rows, None), answered_right(executor, rows, name)
        print(f"    {name:<12}base {base:>3}   adapter {adapted:>3}")

    heading(f"5. an engine trains {NEW_TASK!r} and serves {', '.join(names)} in the same steps")
    finetune_while_serving(executor, names)

    heading("6. save in peft's format, load back, serve beside the others")
    with tempfile.TemporaryDirectory() as folder:
        executor.save_adapter(NEW_TASK, folder)
        executor.remove_adapter(NEW_TASK)
        executor.add_adapter(NEW_TASK, folder)
        print(f"    {', '.join(sorted(path.name for path in Path(folder).iterdir()))}")
        generate(executor, [*names, NEW_TASK])


def heading(text: str) -> None:
    """Print the heading of a step."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def explain() -> None:
    """Print what the step needs; neither weights nor a GPU are there."""
    report = pcg.explain("meta-llama/Llama-3.1-8B", peft="lora", batch=1, seq=4096)
    saved = {stage.stage: stage.bytes / GIB for stage in report.activations}
    weights, total = (report.memory_bytes[kind] / GIB for kind in ("weights", "total"))
    print(f"    weights              {weights:5.1f} GiB")
    print(f"    saved for backward   {saved['compressed']:5.1f} GiB by pcg,", end=" ")
    print(f"{saved['eager']:.1f} GiB by transformers + peft")
    print(f"    whole step           {total:5.1f} GiB")


def generate(executor: pcg.Executor, names: list[str]) -> None:
    """Continue every prompt with the base and with each adapter, all in one batch."""
    adapters = [None, *names]
    prompts = [prompt for prompt in PROMPTS for _ in adapters]
    completions = executor.generate(prompts, adapters * len(PROMPTS), max_new_tokens=48)
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion.adapter is None:
            print(f"  {prompt}")
        first, _, rest = completion.text.lstrip("\n").partition("\n")
        print(f"    {completion.adapter or 'base':<12}{first}{' …' if rest else ''}")


def finetune_while_serving(executor: pcg.Executor, names: list[str]) -> None:
    """Train a fresh adapter in an engine that answers requests for the others meanwhile."""
    held_out = examples(NEW_TASK, HELD_OUT, held_out=True)
    print(f"    step   0   {answered_right(executor, held_out, None):>3} of {HELD_OUT} right (base)")
    asked = [(name, row) for name in names for row in examples(name, HELD_OUT, held_out=True)]
    right = served = 0
    started = time.perf_counter()
    with executor.engine().start() as engine:
        job = engine.finetune(
            examples(NEW_TASK, STEPS * BATCH_SIZE),
            NEW_TASK,
            peft=RECIPE,
            max_steps=STEPS,
            batch_size=BATCH_SIZE,
            learning_rate=5e-3,
            schedule="cosine",
            warmup_ratio=0.05,
        )
        while not job.is_over:
            name, row = asked[served % len(asked)]
            completion = engine.submit(row["prompt"], name, max_new_tokens=48).wait()
            right, served = right + (completion.text == row["completion"]), served + 1
            time.sleep(0.25)
        losses = job.wait().losses
    seconds = time.perf_counter() - started
    print(f"    step {len(losses)}   {answered_right(executor, held_out, NEW_TASK):>3} of {HELD_OUT} right")
    print(f"    {seconds:.0f} s, in which {served} requests were served, {right} of them right")


if __name__ == "__main__":
    main()
