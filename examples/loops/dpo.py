"""Direct preference optimization as a loop of your own over a trainer.

    python examples/loops/dpo.py [--steps 12] [--out adapters/typed]

Of two completions of each prompt the chosen one becomes more likely than the rejected one, measured
by what a reference says of both. `pcg.train.preference.dpo.dpo` does the same with evaluation,
checkpoints and a record. The reference is the adapter before its first update, which here is the
base: one copy of the model has both.
"""

import argparse
import json
import random
from pathlib import Path

import pcg
from pcg.runtime.executor import Executor
from pcg.runtime.training.trainer.trainer import Trainer

EXAMPLES = Path(__file__).parent.parent
DATA = EXAMPLES / "configs/preferences.jsonl"
PAIRS_A_STEP = 8
BETA = 0.1
LEARNING_RATE = 3e-4

Pair = list[pcg.Datum]
"""Two data, the chosen and the rejected one."""


def datum(executor: Executor, prompt: str, completion: str) -> pcg.Datum:
    """Return a prompt with a completion, whose tokens are the targets; -100 is no target."""
    assert executor.tokenizer is not None
    before, after = executor.tokenizer.encode(prompt), executor.tokenizer.encode(completion)
    targets = [-100] * (len(before) - 1) + list(after)
    return pcg.Datum([*before, *after][:-1], targets)


def read(executor: Executor, path: Path) -> list[Pair]:
    """Return the pairs of a file, chosen and rejected."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = ("chosen", "rejected")
    return [[datum(executor, row["prompt"], row[name]) for name in names] for row in rows]


def with_reference(trainer: Trainer, pairs: list[Pair]) -> None:
    """Give each datum the log-probabilities of its targets by the adapter as it is now."""
    flat = [x for pair in pairs for x in pair]
    scored = trainer.forward(flat)
    known = [
        pcg.Datum(x.tokens, x.targets, logprobs=logprobs.tolist())
        for x, logprobs in zip(flat, scored.logprobs, strict=True)
    ]
    pairs[:] = [known[i : i + 2] for i in range(0, len(known), 2)]


def margins(data: list[pcg.Datum], logprobs: list[float]) -> list[float]:
    """Return by how much each pair's chosen completion is preferred, over the reference."""
    gains = [x - sum(y.logprobs or ()) for y, x in zip(data, logprobs, strict=True)]
    return [chosen - other for chosen, other in zip(gains[::2], gains[1::2], strict=True)]


def train(executor: Executor, steps: int, adapter: str = "typed") -> list[float]:
    """Train an adapter, serve it, and return the mean loss of each step's pairs."""
    pairs = read(executor, DATA)
    draw, losses = random.Random(0), []
    peft = pcg.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    with executor.trainer(adapter, peft=peft, seed=0) as trainer:
        with_reference(trainer, pairs)
        for step in range(steps):
            data = [x for pair in draw.sample(pairs, PAIRS_A_STEP) for x in pair]
            scored = trainer.forward_backward(data, "dpo", loss_options={"beta": BETA})
            rate = LEARNING_RATE * (1 - step / steps)
            # The loss is a sum over pairs, and so is its gradient.
            trainer.optim_step(learning_rate=rate, grad_clip_norm=1.0 * PAIRS_A_STEP)
            gains = margins(data, [float(values.sum()) for values in scored.logprobs])
            right = sum(margin > 0 for margin in gains) / len(gains)
            losses.append(scored.loss / PAIRS_A_STEP)
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {right:.0%} preferred")
        print(f"served as {trainer.snapshot().version}")
    return losses


def main() -> None:
    """Train, try the adapter, and save it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps")
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
