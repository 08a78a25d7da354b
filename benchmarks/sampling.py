"""Sampling's options: guides, logprobs, and how far sampled logprobs are from the trainer's.

On one thread in fp32, on a random 8-layer Llama of hidden size 512 and a vocabulary of 32,000;
16 prompts of 17 to 64 tokens. Each contender is an engine, whose decode steps take turns; the unit
is processor time of a step, all threads together.

guided      drawn at temperature 1, with a byte-level BPE tokenizer; no request ends before others
    plain        no fields beside the temperature
    guided       every row has a JSON schema of objects with strings, numbers, an enum and arrays
    half         every other row has it
    penalized    presence, frequency and repetition penalties, and a bias of 100 tokens
logprobs    greedy, on 8 adapters of rank 16 at all linears: no logprobs, each token's, of 5 and 20
logprob_mismatch
    An engine samples from an adapter of the shipped model, updated 8 times, at temperature 1. The
    trainer of the adapter then scores the same tokens in batches of 8 sequences. With x of training
    and q of sampling: mismatch |x - q|, ratio exp(x - q) of a token and of whole outputs, and
    kl = mean of exp(x - q) - 1 - (x - q). The peer is transformers with peft: the same tokens by
    decoding steps over its KV cache, and by one forward of each whole sequence.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness as bench
import tokenizers
import torch
from generation import LENGTHS, NAMES
from peft import PeftModel
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

import pcg

FIELDS = {
    "name": {"type": "string", "pattern": "^[A-Za-z ]{1,40}$"},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "score": {"type": "number"},
    "kind": {"enum": ["person", "company", "place"]},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
    "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
}
ITEM = {
    "type": "object",
    "properties": FIELDS,
    "required": [*FIELDS],
    "additionalProperties": False,
}
# Requests end where their schema does: these arrays are longer than the outputs.
SCHEMA: dict[str, Any] = {"type": "array", "minItems": 1000, "items": ITEM}
COUNTS = {"none": None, "logprobs=0": 0, "logprobs=5": 5, "logprobs=20": 20}
UPDATES = 8


def save_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer of as many tokens as the model has."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=bench.VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    letters, spoken = random.Random(0), "aabcdeeefghiiijklmnnooprrsssttuvwy"
    words = ["".join(letters.choices(spoken, k=letters.randint(2, 9))) for _ in range(60_000)]
    made.train_from_iterator([" ".join(words[i : i + 50]) for i in range(0, 60_000, 50)], trainer)
    made.save(str(directory / "tokenizer.json"))


def random_prompts() -> list[list[int]]:
    return [torch.randint(5, bench.VOCABULARY - 5, (n,)).tolist() for n in LENGTHS]


def decoding(engine: Any, count: int) -> Any:
    """Return the engine once each of its requests has a token."""
    begun: set[int] = set()
    while len(begun) < count:
        begun |= {chunk.index for chunk in engine.step()}
    return engine


@bench.case("guided", new_tokens=12)
def guided(new_tokens: int = 100) -> dict[str, Any]:
    model = bench.random_llama()
    model.generation_config.eos_token_id = model.config.eos_token_id = 0
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        save_tokenizer(Path(folder))
        executor = pcg.compile(folder)
    prompts = random_prompts()
    common: Any = {"max_new_tokens": 2 * new_tokens, "temperature": 1.0, "ignore_eos": True}

    def begun(*fields: dict[str, Any]) -> Any:
        """Return an engine whose prompts are computed."""
        engine = executor.engine(kv_cache_bytes=2**27)
        for row, prompt in enumerate(prompts):
            own = fields[row % len(fields)]
            engine.submit(executor.request(prompt, seed=row, **common, **own))
        engine.wait_prepared()
        return decoding(engine, len(prompts))

    def step_s(engine: Any) -> float:
        took = bench.seconds(engine.step, time.process_time)
        assert len(engine.scheduler.running) == len(prompts)
        return took

    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    engines = {
        "plain": begun({}),
        "guided": begun({"guided_json": SCHEMA}),
        "half": begun({"guided_json": SCHEMA}, {}),
        "penalized": begun({**penalties, "logit_bias": dict.fromkeys(range(100, 200), 1.0)}),
    }
    steps = {name: partial(step_s, engine) for name, engine in engines.items()}
    values = bench.interleave(steps, new_tokens - 3)
    return {
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "vocabulary": bench.VOCABULARY,
        "llguidance": version("llguidance"),
        "processor_seconds_per_step": bench.medians(values),
        "guided / plain (at most 1.05)": bench.ratio(values, "guided", "plain"),
        "half guided / plain": bench.ratio(values, "half", "plain"),
        "penalized / plain": bench.ratio(values, "penalized", "plain"),
    }


@bench.case("logprobs", rounds=1, new_tokens=12)
def logprobs(rounds: int = 4, new_tokens: int = 48) -> dict[str, Any]:
    executor, prompts = pcg.compile(bench.random_llama()), random_prompts()
    for name in NAMES:
        for weights in executor.add_adapter(name, bench.LORA).weights.values():
            weights.b.normal_(0, 0.02)
    values: dict[str, list[float]] = {name: [] for name in COUNTS}
    fields: Any = {"max_new_tokens": 2 * new_tokens, "ignore_eos": True}
    for _ in range(rounds):
        engines = {name: executor.engine() for name in COUNTS}
        for name, engine in engines.items():
            for row, prompt in enumerate(prompts):
                adapter = NAMES[row % len(NAMES)]
                request = executor.request(prompt, adapter, logprobs=COUNTS[name], **fields)
                engine.submit(request)
            decoding(engine, len(prompts))
        for _ in range(new_tokens - 3):
            for name, engine in engines.items():
                values[name].append(1e3 * bench.seconds(engine.step, time.process_time))
    return {
        "new_tokens": new_tokens,
        "prompts": len(prompts),
        "adapters": len(NAMES),
        "vocabulary": bench.VOCABULARY,
        "step_ms": bench.medians(values),
        "logprobs=5 / none (at most 1.03)": bench.ratio(values, "logprobs=5", "none"),
        "logprobs=0 / none": bench.ratio(values, "logprobs=0", "none"),
        "logprobs=20 / none": bench.ratio(values, "logprobs=20", "none"),
    }


# ------------------------------------------------------------------------------- logprob mismatch

Scores = list[torch.Tensor]


def sampled(
    dtype: str, prompts: list[list[int]], new_tokens: int, state: Path
) -> tuple[Scores, Scores, list[list[int]]]:
    """Return the log-probabilities of outputs by sampling and by training, fp64, and the tokens."""
    executor = pcg.compile(bench.CHECKPOINT, dtype=dtype)
    with executor.engine(kv_cache_bytes=2**26).start() as running:
        trainer = running.trainer("mine", peft=bench.LORA, seed=0, batch_size=8)
        for _ in range(UPDATES):
            trainer.forward_backward([pcg.Datum(one) for one in prompts])
            trainer.optim_step(learning_rate=1e-3)
        trainer.snapshot().wait()
        fields: Any = {"max_new_tokens": new_tokens, "logprobs": 0, "ignore_eos": True}
        streams = [
            running.submit(prompt, "mine", temperature=1.0, seed=i, **fields)
            for i, prompt in enumerate(prompts)
        ]
        done = [stream.wait() for stream in streams]
        rows = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, done, strict=True)]
        scored = trainer.forward([pcg.Datum(row) for row in rows]).wait()
        trainer.save_state(state).wait()
        trainer.close().result()
    by_sampling = [
        torch.tensor([token.logprob for token in one.logprobs or ()], dtype=torch.float64)
        for one in done
    ]
    both = zip(prompts, scored.logprobs, strict=True)
    return by_sampling, [values[len(prompt) - 1 : -1].double() for prompt, values in both], rows


@torch.no_grad()
def by_transformers(
    dtype: str, prompts: list[list[int]], rows: list[list[int]], state: Path
) -> tuple[Scores, Scores]:
    """Return the scores of transformers for the same tokens, by decoding and by whole sequences."""
    base = AutoModelForCausalLM.from_pretrained(bench.CHECKPOINT, dtype=getattr(torch, dtype))
    model = PeftModel.from_pretrained(base, state, autocast_adapter_dtype=False).eval()
    decoded, whole = [], []
    for prompt, row in zip(prompts, rows, strict=True):
        begin = len(prompt)
        logits = model(torch.tensor([row])).logits[0, begin - 1 : -1].float().log_softmax(-1)
        whole.append(logits.gather(1, torch.tensor(row[begin:])[:, None])[:, 0].double())
        step = model(torch.tensor([prompt]), use_cache=True)
        found = []
        for token in row[begin:]:
            found.append(step.logits[0, -1].float().log_softmax(-1)[token].double())
            ids, cache = torch.tensor([[token]]), step.past_key_values
            step = model(ids, past_key_values=cache, use_cache=True)
        decoded.append(torch.stack(found))
    return decoded, whole


def compared(by_sampling: Scores, by_training: Scores) -> dict[str, Any]:
    differences = [x - q for x, q in zip(by_training, by_sampling, strict=True)]
    flat = torch.cat(differences)
    whole = torch.stack([one.sum() for one in differences])
    return {
        "tokens": len(flat),
        "largest_mismatch": float(flat.abs().max()),
        "mean_mismatch": float(flat.abs().mean()),
        "p99_mismatch": float(flat.abs().quantile(0.99)),
        "largest_token_ratio": float(flat.abs().exp().max()),
        "largest_output_ratio": float(whole.abs().exp().max()),
        "kl": float((flat.exp() - 1 - flat).mean()),
    }


@bench.case("logprob_mismatch", "largest_mismatch", "kl", prompts=2, new_tokens=4)
def logprob_mismatch(prompts: int = 32, new_tokens: int = 64) -> dict[str, Any]:
    vocabulary = json.loads((bench.CHECKPOINT / "config.json").read_text())["vocab_size"]
    texts = [torch.randint(5, vocabulary - 5, (4 + i % 13,)).tolist() for i in range(prompts)]
    result: dict[str, Any] = {"prompts": prompts, "new_tokens": new_tokens}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder) / "state"
            *ours, rows = sampled(dtype, texts, new_tokens, state)
            result[dtype] = {
                "pcg": compared(*ours),
                "transformers": compared(*by_transformers(dtype, texts, rows, state)),
            }
    return result


if __name__ == "__main__":
    bench.main()
