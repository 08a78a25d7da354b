"""Measure two ranks that share the tokens of sequences on gloo beside one process that has all.

    python benchmarks/bench_context.py [--rounds 5] [--tokens 2048]

The model, its adapter and the way of measuring are those of `bench_pipeline.py`. Two contenders run
in turn in every round: one process alone, while the other waits, and two of context parallelism.
They train the gradients of one sequence, prefill one prompt as long, and eight of an eighth.

The result has the ratios to one process: a half if messages took no time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_pipeline import executor_over, seconds_of
from measure import write

from pcg.ranks.join import join_mesh
from pcg.ranks.launch import launch
from pcg.ranks.mesh import SINGLE_MESH, MeshSizes
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training.runner import training_runner

RANKS = 2
PROMPTS = 8
ALONE, SHARED = "one process", "two ranks"


def rank_main(output: str, rounds: int, tokens: int) -> None:
    """Measure on this rank; the first one writes the seconds."""
    torch.set_num_threads(1)
    mesh = join_mesh(MeshSizes(cp=RANKS), torch.device("cpu"))
    shared, alone = executor_over(mesh), None
    if mesh.world.rank == 0:
        alone = executor_over(SINGLE_MESH)
    example = Example([3] * tokens, [3] * tokens)

    def train(executor: Executor | None) -> Callable[[], None]:
        if executor is None:
            return lambda: None
        runner = training_runner(executor.state, executor.adapters["a"])
        return lambda: void(runner.forward_backward([example], tokens))

    def prefill(executor: Executor | None, prompts: int) -> Callable[[], None]:
        if executor is None:
            return lambda: None
        texts = [[3 + i] * (tokens // prompts) for i in range(prompts)]
        return lambda: void(executor.generate(texts, "a", max_new_tokens=1, ignore_eos=True))

    works = {
        "train": {ALONE: train(alone), SHARED: train(shared)},
        "prompt": {ALONE: prefill(alone, 1), SHARED: prefill(shared, 1)},
        "prompts": {ALONE: prefill(alone, PROMPTS), SHARED: prefill(shared, PROMPTS)},
    }
    found = seconds_of(mesh, works, rounds)
    if mesh.world.rank == 0:
        Path(output).write_text(json.dumps(found))


def void(_: object) -> None:
    """Drop a result."""


def main() -> None:
    """Measure, and write the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    given: dict[str, Any] = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seconds.json"
        launch(RANKS, rank_main, {"output": str(output), **given})
        found = json.loads(output.read_text())
    result: dict[str, Any] = dict(given)
    for kind, values in found.items():
        pairs = zip(values[ALONE], values[SHARED], strict=True)
        ratios = sorted(ours / theirs for theirs, ours in pairs)
        result[kind] = {
            "to_one_process": round(ratios[len(ratios) // 2], 3),
            "seconds": {n: round(sorted(s)[len(s) // 2], 3) for n, s in values.items()},
        }
    write("context", result)


if __name__ == "__main__":
    main()
