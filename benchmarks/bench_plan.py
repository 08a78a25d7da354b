"""Measure how long `pcg plan` takes for all models, and compare it with the papers' machines.

    python benchmarks/bench_plan.py [--processes 2] [--only-papers]

Each of the models that ship is planned for six GPUs, up to eight of one kind, for finetuning beside
requests; a model that pcg does not finetune serves alone. The time is that from the start of the
processes to the last answer, imports and tracing included; no cache is kept between runs. Where
other work shares the cores, as the load average says, CPU seconds of the processes say more.

The papers' machines are those of FlexLLM v2 §8.1, S-LoRA §7.2 and Punica §7.2, with the numbers of
their texts and tables. Nothing is fitted to them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from measure import write

from pcg.errors import UnsupportedError

GPUS = ("A10G", "A100-40", "A100-80", "H100", "H200", "L40S")
WORKLOAD = "train:4x1024,serve:4req/s"
TPOT_MS = 75.0


def planned(model: str) -> dict[str, Any]:
    """Return the answer for one model, and the seconds that it took."""
    from pcg.plan.plan import plan

    started, cpu, workload = time.perf_counter(), time.process_time(), WORKLOAD
    try:
        found = plan(model, workload=workload, gpus=GPUS, tpot_slo_ms=TPOT_MS)
    except UnsupportedError:
        workload = WORKLOAD.partition(",")[2]
        found = plan(model, workload=workload, gpus=GPUS, tpot_slo_ms=TPOT_MS)
    chosen = found.chosen
    return {
        "model": model,
        "workload": workload,
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "machines": found.candidates,
        "kept": found.kept,
        "front": len(found.front),
        "chosen": None if chosen is None else str(chosen.machine),
    }


def all_models(processes: int) -> dict[str, Any]:
    """Plan all models that ship, on so many processes."""
    from pcg.source import shipped

    # The largest first, so that no process is left with one of them at the end.
    models = sorted(shipped(), key=lambda name: (not any(s in name for s in _LARGE), name))
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        rows = list(pool.map(planned, models))
    seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "gpus": GPUS,
        "processes": processes,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "models": sorted(rows, key=lambda row: str(row["model"])),
    }


_LARGE = ("70", "72B", "65b", "40b", "32B", "30b", "27b")


# ------------------------------------------------------------------------------------- papers


def papers() -> list[dict[str, Any]]:
    """Return each machine of the papers, as `pcg plan` sees it."""
    return [*_flexllm(), *_s_lora(), *_punica()]


def _flexllm() -> list[dict[str, Any]]:
    """FlexLLM v2 §8.1: four pipelines of A100s of 80 GB; ShareGPT in single turns."""
    from pcg import LoraConfig

    lora = LoraConfig(r=16, lora_alpha=32, target_modules=("down_proj",))
    cases = (
        ("meta-llama/Llama-3.1-8B", 1, 50.0, {4: 9400, 20: 7200}),
        ("Qwen/Qwen2.5-14B", 2, 75.0, {4: 3700, 20: 2200}),
        ("Qwen/Qwen2.5-32B", 4, 75.0, {4: 3200, 20: 2200}),
    )
    rows = []
    for model, tp, tpot_ms, paper in cases:
        for rate, tokens_per_s in paper.items():
            options = {
                "workload": f"train:1x8192,serve:{rate}req/s",
                "gpus": ("A100-80",),
                "max_gpus": 4 * tp,
                "tpot_slo_ms": tpot_ms,
                "ttft_slo_ms": 5000.0,
            }
            row = _row("FlexLLM v2 §8.1", model, lora, options, tp, 4)
            rows.append(_against(row, "finetuning_tokens_per_s", tokens_per_s))
    return rows


def _s_lora() -> list[dict[str, Any]]:
    """S-LoRA §7.2: table 3's requests a second; table 2's rates on its smaller GPUs."""
    from pcg import LoraConfig

    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    cases = (
        ("huggyllama/llama-7b", "A100-80", 8, 5, 10.0, 8.05),
        ("huggyllama/llama-13b", "A100-80", 64, 2, 6.0, 4.49),
        ("huggyllama/llama-7b", "A10G", 8, 5, 2.0, None),
        ("huggyllama/llama-13b", "A100-40", 64, 2, 2.0, None),
    )
    rows = []
    for model, gpu, rank, adapters, rate, paper in cases:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        options = {
            "workload": f"serve:{rate:g}req/s:260x260",
            "gpus": (gpu,),
            "max_gpus": 1,
            "adapters": adapters,
            "ttft_slo_ms": 6000.0,
        }
        row = _row("S-LoRA §7.2", model, lora, options, 1, 1)
        rows.append(row if paper is None else _against(row, "sustained_requests_per_s", paper))
    return rows


def _punica() -> list[dict[str, Any]]:
    """Punica §7.2: 1,000 requests of 101 tokens each, batches of up to 32, one adapter each."""
    cases = (
        ("meta-llama/Llama-2-7b-hf", "A100-80", 1, 1044),
        ("meta-llama/Llama-2-13b-hf", "A100-80", 1, 693),
        ("meta-llama/Llama-2-70b-hf", "A100-40", 8, 443),
    )
    rows = []
    for model, gpu, tp, paper in cases:
        options = {
            "workload": "serve:1req/s:161x101",
            "gpus": (gpu,),
            "max_gpus": tp,
            "max_num_seqs": 32,
            "adapters": 32,
        }
        row = _row("Punica §7.2", model, "lora", options, tp, 1)
        row["sustained_output_tokens_per_s"] = 101 * row["sustained_requests_per_s"]
        rows.append(_against(row, "sustained_output_tokens_per_s", paper))
    return rows


def _row(
    paper: str, model: str, peft: object, options: dict[str, Any], tp: int, replicas: int
) -> dict[str, Any]:
    """Return the paper's machine as it is planned, and the machine that is chosen instead."""
    from pcg.plan.plan import plan

    free = plan(model, peft, **options)
    own = plan(model, peft, **{**options, "tp": (tp,)})
    there = [one for one in own.front if one.machine.replicas == replicas]
    found = there[0].to_json() if there else None
    return {
        "paper": paper,
        "model": model,
        "machine": f"{tp * replicas}×{options['gpus'][0]} tp={tp}",
        "workload": options["workload"],
        "fits_and_keeps": bool(there),
        "chosen": None if free.chosen is None else str(free.chosen.machine),
        **{name: None if found is None else found[name] for name in _NUMBERS},
        "gib_a_rank": None if found is None else found["memory_bytes"]["total"] / 2**30,
    }


_NUMBERS = ("tpot_s", "ttft_s", "finetuning_tokens_per_s", "sustained_requests_per_s")


def _against(row: dict[str, Any], name: str, paper: float) -> dict[str, Any]:
    found = row[name]
    return {**row, "paper_number": paper, "of_paper": None if found is None else found / paper}


def main() -> None:
    """Measure, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only-papers", action="store_true")
    asked = parser.parse_args()
    result: dict[str, Any] = {} if asked.only_papers else all_models(asked.processes)
    result["papers"] = papers()
    write("plan", result)


if __name__ == "__main__":
    main()
