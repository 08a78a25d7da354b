"""The machines of three papers in `pcg plan`: FlexLLM v2, S-LoRA and Punica.

The numbers are those of the papers' texts and tables. Nothing is fitted to them: times are those of
data sheets.
"""

from __future__ import annotations

from typing import Any

import harness as bench

from pcg import LoraConfig
from pcg.plan.plan import plan


def _flexllm() -> list[dict[str, Any]]:
    """FlexLLM v2 §8.1: four pipelines of A100s of 80 GB; ShareGPT in single turns."""
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


@bench.case("plan", "of_paper")
def papers() -> dict[str, Any]:
    return {"papers": [*_flexllm(), *_s_lora(), *_punica()]}


if __name__ == "__main__":
    bench.main()
