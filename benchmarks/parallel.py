"""Ranks on gloo: LoRA's strategies against the cost model, pipeline stages, shared tokens.

Each process has one thread, in fp32.

parallel    one layer of a Llama of hidden size 512, LoRA on every linear: forward, backward and the
            sum of copied weights' gradients. For each number of ranks, tokens and LoRA rank, every
            strategy of the papers is forced at all sites, and the search's own choice runs beside
            them, in turn in every round, each time with tensors at other addresses; all ranks start
            together, and the slowest counts. The costs are those of a profile of this machine. The
            result has the seconds, measured and predicted, how much slower the chosen strategy is
            than the fastest that was measured, and the share of its time that it takes where
            collectives overlap with what does not depend on them.
pipeline    a Llama of 8 layers, LoRA on all linears, the time until both processes are done: one
            process alone; two stages with a micro-batch for each sequence; and two with all
            sequences in one. They train a step's gradients, and prefill as many prompts. With M
            micro-batches two stages of equal work take (M + 1) / 2 M of its time at best.
context     the same model on one process, and on two that share the tokens of sequences: gradients
            of one sequence, one prompt as long, and eight of an eighth
"""

from __future__ import annotations

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

import harness as bench
import torch
from torch import Tensor

from pcg import compiler
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
from pcg.peft.lora import LoraBypass, LoraConfig
from pcg.ranks import stages
from pcg.ranks.group import Ranks
from pcg.ranks.join import join_group, join_mesh
from pcg.ranks.launch import launch
from pcg.ranks.mesh import SINGLE_MESH, MeshSizes, RankMesh
from pcg.runtime.data.example import Example
from pcg.runtime.model.batch import Batch, whole_sequences
from pcg.runtime.model.random_weights import RandomWeights
from pcg.runtime.training import step as training_step
from pcg.runtime.training.runner import training_runner
from pcg.runtime.training.step import BatchPart, run_stages

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 512,
    "max_position_embeddings": 8192,
}  # fmt: skip
NAMES = ("FlexLLM 1", "FlexLLM 2", "FlexLLM 3", "FlexLLM 4", "fully sharded", "fully replicated")
SEQUENCE = 512
"""The most tokens of a sequence."""
CHOSEN, OVERLAPPED = "chosen", "chosen, overlapped"


def on_ranks(count: int, main: Callable[..., None], **given: Any) -> Any:
    """Run a function on ranks; return the JSON that the first one writes to `output`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        launch(count, main, {"output": str(output), **given})
        return json.loads(output.read_text())


# --------------------------------------------------------------------------------------- parallel


@dataclass(frozen=True)
class Step:
    """A compiled step of a layer on this rank."""

    forward: Callable[[dict[str, Any]], None]
    backward: Callable[[dict[str, Any]], None]
    values: Mapping[str, Any]
    copies: tuple[str, ...]

    def moved(self) -> Step:
        """Return the same step with tensors elsewhere: their addresses change a product's speed."""
        return replace(self, values={name: _copy(value) for name, value in self.values.items()})

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
            source, targets = (
                operator(node.op).source(inputs, dict(node.attributes)),
                _targets(node),
            )
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


def layer_step(
    search: Search, plan: ParallelPlan, batch: Batch, ranks: Ranks, overlaps: bool
) -> Step:
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

    passes = pipeline(Settings(PlanOptions(tp=ranks.size, dtype="float32"), bypasses=bypasses))
    attached = passes.attach.run(passes.base(CONFIG))
    state = passes.parallelize.until(Shard).run(attached)
    assert state.training is not None
    sequence = min(tokens, SEQUENCE)
    costs = DeviceCosts(find_cost_model(profile), ranks.size, tokens, sequence)
    search = Shard(ranks.size, costs).searches(state.training, state, trains=True)[0]
    found = plans(search, search.find())
    lengths = [sequence] * (tokens // sequence)
    batch = whole_sequences([[1] * n for n in lengths], torch.device("cpu"), [0] * len(lengths))
    batch.ranks = ranks
    steps = {
        name: layer_step(search, plan, batch, ranks, name == OVERLAPPED)
        for name, plan in found.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    repeats = max(1, 64 // tokens)
    for turn in range(rounds + 1):
        for name, step in steps.items():
            one = step.moved()
            one.run(ranks)  # the first of a round would be the coldest
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


def parallel_rank(
    output: str, degree: int, cases: Sequence[tuple[int, int]], profile: str, rounds: int
) -> None:
    """Measure on this rank; the first one writes the rows."""
    bench.prepare()
    ranks = join_group(degree, torch.device("cpu"))
    rows = []
    for tokens, rank in cases:
        measured = measure_case(rank, tokens, ranks, profile, rounds)
        seconds = {name: m["seconds"] for name, m in measured.items()}
        overlapped = seconds.pop(OVERLAPPED) / seconds[CHOSEN]
        fastest = min(seconds, key=lambda name: seconds[name])
        ratios = {"chosen / fastest": seconds[CHOSEN] / seconds[fastest]}
        ratios["overlapped / chosen"] = overlapped
        rows.append({
            "tp": degree,
            "tokens": tokens,
            "rank": rank,
            "fastest": fastest,
            **{name: round(value, 3) for name, value in ratios.items()},
            "ms": {n: round(1e3 * m["seconds"], 3) for n, m in measured.items()},
            "predicted_ms": {n: round(1e3 * m["predicted"], 3) for n, m in measured.items()},
        })  # fmt: skip
        bench.note(rows[-1])
    if ranks.rank == 0:
        Path(output).write_text(json.dumps(rows))


@bench.case("parallel", rounds=1, degrees=(2,), tokens=(16,), ranks=(8,))
def parallel(
    rounds: int = 3,
    degrees: tuple[int, ...] = (2, 4),
    tokens: tuple[int, ...] = (1, 16, 256, 4096),
    ranks: tuple[int, ...] = (8, 64, 256),
    profile: str = "",
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if not profile:
            profile = str(Path(folder) / "profile.json")
            command = [sys.executable, "-m", "pcg_cli", "profile", "-o", profile, "--fresh"]
            most = str(max(degrees))
            subprocess.run([*command, "--tp", most, "--dtype", "float32"], check=True)
        cases = list(itertools.product(tokens, ranks))
        for degree in degrees:
            given = {"degree": degree, "cases": cases, "profile": profile, "rounds": rounds}
            rows += on_ranks(degree, parallel_rank, **given)
    within = sum(row["chosen / fastest"] <= 1.1 for row in rows)
    share = {"within 1.1 of the fastest, share of cases (at least 1)": within / len(rows)}
    return {"cases within 1.1 of the fastest": f"{within} of {len(rows)}", **share, "cases": rows}


# -------------------------------------------------------------------------- stages, shared tokens

DEEP = {**CONFIG, "num_key_value_heads": 4, "num_hidden_layers": 8, "vocab_size": 2048}
STAGES, LEAST_TOKENS, PROMPTS = 2, 256, 8
ALONE, PARTS, WHOLE, SHARED = "one process", "stages, in parts", "stages, whole", "two ranks"
Work = dict[str, dict[str, Callable[[], object]]]


def executor_over(mesh: RankMesh) -> Any:
    """Return an executor of random weights, the same on every rank."""
    recipe = {"a": LoraConfig(r=8, target_modules="all-linear")}
    program = compiler.compile_program(DEEP, recipe, dtype="float32", packed_weights=False)
    return compiler.make_executor(program, RandomWeights(0.02, 0), recipe, None, "cpu", mesh)


def executors(mesh: RankMesh) -> tuple[Any, Any]:
    """Return that of all ranks, and that of the first rank alone; None on the other."""
    bench.prepare()
    return executor_over(mesh), executor_over(SINGLE_MESH) if mesh.world.rank == 0 else None


def prefill(executor: Any, prompts: Sequence[Sequence[int]], least: int = LEAST_TOKENS) -> None:
    if executor is not None:
        stages.LEAST_TOKENS = least
        executor.generate(prompts, "a", max_new_tokens=1, ignore_eos=True)


def timed(mesh: RankMesh, work: Work, rounds: int, output: str) -> None:
    """Write the seconds until all ranks are done, of each round but the first, which warms up."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind, contenders in work.items():
        found[kind] = {name: [] for name in contenders}
        for round_ in range(rounds + 1):
            for name, act in contenders.items():
                mesh.world.all_reduce(torch.zeros(1))
                started = time.perf_counter()
                act()
                mesh.world.all_reduce(torch.zeros(1))
                if round_:
                    found[kind][name].append(time.perf_counter() - started)
    if mesh.world.rank == 0:
        Path(output).write_text(json.dumps(found))


def to_one_process(found: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    return {
        kind: {
            "to_one_process": {n: bench.ratio(values, n, ALONE) for n in values if n != ALONE},
            "seconds": bench.medians(values, 3),
        }
        for kind, values in found.items()
    }


def pipeline_rank(output: str, rounds: int, sequences: int, tokens: int) -> None:
    mesh = join_mesh(MeshSizes(pp=STAGES), torch.device("cpu"))
    staged, alone = executors(mesh)
    examples, whole = [Example([3] * tokens, [3] * tokens)] * sequences, sequences * tokens
    prompts = [[3 + i] * tokens for i in range(sequences)]
    runner = staged.training_runner("a")
    runner_alone = None if alone is None else alone.training_runner("a")

    def train(per_stage: int) -> None:
        training_step.PARTS_PER_STAGE = per_stage
        run_stages(runner, [BatchPart(examples, 0, range(sequences))], whole)

    def train_alone() -> None:
        if runner_alone is not None:
            runner_alone.forward_backward(examples, whole)

    work: Work = {
        "train": {
            ALONE: train_alone,
            PARTS: lambda: train(sequences // STAGES),
            WHOLE: lambda: train(0),
        },
        "prefill": {
            ALONE: lambda: prefill(alone, prompts, whole + 1),
            PARTS: lambda: prefill(staged, prompts),
            WHOLE: lambda: prefill(staged, prompts, whole + 1),
        },
    }
    timed(mesh, work, rounds, output)


@bench.case("pipeline", f"process: {PARTS}", rounds=1, sequences=2, tokens=32)
def pipeline_stages(rounds: int = 5, sequences: int = 8, tokens: int = 256) -> dict[str, Any]:
    given: dict[str, Any] = {"rounds": rounds, "sequences": sequences, "tokens": tokens}
    found = on_ranks(STAGES, pipeline_rank, **given)
    most = stages.PARTS_PER_STAGE * STAGES
    of_prompts = max(1, min(most, sequences * tokens // LEAST_TOKENS))
    parts = {"train": sequences, "prefill": of_prompts}
    ideal = {kind: round((m + STAGES - 1) / (STAGES * m), 3) for kind, m in parts.items()}
    return {**given, **to_one_process(found), "ideal": ideal}


def context_rank(output: str, rounds: int, tokens: int) -> None:
    mesh = join_mesh(MeshSizes(cp=2), torch.device("cpu"))
    shared, alone = executors(mesh)
    example = Example([3] * tokens, [3] * tokens)
    runners = {
        e: training_runner(e.state, e.adapters["a"]) for e in (shared, alone) if e is not None
    }

    def train(executor: Any) -> object:
        return executor is not None and runners[executor].forward_backward([example], tokens)

    work: Work = {}
    for kind, count in (("train", 0), ("prompt", 1), ("prompts", PROMPTS)):
        texts = [[3 + i] * (tokens // count) for i in range(count)]
        work[kind] = {
            name: (lambda e=e, t=texts: prefill(e, t) if t else train(e))
            for name, e in ((ALONE, alone), (SHARED, shared))
        }
    timed(mesh, work, rounds, output)


@bench.case("context", f"process: {SHARED}", rounds=1, tokens=64)
def context(rounds: int = 5, tokens: int = 2048) -> dict[str, Any]:
    given: dict[str, Any] = {"rounds": rounds, "tokens": tokens}
    return {**given, **to_one_process(on_ranks(2, context_rank, **given))}


if __name__ == "__main__":
    bench.main()
