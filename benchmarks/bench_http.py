"""Measure what HTTP costs: 32 streaming clients of `pcg serve` against the engine alone.

    python benchmarks/bench_http.py [--rounds 7] [--streams 32] [--tokens 64]
    python benchmarks/bench_http.py --bodies

The model is the random Llama of 8 layers of `bench_generation.py`, with a tokenizer of as many
words. Both contenders get the same prompts of 16 tokens each round, new ones every round, greedy:

    engine      `submit` and `step` until nothing is left, in a process that does nothing else
    http        `pcg serve`; clients in a process of their own (`http_load.py`), an event a token
    scraped     the same while another connection asks for /metrics every 50 ms

A text over HTTP may differ from the engine's where two tokens are equally likely up to rounding, as
requests then run in other batches; wherever one does, transformers in fp64 has to say so.

Each has one thread for tensors. Reported beside tokens a second: processor time of all serving
processes a token, which other programs of the machine do not change as much;
and the time to the first token, of all requests at once, and of one request at a time.

With --bodies it measures what long bodies of one client do to the stream of another instead: the
longest gap between two tokens of one stream while bodies of each kind come over another connection,
beside that of a stream alone. All are the median over the rounds of the longest gap of a stream.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch
from http_load import Heard, arrivals, client, scraper
from measure import interleave, medians, ratio, write

import pcg
from pcg.runtime.executor import Executor

PROMPT = 16
SINGLE = 12
"""Requests one at a time, of a round."""
VOCABULARY = 32000
NEAR = 1e-4
"""A gap between logits that rounding in fp32 decides; the median of the usual ones is 0.09."""
KEY = "key-of-the-benchmark"
MODEL = "random"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CONTEXT = get_context("spawn")
Ask: TypeAlias = Callable[[int, int, int], Heard]
"""Serves prompts from a place on, so many of them, for so many tokens each."""


def save_model(directory: Path) -> None:
    """Write the random model with a tokenizer, of a word for each token."""
    from bench_generation import random_llama
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    random_llama().save_pretrained(directory)
    words = {f"Ġword{index}" if index else "<unk>": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def prompts_of(round_: int, count: int) -> list[list[int]]:
    """Return the prompts of a round."""
    random = Random(round_)
    return [random.choices(range(5, VOCABULARY), k=PROMPT) for _ in range(count)]


@dataclass(frozen=True)
class Round:
    """The numbers of a contender's round.

    Attributes:
        rate: tokens a second, from the first request to the end of the last output.
        cpu_us: processor time of all serving processes a token.
        engine_us: that of the engine's process alone.
        first_ms: mean time to the first token, of requests that come together.
        single_ms: the median time to the first token, of requests that come one at a time.
    """

    rate: float
    cpu_us: float
    engine_us: float
    first_ms: float
    single_ms: float
    texts: list[str]


# --------------------------------------------------------------------------------- the engine alone


def alone(pipe: Connection, directory: str) -> None:
    """Serve the prompts that come over the pipe by an engine, until None comes."""
    torch.set_num_threads(1)
    executor = pcg.compile(directory, dtype="float32")
    gc.collect()
    gc.freeze()
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        pipe.send(serve_alone(executor, *asked))


def serve_alone(executor: Executor, prompts: list[list[int]], tokens: int) -> Heard:
    """Serve prompts at once, stepping an engine."""
    engine = executor.engine(prefix_caching=False)
    requests = [executor.request(p, max_new_tokens=tokens, ignore_eos=True) for p in prompts]
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    texts = [""] * len(prompts)
    first: list[float] = [0.0] * len(prompts)
    chunks = 0
    while not engine.is_idle:
        for chunk in engine.step():
            first[chunk.index] = first[chunk.index] or time.perf_counter() - began
            texts[chunk.index] += chunk.text
            chunks += 1
    return Heard(time.perf_counter() - began, first, texts, chunks)


# --------------------------------------------------------------------------------- processes


@contextmanager
def process_of(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Connection, int]]:
    """Run a function in a process; gives the pipe to it, and its id."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    assert ours.recv() == "ready"
    try:
        yield ours, process.pid or 0
    finally:
        ours.send(None)
        process.join(30)


@contextmanager
def server(directory: Path) -> Iterator[tuple[int, int]]:
    """Run `pcg serve`; gives its port and its process id."""
    command = [sys.executable, "-m", "pcg_cli", "serve", str(directory), "--port", "0"]
    command += ["--api-key", KEY, "--served-model-name", MODEL, "--dtype", "float32"]
    command += ["--no-enable-prefix-caching", "--access-log", str(directory / "requests.jsonl")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stderr is not None
    found = next(filter(None, (re.search(r"at http://.*:(\d+)", x) for x in process.stderr)), None)
    if found is None:
        raise SystemExit("error: the server did not start")
    try:
        yield int(found[1]), process.pid
    finally:
        process.terminate()
        process.communicate(timeout=60)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def started_by(pid: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --------------------------------------------------------------------------------- rounds


def body(prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return the body of a request over HTTP."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def measured(ask: Ask, pid: int, streams: int, tokens: int) -> Round:
    """Measure a round; `ask` serves so many new prompts from a place in their order."""
    pids = [pid, *started_by(pid)]
    before = [cpu_s(one) for one in pids]
    together = ask(0, streams, tokens)
    took = [cpu_s(one) - was for one, was in zip(pids, before, strict=True)]
    single = [ask(streams + place, 1, 1).first_s[0] for place in range(SINGLE)]
    came = streams * tokens
    return Round(
        came / together.seconds,
        sum(took) / came * 1e6,
        max(took) / came * 1e6,
        statistics.fmean(together.first_s) * 1e3,
        statistics.median(single) * 1e3,
        together.texts,
    )


# --------------------------------------------------------------------------------- long bodies


def long_bodies() -> dict[str, tuple[str, bytes]]:
    """Return bodies of nearly 4 MiB, or of as many elements as are taken, each with its path."""
    text = {"model": MODEL, "max_tokens": 1}
    some = {
        "nothing": ("/health", {}),
        "token ids, 1,000,000": ("completions", {"prompt": [1] * 10**6}),
        "token ids, 262,000": ("completions", {"prompt": [12345] * 262_000}),
        "logit_bias, 122,000": ("completions", {"logit_bias": {str(i): 1 for i in range(122_000)}}),
        "names, 100,000": ("completions", {f"field{i}": None for i in range(100_000)}),
        "names, 65,000": ("completions", {"x": {f"field{i}": None for i in range(65_000)}}),
        "texts, 130,000": ("completions", {"prompt": "a", "stop": ["a"] * 130_000}),
        "objects, 65,000": ("completions", {"x": [{"a": 1}] * 65_000}),
        "lists, 1,000,000": ("completions", {"x": [[]] * 10**6}),
        "a text of 4 MB": ("completions", {"prompt": "word " * 800_000}),
        "a text of 1 MB": ("completions", {"prompt": "word " * 200_000}),
        "escapes": ("completions", {"prompt": "\u4e2d" * 600_000}),
        "brackets in a text": ("completions", {"prompt": '"[{,:' * 500_000}),
        "a job of 100,000 names": ("fine_tuning/jobs", {f"field{i}": None for i in range(100_000)}),
        "messages, 8,000": (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}] * 8_000},
        ),
    }
    return {
        name: (path if path[0] == "/" else f"/v1/{path}", json.dumps({**text, **body}).encode())
        for name, (path, body) in some.items()
    }


def sender(pipe: Connection, port: int, key: str) -> None:
    """Send the body that comes over the pipe again and again until the next message; then None."""
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        path, content = asked
        head = f"{'GET' if path == '/health' else 'POST'} {path} HTTP/1.1\r\nHost: a\r\n"
        head += f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        count = 0
        while not pipe.poll(0.05):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(request)
                count += bool(connection.recv(2**16))
        pipe.recv()
        pipe.send(count)


def gaps_beside_bodies(rounds: int, tokens: int) -> dict[str, Any]:
    """Return the longest gaps of a stream beside bodies of each kind, ms."""
    kinds = long_bodies()
    found: dict[str, list[float]] = {name: [] for name in kinds}
    with (
        tempfile.TemporaryDirectory() as folder,
        saved_model(Path(folder)),
        server(Path(folder)) as (port, _),
        process_of(arrivals, port, KEY) as (stream, _),
        process_of(sender, port, KEY) as (bodies, _),
    ):

        def run(name: str) -> float:
            bodies.send(kinds[name])
            stream.send([body(prompts_of(len(found[name]), 1)[0], tokens)])
            times = [time_s for time_s, _ in stream.recv()]
            bodies.send("end")
            print(f"  {bodies.recv()} times {name}", file=sys.stderr)
            # The first gap is that of the prompt, and the last has the end of the reply.
            found[name].append(max(b - a for a, b in pairwise(times[1:-1])) * 1e3)
            return found[name][-1]

        interleave({name: partial(run, name) for name in kinds}, rounds)
    middle = {name: round(statistics.median(gaps[1:]), 1) for name, gaps in found.items()}
    quiet = middle["nothing"]
    return {
        "tokens of the stream": tokens,
        "longest gap of the stream, ms": middle,
        "more than beside nothing, ms (at most 25)": {
            name: round(gap - quiet, 1) for name, gap in middle.items()
        },
    }


def main() -> None:
    """Run the contenders in turn and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bodies", action="store_true", help="measure long bodies instead")
    given = parser.parse_args()
    if given.bodies:
        write("http_bodies", gaps_beside_bodies(given.rounds, given.tokens))
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        saved_model(Path(folder)),
        process_of(alone, folder) as (engine, engine_pid),
        server(Path(folder)) as (port, server_pid),
        process_of(client, port, KEY) as (load, _),
        process_of(scraper, port, KEY) as (scraping, _),
    ):
        found = rounds_of(given, (engine, engine_pid), (load, server_pid), scraping)
        gaps = ties(Path(folder), found, given.streams)
    write("http", report(given, found, gaps))


@contextmanager
def saved_model(directory: Path) -> Iterator[None]:
    """Write the model by a process that ends, so that its memory is free again."""
    process = CONTEXT.Process(target=save_model, args=(directory,))
    process.start()
    process.join()
    yield


def rounds_of(
    given: argparse.Namespace,
    engine: tuple[Connection, int],
    load: tuple[Connection, int],
    scraping: Connection,
) -> dict[str, list[Round]]:
    """Return the rounds of each contender."""
    count = given.streams + SINGLE
    found: dict[str, list[Round]] = {"engine": [], "http": [], "scraped": []}

    def of_engine(prompts: list[list[int]], place: int, number: int, tokens: int) -> Heard:
        engine[0].send((prompts[place : place + number], tokens))
        return engine[0].recv()

    def of_http(prompts: list[list[int]], place: int, number: int, tokens: int) -> Heard:
        load[0].send([body(one, tokens) for one in prompts[place : place + number]])
        return load[0].recv()

    def run(name: str) -> float:
        prompts = prompts_of(len(found[name]), count)
        ask, pid = (of_engine, engine[1]) if name == "engine" else (of_http, load[1])
        if name == "scraped":
            scraping.send("begin")
        one = measured(partial(ask, prompts), pid, given.streams, given.tokens)
        if name == "scraped":
            scraping.send("end")
            print(f"  {scraping.recv()} scrapes", file=sys.stderr)
        found[name].append(one)
        return one.rate

    interleave({name: partial(run, name) for name in found}, given.rounds)
    return {name: rounds[1:] for name, rounds in found.items()}


def ties(directory: Path, found: dict[str, list[Round]], streams: int) -> list[float]:
    """Return how far apart the two likeliest logits are wherever a text over HTTP first differs.

    SystemExit: the texts differ in other tokens, or by more than rounding.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    gaps = []
    for number, pair in enumerate(zip(found["engine"], found["http"], strict=True), 1):
        texts = zip(*(one.texts for one in pair), strict=True)
        for prompt, both in zip(prompts_of(number, streams), texts, strict=True):
            if both[0] == both[1]:
                continue
            own, other = ([int(word) for word in re.findall(r"word(\d+)", text)] for text in both)
            place = next(i for i, two in enumerate(zip(own, other, strict=True)) if len({*two}) > 1)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + own[:place]])).logits[0, -1]
            top = logits.topk(2)
            gaps.append(float(top.values[0] - top.values[1]))
            if {own[place], other[place]} != set(top.indices.tolist()) or gaps[-1] > NEAR:
                raise SystemExit(
                    f"error: after {prompt + own[:place]} the engine has {own[place]} and HTTP "
                    f"{other[place]}; the likeliest are {top}"
                )
    return gaps


def report(
    given: argparse.Namespace, found: dict[str, list[Round]], gaps: list[float]
) -> dict[str, Any]:
    """Return the result: medians, and ratios within rounds."""

    def of(name: str) -> dict[str, list[float]]:
        return {kind: [getattr(one, name) for one in rounds] for kind, rounds in found.items()}

    rate, cpu, first, single = of("rate"), of("cpu_us"), of("first_ms"), of("single_ms")
    steps = of("engine_us")
    more = [a - b for a, b in zip(single["http"], single["engine"], strict=True)]
    return {
        "streams": given.streams,
        "tokens": given.tokens,
        "texts": given.streams * len(found["http"]),
        "ties that rounding decided otherwise, gaps of fp64 logits": sorted(gaps),
        "tokens_per_s": medians(rate),
        "processor_us_a_token": medians(cpu),
        "processor_us_a_token, of the engine's process": medians(steps),
        "first_token_ms, together": medians(first),
        "first_token_ms, one at a time": medians(single),
        "tokens/s, http / engine (at least 0.95)": ratio(rate, "http", "engine"),
        "processor time, engine / http": ratio(cpu, "engine", "http"),
        "first token, http - engine, ms (at most 5)": round(statistics.median(more), 3),
        "tokens/s, scraped / http (at least 0.99)": ratio(rate, "scraped", "http"),
        "processor time, http / scraped": ratio(cpu, "http", "scraped"),
        "processor time of the engine's process, http / scraped": ratio(steps, "http", "scraped"),
    }


if __name__ == "__main__":
    main()
