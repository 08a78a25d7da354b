"""Whole steps of a model with the shape of Llama-3.1-8B and random bf16 weights, by pcg's calls.

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
KV_CACHE_BYTES = 20 * 2**30
"""Size of a pool: 128 sequences of 640 tokens take 10 GiB, 32 adapters in bf16 two and a half."""
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

    def remote(self, *_: object) -> None:
        """None: no other process multiplies by a weight."""

    def release(self) -> None:
        """Do nothing: no file is open."""


def executor_of(bench: Bench, peft: object = None, **options: Any) -> Any:
    """An executor of the model with the triton backend."""
    from pcg.compiler import compile_program, make_executor

    program = compile_program(config(), peft, dtype="bfloat16", backend="triton", **options)
    return make_executor(program, DeviceWeights(), peft, None, bench.device)


def with_adapters(executor: Any, count: int, rank: int = RANK) -> list[str]:
    """Add so many adapters whose B is not zero; their names.

    They have the same numbers, in host memory once, and on the device each has its own copies.
    """
    kind = "adapter" if rank == RANK else f"rank-{rank}"
    names = [f"{kind}-{index}" for index in range(count)]  # as workloads have them
    first = executor.add_adapter(names[0], {"peft_type": "LORA", **RECIPE, "r": rank})
    for weights in first.weights.values():
        weights.b.normal_(0, 0.02)
    for name in names[1:]:
        executor.state.put_adapter(replace(first, name=name))
    return names


def prompts_of(count: int, tokens: int) -> list[list[int]]:
    """Prompts of random tokens, the same at each call."""
    drawn = Random(0)
    return [[drawn.randrange(5, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the seconds until the device is idle after it."""
    import torch

    torch.cuda.synchronize()
    started = perf_counter()
    found = run()
    torch.cuda.synchronize()
    return found, perf_counter() - started


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
    seconds = statistics.median(timed(run)[1] for _ in range(3))
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
    examples = [Example(row, row) for row in prompts_of(batch, tokens)]
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
    ids = torch.tensor(prompts_of(*FINETUNED), device=bench.device)
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
    from pcg.runtime.engine.sharing import CoServing
    from pcg.simulate.papers.sharing_rules import InferenceOnly
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
        warm_up=True,
    )
    if trains:
        rows = prompts_of(16, FINETUNED[1])
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
    Case("finetune", 140, finetune_settings),
    Case("serve", 70, serve_settings),
)
