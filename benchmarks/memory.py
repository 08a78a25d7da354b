"""Activation memory: what a step saves for backward in pcg, eager, checkpointed and partitioned.

The bases are bf16 and have true shapes without weights (fake tensors of `peer_model`); LoRA, batch
1, sequence 1024; nothing is computed. Measured are storages, each once, without parameters, buffers
and the token ids: those that autograd holds after the forward with loss, and those that torch's
min-cut partitioner passes from forward to backward. A block costs what a model of three layers
saves beyond one of two, and the difference of four and three must be the same; the whole model
follows from its number of layers, and so do its FLOPs:

    whole = kept(2) + (layers − 2) · block

torch's partitioner mixes its choices over the layers, so it gets the model at its full depth, with
bf16 adapters, with which it saves less; a block is then (kept − logits and loss) / layers. Under
its `activation_memory_budget` b it aims at

    kept + W ≤ M + b · (kept at 1 + W − M)      W: weights that backward reads, M: graph inputs

and M has weights that backward does not read (the embedding, the first block's): a shallow model
keeps less than they weigh, and then every budget is ignored. At full depth none is; nothing of it
is patched but what it knows of attention, see `attention_as_on_cuda`.

FLOPs are those of matrix products and attention; a causal query sees (S + 1) / 2 keys on average.
`recomputed` is FLOPs of forward and backward less the same with nothing recomputed, by the forward
FLOPs of the blocks as in `pcg.explain`. results/memory.svg has MiB a block against it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import harness as bench
import peft
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

import pcg
from pcg.explain.baselines.partitioner import (
    PRODUCTS,
    JointGraph,
    attention_as_on_cuda,
    capture,
    node_flops,
    operator_flops,
    storages,
    unchanged,
)
from pcg.explain.baselines.peer_model import MASKLESS, UNPADDED, loss_of, peer_model, tensors_of
from pcg.pages import charts
from pcg.pages.charts import Axis

ADAPTERS = {"fp32 adapters": torch.float32, "bf16 adapters": torch.bfloat16}
"""peft's default over a bf16 base, and the dtype with `autocast_adapter_dtype=False`."""
WAYS = {"sdpa": "eager, SDPA", "checkpointing": "checkpointing"}
BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.2, 0.0)
"""torch's budgets between 1, its default, and 0, which saves nothing."""
SHARES = (0.47, 0.62, 0.77)
"""Shares of the forward that are recomputed at most, as torch's partitioner does."""
COLORS = {"eager": "other", "checkpointing": "optimizer", "torch": "recompute", "pcg": "save"}


@dataclass(frozen=True)
class Peft:
    """A model that ships with pcg, a LoRA recipe, and the shape of a step."""

    model: str
    rank: int
    targets: str | tuple[str, ...]
    batch: int = 1
    seq: int = 1024

    @property
    def config(self) -> dict[str, Any]:
        path = bench.ROOT / "pcg/configs" / f"{self.model.replace('/', '--')}.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def lora(self) -> peft.LoraConfig:
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return peft.LoraConfig(r=self.rank, target_modules=targets, task_type="CAUSAL_LM")

    def ids(self) -> torch.Tensor:
        return torch.zeros(self.batch, self.seq, dtype=torch.long)

    def build(self, layers: int, adapters: torch.dtype, attention: str = MASKLESS) -> Any:
        """Return the bf16 model with adapters, of empty tensors; fake under a FakeTensorMode."""

        def wrap(model: Any) -> Any:
            is_default = adapters == torch.float32
            return peft.get_peft_model(model, self.lora, autocast_adapter_dtype=is_default)

        config = {**self.config, **UNPADDED, "num_hidden_layers": layers}
        return peer_model(config, "bfloat16", wrap, attention)[0]


CASES = (
    Peft("meta-llama/Llama-3.1-8B", 16, ("down_proj",)),
    Peft("meta-llama/Llama-3.1-8B", 16, "all-linear"),
    Peft("meta-llama/Llama-3.1-70B", 16, ("down_proj",)),
    Peft("facebook/opt-6.7b", 8, ("q_proj", "k_proj", "v_proj", "out_proj")),
)


def mib(size_bytes: float) -> float:
    return round(size_bytes / 2**20, 2)


# ------------------------------------------------------------------------------------------- ours


def ours(case: Peft) -> dict[str, Any]:
    """Return the numbers of `pcg.explain` of each stage, and of each memory budget that pays."""
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


def within(case: Peft, most: float) -> dict[str, float]:
    """Return the plan that saves least while it recomputes at most this share of the forward."""
    low, high = 0.0, 1.0  # budgets; the higher one recomputes little enough
    best: dict[str, float] = {}
    for _ in range(8):
        middle = (low + high) / 2
        shape: Any = {"batch": case.batch, "seq": case.seq, "memory_budget": middle}
        report = pcg.explain(case.model, case.lora, **shape)
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


# ------------------------------------------------------------------------------------------ eager


class _Flops(TorchDispatchMode):
    """Counts the FLOPs of the operators that run."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.flops += operator_flops(func, args)
        return func(*args, **(kwargs or {}))


def step(case: Peft, layers: int, adapters: torch.dtype, is_checkpointed: bool) -> dict[str, int]:
    """Return bytes kept, those of them after the last block, and FLOPs of forward and of a step."""
    model, ids = case.build(layers, adapters), case.ids()
    if is_checkpointed:  # there is no dropout, and fake tensors have no random state
        options = {"use_reentrant": False, "preserve_rng_state": False}
        model.train().gradient_checkpointing_enable(options)
    tensors = [*model.parameters(), *model.buffers(), ids]
    resident = {tensor.untyped_storage()._cdata for tensor in tensors}
    kept: dict[int, tuple[torch.UntypedStorage, bool]] = {}
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    ended: list[bool] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in resident:
            kept.setdefault(storage._cdata, (storage, bool(ended)))  # held: no address twice
        return tensor

    blocks[-1].register_forward_hook(lambda *_: ended.append(True))
    with _Flops() as counted:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, ids)
        found = {"forward_flops": counted.flops}
        found["kept"] = sum(storage.nbytes() for storage, _ in kept.values())
        found["outside"] = sum(storage.nbytes() for storage, after in kept.values() if after)
        loss.backward()
    return found | {"flops": counted.flops}


def eager(case: Peft, adapters: torch.dtype, way: str) -> dict[str, float]:
    """Return MiB that transformers + peft save, by block, outside, in all; and recomputation."""

    def steps(is_checkpointed: bool) -> list[dict[str, int]]:
        with FakeTensorMode():
            return [step(case, layers, adapters, is_checkpointed) for layers in (2, 3, 4)]

    def a_block(found: Sequence[Mapping[str, int]], name: str) -> int:
        low, middle, high = (one[name] for one in found)
        if high - middle != middle - low:
            raise ValueError(f"{name} of {case.model} is not affine in the layers: {found}")
        return middle - low

    plain = found = steps(False)
    if way == "checkpointing":
        found = steps(True)
    block = a_block(found, "kept")
    again = a_block(found, "flops") - a_block(plain, "flops")
    return {
        "block_mib": mib(block),
        "outside_mib": mib(found[0]["outside"]),
        "whole_mib": mib(found[0]["kept"] + (case.layers - 2) * block),
        "recomputed": round(again / a_block(plain, "forward_flops"), 4),
    }


# ----------------------------------------------------------------------------- torch's partitioner


def joint_graph(case: Peft) -> JointGraph:
    """Trace the loss and its gradients at full depth.

    The graph has no mask and repeats no keys and values, which is kinder to torch than what dynamo
    traces.
    """
    with FakeTensorMode():
        model, ids = case.build(case.layers, torch.bfloat16), case.ids()
        tensors = tensors_of(model)

        def loss(ids: Sequence[Any], values: Sequence[Any], _: Sequence[Any]) -> torch.Tensor:
            named = dict(zip(tensors, values, strict=True))
            arguments = {"input_ids": ids[0], "labels": ids[0], "use_cache": False}
            return torch.func.functional_call(model, named, (), arguments).loss

        return JointGraph.trace(loss, [ids], list(tensors.values()))


def partitioned(case: Peft) -> list[dict[str, Any]]:
    """Partition the whole model at every budget."""
    joint, vocabulary, most = joint_graph(case), case.config["vocab_size"], 0
    rows: list[dict[str, Any]] = []
    for budget in BUDGETS:
        started = time.perf_counter()
        with attention_as_on_cuda():
            found = joint.partition(budget)
        graph = found.forward.graph
        products = [node for node in graph.nodes if node.target in PRODUCTS]
        head = next(node for node in products if node.meta["val"].shape[-1] == vocabulary)
        ids = graph.find_nodes(op="placeholder")[: joint.carried]
        kept, outside = _passed_on(graph, head, found.resident.union(*map(storages, ids)))
        most = max(most, kept)
        blocks = found.forward_flops - node_flops(head)
        rows.append({
            "budget": budget,
            "attention": "as on CUDA",
            "block_mib": mib((kept - outside) / case.layers),
            "outside_mib": mib(outside),
            "whole_mib": mib(kept),
            "recomputed": round(found.recomputed_flops / blocks, 4),
            "ignored": budget < 1 and kept == most,
        })  # fmt: skip
        bench.note(f"budget {budget}: {time.perf_counter() - started:.0f} s, {rows[-1]}")
    return rows


def _passed_on(graph: fx.Graph, head: fx.Node, resident: Set[int]) -> tuple[int, int]:
    """Return the bytes passed to backward without inputs, and those of them from the head on."""
    after = {head}
    for node in graph.nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    kept: dict[int, tuple[int, bool]] = {}
    for node in graph.output_node().args[0][1:]:
        for key, size in storages(node).items():
            if key not in resident:
                kept.setdefault(key, (size, node in after))
    sizes = kept.values()
    return sum(size for size, _ in sizes), sum(size for size, outside in sizes if outside)


def compiled_block(case: Peft, adapters: torch.dtype) -> int:
    """Return the bytes a block that torch.compile saves at budget 1, transformers' mask included.

    Dynamo wants real tensors; they stay empty, and are never touched.
    """
    kept = []
    for layers in (2, 3):
        model, found = case.build(layers, adapters, "sdpa"), []
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=unchanged,
            bw_compiler=unchanged,
            partition_fn=capture(found),
            decompositions=select_decomp_table(),
        )
        try:
            torch.compile(loss_of, backend=backend)(model, case.ids())
        except Exception:  # dynamo's own, around the one that ends the capture
            if not found:
                raise
        residents = len(found[0].graph.find_nodes(op="placeholder"))
        kept.append(JointGraph(found[0], 0, residents).partition(1.0).size_bytes)
    return kept[1] - kept[0]


# ---------------------------------------------------------------------------------------- results


def points(result: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return contender, name and numbers of each measurement for the plot."""
    rows: list[tuple[str, str, Mapping[str, Any]]] = []
    for title in WAYS.values():
        kind = "checkpointing" if title == "checkpointing" else "eager"
        rows += [(kind, f"{title}, {label}", row) for label, row in result[title].items()]
    for row in result.get("torch partitioner, bf16 adapters", ()):
        ignored = ", ignored" if row["ignored"] else ""
        rows.append(("torch", f"torch, budget {row['budget']}{ignored}", row))
    found = result["ours"]
    named = {**found["stages"], **found["plans"]}
    rows += [("pcg", f"pcg, {name}", named[name]) for name in named if name not in WAYS.values()]
    return rows + [("pcg", "pcg, memory budget", row) for row in found["budgets"]]


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
    parts.append(charts.text(880, height - 12, "hollow: fp32 adapters", "end"))
    return charts.svg_file(900, height, title, parts)


def _panel(result: Mapping[str, Any], left: float, top: float) -> list[str]:
    found = points(result)
    x = Axis(-0.02, 1.1, left + 56, left + 436)
    y = Axis(0, 1.06 * max(row["block_mib"] for *_, row in found), top + 216, top)
    parts = [charts.text(left + 56, top - 8, result["case"], "start", "ink")]
    parts.append(charts.grid(x, y, charts.ticks(x, 5, percent=True), charts.ticks(y, 5)))
    for kind, color in COLORS.items():
        marks = [(name, row) for one, name, row in found if one == kind]
        budgets = [
            (row["recomputed"], -row["block_mib"]) for name, row in marks if "budget" in name
        ]
        if budgets:
            line = [(share, -size) for share, size in sorted(budgets)]
            parts.append(charts.line(line, x, y, color))
        for name, row in sorted(marks, key=lambda mark: "fp32" not in mark[0]):
            words = f"{name}: {row['block_mib']} MiB, {row['recomputed']:.1%}"
            place = x(row["recomputed"]), y(row["block_mib"])
            parts.append(charts.mark(*place, color, title=words, hollow="fp32" in name))
    return parts


@bench.case("memory", "again: block_mib", first=3, last=4, partitioner=False)
def memory(first: int = 0, last: int = len(CASES), partitioner: bool = True) -> dict[str, Any]:
    results = []
    for case in CASES[first:last]:
        targets = case.targets if isinstance(case.targets, str) else ", ".join(case.targets)
        name = f"{case.model.split('/')[-1]}, r{case.rank} {targets}"
        found: dict[str, Any] = {"case": name, "layers": case.layers, "ours": ours(case)}
        for way, title in WAYS.items():
            found[title] = {label: eager(case, dtype, way) for label, dtype in ADAPTERS.items()}
        bench.note(f"{name}: eager and checkpointing measured")
        if partitioner:
            found["torch.compile, budget 1, block_mib"] = {
                label: mib(compiled_block(case, dtype)) for label, dtype in ADAPTERS.items()
            }
            found["torch partitioner, bf16 adapters"] = partitioned(case)
        results.append(found)
    if len(results) == len(CASES):
        (bench.RESULTS / "memory.svg").write_text(plot(results))
    plot(results)
    return {"batch": 1, "seq": 1024, "dtype": "bfloat16", "results": results}


if __name__ == "__main__":
    bench.main()
