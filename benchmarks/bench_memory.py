"""Compare what a step saves for backward in pcg, eager, checkpointed and partitioned by torch.

    python benchmarks/bench_memory.py [--skip-partitioner] [--rows 0 1 2 3]

The bases are bf16 and have true shapes without weights; LoRA, batch 1, sequence 1024. Nothing runs:
see `baselines`. A block costs what a model of three layers saves beyond one of two, and the
difference of four and three must be the same; the whole model follows from its number of layers,
and so do its FLOPs and the peak of its step:

    whole = kept(2) + (layers − 2) · block

torch's partitioner mixes its choices over the layers, so it gets the model at its full depth, with
bf16 adapters, with which it saves less; a block is then (kept − logits and loss) / layers. Under
its `activation_memory_budget` b it aims at

    kept + W ≤ M + b · (kept at 1 + W − M)      W: weights that backward reads, M: graph inputs

and M has weights that backward does not read (the embedding, the first block's): a shallow model
keeps less than they weigh, and then every budget is ignored. At full depth none is; nothing of it
is patched but what it knows of attention, see `attention_as_on_cuda`.

`recomputed` is recomputed FLOPs of products and attention, by the forward FLOPs of the blocks as in
`pcg.explain`; `recomputed_of_forward` is by those of the whole forward, the head included. Results:
results/memory.json and results/memory.svg, MiB a block against what is recomputed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from baselines import (
    Case,
    Measured,
    Partitioner,
    build,
    compiled_block,
    prepared,
    step,
)
from measure import RESULTS, write
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

import pcg
from pcg.explain.baselines.partitioner import attention_as_on_cuda
from pcg.explain.baselines.peer_model import MASKLESS
from pcg.pages import charts
from pcg.pages.charts import Axis

LLAMA_8B = "meta-llama/Llama-3.1-8B"
OPT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
CASES = (
    Case(LLAMA_8B, 16, ("down_proj",)),
    Case(LLAMA_8B, 16, "all-linear"),
    Case("meta-llama/Llama-3.1-70B", 16, ("down_proj",)),
    Case("facebook/opt-6.7b", 8, OPT_PROJECTIONS),
)
ADAPTERS = {"fp32 adapters": torch.float32, "bf16 adapters": torch.bfloat16}
"""peft's default over a bf16 base, and the dtype with `autocast_adapter_dtype=False`."""
WAYS = {"sdpa": "eager, SDPA", "eager": "eager attention", "checkpointing": "checkpointing"}
BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.2)
"""torch's budgets between 1, its default, and 0, which saves nothing."""
SHARES = (0.47, 0.62, 0.77)
"""Shares of the forward that are recomputed at most, as torch's partitioner does."""
TINY = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
TINY_LLAMA = {"model_type": "llama", "intermediate_size": 160, "num_key_value_heads": 2, **TINY}
TINY_OPT = {"model_type": "opt", "ffn_dim": 160, "word_embed_proj_dim": 64, **TINY}
COLORS = {"eager": "other", "checkpointing": "optimizer", "torch": "recompute", "pcg": "save"}


def mib(size_bytes: float) -> float:
    """Return bytes in MiB, as results show them."""
    return round(size_bytes / 2**20, 2)


# ------------------------------------------------------------------------------- contenders


def ours(case: Case) -> dict[str, Any]:
    """Return what `pcg.explain` says of each stage, and of each memory budget that pays."""
    found = pcg.explain(case.model, case.lora, batch=case.batch, seq=case.seq).to_json()
    stages = {
        stage["stage"]: {
            "block_mib": mib(stage["bytes_per_block"]),
            "whole_mib": mib(stage["bytes"]),
            "recomputed": round(stage["recompute_flops_ratio"], 4),
        }
        for stage in found["activations"]
    }
    budgets = [
        {
            "block_mib": mib(point["bytes"] / case.layers),  # with our part outside the blocks
            "whole_mib": mib(point["bytes"]),
            "recomputed": round(point["recompute_flops_ratio"], 4),
        }
        for point in found.get("pareto", ())
    ]
    shares = {f"at most {most:.0%} again": within(case, most) for most in SHARES}
    return {"stages": stages, "budgets": budgets, "plans": shares}


def within(case: Case, most: float) -> dict[str, float]:
    """Return the plan that saves least while it recomputes at most this share of the forward."""
    low, high = 0.0, 1.0  # budgets; the higher one makes little enough again
    best: dict[str, float] = {}
    for _ in range(8):
        middle = (low + high) / 2
        report = pcg.explain(
            case.model, case.lora, batch=case.batch, seq=case.seq, memory_budget=middle
        )
        (stage,) = [stage for stage in report.activations if stage.stage == "compressed"]
        if stage.recompute_flops_ratio > most:
            low = middle
            continue
        high = middle
        best = {
            "memory_budget": middle,
            "block_mib": mib(stage.bytes_per_block),
            "whole_mib": mib(stage.bytes),
            "recomputed": round(stage.recompute_flops_ratio, 4),
        }
    return best


def eager(case: Case, adapters: torch.dtype, way: str) -> dict[str, float]:
    """Return MiB that transformers + peft save, by block, outside, in all; and recomputation."""
    steps = _steps(case, adapters, way)
    plain = _steps(case, adapters, "sdpa") if way == "checkpointing" else steps
    block, whole = _at_depth(case, steps, "kept")
    peak = _at_depth(case, steps, "peak")[1]
    # By blocks: checkpointed, peft has the gradient of the embeddings too, which is no repetition.
    again, once = (_at_depth(case, found, "flops")[0] for found in (steps, plain))
    again = case.layers * (again - once)
    of_block, of_forward = _at_depth(case, plain, "forward_flops")
    return {
        "block_mib": mib(block),
        "first_block_mib": mib(steps[0].kept - steps[0].outside - block),
        "outside_mib": mib(steps[0].outside),
        "whole_mib": mib(whole),
        "recomputed": round(again / (case.layers * of_block), 4),
        "recomputed_of_forward": round(again / of_forward, 4),
        "step_peak_mib": mib(peak),
        "peak_beyond_kept_mib": mib(peak - whole),
    }


def _steps(case: Case, adapters: torch.dtype, way: str) -> list[Measured]:
    found = []
    for layers in (2, 3, 4):
        with FakeTensorMode():
            found.append(step(prepared(case, layers, adapters, way), case.ids()))
    return found


def _at_depth(case: Case, steps: Sequence[Measured], name: str) -> tuple[int, int]:
    """Return a quantity of one block, and of the model at its full depth."""
    low, middle, high = (getattr(found, name) for found in steps)
    if high - middle != middle - low:
        raise ValueError(f"{name} of {case.model} is not affine in the layers: {low, middle, high}")
    return middle - low, low + (case.layers - 2) * (middle - low)


def partitioned(case: Case, report: Any) -> list[dict[str, Any]]:
    """Measure the whole model with bf16 adapters under torch's partitioner, at every budget."""
    whole = Partitioner.of(case, case.layers, torch.bfloat16)
    rows: list[dict[str, Any]] = []

    most = 0

    def add(budget: float, attention: str) -> None:
        nonlocal most
        started = time.perf_counter()
        found = whole.partition(budget)
        most = max(most, found.kept)
        blocks = found.forward_flops - found.head_flops
        rows.append(
            {
                "budget": budget,
                "attention": attention,
                "block_mib": mib((found.kept - found.outside) / case.layers),
                "outside_mib": mib(found.outside),
                "whole_mib": mib(found.kept),
                "recomputed": round(found.again_flops / blocks, 4),
                "recomputed_of_forward": round(found.again_flops / found.forward_flops, 4),
                "backward_peak_mib": mib(found.backward_peak),
                "ignored": budget < 1 and found.kept == most,
            }
        )
        report(f"budget {budget}, {attention}: {time.perf_counter() - started:.0f} s, {rows[-1]}")

    with attention_as_on_cuda():
        for budget in (1.0, *BUDGETS, 0.0):
            add(budget, "as on CUDA")
    if case.model == LLAMA_8B:
        for budget in BUDGETS:
            add(budget, "free, as on CPU")
    return rows


def check() -> dict[str, int]:
    """Measure tiny models with real and with fake tensors; return the number of equal pairs.

    Raises:
        ValueError: two differ.
    """
    pairs: list[tuple[Any, Any]] = []
    for config, targets in (
        (TINY_LLAMA, ("down_proj",)),
        (TINY_LLAMA, "all-linear"),
        (TINY_OPT, OPT_PROJECTIONS),
    ):
        case = Case(config, 4, targets, batch=2, seq=16)
        ids = case.ids()
        for adapters in ADAPTERS.values():
            for way in WAYS:
                with FakeTensorMode():
                    fake = step(prepared(case, 3, adapters, way), case.ids())
                with mock.patch("baselines.MASKLESS", "sdpa"):  # with transformers' mask code
                    pairs.append((fake, step(prepared(case, 3, adapters, way), ids)))
            model = build(case, 3, adapters, MASKLESS)
            inputs = [ids, *model.parameters(), *model.buffers()]
            resident = {tensor.untyped_storage()._cdata for tensor in inputs}
            for budget in (1.0, 0.5, 0.0):
                fake_kept = Partitioner.of(case, 3, adapters).partition(budget).kept
                _, *passed = Partitioner.traced(model, ids).partition(budget).forward(*inputs)
                storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in passed}
                real = sum(s.nbytes() for key, s in storages.items() if key not in resident)
                pairs.append((fake_kept, real))
    for fake, real in pairs:
        if fake != real:
            raise ValueError(f"fake tensors give {fake}, real ones {real}")
    return {"fake and real measurements that are equal": len(pairs)}


# ----------------------------------------------------------------------------------- results


def measure(case: Case, with_partitioner: bool) -> dict[str, Any]:
    """Measure all contenders on one case."""
    targets = case.targets if isinstance(case.targets, str) else ", ".join(case.targets)
    name = f"{str(case.model).split('/')[-1]}, r{case.rank} {targets}"

    def report(text: str) -> None:
        print(f"  {name}: {text}", file=sys.stderr)

    result: dict[str, Any] = {"case": name, "layers": case.layers, "ours": ours(case)}
    for way, title in WAYS.items():
        result[title] = {label: eager(case, dtype, way) for label, dtype in ADAPTERS.items()}
    report("eager and checkpointing measured")
    if with_partitioner:
        result["torch.compile, budget 1, block_mib"] = {
            label: mib(compiled_block(case, dtype)) for label, dtype in ADAPTERS.items()
        }
        result["torch partitioner, bf16 adapters"] = partitioned(case, report)
    return result


def points(result: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return contender, name and numbers of each measurement for the table and the plot."""
    rows: list[tuple[str, str, Mapping[str, Any]]] = []
    for title in WAYS.values():
        kind = "checkpointing" if title == "checkpointing" else "eager"
        rows += [(kind, f"{title}, {label}", row) for label, row in result[title].items()]
    for row in result.get("torch partitioner, bf16 adapters", ()):
        free = ", attention free" if "free" in row["attention"] else ""
        ignored = ", ignored" if row["ignored"] else ""
        rows.append(("torch", f"torch, budget {row['budget']}{free}{ignored}", row))
    for name, row in result["ours"]["stages"].items():
        if name not in ("eager", "checkpointing"):  # which are measured above
            rows.append(("pcg", f"pcg, {name}", row))
    rows += [("pcg", f"pcg, {name}", row) for name, row in result["ours"]["plans"].items()]
    rows += [("pcg", "pcg, memory budget", row) for row in result["ours"]["budgets"]]
    return rows


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return the results as a table."""
    shown = Table("case", "contender", title="MiB kept for backward")
    shown.caption = "peak: of a step; for torch's partitioner of its backward graph, not fused"
    for heading in ("a block", "outside", "whole model", "peak", "recomputed"):
        shown.add_column(heading, justify="right")
    for result in results:
        name = result["case"]
        compiled = result.get("torch.compile, budget 1, block_mib", {})
        rows = [(f"torch.compile, {label}", {"block_mib": row}) for label, row in compiled.items()]
        for title, row in [(title, row) for _, title, row in points(result)] + rows:
            peak = row.get("step_peak_mib", row.get("backward_peak_mib"))
            sizes = (row["block_mib"], row.get("outside_mib"), row.get("whole_mib"), peak)
            cells = ["" if size is None else f"{size:,.1f}" for size in sizes]
            shown.add_row(name, title, *cells, f"{row.get('recomputed', 0):.1%}")
            name = ""
        shown.add_section()
    return shown


def plot(results: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG with a panel a case: MiB a block against the recomputed share of the blocks."""
    rows, title = (len(results) + 1) // 2, "MiB a block kept for backward, against the share"
    title += " of its forward that is computed again"
    labels = {"eager": "eager, SDPA", "torch": "torch's partitioner"}
    marks = {labels.get(kind, kind): charts.mark(0, 0, color) for kind, color in COLORS.items()}
    height = 270 * rows + 80
    parts = [charts.text(14, 20, title, "start", "ink")]
    for place, result in enumerate(results):
        parts += _panel(result, 450 * (place % 2), 60 + 270 * (place // 2))
    parts.append(charts.legend(marks, 14, height - 12, 600)[0])
    note = "hollow: fp32 adapters, or attention taken for free"
    parts.append(charts.text(880, height - 12, note, "end"))
    return charts.svg_file(900, height, title, parts)


def _panel(result: Mapping[str, Any], left: float, top: float) -> list[str]:
    found = [mark for mark in points(result) if "eager attention" not in mark[1]]
    x = Axis(-0.02, 1.1, left + 56, left + 436)
    y = Axis(0, 1.06 * max(row["block_mib"] for *_, row in found), top + 216, top)
    parts = [charts.text(left + 56, top - 8, result["case"], "start", "ink")]
    parts.append(charts.grid(x, y, charts.ticks(x, 5, percent=True), charts.ticks(y, 5)))
    for kind, color in COLORS.items():
        marks = [(name, row) for one, name, row in found if one == kind]
        budgets = [row for name, row in marks if _on_line(name)]
        line = sorted((row["recomputed"], -row["block_mib"]) for row in budgets)
        if line:
            parts.append(charts.line([(share, -size) for share, size in line], x, y, color))
        for name, row in sorted(marks, key=lambda mark: not _is_hollow(mark[0])):
            words = f"{name}: {row['block_mib']} MiB, {row['recomputed']:.1%}"
            place = x(row["recomputed"]), y(row["block_mib"])
            parts.append(charts.mark(*place, color, title=words, hollow=_is_hollow(name)))
    return parts


def _on_line(name: str) -> bool:
    """True if a point lies on its contender's line: a budget, of the partitioner as on CUDA."""
    return "budget" in name and "free" not in name


def _is_hollow(name: str) -> bool:
    return "free" in name or "fp32" in name


def main() -> None:
    """Measure, print the table, write the results and the plot."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip-partitioner", action="store_true", help="which takes minutes")
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(CASES)), help="of CASES")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # of torch's own code
    checked = check()
    results = [measure(CASES[row], not arguments.skip_partitioner) for row in arguments.rows]
    fields = {"batch": 1, "seq": 1024, "dtype": "bfloat16", "check": checked, "results": results}
    write("memory", fields)
    (RESULTS / "memory.svg").write_text(plot(results))
    Console(width=140).print(table(results))


if __name__ == "__main__":
    main()
