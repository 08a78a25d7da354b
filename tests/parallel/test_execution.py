"""Executors over ranks that are threads give what an executor on one rank gives."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.errors import ParallelError, TypeCheckError
from pcg.ir.layouts import REPLICATED, WHOLE, Layout
from pcg.ir.program.folder import load_program, save_program
from pcg.ir.types import RANK
from pcg.parallel.base_plan import COLUMN, ROW
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.search import Search
from pcg.peft.lora import LoraConfig
from pcg.peft.registry import recipe_from
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import Checkpoint, StateDictCheckpoint
from pcg.runtime.training.runner import TrainingPass
from pcg.source import resolve
from tests.support import meshes, oracle
from tests.support.families import BY_NAME
from tests.support.held import seeded
from tests.support.interpreter import bf16
from tests.support.measured_memory import BATCH, SEQ
from tests.support.parameters import mostly_slow
from tests.support.ranked import (
    EXAMPLES,
    JOB,
    LAYERS,
    METHODS,
    SEQUENCES,
    USED,
    check_memory,
    check_same,
    fill,
    make_executor,
    make_program,
    predicted_memory,
    rank_memory,
    work,
    worst_error,
)
from tests.support.threads import ThreadRanks, run_ranks, tp_mesh

bf16.install()
FAMILIES = ("llama3", "qwen2", "opt", "gpt2", "falcon-7b", "gemma2")


@pytest.mark.parametrize(
    ("name", "degree"),
    mostly_slow(itertools.product(FAMILIES, (2, 4)), ("gpt2", 2), ("llama3", 4)),
)
def test_memory_of_a_rank_is_what_is_predicted(name: str, degree: int) -> None:
    """Llama's two KV heads over four ranks, too: each keeps those that its own heads attend to."""
    check_memory(name, degree)


@pytest.mark.parametrize(
    ("name", "degree", "ep"),
    mostly_slow([("mixtral", 2, 2), ("gpt_oss", 4, 4), ("gpt_oss", 4, 2)], ("mixtral", 2, 2)),
)
def test_memory_of_a_rank_with_some_of_the_experts(
    name: str, degree: int, ep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank saves the rows of its experts, by the routes that are replayed."""
    program = make_program(name, degree, ep=ep)
    routes = torch.rand((SEQ, LAYERS, 4), generator=seeded("routes")).argsort(-1)[..., :2]
    routes[:, 0] = torch.arange(2)  # in the first layer all tokens choose the first two experts
    monkeypatch.setattr(TrainingPass, "routes_of", lambda *_: routes.to(torch.int16))
    found = run_ranks(degree, lambda ranks: rank_memory(make_executor(program, name, ranks), "a"))
    most, even = (predicted_memory(program, name, "a", s) for s in ("compressed", "even-routing"))
    parts = [rank * ep // degree for rank in range(degree)]
    rows = [(routes * ep // 4 == part).sum((0, 2)).tolist() for part in parts]
    spared = [0] * degree
    for layer, index in enumerate(program.training.layers):
        for node in program.training.plans[index].forward.nodes:
            if node.op == "pack_rows":
                most_rows, size = node.output.type.features
                for rank, chosen in enumerate(rows):
                    spared[rank] += 4 * size * BATCH * (SEQ * most_rows - chosen[layer])
    assert found == [{**most, "activations": most["activations"] - less} for less in spared]
    assert sum(memory["activations"] for memory in found) == degree * even["activations"]


def test_ranks_hold_the_kv_heads_that_their_queries_read() -> None:
    """Keys, values, their biases and what adapters add to them, in all graphs and in the cache."""
    family, degree = BY_NAME["qwen2"].config(LAYERS), 4
    program = make_program("qwen2", degree)
    width = family["hidden_size"] // family["num_attention_heads"]
    models = [program.serving.model, program.training.model]
    for block in (block for model in models for block in model.blocks):
        shared = {p.name: p for p in block.parameters if p.copies > 1}
        assert {p.copies for p in shared.values()} == {degree // family["num_key_value_heads"]}
        weights = {f"self_attn.{kind}_proj.{end}" for kind in "kv" for end in ("weight", "bias")}
        assert weights < shared.keys()
        assert sum("lora_B" in name for name in shared) == 2
        assert {p.type.features[0] for p in shared.values() if "lora" not in p.name} == {width}
        (attention,) = (node for node in block.nodes if node.op.startswith("attention"))
        assert [block.types[name].features for name in attention.inputs[:3]] == [(1, width)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_hand_on_more_than_hidden_states(name: str) -> None:
    """Inputs of each layer, and keys and values that the last layer shares."""
    expected = work(make_executor(make_program(name, 1, layers=3), name))
    program = make_program(name, 2, layers=3)
    assert len(program.base.blocks[0].outputs) > 1
    for outcome in run_ranks(2, lambda ranks: work(make_executor(program, name, ranks))):
        assert worst_error(outcome, expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "degree", "options"),
    [
        ("gpt2", 2, {"sequence_parallel": True, "gradient_accumulation_steps": 8}),
        ("gpt_oss", 4, {"ep": 2}),  # matrices and biases that two ranks share
    ],
)
def test_a_program_of_ranks_is_saved_and_loaded(
    name: str, degree: int, options: dict[str, Any], tmp_path: Path
) -> None:
    program = make_program(name, degree, **options)
    save_program(program, tmp_path / "program")
    loaded = load_program(tmp_path / "program")
    assert loaded.options == program.options
    assert {key: getattr(loaded.options, key) for key in options} == options
    assert loaded.serving == program.serving
    assert loaded.training == program.training


def test_a_rank_reads_its_slices_alone(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = oracle.random_model(BY_NAME["llama3"].config(LAYERS))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    source = resolve(tmp_path, weights=True)
    program = make_program("llama3", 2)

    def read(ranks: ThreadRanks) -> tuple[int, int]:
        weights = Checkpoint.open(source, program.base_prefix, program.renamings)
        compiler.make_executor(program, weights, None, None, "cpu", tp_mesh(ranks))
        return weights.read_bytes, len(weights.unused())

    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    for found in run_ranks(2, read):
        assert found == ((sum(sizes.values()) - norms) // 2 + norms, 0)


def test_ranks_save_one_adapter(tmp_path: Path) -> None:
    expected = make_executor(make_program("gpt2", 1), "gpt2")
    expected.finetune(EXAMPLES, "b", **JOB)
    program = make_program("gpt2", 2)

    def save(ranks: ThreadRanks) -> None:
        executor = make_executor(program, "gpt2", ranks)
        executor.finetune(EXAMPLES, "b", **JOB)
        executor.save_adapter("b", tmp_path / "b")

    run_ranks(2, save)
    loaded = expected.add_adapter("loaded", tmp_path / "b")
    check_same(loaded, expected.adapters["b"])
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {"README.md", "SHA256SUMS", "adapter_config.json", "adapter_model.safetensors"}


def test_one_process_is_refused_with_how_to_start_more() -> None:
    message = r"tp=2 takes 2 processes, and this is one of 1; run it under torchrun --nproc-per-nod"
    with pytest.raises(ParallelError, match=message):
        compiler.compile(oracle.random_model(BY_NAME["llama3"].config(LAYERS)), tp=2)
    with pytest.raises(ParallelError, match="tp=0; use an int of at least 1"):
        compiler.compile(BY_NAME["llama3"].config(LAYERS), tp=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("method", mostly_slow(METHODS, "adalora", "vera", "pfeiffer"))
def test_every_method_compiles_over_ranks(method: str, backend: str) -> None:
    program = make_program("qwen2", 2, peft={"m": METHODS[method]}, backend=backend)
    assert program.training is not None


@pytest.mark.parametrize("name", mostly_slow(["gpt2", "falcon-7b"], "gpt2"))
@pytest.mark.parametrize(
    "method", mostly_slow([name for name in METHODS if "dropout" not in name], "dora", "vera")
)
def test_every_method_with_dropout_compiles_over_fused_projections(name: str, method: str) -> None:
    recipe = recipe_from(METHODS[method])
    if recipe.dropout_field:
        recipe = dataclasses.replace(recipe, **{recipe.dropout_field: 0.2})
    assert make_program(name, 2, peft={"m": recipe}).training is not None


LAYOUTS = (WHOLE, REPLICATED, COLUMN, ROW)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(*pair, marks=() if pair == (COLUMN, ROW) else pytest.mark.slow)
        for pair in itertools.product(LAYOUTS, repeat=2)
    ],
    ids=str,
)
def test_lora_held_in_every_way(a: Layout, b: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving adapters of two ranks in one batch, and training one of them."""

    kinds = {".lora_A": a, ".lora_B": b}

    free = Search.plan

    def forced(search: Search) -> ParallelPlan:
        held = {
            parameter.name: layout
            for parameter in search.graph.parameters
            for kind, layout in kinds.items()
            if parameter.source.endswith(kind)
        }
        try:
            return search.hold(held)
        except TypeCheckError:
            # The stacks of a batch's adapters are read as they are held, which not every pair is.
            assert search.graph.types[next(iter(held))].shape[0] == RANK
            return free(search)

    def act(executor: Executor) -> list[Tensor]:
        recipe = LoraConfig(r=4, lora_alpha=8, target_modules=("q_proj", "o_proj", "down_proj"))
        executor.add_adapter("a", recipe)
        executor.add_adapter("b", dataclasses.replace(recipe, r=3))
        for adapter in executor.adapters.values():
            fill(adapter.tensors)
            executor.refresh_adapter(adapter.name)
        logits = executor.logits(SEQUENCES, USED)
        executor.finetune(EXAMPLES, "a", **JOB)
        return [*logits, *executor.adapters["a"].tensors]

    one = act(make_executor(make_program("llama3", 1, peft=None), "llama3"))
    program = make_program("llama3", 2, peft=None)
    monkeypatch.setattr(Search, "plan", forced)
    for found in run_ranks(2, lambda ranks: act(make_executor(program, "llama3", ranks))):
        for x, y in zip(found, one, strict=True):
            assert (x - y).norm() < 1e-5 * y.norm()


def test_norms_of_experts_outputs() -> None:
    """Mixtral with a norm between the experts' products and their sum: a rank norms its rows."""
    model = oracle.random_model(BY_NAME["mixtral"].config(1))
    for layer in model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
        layer.mlp.experts.post_expert_norm = norm = torch.nn.LayerNorm(model.config.hidden_size)
        fill([norm.weight.data, norm.bias.data])
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    recipe = {"peft_type": "LORA", "r": 2, "target_modules": [], "target_parameters": parameters}
    options: Any = {"dtype": "float32", "batch": 2, "seq": 16}
    alone, over_ranks = (
        compiler.compile_program(model, recipe, **options, **ranks)
        for ranks in ({}, {"tp": 2, "ep": 2})
    )
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def run(ranks: ThreadRanks | None = None) -> tuple[Tensor, meshes.Trained]:
        program, mesh = (alone, []) if ranks is None else (over_ranks, [tp_mesh(ranks)])
        weights = StateDictCheckpoint(state, program.base_prefix)
        executor = compiler.make_executor(program, weights, {"a": recipe}, None, "cpu", *mesh)
        return executor.logits([SEQUENCES[0]])[0], meshes.train(executor)

    _, trained = run()
    model.config._experts_implementation = "batched_mm"
    with torch.no_grad():
        expected = model(torch.tensor([SEQUENCES[0]])).logits[0]
    for logits, found in run_ranks(2, run):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        meshes.check_close(found, trained)
