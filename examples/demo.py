"""The main job on real input: one base model, several adapters, served and finetuned together.

    make demo

The demo explains what finetuning two models takes, compiles the small Llama that ships, serves
each prompt under every adapter in one batch, and counts exact answers about functions whose names
no adapter was trained on. Then an engine trains a fresh adapter and serves the others in the same
steps; the new adapter is saved in peft's format, loaded back, and served beside them. It takes
one to two minutes on two cores. `examples/chat_demo.py` continues with a real chat model.

The base never saw these tasks: it continues a function as the standard library would.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from signature_tasks import answered_right, examples

import pcg

HERE = Path(__file__).parent
ADAPTERS = HERE / "adapters"
PROMPTS = (
    "def copy_file(path, recursive=True):",
    'def find_user(name, limit=20, prefix="tmp"):',
)
HELD_OUT = 100
NEW_TASK = "unittest"
RECIPE = pcg.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
STEPS, BATCH_SIZE, PUBLISH_EVERY = 200, 32, 40
GIB = 2**30


def main() -> None:
    """Run the demo from the first step to the last."""
    torch.set_num_threads(1)
    heading("1. explain: a LoRA step of 4,096 tokens, from the model's configuration alone")
    for model in ("meta-llama/Llama-3.1-8B", "openai/gpt-oss-20b"):
        explain(model)

    heading(
        "2. compile the Llama that ships (3.1 M parameters); load its weights and three adapters"
    )
    started = time.perf_counter()
    names = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
    paths = {name: ADAPTERS / name for name in names}
    executor = pcg.compile(HERE / "checkpoint", paths, dtype="float32")
    print(f"    {time.perf_counter() - started:.1f} s")

    heading("3. generate: one batch, each prompt under the base and under every adapter")
    generate(executor, PROMPTS, names)

    heading(f"4. exact answers, of {HELD_OUT} about functions that no adapter was trained on")
    for name in names:
        rows = examples(name, HELD_OUT, held_out=True)
        base, adapted = answered_right(executor, rows, None), answered_right(executor, rows, name)
        print(f"    {name:<12}base {base:>3}   adapter {adapted:>3}")

    heading(f"5. finetune a fresh adapter, {NEW_TASK}, while the engine serves the others")
    finetune_while_serving(executor, names)

    heading("6. save in peft's format, load back, serve beside the others")
    with tempfile.TemporaryDirectory() as folder:
        executor.save_adapter(NEW_TASK, folder)
        executor.remove_adapter(NEW_TASK)
        executor.add_adapter(NEW_TASK, folder)
        print(f"    {', '.join(sorted(path.name for path in Path(folder).iterdir()))}")
        generate(executor, PROMPTS[1:], [*names, NEW_TASK])


def heading(text: str) -> None:
    """Print the heading of a step."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def explain(model: str) -> None:
    """Print what the step needs; neither weights nor a GPU are there."""
    report = pcg.explain(model, peft="lora", batch=1, seq=4096)
    saved = {stage.stage: stage.bytes / GIB for stage in report.activations}
    weights, total = (report.memory_bytes[kind] / GIB for kind in ("weights", "total"))
    print(f"  {model}")
    print(f"    weights              {weights:5.1f} GiB")
    print(f"    saved for backward   {saved['compressed']:5.1f} GiB by pcg,", end=" ")
    print(f"{saved['eager']:.1f} GiB by transformers + peft")
    print(f"    whole step           {total:5.1f} GiB")


def generate(executor: pcg.Executor, texts: Sequence[str], names: Sequence[str]) -> None:
    """Continue every prompt with the base and with each adapter, all in one batch."""
    adapters = [None, *names]
    prompts = [text for text in texts for _ in adapters]
    completions = executor.generate(prompts, adapters * len(texts), max_new_tokens=48)
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion.adapter is None:
            print(f"  {prompt}")
        print(f"    {completion.adapter or 'base':<12}{first_line(completion.text)}")


def finetune_while_serving(executor: pcg.Executor, names: list[str]) -> None:
    """Train a fresh adapter in an engine that answers requests for the others meanwhile.

    The engine serves a version of the new adapter from step PUBLISH_EVERY on, and a newer one every
    PUBLISH_EVERY steps.
    """
    held_out = examples(NEW_TASK, HELD_OUT, held_out=True)
    prompt = PROMPTS[0]
    print(f"  {prompt}")
    print(f"    step   0   {first_line(executor.generate(prompt, max_new_tokens=24).text)}")
    asked = [(name, row) for row in range(HELD_OUT) for name in names]
    answers = {name: examples(name, HELD_OUT, held_out=True) for name in names}
    done: list[int] = []
    shown = served = right = 0
    started = time.perf_counter()
    with executor.engine().start() as engine:
        job = engine.finetune(
            examples(NEW_TASK, STEPS * BATCH_SIZE),
            NEW_TASK,
            peft=RECIPE,
            publish_every=PUBLISH_EVERY,
            on_step=lambda record: done.append(record.step),
            max_steps=STEPS,
            batch_size=BATCH_SIZE,
            learning_rate=5e-3,
            schedule="cosine",
            warmup_ratio=0.05,
        )
        while True:
            try:
                job.wait(timeout_s=0.2)
                break
            except TimeoutError:
                pass
            name, index = asked[served % len(asked)]
            row = answers[name][index]
            completion = engine.submit(row["prompt"], name, max_new_tokens=48).wait()
            served, right = served + 1, right + (completion.text == row["completion"])
            if len(done) >= shown + PUBLISH_EVERY:
                shown = len(done) // PUBLISH_EVERY * PUBLISH_EVERY
                completion = engine.submit(prompt, NEW_TASK, max_new_tokens=24).wait()
                print(f"    step {shown:>3}   {first_line(completion.text)}", flush=True)
    seconds = time.perf_counter() - started
    base, adapted = (answered_right(executor, held_out, name) for name in (None, NEW_TASK))
    print(f"    {seconds:.0f} s; meanwhile {right} of {served} requests had exact answers")
    print(f"    {NEW_TASK:<12}base {base:>3}   adapter {adapted:>3}")


def first_line(text: str) -> str:
    """Return the first line that a model adds below its prompt."""
    first, _, rest = text.lstrip("\n").partition("\n")
    return f"{first} …" if rest else first


if __name__ == "__main__":
    main()
