"""Measure the gaps between tokens while the data of a job is prepared beside running requests.

    python benchmarks/bench_preparation.py [--rounds 3]

The model is a random 8-layer Llama of hidden size 512 with a tokenizer of 8,000 tokens, on one
thread in fp32; eight requests generate all the time. Jobs are prepared and do not train, so that
what is left of their cost is their preparation's:

    30,000 rows of a file        prompts and completions of 8 to 40 words
    30,000 rows in memory        the same
    a line of 2.4 MB             one row, of which the first 512 tokens are kept

Each is prepared by the engine, and by a thread of the same process, with texts encoded one by one,
as all data was before it was tokenized in a process of its own. Nothing of what was loaded before
is visited by the garbage collector (`gc.freeze`), as a process that serves should have it.
Reported: the median, the 99th percentile and the longest gap between the steps that run meanwhile,
against those of as many steps with nothing beside them, and the seconds until the job is ready.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
from bench_generation import random_llama
from measure import write
from tokenizers import decoders, models, pre_tokenizers, trainers

import pcg
from pcg.runtime.data.dataset import ReadOptions
from pcg.runtime.data.example import Example, ModelSizes
from pcg.runtime.data.sources import gather
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import JobState
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.training_data import load_here
from pcg.simulate.flexllm import InferenceOnly

REQUESTS, ROWS, LINE_BYTES = 8, 30_000, 2_400_000
STEPS = 300
SYLLABLES = ("ka", "to", "mi", "re", "su", "na", "li", "po", "de", "va", "ren", "tor", "mel", "sin")
OPTIONS: dict[str, Any] = {"max_length": 512, "max_steps": 1, "batch_size": 1}
RECIPE = {"peft_type": "LORA", "r": 8, "target_modules": "all-linear"}


def words(generator: random.Random, count: int) -> str:
    """Return random words."""
    return " ".join("".join(generator.choices(SYLLABLES, k=3)) for _ in range(count))


def save_model(directory: Path) -> None:
    """Write a model with a byte-level tokenizer that was trained on such words."""
    random_llama().save_pretrained(directory)  # type: ignore[operator]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([words(random.Random(0), 20_000)], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def sources(directory: Path) -> dict[str, Any]:
    """Return the data of each case."""
    generator = random.Random(1)
    rows = [
        {"prompt": words(generator, generator.randint(8, 40)), "completion": words(generator, 8)}
        for _ in range(ROWS)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = words(generator, LINE_BYTES // 8)[:LINE_BYTES]
    (directory / "line.jsonl").write_text(json.dumps({"text": line}) + "\n")
    return {
        "30,000 rows of a file": str(directory / "rows.jsonl"),
        "30,000 rows in memory": rows,
        "a line of 2.4 MB": str(directory / "line.jsonl"),
    }


class OneByOne(Tokenizer):
    """A tokenizer that holds Python's lock while it encodes a text, however long."""

    def _encoded(self, text: str, add_special_tokens: bool) -> Any:
        return self.backend.encode(text, add_special_tokens=add_special_tokens)


class Bench:
    """Requests that run all the time, and the ends of the steps."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        engine = executor.engine(sharing=InferenceOnly(), kv_cache_bytes=2**31)
        self.ends: list[float] = []
        step = engine.step

        def timed() -> Any:
            chunks = step()
            self.ends.append(time.perf_counter())
            return chunks

        engine.step = timed  # type: ignore[method-assign]
        self.running: AsyncEngine = engine.start()

    def gaps(self, beside: Callable[[], object]) -> tuple[list[float], float]:
        """Return the gaps between steps, milliseconds, while a call runs, and its seconds."""
        ids = list(range(5, 37))
        fields: dict[str, Any] = {"max_new_tokens": 1900, "ignore_eos": True}
        streams = [self.running.submit([n, *ids], **fields) for n in range(REQUESTS)]
        first = len(self.ends)
        while len(self.ends) < first + 20:
            time.sleep(0.05)
        begin, started = len(self.ends), time.perf_counter()
        beside()
        seconds, end = time.perf_counter() - started, len(self.ends)
        for stream in streams:
            stream.cancel()
            stream.wait()
        ends = self.ends[begin - 1 : end + 1]
        return [1e3 * (b - a) for a, b in itertools.pairwise(ends)], seconds

    def nothing(self) -> None:
        """Wait for some steps."""
        until = len(self.ends) + STEPS
        while len(self.ends) < until:
            time.sleep(0.05)

    def by_engine(self, data: Any, recipe: Any, name: str) -> None:
        """Prepare a job; it is not trained."""
        job = self.running.finetune(data, name, peft=recipe, **OPTIONS)
        while job.state is JobState.QUEUED and job._job is None:
            time.sleep(0.01)
        job.cancel()
        if job.state is JobState.FAILED:
            job.wait()

    def by_thread(self, data: Any) -> None:
        """Read the data on a thread of this process."""
        own, vocabulary = self.executor.tokenizer, self.executor.program.base.vocabulary
        tokenizer = OneByOne(**vars(own))
        options, sizes = ReadOptions(max_length=OPTIONS["max_length"]), ModelSizes(vocabulary, 2048)
        thread = threading.Thread(target=lambda: load_here(tokenizer, gather(data), options, sizes))
        thread.start()
        thread.join()


def summary(gaps: Sequence[float], alone: Sequence[float], seconds: float) -> dict[str, float]:
    """Return the figures of a case, gaps as ratios to those with nothing beside."""

    def figures(values: Sequence[float]) -> tuple[float, float, float]:
        ordered = sorted(values)
        return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]

    names = ("median", "p99", "longest")
    ratios = [a / b for a, b in zip(figures(gaps), figures(alone), strict=True)]
    return {
        **{name: round(value, 2) for name, value in zip(names, ratios, strict=True)},
        "longest_ms": round(max(gaps), 1),
        "steps": len(gaps),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Run all cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        save_model(directory)
        data = sources(directory)
        bench = Bench(pcg.compile(str(directory)))
        gc.collect()
        gc.freeze()
        examples = [Example([5, 6, 7], [5, 6, 7])]
        bench.gaps(lambda: bench.by_engine(examples, RECIPE, "warm"))
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(rounds):
            alone, _ = bench.gaps(bench.nothing)
            acts: dict[str, Callable[[], object]] = {}
            for name, source in data.items():
                acts[f"{name}, by the engine"] = partial(bench.by_engine, source, RECIPE, "job")
                acts[f"{name}, by a thread"] = partial(bench.by_thread, source)
            for name, act in acts.items():
                gaps, seconds = bench.gaps(act)
                found.setdefault(name, []).append(summary(gaps, alone, seconds))
                print(f"  {name:<40} {found[name][-1]}", file=sys.stderr)
            found.setdefault("nothing", []).append(summary(alone, alone, 0.0))
        bench.running.close()
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    }
    write("preparation", {"gaps_against_nothing": medians, "rounds": rounds})


if __name__ == "__main__":
    main()
