"""Two clients of one base: each finetunes an adapter of its own method, and generates with it.

    python examples/split_client.py [--steps 30]

The base is a process, `pcg serve-base`, that holds the weights of the checkpoint that ships. The
clients are two threads here, and could be on machines of their own: each has its adapter, its KV
cache, its data and its optimizer, and asks the base for products alone.
"""

import argparse
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from signature_tasks import examples

import pcg

HERE = Path(__file__).parent
KEY = "key-of-the-example"
RECIPES = {
    "typed": pcg.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    "docstring": pcg.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def main() -> None:
    """Start a base, and two clients of it, one after the other's beginning."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each client")
    steps = parser.parse_args().steps
    with serving_base() as where:
        threads = [
            threading.Thread(target=client, args=(where, task, steps), name=task)
            for task in RECIPES
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def client(where: str, task: str, steps: int) -> None:
    """Finetune an adapter by a base's weights, and answer a signature that it never saw."""
    with pcg.connect(where, peft={task: RECIPES[task]}, api_key=KEY) as executor:
        rows = examples(task, 8 * steps)
        options = {"max_steps": steps, "batch_size": 8, "learning_rate": 5e-3}
        result = executor.finetune(rows, adapter=task, **options)
        (row,) = examples(task, 1, held_out=True)
        completion = executor.generate(row["prompt"], task, max_new_tokens=24)
        print(
            f"{task}: loss {result.losses[0]:.3f} to {result.losses[-1]:.3f} in {steps} steps, "
            f"{executor.caller.moved.calls} calls of the base\n{executor.cut}\n"
            f"{row['prompt']}{completion.text}",
            flush=True,
        )


@contextmanager
def serving_base() -> Iterator[str]:
    """Start `pcg serve-base` with the checkpoint that ships; yields its address."""
    command = [sys.executable, "-m", "pcg_cli", "serve-base", str(HERE / "checkpoint")]
    environment = {**os.environ, "PCG_API_KEY": KEY}
    options = ["--dtype", "float32", "--port", "0"]
    base = subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert base.stderr is not None
    try:
        said = []
        for line in base.stderr:
            said.append(line)
            if found := re.match(r"listening at (\S+)", line):
                reader = threading.Thread(target=base.stderr.read, daemon=True)
                reader.start()  # the base is never kept waiting for who reads what it says
                yield found[1]
                break
        else:
            raise SystemExit("the base ended:\n" + "".join(said))
    finally:
        base.terminate()
        base.wait(60)


if __name__ == "__main__":
    main()
