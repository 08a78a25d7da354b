"""Finetuning steps against transformers + peft, by time, memory and precision.

On one thread. The model of the first two is a random 8-layer Llama of hidden size 512, with LoRA of
rank 16 on all linears: forward, loss, backward and AdamW, on the same tokens as the peer's.

finetuning-…  at a memory budget of 1 (no matrix product recomputed) and at the budget that
              recomputes 62 % of the forward. A process's peak is its resident memory at the most,
              over three steps, less that before the first. `-bfloat16-native` is for a CPU that has
              instructions for bf16.
subsets       LoRA on some layers, or of ranks that differ; seconds of the thread's processor time
lossy         errors of LoRA's gradients, relative to those of transformers + peft in fp64, with
              saved activations in 8 bits, beside those of bf16 alone: the Frobenius norm of the
              difference for each matrix of the adapter, mean and greatest over the layers. Weights
              are bf16 numbers, so that each dtype computes the same function.
peak          resident memory of a CPU step, in a fresh process, against `pcg.explain`'s: a small
              Llama in fp32 with LoRA on all linears and AdamW. A step of a tiny model comes first,
              which loads the libraries' code, and one of 80 tokens, which makes the states.
    measured  = peak over two steps (VmHWM, reset before) - floor before them (VmRSS)
    predicted = activations + workspace + gradients of `pcg.explain`
    process   = the same peak - VmRSS before the model is loaded
    explained = total + allocator_bytes of `pcg.explain --device cpu`
    Contenders: pcg as it is, and with nothing given back to the system but by glibc itself.
peak_cases    errors of predicted peaks, of the bytes of tensors that are alive at once, over random
              models, methods, budgets and steps (`tests.support.measured_memory.drawn_step`)
"""

from __future__ import annotations

import copy
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import harness as bench
import torch
from peft import LoraConfig, get_peft_model

import pcg
from pcg.runtime.data.example import Example

PEER, OURS = "transformers + peft", "pcg"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECOMPUTED = 0.62
BUDGETS = {"budget 1": 1.0, "62 % again": None}
"""pcg's contenders by memory budget; None is the budget that recomputes that share."""
Step = Callable[[], None]


def tokens(batch: int, sequence: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, 31_000, (batch, sequence), generator=generator)


def step_of(backward: Callable[[], object], parameters: list[torch.Tensor]) -> Step:
    """Return a call that runs a step: gradients by a contender, then AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def run() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def our_step(model: Any, ids: torch.Tensor, recipe: Any, budget: float = 1.0) -> Step:
    batch, sequence = ids.shape
    options: Any = {"memory_budget": budget, "batch": batch, "seq": sequence}
    runner = pcg.compile(model, {"mine": recipe}, **options).training_runner("mine")
    examples = [Example(row, row) for row in ids.tolist()]
    backward = partial(runner.forward_backward, examples, batch * (sequence - 1))
    return step_of(backward, list(runner.parameters.values()))


def peer_step(model: Any, ids: torch.Tensor, recipe: Any) -> Step:
    wrapped = get_peft_model(model, recipe).train()
    call = partial(wrapped, input_ids=ids, labels=ids, use_cache=False)
    return step_of(
        lambda: call().loss.backward(), [p for p in wrapped.parameters() if p.requires_grad]
    )


# ------------------------------------------------------------------------------------- finetuning


def budget_of(model: Any, batch: int, sequence: int) -> float:
    """Return the memory budget whose plan recomputes at most that share of the forward."""
    options: Any = {"batch": batch, "seq": sequence, "dtype": str(next(model.parameters()).dtype)}
    low, high = 0.0, 1.0
    for _ in range(7):
        middle = (low + high) / 2
        report = pcg.explain(model, "lora", memory_budget=middle, **options)
        (stage,) = [stage for stage in report.activations if stage.stage == "compressed"]
        low, high = (middle, high) if stage.recompute_flops_ratio > RECOMPUTED else (low, middle)
    return high


def contender(name: str, dtype: str, ids: torch.Tensor) -> Step:
    torch.manual_seed(0)
    model = bench.random_llama().to(getattr(torch, dtype))
    if name == PEER:
        return peer_step(model, ids, LoraConfig(**bench.RECIPE))
    budget = BUDGETS[name]
    return our_step(model, ids, "lora", budget_of(model, *ids.shape) if budget is None else budget)


def peak_mib(name: str, dtype: str, ids: torch.Tensor) -> float:
    """Return the peak of three steps beyond the memory before, in this process."""
    run = contender(name, dtype, ids)
    before = bench.resident("VmRSS")
    for _ in range(3):
        run()
    return round((bench.resident("VmHWM") - before) / 2**20, 1)


def finetuning(dtype: str, rounds: int, batch: int, sequence: int) -> dict[str, Any]:
    ids, names = tokens(batch, sequence), (*BUDGETS, PEER)
    runs = {name: contender(name, dtype, ids) for name in names}
    values = bench.interleave({n: partial(bench.seconds, run) for n, run in runs.items()}, rounds)
    most = {"budget 1": 0.9 if dtype == "float32" else 0.8, "62 % again": 1.15}
    ratios = {f"{n} / {PEER} (at most {most[n]})": bench.ratio(values, n, PEER) for n in BUDGETS}
    del runs
    peaks = {name: bench.fresh(peak_mib, name, dtype, ids) for name in names}
    sizes = {"batch": batch, "sequence": sequence}
    return {**sizes, "seconds_per_step": bench.medians(values), **ratios, "peak_mib": peaks}


@bench.case("finetuning-float32", rounds=1, batch=1, sequence=32)
def finetuning_float32(rounds: int = 7, batch: int = 4, sequence: int = 512) -> dict[str, Any]:
    return finetuning("float32", rounds, batch, sequence)


@bench.case("finetuning-bfloat16", rounds=1, sequence=32)
def finetuning_bfloat16(rounds: int = 7, batch: int = 1, sequence: int = 512) -> dict[str, Any]:
    return finetuning("bfloat16", rounds, batch, sequence)


@bench.case("finetuning-bfloat16-native", rounds=1, sequence=32)
def finetuning_native(rounds: int = 7, batch: int = 1, sequence: int = 512) -> dict[str, Any]:
    return finetuning("bfloat16", rounds, batch, sequence)


# ---------------------------------------------------------------------------------------- subsets

SUBSETS: dict[str, dict[str, Any]] = {
    "every layer": {"target_modules": PROJECTIONS},
    "the last layer": {"target_modules": PROJECTIONS, "layers_to_transform": [7]},
    "the last quarter": {"target_modules": PROJECTIONS, "layers_to_transform": [6, 7]},
    "a layer in the middle": {"target_modules": PROJECTIONS, "layers_to_transform": [3]},
    "a regex": {"target_modules": r".*\.(3|5)\.self_attn\.[qv]_proj|.*\.7\.mlp\.down_proj"},
    "ranks by layer": {
        "target_modules": PROJECTIONS,
        "rank_pattern": {r"layers\.[0-3]\..*": 4, r"layers\.[67]\..*": 32},
    },
}


@bench.case("subsets", rounds=1, batch=1, sequence=32)
def subsets(rounds: int = 7, batch: int = 4, sequence: int = 256) -> dict[str, Any]:
    ids = tokens(batch, sequence)
    result: dict[str, Any] = {"batch": batch, "sequence": sequence}
    for name, fields in SUBSETS.items():
        torch.manual_seed(0)
        model = bench.random_llama()
        recipe = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", **fields)
        ours = our_step(model, ids, recipe)
        runs = {OURS: ours, PEER: peer_step(copy.deepcopy(model), ids, recipe)}
        timed = {one: partial(bench.seconds, run, time.thread_time) for one, run in runs.items()}
        values = bench.interleave(timed, rounds)
        result[name] = {
            "cpu_seconds_per_step": bench.medians(values),
            f"{OURS} / {PEER} (at most 0.9)": bench.ratio(values, OURS, PEER),
        }
    return result


# ------------------------------------------------------------------------------------------ lossy

DTYPES: dict[str, tuple[torch.dtype, str | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "bf16 and fp8": (torch.bfloat16, "fp8"),
    "fp64 and fp8": (torch.float64, "fp8"),
}


@bench.case("lossy", sequence=16)
def lossy(batch: int = 2, sequence: int = 256) -> dict[str, Any]:
    sizes = {"intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 1024}
    model = bench.random_llama(**sizes, tie_word_embeddings=False)
    model = model.to(torch.bfloat16).to(torch.float64)
    ids = torch.randint(0, 1024, (batch, sequence), generator=torch.Generator().manual_seed(2))
    examples = [Example(row, row) for row in ids.tolist()]
    result: dict[str, Any] = {"batch": batch, "sequence": sequence}
    for name, modules in {"every projection": PROJECTIONS, "down_proj": ["down_proj"]}.items():
        recipe = LoraConfig(r=16, lora_alpha=32, target_modules=modules, task_type="CAUSAL_LM")
        wrapped = get_peft_model(copy.deepcopy(model), recipe).eval()
        generator, exact = torch.Generator().manual_seed(1), {}
        for path, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator).double()
                own = path.removeprefix("base_model.model.").removesuffix(".default.weight")
                exact[own] = parameter
        wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        errors = {}
        for contender_name, (dtype, kind) in DTYPES.items():
            ours = pcg.compile(
                copy.deepcopy(model).to(dtype), {"a": recipe}, lossy_activations=kind
            )
            runner = ours.training_runner("a")
            for path, parameter in exact.items():
                runner.parameters[path].data.copy_(parameter.data)
            runner.forward_backward(examples, batch * (sequence - 1))
            by_matrix: dict[str, list[float]] = {}
            for path, parameter in exact.items():
                far = (runner.parameters[path].grad.double() - parameter.grad).norm()
                matrix = " ".join(path.split(".")[-2:])
                by_matrix.setdefault(matrix, []).append(float(far / parameter.grad.norm()))
            errors[contender_name] = {
                matrix: {"mean": _digits(statistics.fmean(some)), "greatest": _digits(max(some))}
                for matrix, some in by_matrix.items()
            }
        result[name] = {"relative_error": errors}
    return result


def _digits(number: float) -> float:
    return float(f"{number:.3g}")


# ------------------------------------------------------------------------------------------- peak

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096,
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
TINY = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
WAYS = ("pcg", "glibc alone")


def resident_step(way: str, budget: float, batch: int, seq: int, layers: int) -> dict[str, float]:
    """Measure a step in this process, which is a fresh one."""
    from pcg import compiler
    from pcg.runtime.memory.host_memory import FreedMemory
    from pcg.runtime.model.random_weights import RandomWeights
    from pcg.runtime.training import runner as training

    recipes = {"a": pcg.LoraConfig(r=8, target_modules="all-linear")}
    options: dict[str, Any] = {"memory_budget": budget, "batch": batch, "seq": seq}
    options["dtype"] = "float32"
    if way != WAYS[0]:
        mock.patch.object(training, "return_freed_memory").start()
        mock.patch.object(FreedMemory, "look").start()

    def stepper(program: Any) -> tuple[Callable[[int, int], None], Any]:
        executor = compiler.make_executor(program, RandomWeights(0.02, 0), recipes, None, "cpu")
        runner = executor.training_runner("a")
        optimizer = torch.optim.AdamW(list(runner.parameters.values()))

        def step(batch: int, seq: int) -> None:
            runner.forward_backward([Example([3] * seq, [3] * seq)] * batch, batch * (seq - 1))
            optimizer.step()
            optimizer.zero_grad()

        return step, executor

    step, _ = stepper(compiler.compile_program({**CONFIG, **TINY}, recipes, **options))
    step(1, 80)
    del step, _
    config = {**CONFIG, "num_hidden_layers": layers}
    report = pcg.explain(config, recipes, device="cpu", **options)
    memory = report.memory_bytes
    program = compiler.compile_program(config, recipes, **options)
    start = bench.resident("VmRSS")
    step, executor = stepper(program)  # which holds the packed copies
    step(1, 80)
    floor = bench.resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    started, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(batch, seq)
    step(batch, seq)
    peak = bench.resident("VmHWM")
    del executor
    fresh = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    predicted = sum(memory[name] for name in ("activations", "workspace", "gradients"))
    return {
        "seconds": (time.process_time() - started) / 2,
        "fresh_pages_mib": fresh * resource.getpagesize() / 2 / 2**20,
        "floor_mib": floor / 2**20,
        "measured_mib": (peak - floor) / 2**20,
        "predicted_mib": predicted / 2**20,
        "process_mib": (peak - start) / 2**20,
        "explained_mib": (memory["total"] + report.allocator_bytes) / 2**20,
        "packed_mib": report.packed_bytes / 2**20,
        "allocator_mib": report.allocator_bytes / 2**20,
    }


@bench.case("peak", rounds=1, budgets=(0.0,), batch=2, seq=128, layers=2)
def peak(
    rounds: int = 3,
    budgets: tuple[float, ...] = (1.0, 0.5, 0.0),
    batch: int = 4,
    seq: int = 512,
    layers: int = 8,
) -> dict[str, Any]:
    found: dict[tuple[float, str], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for budget in budgets:
            for way in WAYS:
                one = bench.fresh(resident_step, way, budget, batch, seq, layers)
                found.setdefault((budget, way), []).append(one)
                bench.note(f"budget {budget:g} {way:<20} {one}")
    rows = []
    for (budget, way), runs in found.items():
        middle = bench.medians_of_rows(runs, 2)
        error = round(middle["measured_mib"] / middle["predicted_mib"] - 1, 3)
        process = round(middle["process_mib"] / middle["explained_mib"], 3)
        row = {"memory_budget": budget, "malloc": way, **middle}
        rows.append({**row, "error": error, "process": process})
    most = max(abs(row["error"]) for row in rows if row["malloc"] == WAYS[0])
    sizes = {"batch": batch, "seq": seq, "dtype": "float32"}
    model = {**CONFIG, "num_hidden_layers": layers}
    key = "largest error of pcg's (at most 10 %)"
    return {"model": model, **sizes, "results": rows, key: most}


def drawn_errors(seeds: list[int]) -> list[dict[str, Any]]:
    sys.path.insert(0, str(bench.ROOT))
    from tests.support.measured_memory import drawn_step

    found = [(seed, *drawn_step(seed)) for seed in seeds]
    return [{"seed": seed, "step": str(one), "error": round(e, 4)} for seed, one, e in found]


@bench.case("peak_cases", cases=1)
def peak_cases(cases: int = 60) -> dict[str, Any]:
    rows = bench.fresh(drawn_errors, list(range(cases)))
    errors = sorted(abs(row["error"]) for row in rows)
    key = "largest error (at most 3 %)"
    return {"cases": cases, key: errors[-1], "median": statistics.median(errors), "results": rows}


if __name__ == "__main__":
    bench.main()
