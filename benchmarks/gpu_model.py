"""Whole steps of a model with the shape of Llama-3.1-8B and random bf16 weights, by pcg's calls.

    decode     a step of an engine that serves, against the time to read weights, keys and values;
               replayed from a graph, and beside it eager: launched by the host
    prefill    prompts, against their FLOPs
    finetune   a step, against transformers + peft: as it is, checkpointed, and compiled
    serve      what `pcg bench serve` measures, with a finetuning job beside and without

Times are of the host's clock with the device idle before and after: a step's own work on the host
is in them. Peaks are all that torch has allocated, weights among it; each contender is alone.
"""

from __future__ import annotations

import gc
import json
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import gpu_work as work
from gpu_case import Bench, Case, Row, Setting

CONFIG = Path(__file__).parent.parent / "pcg/configs/meta-llama--Llama-3.1-8B.json"
RANK = 16
RECIPE: dict[str, Any] = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
ADAPTERS = 32
CONTEXT = 512
"""Tokens of a prompt in decode."""
STEPS = 32
"""Decode steps of a median."""
EAGER_STEPS = 8
"""Decode steps of a median where the host launches them."""
KV_CACHE_BYTES = 20 * 2**30
"""Size of a pool: 128 sequences of 640 tokens take 10 GiB, 32 adapters in fp32 five."""
VOCABULARY = 100_000
"""Token ids of prompts are below it."""
FINETUNED = (4, 1024)
"""Sequences of a step, and tokens of each."""


@cache
def config() -> dict[str, Any]:
    """The config.json that pcg ships."""
    found: dict[str, Any] = json.loads(CONFIG.read_text())
    return found


class DeviceWeights:
    """Random weights that are made on the device, where eight billion take a second."""

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        transposed: bool = False,
        device: Any = "cpu",
        ranges: Sequence[tuple[int, int]] | None = None,
        out: Any = None,
    ) -> Any:
        """A tensor, or a part of it, in `out` if it is given: normal matrices, and ones."""
        import torch

        if ranges is not None:
            shape = [stop - start for start, stop in ranges]
        if out is None:
            out = torch.empty(*shape, dtype=dtype, device=device)
        return out.fill_(1.0) if len(shape) < 2 else out.normal_(0, 0.02)

    def shared(self, name: str, *place: object) -> None:
        """None: no tensor is there before it is made."""


def executor_of(bench: Bench, peft: object = None, **options: Any) -> Any:
    """An executor of the model with the triton backend."""
    from pcg.compiler import compile_program, make_executor

    program = compile_program(config(), peft, dtype="bfloat16", backend="triton", **options)
    return make_executor(program, DeviceWeights(), peft, None, bench.device)


def with_adapters(executor: Any, count: int) -> list[str]:
    """Add so many adapters whose B is not zero; their names."""
    names = [f"adapter-{index}" for index in range(count)]
    for seed, name in enumerate(names):
        adapter = executor.add_adapter(name, {"peft_type": "LORA", **RECIPE}, seed=seed)
        for weights in adapter.weights.values():
            weights.b.normal_(0, 0.02)
    return names


def _prompts(count: int, tokens: int) -> list[list[int]]:
    drawn = Random(0)
    return [[drawn.randrange(5, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


# ---------------------------------------------------------------------------------------- decode


def decode_settings(bench: Bench) -> Iterator[Setting]:
    """A decode step at four batches with 0, 1 and 32 adapters, and prompts of three sizes."""
    executor = executor_of(bench, "lora")
    names = with_adapters(executor, ADAPTERS)
    base_us: dict[int, float] = {}
    for batch in (32,) if bench.quick else (32, 1, 8, 128):
        for distinct in (0, ADAPTERS, 1):
            if distinct <= batch:
                yield (
                    f"batch {batch}, {distinct} adapters",
                    lambda b=batch, d=distinct: _decode(bench, executor, b, names[:d], base_us),
                )
    for batch, tokens in ((1, 4096),) if bench.quick else ((1, 512), (1, 4096), (8, 2048)):
        yield (
            f"prefill, {batch} of {tokens} tokens",
            lambda b=batch, t=tokens: _prefill(bench, executor, b, t),
        )


def _engine(executor: Any, tokens: int) -> Any:
    from pcg.runtime.engine.limits import Limits
    from pcg.runtime.engine.sharing import InferenceOnly

    gc.collect()  # the pool of the engine before this one
    return executor.engine(
        Limits(tokens=tokens),
        kv_cache_bytes=KV_CACHE_BYTES,
        sharing=InferenceOnly(),
        prefix_caching=False,
    )


def _decode(
    bench: Bench, executor: Any, batch: int, names: Sequence[str], base_us: dict[int, float]
) -> Row:
    from pcg.runtime.model import step_graphs

    engine = _engine(executor, 8192)
    for i, prompt in enumerate(_prompts(batch, CONTEXT)):
        adapter = names[i % len(names)] if names else None
        sampling = {"max_new_tokens": 64 + 2 * STEPS, "ignore_eos": True}
        engine.submit(executor.request(prompt, adapter, **sampling))
    begun: set[int] = set()
    while len(begun) < batch:
        begun.update(chunk.index for chunk in engine.step())
    warm = step_graphs.EAGER_STEPS + 4
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
    shape = work.LlamaShape.of(config())
    size = 4 if executor.adapter_dtype == "f32" else 2
    needed = work.decode_work(shape, batch, seen, len(names), RANK, size)
    setting = f"batch {batch}, {len(names)} adapters"
    row = bench.row("decode", setting, ours_us, needed, peers_us=peers_us)
    if not names:
        base_us[batch] = ours_us
    return _decode_aimed(row, batch, len(names), base_us)


def _median_us(engine: Any, batch: int, steps: int) -> float:
    """The median time of decode steps of an engine."""
    took_us = []
    for _ in range(steps):
        chunks, seconds = _timed(engine.step)
        if len(chunks) != batch:
            raise AssertionError(f"a step gave {len(chunks)} tokens to {batch} sequences")
        took_us.append(1e6 * seconds)
    return statistics.median(took_us)


def _decode_aimed(row: Row, batch: int, distinct: int, base_us: Mapping[int, float]) -> Row:
    assert row.ours_us is not None
    assert row.floor_us is not None
    if batch == 32 and not distinct:
        ratio = row.ours_us / row.floor_us
        return replace(row, target="1.25 of the floor", reached=ratio, met=ratio <= 1.25)
    if batch == 32 and distinct == 32 and batch in base_us:
        ratio = row.ours_us / base_us[batch]
        return replace(row, target="1.08 of no adapter", reached=ratio, met=ratio <= 1.08)
    return row


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the seconds until the device is idle after it."""
    import torch

    torch.cuda.synchronize()
    started = perf_counter()
    found = run()
    torch.cuda.synchronize()
    return found, perf_counter() - started


def _prefill(bench: Bench, executor: Any, batch: int, tokens: int) -> Row:
    took_us = []
    for _ in range(4):
        engine = _engine(executor, batch * tokens)
        for prompt in _prompts(batch, tokens):
            engine.submit(executor.request(prompt, None, max_new_tokens=1, ignore_eos=True))
        chunks, seconds = _timed(engine.step)
        if len(chunks) != batch:
            raise AssertionError(f"a step gave {len(chunks)} tokens to {batch} prompts")
        took_us.append(1e6 * seconds)
    needed = work.prefill_work(work.LlamaShape.of(config()), batch, tokens)
    setting = f"prefill, {batch} of {tokens} tokens"
    return bench.row("decode", setting, statistics.median(took_us[1:]), needed)


# -------------------------------------------------------------------------------------- finetune

PEERS = ("eager", "checkpointing", "torch.compile")


def finetune_settings(bench: Bench) -> Iterator[Setting]:
    """A step of LoRA on all linears, against transformers + peft; time and peak memory."""
    found: dict[str, tuple[float, int]] = {}
    for peer in PEERS[:2] if bench.quick else PEERS:
        yield f"against {peer}", lambda peer=peer: _finetune(bench, peer, found)


def _finetune(bench: Bench, peer: str, found: dict[str, tuple[float, int]]) -> Row:
    if "ours" not in found:
        found["ours"] = _step_of(lambda: _our_step(bench))
    ours_us, ours_bytes = found["ours"]
    peer_us, peer_bytes = _step_of(lambda: _peer_step(bench, peer))
    needed = work.finetune_work(work.LlamaShape.of(config()), *FINETUNED, RANK)
    row = bench.row("finetune", f"against {peer}", ours_us, needed, peers_us={peer: peer_us})
    row = replace(row, ours_bytes=ours_bytes, peers_bytes={peer: peer_bytes})
    if peer == "torch.compile":
        return row
    # Both have to be below: what is further from it counts.
    reached = max(ours_us / peer_us, ours_bytes / peer_bytes)
    return replace(
        row, target="below its time and its peak memory", reached=reached, met=reached < 1
    )


def _step_of(make: Callable[[], Callable[[], object]]) -> tuple[float, int]:
    """Microseconds and peak bytes of a step; what it takes is free again behind it."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    run = make()
    for _ in range(2):
        run()
    torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(_timed(run)[1] for _ in range(3))
    peak = torch.cuda.max_memory_allocated() - left
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return 1e6 * seconds, peak


def _our_step(bench: Bench) -> Callable[[], object]:
    import torch

    from pcg.runtime.data.example import Example

    batch, tokens = FINETUNED
    recipes = {"mine": {"peft_type": "LORA", **RECIPE}}
    executor = executor_of(bench, recipes, batch=batch, seq=tokens)
    runner = executor.training_runner("mine")
    examples = [Example(row, row) for row in _prompts(batch, tokens)]
    optimizer = torch.optim.AdamW(list(runner.parameters.values()), lr=1e-4)

    def run() -> None:
        runner.forward_backward(examples, batch * (tokens - 1))
        optimizer.step()
        optimizer.zero_grad()

    return run


def _peer_step(bench: Bench, how: str) -> Callable[[], object]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device(bench.device):
        base = AutoModelForCausalLM.from_config(LlamaConfig(**config()), dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(**RECIPE)).train()
    if how == "checkpointing":
        model.enable_input_require_grads()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers 6 will have another name for it
            base.gradient_checkpointing_enable({"use_reentrant": False})
    if how == "torch.compile":
        for layer in base.model.layers:  # one by one: they share what is compiled
            layer.compile()
    ids = torch.tensor(_prompts(*FINETUNED), device=bench.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def run() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


# ----------------------------------------------------------------------------------------- serve

REQUESTS_A_S = 8.0
SERVED_S = 10.0
PROMPT_TOKENS = (64, 512)
NEW_TOKENS = (32, 128)


def serve_settings(bench: Bench) -> Iterator[Setting]:
    """Requests of 32 adapters for ten seconds, alone and beside a finetuning job."""
    executor = executor_of(bench, "lora")
    with_adapters(executor, ADAPTERS)
    for trains in (False, True):
        setting = "beside finetuning" if trains else "alone"
        yield setting, lambda trains=trains: _serve(executor, trains, ADAPTERS)


def _serve(executor: Any, trains: bool, adapters: int) -> Row:
    from pcg.runtime.data.example import Example
    from pcg.runtime.engine.limits import Limits
    from pcg.runtime.engine.sharing import CoServing, InferenceOnly
    from pcg.simulate.replay import replay
    from pcg.simulate.workloads.arrivals import Poisson
    from pcg.simulate.workloads.lengths import Between
    from pcg.simulate.workloads.popularity import PowerLaw
    from pcg.simulate.workloads.synthetic import assign_adapters, synthetic

    count = int(REQUESTS_A_S * SERVED_S)
    lengths = Between(*PROMPT_TOKENS), Between(*NEW_TOKENS)
    workload = synthetic(Poisson(REQUESTS_A_S), *lengths, seed=0, requests=count)
    workload = assign_adapters(workload, PowerLaw(adapters, 1.0), seed=0)
    engine = executor.engine(
        Limits(tpot_slo_s=0.05, ttft_slo_s=5.0),
        kv_cache_bytes=KV_CACHE_BYTES,
        sharing=CoServing() if trains else InferenceOnly(),
    )
    if trains:
        rows = _prompts(16, FINETUNED[1])
        engine.finetune(
            [Example(row, row) for row in rows], "trained", peft={"peft_type": "LORA", **RECIPE},
            max_steps=10**6, batch_size=2,
        )  # fmt: skip
    report = replay(engine, workload, executor.adapters, config()["vocab_size"])
    for job in list(engine.jobs):
        engine.cancel_job(job.name)
    setting = "beside finetuning" if trains else "alone"
    found = report.to_json()
    return Row("serve", setting, note=_summary(found), details=found)


def _summary(report: Mapping[str, Any]) -> str:
    """The note on a report in the table."""
    return (
        f"{report['output_throughput']:,.0f} tokens/s out, "
        f"median TTFT {report['median_ttft_ms'] or 0:.0f} ms, "
        f"TPOT {report['median_tpot_ms'] or 0:.1f} ms, "
        f"SLOs attained {report['slo_attainment'] or 0:.1%}, "
        f"gaps within theirs {report['gap_attainment'] or 0:.1%}, "
        f"finetuning {report['finetuning_throughput']:,.0f} tokens/s"
    )


CASES = (
    Case("decode", 115, decode_settings),
    Case("finetune", 95, finetune_settings),
    Case("serve", 50, serve_settings),
)
