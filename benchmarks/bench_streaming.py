"""Measure what streams cost: chunks through the AsyncEngine against stepping the engine directly.

    python benchmarks/bench_streaming.py [--rounds 7] [--streams 64] [--tokens 128]

Each contender serves the same requests, of 16 tokens each, on one executor of a random model. The
models are small, so that a token costs little beside what hands it on; in that of two layers it
costs hardly more than the engine's own work.

    direct      `submit`, then `step` until nothing is left, in one thread
    coroutines  a task for each stream, `async for chunk in stream`, all on one event loop
    loops       the same over two event loops, each on a thread of its own
    threads     a thread for each of eight streams at a time, `for chunk in stream`
    awaited     `await stream.completion()`, which reads no chunks

Reported: microseconds of processor time a token of the whole process, its threads included, and
ratios to `direct` within a round. Times are of the process itself, so that what else the machine
runs does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import torch
from measure import interleave, medians, ratio, write
from transformers import AutoModelForCausalLM, LlamaConfig

import pcg
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.stream import Stream

PROMPT = 16
READERS = 8
MODELS = {"4 layers, hidden 256": (4, 256), "2 layers, hidden 64": (2, 64)}
VOCABULARY = 512


def make_executor(layers: int, hidden: int) -> Executor:
    """Return a random model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    return pcg.compile(AutoModelForCausalLM.from_config(config).eval())


def make_requests(executor: Executor, streams: int, tokens: int) -> list[Request]:
    """Return greedy requests with random prompts."""
    random = Random(0)
    prompts = [random.choices(range(VOCABULARY), k=PROMPT) for _ in range(streams)]
    return [executor.request(p, max_new_tokens=tokens, ignore_eos=True) for p in prompts]


def direct(executor: Executor, requests: Sequence[Request]) -> int:
    """Step an engine; return the tokens that came."""
    engine, came = executor.engine(prefix_caching=False), 0
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        came += sum(chunk.token_id is not None for chunk in engine.step())
    return came


def served(
    executor: Executor, requests: Sequence[Request], read: Callable[[list[Stream]], int]
) -> int:
    """Serve requests on the engine's thread; return the tokens that `read` finds."""
    with executor.engine(prefix_caching=False).start() as engine:
        return read(submitted(engine, requests))


def submitted(engine: AsyncEngine, requests: Sequence[Request]) -> list[Stream]:
    """Submit requests so that all of them begin in one step."""
    return engine.call(lambda: [engine.submit_request(one) for one in requests]).result()


async def read_one(stream: Stream) -> int:
    """Return the tokens of a stream, read as they come."""
    return sum([chunk.token_id is not None async for chunk in stream])


async def read_all(streams: Sequence[Stream]) -> int:
    """Return the tokens of streams, with a task for each."""
    return sum(await asyncio.gather(*map(read_one, streams)))


def by_coroutines(streams: list[Stream]) -> int:
    """Read all streams on one event loop."""
    return asyncio.run(read_all(streams))


def by_loops(streams: list[Stream]) -> int:
    """Read half of the streams on each of two event loops."""
    halves = streams[::2], streams[1::2]
    with ThreadPoolExecutor(len(halves)) as threads:
        return sum(threads.map(lambda half: asyncio.run(read_all(half)), halves))


def by_threads(streams: list[Stream]) -> int:
    """Read the streams by a few threads."""
    with ThreadPoolExecutor(READERS) as threads:
        return sum(threads.map(lambda stream: sum(c.token_id is not None for c in stream), streams))


def awaited(streams: list[Stream]) -> int:
    """Wait for the completions alone."""

    async def wait() -> int:
        done = await asyncio.gather(*(stream.completion() for stream in streams))
        return sum(len(completion.token_ids) for completion in done)

    return asyncio.run(wait())


READERS_OF = {
    "coroutines": by_coroutines,
    "loops": by_loops,
    "threads": by_threads,
    "awaited": awaited,
}


def main() -> None:
    """Run all contenders and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"streams": arguments.streams, "tokens": arguments.tokens}
    for name, sizes in MODELS.items():
        executor = make_executor(*sizes)
        requests = make_requests(executor, arguments.streams, arguments.tokens)
        result[f"Llama, {name}"] = measured(executor, requests, arguments.rounds)
    write("streaming", result)


def measured(executor: Executor, requests: Sequence[Request], rounds: int) -> dict[str, Any]:
    """Return the processor time of a token under each contender, and ratios to `direct`."""
    gc.collect()
    gc.freeze()
    wanted = sum(request.params.max_new_tokens for request in requests)

    def token_us(run: Callable[[], int]) -> float:
        started = time.process_time()
        came = run()
        took = time.process_time() - started
        assert came == wanted
        return took / came * 1e6

    runs: dict[str, Callable[[], int]] = {"direct": partial(direct, executor, requests)}
    for name, read in READERS_OF.items():
        runs[name] = partial(served, executor, requests, read)
    found = interleave({name: partial(token_us, run) for name, run in runs.items()}, rounds)
    return {
        "us_a_token": medians(found),
        "to_direct": {name: ratio(found, name, "direct") for name in READERS_OF},
    }


if __name__ == "__main__":
    main()
