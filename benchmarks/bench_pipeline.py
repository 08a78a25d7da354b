"""Measure two pipeline stages on gloo beside one process that has all layers.

    python benchmarks/bench_pipeline.py [--rounds 5] [--sequences 8] [--tokens 256]

A Llama of 8 layers of hidden size 512 in fp32, LoRA on all linears; each process has one thread.
Three contenders run in turn in every round, of which the time until both processes are done counts:
one process alone, while the other waits; two stages with a micro-batch for each sequence; and two
stages with all sequences in one. They train a step's gradients, and prefill as many prompts, where
the second has parts of at least `LEAST_TOKENS` and the third has the step whole.

The result has the ratios to one process. With M micro-batches or parts two stages of equal work
take (M + 1) / 2 M of its time if messages take none.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measure import write

from pcg import compiler
from pcg.peft.lora import LoraConfig
from pcg.ranks import stages as pipeline
from pcg.ranks.join import join_mesh
from pcg.ranks.launch import launch
from pcg.ranks.mesh import SINGLE_MESH, MeshSizes, RankMesh
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import RandomWeights
from pcg.runtime.training import step
from pcg.runtime.training.step import BatchPart, run_stages

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}
STAGES = 2
LEAST_TOKENS = 256
ALONE, PARTS, WHOLE = "one process", "stages, in parts", "stages, whole"


def executor_over(mesh: RankMesh) -> Executor:
    """Return an executor of random weights, the same on every rank."""
    recipe = {"a": LoraConfig(r=8, target_modules="all-linear")}
    program = compiler.compile_program(CONFIG, recipe, dtype="float32", packed_weights=False)
    return compiler.make_executor(program, RandomWeights(0.02, 0), recipe, None, "cpu", mesh)


def rank_main(output: str, rounds: int, sequences: int, tokens: int) -> None:
    """Measure on this rank; the first one writes the seconds."""
    torch.set_num_threads(1)
    mesh = join_mesh(MeshSizes(pp=STAGES), torch.device("cpu"))
    staged, alone = executor_over(mesh), None
    if mesh.world.rank == 0:
        alone = executor_over(SINGLE_MESH)
    examples = [Example([3] * tokens, [3] * tokens)] * sequences
    prompts = [[3 + i] * tokens for i in range(sequences)]

    runner = staged.training_runner("a")
    runner_alone = None if alone is None else alone.training_runner("a")

    def train(per_stage: int) -> None:
        step.PARTS_PER_STAGE = per_stage
        run_stages(runner, [BatchPart(examples, 0, range(sequences))], sequences * tokens)

    def train_alone() -> None:
        if runner_alone is not None:
            runner_alone.forward_backward(examples, sequences * tokens)

    def prefill(executor: Executor | None, least: int) -> None:
        if executor is not None:
            pipeline.LEAST_TOKENS = least
            executor.generate(prompts, "a", max_new_tokens=1, ignore_eos=True)

    whole = sequences * tokens + 1
    work: dict[str, dict[str, Callable[[], None]]] = {
        "train": {
            ALONE: train_alone,
            PARTS: lambda: train(sequences // STAGES),
            WHOLE: lambda: train(0),
        },
        "prefill": {
            ALONE: lambda: prefill(alone, whole),
            PARTS: lambda: prefill(staged, LEAST_TOKENS),
            WHOLE: lambda: prefill(staged, whole),
        },
    }
    found = seconds_of(mesh, work, rounds)
    if mesh.world.rank == 0:
        Path(output).write_text(json.dumps(found))


def seconds_of(
    mesh: RankMesh, work: Mapping[str, Mapping[str, Callable[[], None]]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds until all ranks are done, of each round but the first, which warms up.

    Args:
        work: by its kind, what contenders do, who run in turn in every round.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for kind, contenders in work.items():
        found[kind] = {name: [] for name in contenders}
        for round_ in range(rounds + 1):
            for name, act in contenders.items():
                meet(mesh)
                started = time.perf_counter()
                act()
                meet(mesh)
                if round_:
                    found[kind][name].append(time.perf_counter() - started)
    return found


def meet(mesh: RankMesh) -> None:
    """Wait for all ranks."""
    mesh.world.all_reduce(torch.zeros(1))


def main() -> None:
    """Measure, and write the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    given: dict[str, Any] = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seconds.json"
        launch(STAGES, rank_main, {"output": str(output), **given})
        found = json.loads(output.read_text())
    result: dict[str, Any] = dict(given)
    for kind, values in found.items():
        rows = {
            name: [b / a for a, b in zip(values[ALONE], series, strict=True)]
            for name, series in values.items()
        }
        result[kind] = {
            "to_one_process": {n: round(sorted(r)[len(r) // 2], 3) for n, r in rows.items()},
            "seconds": {n: round(sorted(s)[len(s) // 2], 3) for n, s in values.items()},
        }
    most = pipeline.PARTS_PER_STAGE * STAGES
    of_prompts = max(1, min(most, given["sequences"] * given["tokens"] // LEAST_TOKENS))
    parts = {"train": given["sequences"], "prefill": of_prompts}
    result["ideal"] = {kind: round((m + STAGES - 1) / (STAGES * m), 3) for kind, m in parts.items()}
    write("pipeline", result)


if __name__ == "__main__":
    main()
