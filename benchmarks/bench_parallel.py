"""Compare LoRA's strategies over ranks on gloo as the cost model predicts and as measured.

    python benchmarks/bench_parallel.py [--profile FILE] [--rounds 3] [--degrees 2 4] [--tokens 1 …]

One layer of a Llama of hidden size 512 in fp32, LoRA on every linear, forward, backward and the sum
of copied weights' gradients. For each number of ranks, tokens and LoRA rank, every strategy of the
papers is forced at all sites, and the search's own choice runs beside them, in turn in every round,
each time with tensors at other addresses; all ranks start together, and the slowest counts. Where
the choice is one of them, the two are the same plan measured twice, which shows the noise. The
costs are those of a profile of this machine, which is measured first unless one is given.

The result has for each case the seconds, measured and predicted, and how much slower the chosen
strategy is than the fastest one that was measured (at most 1.1). There each collective is waited
for where it begins; the result also has the share of its time that the chosen strategy takes where
collectives overlap with what does not depend on them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import write
from torch import Tensor

from pcg.errors import TypeCheckError
from pcg.ir.analysis.dataflow import collective_of, waits
from pcg.ir.graph import Graph, Node
from pcg.ir.layouts import REPLICATED
from pcg.ir.operators import operator
from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.torch.lora import as_weight
from pcg.options import PlanOptions
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.layer_costs import DeviceCosts
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.search import Search, SearchResult
from pcg.passes.attach import Bypasses
from pcg.passes.graphs.collectives import CoalesceCollectives, Overlap
from pcg.passes.graphs.differentiate import Differentiate
from pcg.passes.graphs.gradients import Prune
from pcg.passes.graphs.localize import Localize
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.shard import Shard, shard
from pcg.peft.lora import LoraBypass
from pcg.ranks.group import Ranks
from pcg.ranks.join import join_group
from pcg.ranks.launch import launch
from pcg.runtime.model.batch import Batch, whole_sequences

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
NAMES = ("FlexLLM 1", "FlexLLM 2", "FlexLLM 3", "FlexLLM 4", "fully sharded", "fully replicated")
SEQUENCE = 512
"""The most tokens of a sequence."""
CHOSEN, OVERLAPPED = "chosen", "chosen, overlapped"


@dataclass(frozen=True)
class Step:
    """A compiled step of a layer on this rank."""

    forward: Callable[[dict[str, Any]], None]
    backward: Callable[[dict[str, Any]], None]
    values: Mapping[str, Any]
    copies: tuple[str, ...]

    def moved(self) -> Step:
        """Return the same step with tensors elsewhere: their addresses change a product's speed."""
        values = {name: _copy(value) for name, value in self.values.items()}
        return replace(self, values=values)

    def run(self, ranks: Ranks) -> None:
        """Run forward, backward, and the sum of the copies' gradients."""
        values = dict(self.values)
        self.forward(values)
        self.backward(values)
        if self.copies:
            ranks.all_reduce(torch.cat([values[name].reshape(-1) for name in self.copies]))


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return replace(value, weight=value.weight.clone()) if hasattr(value, "weight") else value


def compiled(graph: Graph, overlaps: bool) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds a graph's values to a dict."""
    lines = ["def run(values):"]
    waited = waits(graph.nodes) if overlaps else {}
    for place in range(len(graph.nodes) + 1):
        ended = [graph.nodes[begun] for begun, first in waited.items() if first == place]
        lines += [f"    {_targets(node)} = values[{node.name!r}]()" for node in ended]
        for node in graph.nodes[place : place + 1]:
            inputs = [f"values[{name!r}]" for name in node.inputs]
            source = operator(node.op).source(inputs, dict(node.attributes))
            targets = _targets(node)
            entry = collective_of(node)
            if entry is not None and place in waited:
                source = entry.begun_source(inputs, dict(node.attributes))
                targets = f"values[{node.name!r}]"
            lines.append(f"    batch = values['batch']; {targets} = {source}")
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "K": torch_ops}
    exec("\n".join([*lines, "    return"]), space)
    return space["run"]  # type: ignore[no-any-return]


def _targets(node: Node) -> str:
    targets = ", ".join(f"values[{value.name!r}]" for value in node.outputs)
    is_one = operator(node.op).returns_sequence and len(node.outputs) == 1
    return f"{targets}," if is_one else targets


def random_tensor(shape: Sequence[object], tokens: int) -> Tensor:
    """Return a normally distributed tensor, scaled down as weights are."""
    return torch.randn([size if isinstance(size, int) else tokens for size in shape]) * 0.05


def step(search: Search, plan: ParallelPlan, batch: Batch, ranks: Ranks, overlaps: bool) -> Step:
    """Return the step of a plan on this rank."""
    graph = Localize(ranks.size).run(shard(search.graph, ranks.size, plan))
    carried = [value.name for value in graph.inputs[: len(graph.outputs)]]
    found = Prune().run(Differentiate(wrt=tuple(carried)).run(graph))
    tokens = len(batch.input_ids)
    values: dict[str, Any] = {"batch": batch}
    for value in (*graph.inputs, *(p.value for p in graph.parameters)):
        values[value.name] = random_tensor(value.type.shape, tokens)
    for parameter in graph.parameters:
        if parameter.role == "adapter":
            values[parameter.name] = as_weight(values[parameter.name])
    for name in graph.outputs:
        values[f"d_{name}"] = random_tensor(graph.types[name].shape, tokens)
    outputs = dict(zip(found.trained, found.backward.outputs[len(found.wrt) :], strict=False))
    copies = [
        outputs[p.name] for p in graph.parameters if p.name in outputs and p.part == REPLICATED
    ]
    graphs = [CoalesceCollectives().run(graph), CoalesceCollectives().run(found.backward)]
    if overlaps:
        graphs = [Overlap().run(one) for one in graphs]
    forward, backward = (compiled(one, overlaps) for one in graphs)
    return Step(forward, backward, values, tuple(copies))


def plans(search: Search, found: SearchResult) -> dict[str, ParallelPlan]:
    """Return the chosen plan, and the papers' strategies at all sites."""
    result = {CHOSEN: found.plan, OVERLAPPED: found.plan}
    for name in NAMES:
        layouts, gathered = {}, set()
        for choice in found.sites:
            for candidate in choice.candidates:
                algorithm, _, held = candidate.strategy.partition("; ")
                if name in (held or algorithm[: len(name)]):
                    layouts |= candidate.layouts
                    gathered |= candidate.gathered
        if not layouts:
            continue  # another way is cheaper with weights that are held so
        try:
            result[name] = search.hold(layouts, frozenset(gathered))
        except TypeCheckError:
            continue  # the rank has no equal parts
    return result


def measure_case(
    rank: int, tokens: int, ranks: Ranks, profile: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Return the seconds of each strategy, measured and predicted."""

    def bypasses(base: Any) -> Bypasses:
        sites = (s for s in base.linear_sites() if "{layer}" in s)
        return Bypasses(dict.fromkeys(sites, (LoraBypass(rank),)))

    options = PlanOptions(tp=ranks.size, dtype="float32")
    stages = pipeline(Settings(options, bypasses=bypasses))
    attached = stages.attach.run(stages.base(CONFIG))
    state = stages.parallelize.until(Shard).run(attached)
    assert state.training is not None
    sequence = min(tokens, SEQUENCE)
    costs = DeviceCosts(find_cost_model(profile), ranks.size, tokens, sequence)
    search = Shard(ranks.size, costs).searches(state.training, state, trains=True)[0]
    found = plans(search, search.find())
    lengths = [sequence] * (tokens // sequence)
    batch = whole_sequences([[1] * n for n in lengths], torch.device("cpu"), [0] * len(lengths))
    batch.ranks = ranks
    steps = {
        name: step(search, plan, batch, ranks, name == OVERLAPPED) for name, plan in found.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    repeats = max(1, 64 // tokens)
    for turn in range(rounds + 1):
        for name, step_ in steps.items():
            one = step_.moved()
            one.run(ranks)  # whoever comes first in a round is else the coldest
            ranks.all_reduce(torch.zeros(1))
            started = time.perf_counter()
            for _ in range(repeats):
                one.run(ranks)
            taken = torch.tensor((time.perf_counter() - started) / repeats)
            slowest = max(float(other) for other in ranks.all_gather(taken))
            if turn:
                seconds[name].append(slowest)
    return {
        name: {"seconds": median(values), "predicted": search.costs.of(found[name]).value}
        for name, values in seconds.items()
    }


def on_rank(
    degree: int, cases: Sequence[tuple[int, int]], profile: str, rounds: int, output: str
) -> None:
    """Run on each rank; the first one writes the rows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = join_group(degree, torch.device("cpu"))
    rows = []
    for tokens, rank in cases:
        measured = measure_case(rank, tokens, ranks, profile, rounds)
        seconds = {name: m["seconds"] for name, m in measured.items()}
        overlapped = seconds.pop(OVERLAPPED) / seconds[CHOSEN]
        fastest = min(seconds, key=lambda name: seconds[name])
        slower = seconds[CHOSEN] / seconds[fastest]
        rows.append(
            {
                "tp": degree,
                "tokens": tokens,
                "rank": rank,
                "fastest": fastest,
                "chosen / fastest": round(slower, 3),
                "overlapped / chosen": round(overlapped, 3),
                "ms": {n: round(1e3 * m["seconds"], 3) for n, m in measured.items()},
                "predicted_ms": {n: round(1e3 * m["predicted"], 3) for n, m in measured.items()},
            }
        )
        print(
            f"tp {degree}, {tokens:>5} tokens, rank {rank:>3}: {slower:.2f} of {fastest}, "
            f"overlapped {overlapped:.2f}"
        )
    if ranks.rank == 0:
        Path(output).write_text(json.dumps(rows))


def main() -> None:
    """Measure the profile, then every case, and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--degrees", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 256, 4096])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 256])
    arguments = parser.parse_args()
    cases = list(itertools.product(arguments.tokens, arguments.ranks))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        profile = arguments.profile or str(Path(folder) / "profile.json")
        if arguments.profile is None:
            degree = str(max(arguments.degrees))
            command = ["-m", "pcg_cli", "profile", "-o", profile, "--tp", degree, "--fresh"]
            subprocess.run([sys.executable, *command, "--dtype", "float32"], check=True)
        for degree in arguments.degrees:
            output = str(Path(folder) / f"{degree}.json")
            given = {"degree": degree, "cases": cases, "profile": profile}
            launch(degree, on_rank, {**given, "rounds": arguments.rounds, "output": output})
            rows += json.loads(Path(output).read_text())
    within = sum(row["chosen / fastest"] <= 1.1 for row in rows)
    write(
        "parallel", {"cases within 1.1 of the fastest": f"{within} of {len(rows)}", "cases": rows}
    )


if __name__ == "__main__":
    main()
