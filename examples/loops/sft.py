"""Supervised finetuning as a loop of your own over a trainer.

    python examples/loops/sft.py [--steps 20] [--out adapters/typed]

`executor.finetune` does the same with evaluation, checkpoints and a record. Here each step is a
call: forward and backward over a few batches, whose gradients add up, and an update.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pcg
from pcg.runtime.executor import Executor

EXAMPLES = Path(__file__).parent.parent
DATA = EXAMPLES / "configs/signatures.jsonl"
BATCH_SIZE, BATCHES_A_STEP = 8, 2
LEARNING_RATE, WARMUP = 5e-3, 3


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file, each with a prompt and its completion."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def datum(executor: Executor, row: dict[str, str]) -> pcg.Datum:
    """Return a row as tokens, of which the completion's are learned.

    A target is what comes after its token, so the targets are the tokens moved by a place; the
    weights say which of them count.
    """
    assert executor.tokenizer is not None
    prompt = executor.tokenizer.encode(row["prompt"])
    completion = executor.tokenizer.encode(row["completion"])
    ids = [*prompt, *completion]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return pcg.Datum(ids[:-1], ids[1:], weights=weights)


def batches(data: list[pcg.Datum], seed: int) -> Iterator[list[pcg.Datum]]:
    """Yield batches for ever, in a new order each epoch."""
    draw = random.Random(seed)
    while True:
        order = draw.sample(data, len(data))
        yield from (order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE))


def rate(step: int, steps: int) -> float:
    """Return a learning rate that warms up, and then falls along a cosine."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    return LEARNING_RATE * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def scaled(data: list[pcg.Datum], targets: float) -> list[pcg.Datum]:
    """Return data whose losses, which are sums, add up to the mean over so many targets."""
    return [
        pcg.Datum(x.tokens, x.targets, weights=[w / targets for w in x.weights or ()]) for x in data
    ]


def train(executor: Executor, steps: int, adapter: str = "typed") -> list[float]:
    """Train an adapter, serve it, and return the loss of each step."""
    source = batches([datum(executor, row) for row in read(DATA)], seed=0)
    losses = []
    peft = pcg.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    with executor.trainer(adapter, peft=peft, seed=0) as trainer:
        for step in range(steps):
            group = [next(source) for _ in range(BATCHES_A_STEP)]
            targets = sum(sum(x.weights or ()) for batch in group for x in batch)
            loss = 0.0
            for batch in group:  # forward windows, loss, backward windows; gradients add up
                loss += trainer.forward_backward(scaled(batch, targets)).loss
            # clip, update
            update = trainer.optim_step(learning_rate=rate(step, steps), grad_clip_norm=1.0)
            losses.append(loss)
            print(f"step {update.step}: loss {loss:.4f}, gradient norm {update.gradient_norm:.3f}")
        print(f"served as {trainer.snapshot().version}")  # publish
    return losses


def main() -> None:
    """Train, try the adapter, and save it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--out", type=Path, help="folder to save the adapter in, in peft's format")
    arguments = parser.parse_args()
    executor = pcg.compile(EXAMPLES / "checkpoint", dtype="float32")
    train(executor, arguments.steps)
    prompt = "def write_page(title, size=12):"
    print(prompt + executor.generate(prompt, "typed", max_new_tokens=32).text)
    if arguments.out is not None:
        executor.save_adapter("typed", arguments.out)


if __name__ == "__main__":
    main()
