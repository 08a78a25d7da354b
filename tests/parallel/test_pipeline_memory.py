"""The shares of pipeline stages: how layers are cut, what a rank holds, and what is under way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcg.compiler import compile_program
from pcg.errors import ParallelError
from pcg.explain import explain as explaining
from pcg.ir.program.program import Program
from pcg.ranks.mesh import MeshSizes, RankMesh
from pcg.ranks.stages import Stages, cut_stages
from pcg.runtime.data.example import Example
from pcg.runtime.memory.kv_cache import stage_kv_types
from pcg.runtime.training.runner import TrainingPass
from pcg.runtime.training.step import BatchPart, micro_batches
from tests.support.families import BY_NAME
from tests.support.prompts import prompts
from tests.support.ranked import (
    make_executor,
    make_program,
    rank_memory,
    recipes,
)
from tests.support.threads import run_mesh

LAYERS = 4
TWO = MeshSizes(pp=2)


@functools.cache
def program(name: str, degree: int = 1, **options: Any) -> Program:
    return make_program(name, degree, LAYERS, **options)


# ------------------------------------------------------------------------------------ the cut


def test_the_head_is_some_layers_work() -> None:
    """That of Llama-3.1-8B has the operations of two layers and a half, and the last stage it.

    The first stage, which has the embedding, has fewer layers than the second.
    """
    base = compile_program("llama-3.1-8b", None).base
    assert cut_stages(base, 1) == Stages((0, 32))
    assert cut_stages(base, 4) == Stages((0, 8, 17, 26, 32))
    assert str(cut_stages(base, 2)) == "0-16, 17-31"


@settings(max_examples=15)
@given(st.integers(1, 9), st.integers(1, 9))
def test_every_layer_has_one_stage(layers: int, count: int) -> None:
    base = _of_layers(layers)
    if count > layers:
        with pytest.raises(ParallelError, match=f"pp={count} stages need a layer each"):
            cut_stages(base, count)
        return
    stages = cut_stages(base, count)
    parts = [stages[i].layers for i in range(count)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert all(parts)


@functools.cache
def _of_layers(layers: int) -> Any:
    return make_program("gpt2", 1, layers).base


# ------------------------------------------------------------------------------------ memory


def test_a_stage_holds_its_own_layers() -> None:
    compiled = program("llama3")
    whole = make_executor(compiled, "llama3").state.weight_store.size_bytes

    def run(mesh: RankMesh) -> tuple[int, int, range]:
        state = make_executor(compiled, "llama3", mesh).state
        state.training(state.adapter("a"), windows=False)
        heads = [
            keys.features[0]
            for keys, _ in stage_kv_types(state.serving.serving.model, state.stages, mesh.stage)
        ]
        assert [bool(one) for one in heads] == [i in state.stage.layers for i in range(LAYERS)]
        return state.weight_store.size_bytes, mesh.stage, state.stage.layers

    found = run_mesh(TWO, run)
    assert [stage for _, stage, _ in found] == [1, 0]
    assert [layer for _, _, layers in reversed(found) for layer in layers] == list(range(LAYERS))
    # The tables of positions, which every layer reads, are the first stage's.
    assert sum(size for size, _, _ in found) == whole


@pytest.mark.parametrize("sizes", [MeshSizes(pp=3), MeshSizes(pp=2, tp=2)], ids=str)
def test_a_rank_holds_what_explain_says(sizes: MeshSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    name, batch, seq = "llama3", 8, 24
    given: dict[str, Any] = {"batch": batch, "seq": seq, "dtype": "float32"}
    recipe = recipes(BY_NAME[name])["a"]
    options = {**given, "packed_weights": False, "tp": sizes.tp}
    compiled = make_program(name, sizes.tp, LAYERS, **given, packed_weights=False)
    said = explaining.explain(compiled.config, recipe, pp=sizes.pp, **options)
    saved: dict[int, int] = {}
    under_way: dict[int, list[TrainingPass]] = {}
    forward, ended = TrainingPass.forward, TrainingPass._end_backward

    def noted(own: TrainingPass, tokens: int) -> None:
        forward(own, tokens)
        rank = own._runner.mesh.world.rank
        there = under_way.setdefault(rank, [])
        there.append(own)
        saved[rank] = max(saved.get(rank, 0), live_bytes(there))

    def gone(own: TrainingPass) -> None:
        ended(own)
        under_way[own._runner.mesh.world.rank].remove(own)

    monkeypatch.setattr(TrainingPass, "forward", noted)
    monkeypatch.setattr(TrainingPass, "_end_backward", gone)
    examples = [Example([3] * seq, [3] * seq)] * batch

    def run(mesh: RankMesh) -> tuple[int, dict[str, int]]:
        executor = make_executor(compiled, name, mesh)
        job = {"batch_size": batch, "max_steps": 1, "progress": False}
        executor.finetune(examples, "a", **job)
        found = rank_memory(executor, "a", measures=False)
        return mesh.stage, found | {"activations": saved[mesh.world.rank]}

    for stage, found in run_mesh(sizes, run):
        row = said.stages[stage]["memory_bytes"]
        assert found == {kind: row[kind] for kind in found}
    assert said.memory_bytes == max(
        (row["memory_bytes"] for row in said.stages), key=lambda memory: memory["total"]
    )


def live_bytes(passes: list[TrainingPass]) -> int:
    """Bytes that passes hold between their forward and their backward, beside weights."""
    held = [
        tensor
        for one in passes
        for window in one._windows
        for tensor in (
            *(kept for of_layer in window.saved.values() for kept in of_layer),
            *window.shared,
            *window.carried,
            *((window.targets,) if one._own.is_last else ()),
        )
        if tensor is not None
    ]
    runner = passes[0]._runner
    places = (runner.weights.prologue, *runner.weights.layers, runner.weights.epilogue)
    weights = {one.untyped_storage().data_ptr() for of in places for one in vars(of).values()}
    weights |= {one.untyped_storage().data_ptr() for one in runner.parameters.values()}
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in held}
    return sum(one.nbytes() for place, one in storages.items() if place not in weights)


def test_micro_batches_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage i of S has at most S - i under way, and the last one goes back through each at once."""
    examples = [Example(ids, ids) for ids in prompts((5, 6, 7, 8, 9, 5, 6, 7))]
    events: dict[int, list[str]] = {}

    def noted(act: Callable[..., Any], word: str) -> Callable[..., Any]:
        def call(own: TrainingPass, *given: Any) -> Any:
            events.setdefault(own._own.index, []).append(word)
            return act(own, *given)

        return call

    monkeypatch.setattr(TrainingPass, "forward", noted(TrainingPass.forward, "f"))
    ended = TrainingPass._end_backward
    monkeypatch.setattr(TrainingPass, "_end_backward", noted(ended, "b"))

    def run(mesh: RankMesh) -> None:
        executor = make_executor(program("llama3"), "llama3", mesh)
        executor.finetune(examples, "a", batch_size=8, max_steps=1, progress=False)

    run_mesh(MeshSizes(pp=3), run)
    assert set(events) == {0, 1, 2}
    for stage, found in events.items():
        under_way = [
            found[: i + 1].count("f") - found[: i + 1].count("b") for i in range(len(found))
        ]
        assert found.count("f") == found.count("b") == 8
        assert max(under_way) == 3 - stage


def test_micro_batches_have_all_sequences_with_their_numbers() -> None:
    examples = [Example(ids, ids) for ids in prompts((5, 6, 7, 8, 9))]
    parts = [
        BatchPart(examples[:3], 1, [4, 0, 2]),
        BatchPart([], 2, []),
        BatchPart(examples, 3, range(5)),
    ]
    found = micro_batches(parts, 2)
    of_first = [
        pair
        for index, part in found
        for pair in zip(part.numbers, part.examples, strict=True)
        if index == 0
    ]
    assert sorted(number for number, _ in of_first) == [0, 2, 4]
    assert dict(of_first)[4] is examples[0]
    assert sorted(n for i, part in found if i == 2 for n in part.numbers) == list(range(5))
    assert {i for i, _ in found} == {0, 2}
    assert all(part.seed == i + 1 for i, part in found)
