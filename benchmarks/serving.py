"""What HTTP costs: streaming clients of `pcg serve` against the engine alone.

The model is a random Llama of 8 layers with a tokenizer of as many words, on one thread in fp32.
Clients are in a process of their own and read as little as tells tokens and times, so that their
time is small beside the server's: bytes are kept as they come, and parsed after the round.

http          32 prompts of 16 tokens, new ones every round, greedy; by `submit` and `step` in a
              process that does nothing else, and by `pcg serve`. A text over HTTP may differ from
              the engine's where two tokens are equally likely up to rounding, as requests run in
              other batches; wherever one does, transformers in fp64 must confirm that. Beside
              tokens a second: processor time of all serving processes a token, and the time to the
              first token, of all requests at once and of one request at a time.
scrapes       tokens a second in turns of a second in which /metrics is asked for every 50 ms, to
              the mean of the turns before and after it; 32 clients stream without a pause. A step's
              tokens come to all clients together, so the events of the first one count them.
http_bodies   the longest gap between two tokens of one stream while long bodies of each kind come
              over another connection, and that of a stream alone; medians over the rounds
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import statistics
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import harness as bench
import torch

import pcg

PROMPT, SINGLE = 16, 12
"""Tokens of a prompt, and requests one at a time of a round."""
NEAR = 1e-4
"""A gap between logits that rounding in fp32 decides; the median of the usual ones is 0.09."""
OPTIONS = ("--no-enable-prefix-caching", "--access-log", "none")


def prompts_of(round_: int, count: int) -> list[list[int]]:
    random = Random(round_)
    return [random.choices(range(5, bench.VOCABULARY), k=PROMPT) for _ in range(count)]


def body(prompt: list[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "stream": True}
    return {"model": "model", "prompt": prompt, "max_tokens": tokens, **sampling}


@dataclass(frozen=True)
class Heard:
    """The replies of one round.

    Attributes:
        seconds: from the first request to the end of the last reply.
        first_s: times from a request to the first text of its reply, seconds.
    """

    seconds: float
    first_s: list[float]
    texts: list[str]


# ---------------------------------------------------------------------------------------- clients


def request(method: str, path: str, content: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {bench.KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


class StreamConnection(asyncio.Protocol):
    """A connection with one request, whose reply is kept as it comes.

    Attributes:
        parts: the times of the reply's parts, and how much of the reply was there then.
    """

    def __init__(self) -> None:
        self.received = bytearray()
        self.first: float | None = None
        self.parts: list[tuple[float, int]] = []
        self.transport: Any
        self.done: asyncio.Future[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.parts.append((time.perf_counter(), len(self.received)))
        if self.first is None and b"data: " in self.received:
            self.first = time.perf_counter()
        is_refused = self.first is None and b"HTTP/1.1 200" not in self.received
        if self.received.endswith(b"0\r\n\r\n") or is_refused:
            self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    async def ask(self, content: bytes) -> float:
        """Send a request and wait for its reply; returns the time to the first event, seconds."""
        self.done = asyncio.get_running_loop().create_future()
        sent = time.perf_counter()
        self.transport.write(content)
        await self.done
        self.transport.close()
        if self.first is None:
            raise SystemExit(f"error: the server answered {bytes(self.received[:600])!r}")
        return self.first - sent

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the reply, which came in chunks."""
        rest, content = bytes(self.received).partition(b"\r\n\r\n")[2], bytearray()
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            content += rest[:length]
            rest = rest[length + 2 :]
        lines = (part.removeprefix(b"data: ") for part in bytes(content).split(b"\n\n") if part)
        return [json.loads(line) for line in lines if line != b"[DONE]"]


async def streamed(port: int, bodies: Sequence[Any]) -> tuple[list[StreamConnection], Any, float]:
    """Send all requests at once, each over a connection of its own that is there already."""
    loop = asyncio.get_running_loop()
    opened = [
        (await loop.create_connection(StreamConnection, "127.0.0.1", port))[1] for _ in bodies
    ]
    contents = [request("POST", "/v1/completions", json.dumps(one).encode()) for one in bodies]
    began = time.perf_counter()
    asked = zip(opened, contents, strict=True)
    first_s = await asyncio.gather(*(one.ask(content) for one, content in asked))
    return opened, first_s, time.perf_counter() - began


def client(pipe: Any, port: int) -> None:
    """Ask for the bodies that come over the pipe, and answer with the replies, until None comes."""
    while (bodies := pipe.recv()) is not None:
        opened, first_s, seconds = asyncio.run(streamed(port, bodies))
        replies = [one.events() for one in opened]
        texts = ["".join(c["text"] for e in reply for c in e["choices"]) for reply in replies]
        pipe.send(Heard(seconds, list(first_s), texts))


def arrivals(pipe: Any, port: int) -> None:
    """Do the same; answer with times, and how many events of the first reply had come then."""
    while (bodies := pipe.recv()) is not None:
        first = asyncio.run(streamed(port, bodies))[0][0]
        found, start, count = [], 0, 0
        for time_s, end in first.parts:
            count += first.received.count(b"data: {", start, end)
            found.append((time_s, count))
            start = end
        pipe.send(found)


def scraper(pipe: Any, port: int) -> None:
    """Ask for /metrics every 50 ms from a message to the next; answer how often; until None."""
    while pipe.recv() is not None:
        count, due = 0, time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while not pipe.poll(max(0.0, due - time.perf_counter())):
                due += 0.05
                connection.sendall(request("GET", "/metrics"))
                head, end, page = b"", b"", b""
                while not end:
                    head += connection.recv(2**18)
                    head, end, page = head.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                if not head.startswith(b"HTTP/1.1 200 ") or length is None:
                    raise SystemExit(f"error: /metrics answered {head!r}")
                left = int(length[1]) - len(page)
                while left:
                    left -= len(connection.recv(min(left, 2**18)))
                count += 1
        pipe.recv()
        pipe.send(count)


def sender(pipe: Any, port: int) -> None:
    """Send the content that comes over the pipe again and again until the next message."""
    while (content := pipe.recv()) is not None:
        count = 0
        while not pipe.poll(0.05):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(content)
                count += bool(connection.recv(2**16))
        pipe.recv()
        pipe.send(count)


# ------------------------------------------------------------------------------------------- http


def alone(pipe: Any, directory: Path) -> None:
    """Serve the prompts that come over the pipe by an engine, until None comes."""
    bench.prepare()
    executor = pcg.compile(str(directory), dtype="float32")
    gc.collect()
    gc.freeze()
    while (asked := pipe.recv()) is not None:
        prompts, tokens = asked
        engine = executor.engine(prefix_caching=False)
        requests = [executor.request(p, max_new_tokens=tokens, ignore_eos=True) for p in prompts]
        began = time.perf_counter()
        for one in requests:
            engine.submit(one)
        texts, first = [""] * len(prompts), [0.0] * len(prompts)
        while not engine.is_idle:
            for chunk in engine.step():
                first[chunk.index] = first[chunk.index] or time.perf_counter() - began
                texts[chunk.index] += chunk.text
        pipe.send(Heard(time.perf_counter() - began, first, texts))


@bench.case("http", rounds=1, streams=2, tokens=4)
def http(rounds: int = 7, streams: int = 32, tokens: int = 64) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"engine": [], "http": []}
    with (
        bench.saved() as folder,
        bench.started(alone, folder) as engine,
        bench.server(folder, *OPTIONS) as (port, server_pid),
        bench.started(client, port) as load,
    ):

        def ask(name: str, prompts: list[list[int]], count: int) -> Heard:
            if name == "engine":
                return engine.ask(prompts, count)
            return load.ask([body(prompt, count) for prompt in prompts])

        def run(name: str) -> float:
            prompts = prompts_of(len(found[name]), streams + SINGLE)
            pid = engine.pid if name == "engine" else server_pid
            pids = [pid, *bench.children(pid)]
            before = [bench.cpu_s(one) for one in pids]
            together = ask(name, prompts[:streams], tokens)
            spent = [bench.cpu_s(one) - was for one, was in zip(pids, before, strict=True)]
            single = [ask(name, [prompt], 1).first_s[0] for prompt in prompts[streams:]]
            came = streams * tokens
            row = {"rate": came / together.seconds, "texts": together.texts}
            row |= {"cpu_us": sum(spent) / came * 1e6, "engine_us": max(spent) / came * 1e6}
            row["first_ms"] = statistics.fmean(together.first_s) * 1e3
            row["single_ms"] = statistics.median(single) * 1e3
            found[name].append(row)
            return row["rate"]

        bench.interleave({name: partial(run, name) for name in found}, rounds)
        found = {name: rows[1:] for name, rows in found.items()}
        gaps = ties(folder, found, streams)

    def of(name: str) -> dict[str, list[float]]:
        return {kind: [row[name] for row in rows] for kind, rows in found.items()}

    rate, cpu, single = of("rate"), of("cpu_us"), of("single_ms")
    more = [a - b for a, b in zip(single["http"], single["engine"], strict=True)]
    return {
        "streams": streams,
        "tokens": tokens,
        "texts": streams * len(found["http"]),
        "ties that rounding decided otherwise, gaps of fp64 logits": sorted(gaps),
        "tokens_per_s": bench.medians(rate),
        "processor_us_a_token": bench.medians(cpu),
        "processor_us_a_token, of the engine's process": bench.medians(of("engine_us")),
        "first_token_ms, together": bench.medians(of("first_ms")),
        "first_token_ms, one at a time": bench.medians(single),
        "tokens/s, http / engine (at least 0.95)": bench.ratio(rate, "http", "engine"),
        "processor time, engine / http": bench.ratio(cpu, "engine", "http"),
        "first token, http - engine, ms (at most 5)": round(statistics.median(more), 3),
    }


def ties(directory: Path, found: dict[str, list[dict[str, Any]]], streams: int) -> list[float]:
    """Return the gaps between the two likeliest logits where texts over HTTP first differ.

    SystemExit: texts differ in other tokens, or by more than rounding.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    gaps = []
    for number, pair in enumerate(zip(found["engine"], found["http"], strict=True), 1):
        texts = zip(*(one["texts"] for one in pair), strict=True)
        for prompt, both in zip(prompts_of(number, streams), texts, strict=True):
            if both[0] == both[1]:
                continue
            own, other = ([int(word) for word in re.findall(r"word(\d+)", text)] for text in both)
            place = next(i for i, two in enumerate(zip(own, other, strict=True)) if len({*two}) > 1)
            with torch.no_grad():
                top = model(torch.tensor([prompt + own[:place]])).logits[0, -1].topk(2)
            gaps.append(float(top.values[0] - top.values[1]))
            if {own[place], other[place]} != set(top.indices.tolist()) or gaps[-1] > NEAR:
                raise SystemExit(
                    f"error: after {prompt + own[:place]} the engine has {own[place]} and HTTP "
                    f"{other[place]}; the likeliest are {top}"
                )
    return gaps


# ---------------------------------------------------------------------------------------- scrapes


@dataclass(frozen=True)
class Turn:
    """A turn: tokens a second, processor seconds of server, engine and scraper, and scrapes."""

    rate: float
    cpu_s: tuple[float, ...]
    scrapes: int


def turns(
    load: Any, scraping: Any, bodies: list[Any], pids: list[int], turn_s: float
) -> list[Turn | None]:
    """Stream, and scrape every other turn; None for turns in which not all streams ran."""
    load.pipe.send(bodies)
    time.sleep(2.0)  # prompts are read
    measured: list[tuple[float, float, tuple[float, ...], int]] = []
    while not load.pipe.poll():
        count, is_scraped = 0, len(measured) % 2 == 1
        if is_scraped:
            scraping.pipe.send("begin")
        began_s, before = time.perf_counter(), [bench.threads_s(pid) for pid in pids]
        time.sleep(turn_s)
        ended_s, after = time.perf_counter(), [bench.threads_s(pid) for pid in pids]
        if is_scraped:
            count = scraping.ask("end")
        spent = tuple(b - a for a, b in zip(before, after, strict=True))
        measured.append((began_s, ended_s, spent, count))
    found = load.answer()

    def steps_at(time_s: float) -> float:
        """Return the steps that had come at a time, between two of them a part of one."""
        place = bisect(found, (time_s, 0))
        (before_s, before), (after_s, after) = found[place - 1 : place + 1]
        return before + (after - before) * (time_s - before_s) / (after_s - before_s)

    return [
        Turn((steps_at(end_s) - steps_at(begin_s)) / (end_s - begin_s) * len(bodies), spent, count)
        if found[0][0] < begin_s and end_s < found[-1][0]
        else None
        for begin_s, end_s, spent, count in measured
    ]


@bench.case("scrapes", runs=1, streams=2, tokens=400, turn_s=0.3)
def scrapes(
    runs: int = 3, streams: int = 32, tokens: int = 700, turn_s: float = 1.0
) -> dict[str, Any]:
    rows: list[dict[str, float]] = []
    with (
        bench.saved() as folder,
        bench.server(folder, *OPTIONS) as (port, server_pid),
        bench.started(arrivals, port) as load,
        bench.started(scraper, port) as scraping,
    ):
        engine_pid = max(bench.children(server_pid), key=bench.threads_s)
        pids = [server_pid, engine_pid, scraping.pid]
        for run in range(runs):
            bodies = [body(one, tokens) for one in prompts_of(run, streams)]
            found = turns(load, scraping, bodies, pids, turn_s)
            for a, one, b in zip(found[::2], found[1::2], found[2::2], strict=False):
                if a is None or one is None or b is None:
                    continue
                rate = (a.rate + b.rate) / 2
                cpu = [(x + y) / 2 for x, y in zip(a.cpu_s, b.cpu_s, strict=True)]
                of_server, _, of_scraper = (
                    (used - usual) / max(1, one.scrapes) * 1e6
                    for used, usual in zip(one.cpu_s, cpu, strict=True)
                )
                row = {"quiet": a.rate, "rate": one.rate / rate}
                row["engine"] = one.cpu_s[1] / one.rate / (cpu[1] / rate)
                rows.append({**row, "server": of_server, "scraper": of_scraper})
            bench.note(f"run {run}: {bench.medians_of_rows(rows)}")
    middle, ratios = bench.medians_of_rows(rows), [row["rate"] for row in rows]
    return {
        "streams": streams,
        "turn_s": turn_s,
        "pairs": len(rows),
        "tokens_per_s": round(middle["quiet"], 1),
        "tokens/s, scraped / not (at least 0.99)": middle["rate"],
        "tokens/s, scraped / not, mean": round(statistics.fmean(ratios), 4),
        "its standard error": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
        "processor time of the engine's process a token, scraped / not": middle["engine"],
        "processor_us_a_scrape": {key: round(middle[key]) for key in ("server", "scraper")},
    }


# ------------------------------------------------------------------------------------ long bodies

BODIES: dict[str, tuple[str, Any]] = {
    "token ids, 1,000,000": ("completions", lambda: {"prompt": [1] * 10**6}),
    "token ids, 262,000": ("completions", lambda: {"prompt": [12345] * 262_000}),
    "logit_bias, 122,000": (
        "completions",
        lambda: {"logit_bias": {str(i): 1 for i in range(122_000)}},
    ),
    "names, 100,000": ("completions", lambda: {f"field{i}": None for i in range(100_000)}),
    "names, 65,000": ("completions", lambda: {"x": {f"field{i}": None for i in range(65_000)}}),
    "texts, 130,000": ("completions", lambda: {"prompt": "a", "stop": ["a"] * 130_000}),
    "objects, 65,000": ("completions", lambda: {"x": [{"a": 1}] * 65_000}),
    "lists, 1,000,000": ("completions", lambda: {"x": [[]] * 10**6}),
    "a text of 4 MB": ("completions", lambda: {"prompt": "word " * 800_000}),
    "a text of 1 MB": ("completions", lambda: {"prompt": "word " * 200_000}),
    "escapes": ("completions", lambda: {"prompt": "\u4e2d" * 600_000}),
    "brackets in a text": ("completions", lambda: {"prompt": '"[{,:' * 500_000}),
    "a job of 100,000 names": (
        "fine_tuning/jobs",
        lambda: {f"field{i}": None for i in range(100_000)},
    ),
    "messages, 8,000": (
        "chat/completions",
        lambda: {"messages": [{"role": "user", "content": "a"}] * 8_000},
    ),
}
"""Bodies of nearly 4 MiB, or of as many elements as are taken, each with its path."""


@bench.case("http_bodies", rounds=1, tokens=64)
def http_bodies(rounds: int = 7, tokens: int = 64) -> dict[str, Any]:
    kinds = {"nothing": request("GET", "/health")}
    for name, (path, fields) in BODIES.items():
        content = json.dumps({"model": "model", "max_tokens": 1, **fields()}).encode()
        kinds[name] = request("POST", f"/v1/{path}", content)
    with (
        bench.saved() as folder,
        bench.server(folder, *OPTIONS) as (port, _),
        bench.started(arrivals, port) as stream,
        bench.started(sender, port) as bodies,
    ):
        turns = dict.fromkeys(kinds, 0)

        def run(name: str) -> float:
            bodies.pipe.send(kinds[name])
            times = [t for t, _ in stream.ask([body(prompts_of(turns[name], 1)[0], tokens)])]
            turns[name] += 1
            bench.note(f"{bodies.ask('end')} times {name}")
            # The first gap is that of the prompt, and the last has the end of the reply.
            return max(b - a for a, b in pairwise(times[1:-1])) * 1e3

        found = bench.interleave({name: partial(run, name) for name in kinds}, rounds)
    middle = bench.medians(found, 1)
    more = {name: round(gap - middle["nothing"], 1) for name, gap in middle.items()}
    return {
        "tokens of the stream": tokens,
        "longest gap of the stream, ms": middle,
        "more than beside nothing, ms (at most 25)": more,
    }


if __name__ == "__main__":
    bench.main()
