"""Pipeline stages give what one rank with all layers gives, and hold no more than their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.compiler import compile_program
from pcg.errors import FinetuneError, FinetuneInterrupted, ParallelError, UnsupportedError
from pcg.explain import explain as explaining
from pcg.ir.program.program import Program
from pcg.parallel.ranks import stage_link
from pcg.parallel.ranks.group import Ranks
from pcg.parallel.ranks.mesh import MeshSizes, RankMesh
from pcg.parallel.ranks.stages import Stages, cut_stages
from pcg.parallel.ranks.united import united
from pcg.peft.lora import LoraConfig
from pcg.peft.prompt import PromptEncoderConfig, PromptTuningConfig
from pcg.runtime.data.example import Example
from pcg.runtime.engine.calibration import calibrated
from pcg.runtime.engine.clock import MachineClock
from pcg.runtime.engine.served_batch import ServedBatch
from pcg.runtime.memory.stage_pages import stage_kv_types
from pcg.runtime.training.result import StepRecord
from pcg.runtime.training.stages.micro_batches import BatchPart, micro_batches
from pcg.runtime.training.training_pass import TrainingPass
from tests.support.families import BY_NAME
from tests.support.meshes import Trained, check_close, train
from tests.support.prompts import prompts
from tests.support.ranked import (
    METHODS,
    SEQUENCES,
    USED,
    Outcome,
    make_executor,
    make_program,
    method_work,
    rank_memory,
    recipes,
    work,
    worst_error,
)
from tests.support.threads import run_mesh

LAYERS = 4
TWO = MeshSizes(pp=2)


@functools.cache
def program(name: str, degree: int = 1, **options: Any) -> Program:
    return make_program(name, degree, LAYERS, **options)


@functools.cache
def on_one(name: str) -> Outcome:
    return work(make_executor(program(name), name))


@functools.cache
def trained_alone(name: str) -> Trained:
    return train(make_executor(program(name), name))


# ------------------------------------------------------------------------------------ the cut


def test_the_head_is_some_layers_work() -> None:
    """That of Llama-3.1-8B has the operations of two layers and a half, and the last stage it.

    The first stage, which has the embedding, has fewer layers than the second.
    """
    base = compile_program("llama-3.1-8b", None).base
    assert cut_stages(base, 1) == Stages((0, 32))
    assert cut_stages(base, 4) == Stages((0, 8, 17, 26, 32))
    assert str(cut_stages(base, 2)) == "0-16, 17-31"


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


# ------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama3", TWO),
        ("gpt2", MeshSizes(pp=3)),
        ("gemma2", TWO),
        ("mixtral", MeshSizes(pp=2, tp=2)),
        pytest.param("qwen3", MeshSizes(pp=4), marks=pytest.mark.slow),
        pytest.param("bloom", MeshSizes(pp=2, tp=2), marks=pytest.mark.slow),
        pytest.param("opt-projected", MeshSizes(pp=3), marks=pytest.mark.slow),
        pytest.param("falcon-7b", MeshSizes(pp=2, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_job_over_stages(name: str, sizes: MeshSizes) -> None:
    """Logits, tokens, gradients, losses, what is trained, and what is served of it."""
    compiled = program(name, sizes.tp)
    for found in run_mesh(sizes, lambda mesh: work(make_executor(compiled, name, mesh))):
        assert worst_error(found, on_one(name)) < (1e-6 if sizes.tp == 1 else 1e-5)


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("llama3", MeshSizes(pp=2, dp=2), {}),
        ("gpt2", MeshSizes(pp=2, tp=2), {"sequence_parallel": True}),
        ("gpt2", TWO, {"memory_budget": 0.5}),
        pytest.param("llama3", MeshSizes(pp=2, cp=2), {}, marks=pytest.mark.slow),
        pytest.param("llama3", MeshSizes(pp=2, dp=2, tp=2), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_batches_over_stages(name: str, sizes: MeshSizes, options: dict[str, Any]) -> None:
    """Batches of several sequences are cut into micro-batches."""
    compiled = program(name, sizes.tp, **options)
    for found in run_mesh(sizes, lambda mesh: train(make_executor(compiled, name, mesh))):
        check_close(found, trained_alone(name))


@pytest.mark.parametrize(
    "method",
    [
        "dora",
        "ia3",
        "houlsby",
        "prompt",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("prefix", "loha", "vera", "parallel")),
    ],
)
def test_methods(method: str) -> None:
    """Of a prompt the first stage trains all, and the others nothing."""
    compiled = program("llama3", peft=None)
    expected = method_work(make_executor(compiled, "llama3"), METHODS[method])
    run = lambda mesh: method_work(make_executor(compiled, "llama3", mesh), METHODS[method])  # noqa: E731
    for found in run_mesh(TWO, run):
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_dropout_and_layers_that_one_stage_trains() -> None:
    """Stages below the first trained layer get no gradient, and wait for none."""
    targets = ["q_proj", "down_proj"]
    recipe = LoraConfig(r=4, lora_dropout=0.5, target_modules=targets, layers_to_transform=[3])

    def run(mesh: RankMesh | None) -> Trained:
        options = {"gradient_accumulation_steps": 2, "batch_size": 2, "peft": recipe}
        return train(make_executor(program("llama3"), "llama3", mesh), "top", **options)

    expected = run(None)
    for found in run_mesh(MeshSizes(pp=3), run):
        check_close(found, expected)


@pytest.mark.parametrize(
    ("method", "optimizer", "tp"),
    [
        ("lora", {}, 2),
        ("dora", {"optimizer": "adafactor", "eps": None}, 1),
        ("lora", {"optimizer": "adamw8bit", "optimizer_options": {"min_8bit_size": 16}}, 1),
    ],
    ids=["adamw", "adafactor", "8 bits"],
)
def test_a_job_goes_on_at_another_shape(
    method: str, optimizer: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    """Two steps by two stages, of shards or not, one by one process, the last ones by three."""
    if optimizer.get("optimizer") == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    given = {"eval_data": None, "peft": METHODS.get(method, method), **optimizer}
    expected = train(make_executor(program("llama3"), "llama3"), "new", **given)
    options = {"checkpoint_dir": tmp_path, "save_every": 1, **given}

    def stop_after(step: int, mesh: RankMesh | None) -> None:
        def interrupt(record: StepRecord) -> None:
            if record.step == step:
                raise KeyboardInterrupt

        compiled = program("llama3", mesh.sizes.tp if mesh else 1)
        with pytest.raises(FinetuneInterrupted):
            train(make_executor(compiled, "llama3", mesh), "new", on_step=interrupt, **options)

    run_mesh(MeshSizes(pp=2, tp=tp), lambda mesh: stop_after(2, mesh))
    stop_after(3, None)

    def finish(mesh: RankMesh) -> Trained:
        return train(make_executor(program("llama3"), "llama3", mesh), "new", **options)

    for found in run_mesh(MeshSizes(pp=3), finish):
        if "8bit" not in optimizer.get("optimizer", ""):
            check_close(found, expected)
        for name, tensor in expected[2].items():  # of 8 bits a rounding may be another number
            assert float((found[2][name] - tensor).norm()) <= 1e-3 * float(tensor.norm())


@pytest.mark.parametrize("sizes", [TWO, MeshSizes(pp=2, tp=2)], ids=str)
def test_an_engine_on_threads(sizes: MeshSizes) -> None:
    """The first rank drives: it has the last stage, which chooses tokens."""
    options: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True, "logprobs": 2}

    def run(mesh: RankMesh | None) -> Any:
        executor = make_executor(program("llama3", mesh.sizes.tp if mesh else 1), "llama3", mesh)
        with executor.engine(kv_cache_bytes=2**20).start() as running:
            if executor.ranks.rank:
                return None
            done = executor.generate(SEQUENCES, USED, **options)
            sampled = executor.generate(SEQUENCES, USED, n=2, temperature=1.0, seed=5, **options)
            if mesh is not None:
                with pytest.raises(UnsupportedError, match="a job of an engine over pp=2"):
                    running.finetune([Example([1, 2, 3], [1, 2, 3])], "a").wait(60)
            return [one.token_ids for one in (*done, *sampled)]

    assert run_mesh(sizes, run)[0] == run(None)


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, TWO), (4, TWO), (4, MeshSizes(pp=2, tp=2))], ids=str
)
def test_prompts_in_parts(tokens: int, sizes: MeshSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's tokens go through the stages in parts, which cut sequences and prompts anywhere."""
    monkeypatch.setattr(stage_link, "LEAST_TOKENS", tokens)
    options: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    used = ("a", None, "soft", "b")

    def run(mesh: RankMesh | None) -> Any:
        compiled = program("llama3", 1 if mesh is None else sizes.tp)
        executor = make_executor(compiled, "llama3", mesh)
        executor.add_adapter("soft", PromptTuningConfig(num_virtual_tokens=6), seed=1)
        done = executor.generate(SEQUENCES, used, prompt_logprobs=1, **options)
        return done, executor.embed(SEQUENCES, used)

    cut: set[int] = set()
    put = ServedBatch.put

    def noted(own: ServedBatch, *given: Any) -> None:
        put(own, *given)
        cut.add(len(own.parts))

    expected, states = run(None)
    monkeypatch.setattr(ServedBatch, "put", noted)
    for completions, embedded in run_mesh(sizes, run):
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
        torch.testing.assert_close(embedded, states, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(completions, expected, strict=True):
            pairs = zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
            for a, b in [pair for pair in pairs if pair[1] is not None]:
                assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
    assert cut == ({4} if tokens == 1 else {1, 4})


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


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        (PromptEncoderConfig(num_virtual_tokens=3), {}, "its encoder trains what all stages read"),
        (METHODS["adalora"], {}, "which ranks all layers' weights, over pp=2"),
        ("lora", {"memory_budget": "40KB"}, "planned for all layers of one rank"),
    ],
    ids=["encoder", "adalora", "budget"],
)
def test_what_stages_do_not_train(recipe: Any, options: dict[str, Any], words: str) -> None:
    def run(mesh: RankMesh) -> None:
        executor = make_executor(program("llama3", **options), "llama3", mesh)
        with pytest.raises(UnsupportedError, match=words):
            train(executor, "new", peft=recipe)
        assert "new" not in executor.adapters

    run_mesh(TWO, run)


def test_a_stage_that_trains_nothing_has_any_optimizer() -> None:
    recipe = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[3])
    options = {"peft": recipe, "optimizer": "muon"}
    expected = train(make_executor(program("llama3"), "llama3"), "top", **options)
    run = lambda mesh: train(make_executor(program("llama3"), "llama3", mesh), "top", **options)  # noqa: E731
    for found in run_mesh(TWO, run):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=0)


def test_a_weight_of_one_stage_that_an_optimizer_does_not_take() -> None:
    """All stages refuse it, as the others would wait for the one that does."""
    recipe = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[3], use_dora=True)

    def run(mesh: RankMesh) -> None:
        with pytest.raises(FinetuneError, match="takes matrices alone"):
            train(
                make_executor(program("llama3"), "llama3", mesh), "d", peft=recipe, optimizer="muon"
            )

    run_mesh(TWO, run)


def test_stages_know_one_latency_and_collect_versions() -> None:
    def run(mesh: RankMesh) -> Any:
        state = make_executor(program("llama3"), "llama3", mesh).state
        found = calibrated(state, MachineClock(mesh.alike))
        parts = (found.forward, found.backward, found.loss, found.layer)
        return [(*one.coefficients_s, *one.knee) for one in parts], state.versions._collects

    (first, collects), (second, also) = run_mesh(TWO, run)
    assert first == second
    assert collects
    assert also


def test_what_else_is_refused() -> None:
    def run(mesh: RankMesh) -> None:
        with pytest.raises(ParallelError, match="stages hold whole layers"):
            mesh.sharing(True)
        with pytest.raises(UnsupportedError, match="trainers over"):
            make_executor(program("llama3"), "llama3", mesh).trainer("t")

    run_mesh(MeshSizes(pp=2, dp=2), run)
    run = lambda mesh: make_executor(program("llama3"), "llama3", mesh)  # noqa: E731
    with pytest.raises(ParallelError, match="pp=5 stages need a layer each, and the model has 4"):
        run_mesh(MeshSizes(pp=5), run)


def test_tensors_by_name_are_united() -> None:
    own = {
        0: {"a": torch.arange(3), "é": torch.ones(2, 2).bfloat16()},
        1: {},
        2: {"c": torch.tensor(2.0)},
    }

    def run(mesh: RankMesh) -> dict[str, torch.Tensor]:
        return united(own[mesh.tp.rank], cast(Ranks, mesh.tp))

    for found in run_mesh(MeshSizes(tp=3), run):
        assert found.keys() == {"a", "é", "c"}
        assert torch.equal(found["a"], own[0]["a"])
        assert torch.equal(found["é"], own[0]["é"])
        assert torch.equal(found["c"], own[2]["c"])
