"""Decode steps and prompts of a model with the shape of Llama-3.1-8B, by pcg's calls.

    decode     a step of an engine that serves, against the time to read weights, keys and values;
               replayed from a graph, and beside it eager: launched by the host
    prefill    prompts, against their FLOPs

Both without adapters, and with some in the pages of the engine's arena. Times are as in
`gpu_model.py`.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import gpu_model as model
import gpu_work as work
from gpu_case import Bench, Case, Row, Setting

CONTEXT = 512
"""Tokens of a prompt in decode."""
STEPS = 32
"""Decode steps of a median."""
EAGER_STEPS = 8
"""Decode steps of a median where the host launches them."""
BATCHES = (32, 1, 8, 128)
"""Sequences of a decode step, those of the goals first."""
HIGH_RANK = 256
"""Rank of the one adapter that is far larger than the others."""
PROMPTS = ((8, 1024), (1, 512), (1, 4096))
"""Prompts of a step, and tokens of each; with and without an adapter for each."""


def decode_settings(bench: Bench) -> Iterator[Setting]:
    """A decode step at four batches with 0, 1 and 32 adapters, and prompts of three sizes."""
    executor = model.executor_of(bench, "lora")
    names = model.with_adapters(executor, model.ADAPTERS)
    high = model.with_adapters(executor, 1, HIGH_RANK)
    among = [*names[: model.ADAPTERS - 1], *high]
    base_us: dict[str, float] = {}
    for batch in BATCHES[:1] if bench.quick else BATCHES:
        for distinct in (0, model.ADAPTERS, 1):
            if distinct <= batch:
                yield (
                    f"batch {batch}, {distinct} adapters",
                    lambda b=batch, d=distinct: _decode(bench, executor, b, names[:d], base_us),
                )
        if batch == BATCHES[0]:
            yield from _prefills(bench, executor, names, PROMPTS[0], base_us)
            yield (
                f"batch {batch}, one of rank {HIGH_RANK}",
                lambda b=batch: _decode(bench, executor, b, among, base_us),
            )
    for prompts in () if bench.quick else PROMPTS[1:]:
        yield from _prefills(bench, executor, names, prompts, base_us)


def _prefills(
    bench: Bench,
    executor: Any,
    names: Sequence[str],
    prompts: tuple[int, int],
    base_us: dict[str, float],
) -> Iterator[Setting]:
    for own in ([], names[: prompts[0]]):
        yield (
            _prefill_setting(prompts, own),
            lambda own=own: _prefill(bench, executor, prompts, own, base_us),
        )


def _prefill_setting(prompts: tuple[int, int], names: Sequence[str]) -> str:
    return f"prefill, {prompts[0]} of {prompts[1]} tokens, {len(names)} adapters"


def _engine(executor: Any, tokens: int) -> Any:
    from pcg.runtime.engine.limits import Limits
    from pcg.simulate.papers.sharing_rules import InferenceOnly

    gc.collect()  # the pool of the engine before this one
    return executor.engine(
        Limits(tokens=tokens),
        kv_cache_bytes=model.KV_CACHE_BYTES,
        sharing=InferenceOnly(),
        prefix_caching=False,
    )


def _decode(
    bench: Bench, executor: Any, batch: int, names: Sequence[str], base_us: dict[str, float]
) -> Row:
    from pcg.runtime.model import step_graphs

    engine = _engine(executor, 8192)
    for i, prompt in enumerate(model.prompts_of(batch, CONTEXT)):
        adapter = names[i % len(names)] if names else None
        sampling = {"max_new_tokens": 64 + 2 * STEPS, "ignore_eos": True}
        engine.submit(executor.request(prompt, adapter, **sampling))
    begun: set[int] = set()
    while len(begun) < batch:
        for chunk in engine.step():
            if chunk.error is not None:
                raise chunk.error
            begun.add(chunk.index)
    warm = step_graphs.EAGER_STEPS + 2
    for _ in range(warm):  # kernels are compiled, the graph is recorded
        engine.step()
    graphs = engine.device.graphs
    replayed = 0 if graphs is None else graphs.replayed
    ours_us = _median_us(engine, batch, STEPS)
    peers_us = {}
    if graphs is not None and graphs.recorder is not None:
        if graphs.replayed - replayed != STEPS:
            raise AssertionError(f"{graphs.replayed - replayed} of {STEPS} steps were replayed")
        graphs.recorder = None
        engine.step()
        peers_us["eager"] = _median_us(engine, batch, EAGER_STEPS)
    seen = CONTEXT + warm + STEPS // 2
    adapters = _adapter_work(executor, names)
    needed = work.decode_work(work.LlamaShape.of(model.config()), batch, seen, 0, 0, 0) + adapters
    ranks = {executor.adapters[name].recipe.rank for name in names}
    kind = f"one of rank {HIGH_RANK}" if HIGH_RANK in ranks else f"{len(names)} adapters"
    row = bench.row("decode", f"batch {batch}, {kind}", ours_us, needed, peers_us=peers_us)
    if not names:
        base_us[f"batch {batch}"] = ours_us
    if batch != BATCHES[0] or len(names) not in (0, model.ADAPTERS):
        return row
    return _decode_aimed(bench, row, adapters if names else None, base_us.get(f"batch {batch}"))


def _adapter_work(executor: Any, names: Sequence[str]) -> work.Work:
    """The adapters once, in the dtype that they are served in."""
    ranks = sum(executor.adapters[name].recipe.rank for name in names)
    size = executor.serving.tables.lora.element_bytes
    elements = work.LlamaShape.of(model.config()).adapter_elements(ranks)
    return work.Work(size * elements, 2 * elements)


def _median_us(engine: Any, batch: int, steps: int) -> float:
    """The median time of decode steps of an engine."""
    took_us = []
    for _ in range(steps):
        chunks, seconds = model.timed(engine.step)
        if len(chunks) != batch:
            raise AssertionError(f"a step gave {len(chunks)} tokens to {batch} sequences")
        took_us.append(1e6 * seconds)
    return statistics.median(took_us)


def _decode_aimed(bench: Bench, row: Row, adapters: work.Work | None, base_us: float | None) -> Row:
    """A decode step with its goal: the floor, or for adapters what their own bytes take."""
    assert row.ours_us is not None
    assert row.floor_us is not None
    if adapters is None:
        ratio = row.ours_us / row.floor_us
        return replace(row, target="at most 1.25 of the floor", reached=ratio, met=ratio <= 1.25)
    target = "adapters at most 1.25 of their bytes"
    if base_us is None:
        return replace(row, target=target)
    ratio = (row.ours_us - base_us) / bench.ceilings.floor_us(work.Work(adapters.bytes))
    return replace(row, target=target, reached=ratio, met=ratio <= 1.25)


def _prefill(
    bench: Bench,
    executor: Any,
    prompts: tuple[int, int],
    names: Sequence[str],
    base_us: dict[str, float],
) -> Row:
    batch, tokens = prompts
    took_us = []
    for _ in range(4):
        engine = _engine(executor, batch * tokens)
        for i, prompt in enumerate(model.prompts_of(batch, tokens)):
            adapter = names[i] if names else None
            engine.submit(executor.request(prompt, adapter, max_new_tokens=1, ignore_eos=True))
        chunks, seconds = model.timed(engine.step)
        if len(chunks) != batch:
            raise AssertionError(f"a step gave {len(chunks)} tokens to {batch} prompts")
        took_us.append(1e6 * seconds)
    elements = work.LlamaShape.of(model.config()).adapter_elements(model.RANK)
    own = work.Work(_adapter_work(executor, names).bytes, 2 * tokens * len(names) * elements)
    needed = work.prefill_work(work.LlamaShape.of(model.config()), batch, tokens) + own
    ours_us = statistics.median(took_us[1:])
    row = bench.row("decode", _prefill_setting(prompts, names), ours_us, needed)
    if not names:
        base_us[f"prefill {prompts}"] = ours_us
    if prompts != PROMPTS[0] or not names:
        return row
    target, alone_us = "at most 1.15 of no adapters", base_us.get(f"prefill {prompts}")
    if alone_us is None:
        return replace(row, target=target)
    ratio = ours_us / alone_us
    return replace(row, target=target, reached=ratio, met=ratio <= 1.15)


CASES = (Case("decode", 200, decode_settings),)
