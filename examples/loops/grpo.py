"""Reinforcement learning by GRPO as a loop of your own: sample, score, update.

    python examples/loops/grpo.py [--steps 10]

One engine samples the completions and trains the adapter, with the same copy of the base: a version
of the adapter is a snapshot, which requests name. While the completions of a step are sampled, the
engine may serve anything else. `pcg.train.grpo.train_grpo` does the same with a KL divergence to a
reference, off-policy corrections, checkpoints and a record.
"""

import argparse
import asyncio
import json
import statistics
from pathlib import Path

import pcg
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion

EXAMPLES = Path(__file__).parent.parent
DATA = EXAMPLES / "configs/prompts.jsonl"
PROMPTS_A_STEP, GROUP = 4, 8
MOST_TOKENS = 12
LEARNING_RATE = 2e-3


def reward(text: str) -> float:
    """Return how good a completion is: here how many of its letters are "e"."""
    return text.count("e") / max(len(text), 1)


def advantages(rewards: list[float]) -> list[float]:
    """Return how much better each completion is than its group, in deviations of the group."""
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(x - mean) / (spread + 1e-4) for x in rewards]


def datum(prompt: list[int], completion: Completion, advantage: float, weight: float) -> pcg.Datum:
    """Return a prompt with a completion: the advantage and the log-probability of each token."""
    assert completion.logprobs is not None
    before, tokens = len(prompt) - 1, list(completion.token_ids)
    zeros = [0.0] * before
    return pcg.Datum(
        tokens=[*prompt, *tokens][:-1],
        targets=[-100] * before + tokens,
        weights=[*zeros, *[weight] * len(tokens)],
        advantages=[*zeros, *[advantage] * len(tokens)],
        logprobs=[*zeros, *(token.logprob for token in completion.logprobs)],
    )


async def train(executor: Executor, steps: int, adapter: str = "policy") -> list[float]:
    """Train an adapter, serve it, and return the mean reward of each step."""
    assert executor.tokenizer is not None
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    prompts = [list(executor.tokenizer.encode(row["prompt"])) for row in rows]
    peft = pcg.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    means = []
    async with (
        executor.engine(kv_cache_bytes=2**24).start() as engine,
        engine.trainer(adapter, peft=peft, seed=0, dropout=False) as trainer,
    ):
        for step in range(steps):
            snapshot = await trainer.snapshot()
            first = step * PROMPTS_A_STEP
            chosen = [prompts[(first + i) % len(prompts)] for i in range(PROMPTS_A_STEP)]
            streams = [
                engine.submit(
                    prompt,
                    snapshot.adapter,
                    n=GROUP,
                    max_new_tokens=MOST_TOKENS,
                    temperature=1.0,
                    logprobs=0,
                    seed=first + place,
                )
                for place, prompt in enumerate(chosen)
            ]
            groups = [await asyncio.to_thread(stream.wait_all) for stream in streams]
            data, rewards = [], []
            count = sum(len(completion.token_ids) for group in groups for completion in group)
            for prompt, group in zip(chosen, groups, strict=True):
                scores = [reward(completion.text) for completion in group]
                rewards += scores
                for completion, advantage in zip(group, advantages(scores), strict=True):
                    data.append(datum(prompt, completion, advantage, 1 / count))
            # Both calls are asked for at once, so that the engine need not wait for this loop.
            scored = trainer.forward_backward(data, "ppo")
            update = trainer.optim_step(learning_rate=LEARNING_RATE, grad_clip_norm=1.0)
            loss, norm = (await scored).loss, (await update).gradient_norm
            means.append(statistics.fmean(rewards))
            print(f"step {step + 1}: reward {means[-1]:.4f}, loss {loss:.4f}, norm {norm:.3f}")
        print(f"served as {(await trainer.snapshot()).version}")
    return means


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="updates")
    executor = pcg.compile(EXAMPLES / "checkpoint", dtype="float32")
    asyncio.run(train(executor, parser.parse_args().steps))


if __name__ == "__main__":
    main()
