"""LoHa, VeRA, DoRA and (IA)³: the operators that each adds, and what it begins with."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from pcg.errors import AdapterError, PcgError, UnsupportedError
from pcg.ir.analysis.verifier import verify
from pcg.ir.parser import parse_graph
from pcg.ir.printer import print_graph
from pcg.passes.attach import Bypasses, attach
from pcg.passes.registry import run_graphs
from pcg.peft.adapter import new_adapter
from pcg.peft.ia3 import Ia3Bypass
from pcg.peft.loha import LohaBypass
from pcg.peft.lora import LoraBypass, LoraConfig, LoraWeights
from pcg.peft.vera import VeraBypass
from pcg.runtime.data.example import Example
from tests.support import compiled, oracle
from tests.support.bypasses import lora
from tests.support.families import BY_NAME
from tests.support.mlp import inner_plan, mlp_model
from tests.support.parameters import mostly_slow
from tests.support.peft_cases import check_batch, trained, wrap
from tests.support.prompts import TOLERANCE, prompts

UP, DOWN = "model.layers.{layer}.up", "model.layers.{layer}.down"
IA3, IN, VERA = Ia3Bypass(False), Ia3Bypass(True), VeraBypass(2)
Q_DOWN = {"target_modules": ["q_proj", "down_proj"]}
LOHA = {"peft_type": "LOHA", "r": 3, "alpha": 5, **Q_DOWN}
DORA = {"peft_type": "LORA", "r": 4, "use_dora": True, **Q_DOWN}
JOB: dict[str, Any] = {"batch_size": 1, "max_steps": 3, "learning_rate": 0.02, "progress": False}

# ------------------------------------------------------------------------------- operators


def ops(bypasses: Bypasses, passes: str = "") -> list[str]:
    blocks = attach(mlp_model(), bypasses).blocks
    (block,) = run_graphs(blocks, passes) if passes else blocks
    verify(block)
    return [node.op for node in block.nodes]


def test_training_by_loha_makes_a_product_of_rank_r2_beside_the_module() -> None:
    (block,) = attach(mlp_model(), Bypasses({DOWN: (LohaBypass(2, 1.0),)})).blocks
    after = """
graph @block_0(%x: f32[T, 4]) {
  frozen %norm.weight: f32[4] = "model.layers.{layer}.norm.weight"
  frozen %up.weight: f32[6, 4] = "model.layers.{layer}.up.weight"
  frozen %down.weight: f32[4, 6] = "model.layers.{layer}.down.weight"
  frozen %down.bias: f32[4] = "model.layers.{layer}.down.bias"
  adapter %down.hada_w1_b: f32[2, 6] = "model.layers.{layer}.down.hada_w1_b"
  adapter %down.hada_w2_b: f32[2, 6] = "model.layers.{layer}.down.hada_w2_b"
  adapter %down.hada_w1_a: f32[4, 2] = "model.layers.{layer}.down.hada_w1_a"
  adapter %down.hada_w2_a: f32[4, 2] = "model.layers.{layer}.down.hada_w2_a"
  %norm: f32[T, 4] = rms_norm(%x, %norm.weight) {eps=1e-06, offset=0.0, round_first=True}  @norm
  %up: f32[T, 6] = linear(%norm, %up.weight)  @up
  %relu: f32[T, 6] = relu(%up)
  %down: f32[T, 4] = linear(%relu, %down.weight, %down.bias)  @down
  %down_loha_down: f32[4, 6] = khatri_rao(%down.hada_w1_b, %down.hada_w2_b) {dim=-2}  @down
  %down_loha_up: f32[4, 4] = khatri_rao(%down.hada_w1_a, %down.hada_w2_a) {dim=-1}  @down
  %down_loha_s: f32[T, 4] = shrink(%relu, %down_loha_down)  @down
  %down_loha_z: f32[T, 4] = expand_add(%down, %down_loha_s, %down_loha_up)  @down
  %add: f32[T, 4] = add(%x, %down_loha_z)
  return %add
}
"""
    assert print_graph(block) == print_graph(parse_graph(after))


FUSED = ["rms_norm", "linear", "relu", "lora_linear", "add"]
SHRUNK = ["rms_norm", "linear", "relu", "linear", "shrink", "expand_add"]
DORA_OPS = ["shrink", "expand_add", "column_norm", "column_factor", "scale"]


@pytest.mark.parametrize(
    ("bypasses", "passes", "expected"),
    [
        (Bypasses({DOWN: (LoraBypass(4), LohaBypass(2, 1.0))}).for_serving(), "fuse", FUSED),
        (Bypasses({DOWN: (VERA,)}).for_serving(), "fuse", FUSED),
        (lora({UP: None, DOWN: None}), "fuse",
         ["rms_norm", "lora_linear", "relu", "lora_linear", "add"]),
        (Bypasses({UP: (LoraBypass(None), IA3), DOWN: (LoraBypass(None), IN)}), "fuse",
         ["rms_norm", "lora_linear", "scale", "relu", "scale", "lora_linear", "add"]),
        (lora({DOWN: 2}, use_dora=True), "", [*FUSED[:3], "linear", *DORA_OPS, "add"]),
        (lora({DOWN: 2}, dropout=0.5, use_dora=True), "",
         [*FUSED[:3], "linear", "dropout", "linear", *DORA_OPS, "sub", "add", "add"]),
    ],
    ids=["loha served", "vera served", "lora served", "lora and ia3", "dora", "dora with dropout"],
)  # fmt: skip
def test_operators(bypasses: Bypasses, passes: str, expected: list[str]) -> None:
    """LoRA stays fused where other methods meet it, and serves alone without a call more."""
    assert ops(bypasses, "fuse_linears,fuse_lora" if passes else "") == expected


def test_operands() -> None:
    (block,) = attach(mlp_model(), Bypasses({UP: (IA3,), DOWN: (IN,)})).blocks
    text = print_graph(block)
    assert "%up_scaled: f32[T, 6] = scale(%up, %up.ia3_l)  @up" in text
    assert "%down_scaled_x: f32[T, 6] = scale(%relu, %down.ia3_l_in)  @down" in text
    assert "linear(%down_scaled_x, %down.weight, %down.bias)" in text
    dora = lora({DOWN: 2}, use_dora=True)
    (trained_block,), (served,) = (
        attach(mlp_model(), b).blocks for b in (dora, dora.for_serving())
    )
    assert "scale(%down_z, %down_factor, %down.bias)" in print_graph(trained_block)
    assert "scale(%down_z, %down.lora_factor, %down.bias)" in print_graph(served)
    assert "column_norm" not in print_graph(served)
    (block,) = attach(mlp_model(), Bypasses({UP: (VERA,), DOWN: (VERA,)})).blocks
    types = {p.source: str(p.type) for p in block.parameters if p.role == "adapter"}
    assert types == {  # VeRA's matrices are as large as the largest site
        "vera_A": "f32[2, 6]", "vera_B": "f32[6, 2]",
        f"{UP}.vera_lambda_b": "f32[6]", f"{UP}.vera_lambda_d": "f32[2]",
        f"{DOWN}.vera_lambda_b": "f32[4]", f"{DOWN}.vera_lambda_d": "f32[2]",
    }  # fmt: skip


def test_what_is_kept_for_backward() -> None:
    """LoRA keeps A's input for A's gradient; VeRA A's result; LoHa makes its factors again."""
    vera, plain = (
        inner_plan(attach(mlp_model(), b)) for b in (Bypasses({DOWN: (VERA,)}), lora({DOWN: 2}))
    )
    assert "down_vera_s" in vera.saved
    assert set(plain.saved) - set(vera.saved) == {"down_s"}
    assert {name.rpartition(".")[2] for name in vera.trained} == {"vera_lambda_b", "vera_lambda_d"}
    loha = inner_plan(attach(mlp_model(), Bypasses({DOWN: (LohaBypass(2, 1.0),)})))
    assert not {"down_loha_down", "down_loha_up"} & set(loha.saved)


# ---------------------------------------------------------------------------------------- LoHa


@pytest.mark.parametrize("family", mostly_slow(["qwen2", "gemma2", "falcon-7b"], "falcon-7b"))
def test_loha_of_a_mixed_batch(family: str, tmp_path: Path) -> None:
    """With patterns of ranks and alphas, at all linear modules, beside LoRA and the base."""
    base = oracle.random_model(BY_NAME[family].config(2))
    first = "query_key_value" if family == "falcon-7b" else "q_proj"
    patterns = {"rank_pattern": {first: 2}, "alpha_pattern": {rf".*\.1\..*{first}": 3}}
    check_beside_lora(base, {"target_modules": "all-linear", "r": 4, **patterns}, tmp_path)


@pytest.mark.slow
def test_loha_in_programs_for_triton(tmp_path: Path) -> None:
    """Serving reads rows as LoRA's, and training multiplies by what torch makes of the factors."""
    base = oracle.random_model(BY_NAME["llama-biases"].config(2))
    check_beside_lora(base, {"r": 3, "alpha": 5, **Q_DOWN}, tmp_path, backend="triton")


def check_beside_lora(base: Any, fields: Any, directory: Path, **options: Any) -> None:
    configs = {
        "loha": peft.LoHaConfig(**fields),
        "lora": peft.LoraConfig(r=5, target_modules="all-linear"),
    }
    wrapped = {name: wrap(base, config) for name, config in configs.items()}
    for name, model in wrapped.items():
        oracle.save(model, directory / name)
    paths = {name: str(directory / name) for name in wrapped}
    executor = compiled.executor(base, paths, **options)
    check_batch(executor, {**wrapped, None: base}, "loha")


def test_gpt2_which_peft_does_not_adapt_by_loha() -> None:
    """Against LoRA of the same products: a file for pcg, which peft refuses."""
    base = oracle.random_model(BY_NAME["gpt2"].config(2))
    with pytest.raises(TypeError, match="Conv1D"):
        peft.get_peft_model(copy.deepcopy(base), peft.LoHaConfig(target_modules=["c_attn"]))
    executor = compiled.executor(base)
    fields = {**LOHA, "target_modules": ["c_attn"], "init_weights": False}
    loha = executor.add_adapter("loha", fields)
    plain = {"peft_type": "LORA", "r": 9, "lora_alpha": 9, "target_modules": ["c_attn"]}
    same = executor.add_adapter("lora", plain)
    for path, weights in loha.weights.items():
        delta = (weights.w1_a @ weights.w1_b) * (weights.w2_a @ weights.w2_b) * weights.scale
        u, s, v = torch.linalg.svd(delta, full_matrices=False)
        same.weights[path].a.copy_(v[:9])
        same.weights[path].b.copy_(u[:, :9] * s[:9])
    executor.refresh_adapter("lora")
    (sequence,) = prompts((9,))
    ours, theirs = executor.logits([sequence, sequence], ["loha", "lora"])
    assert oracle.relative_error(ours, theirs) < 1e-4


def test_dropout_of_loha_is_kept_in_files_and_refused_in_training(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama-biases"].config(2))
    config = peft.LoHaConfig(r=3, **Q_DOWN, rank_dropout=0.25, module_dropout=0.5)
    wrapped = wrap(base, config)
    oracle.save(wrapped, tmp_path / "theirs")
    executor = compiled.executor(base, {"a": str(tmp_path / "theirs")})
    (sequence,) = prompts((9,))
    expected = oracle.logits(wrapped, sequence)
    assert oracle.relative_error(executor.logits([sequence], "a")[0], expected) < 1e-5
    executor.save_adapter("a", tmp_path / "ours")
    fields = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert (fields["rank_dropout"], fields["module_dropout"]) == (0.25, 0.5)
    data = [Example(sequence, sequence)]
    with pytest.raises(UnsupportedError, match=r"rank_dropout=0\.25: pcg trains LoHa without"):
        executor.finetune(data, "a", **JOB)
    with pytest.raises(UnsupportedError, match=r"module_dropout=1: pcg trains LoHa without"):
        executor.finetune(data, "b", peft={**LOHA, "module_dropout": 1}, **JOB)


# ------------------------------------------------------------------------------- fresh adapters


def alike(ours: torch.Tensor, theirs: torch.Tensor, spread: float, most: float = 0.0) -> None:
    """Random tensors of one shape and distribution."""
    assert ours.shape == theirs.shape
    assert float(ours.std()) == pytest.approx(float(theirs.detach().std()), rel=spread)
    if most:
        largest = float(theirs.detach().abs().max())
        assert float(ours.abs().max()) == pytest.approx(largest, rel=most)


@pytest.mark.parametrize("init", [True, False])
def test_fresh_adapters_are_as_in_peft(init: bool) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiled.executor(base)
    fields: dict[str, Any] = {"r": 16, "init_weights": init, **Q_DOWN}
    loha = executor.add_adapter("loha", {"peft_type": "LOHA", **fields})
    theirs = trained(peft.get_peft_model(copy.deepcopy(base), peft.LoHaConfig(**fields)))
    for path, parameter in theirs.items():
        alike(loha.parameter(path).weight, parameter, 0.1, 0.05)
    fields |= {"projection_prng_key": 3, "d_initial": 0.3}
    vera = executor.add_adapter("vera", {"peft_type": "VERA", **fields})
    wrapped = peft.get_peft_model(copy.deepcopy(base), peft.VeraConfig(**fields))
    assert torch.equal(vera.shared["vera_A"], wrapped.base_model.vera_A["default"])
    assert torch.equal(vera.shared["vera_B"], wrapped.base_model.vera_B["default"])
    for path, weights in vera.weights.items():
        module = wrapped.base_model.model.get_submodule(path)
        lambda_b, lambda_d = weights.tensors
        assert torch.equal(lambda_b, module.vera_lambda_b["default"])
        assert not init or torch.equal(lambda_d, module.vera_lambda_d["default"])
    ia3 = executor.add_adapter("ia3", {"peft_type": "IA3", "init_ia3_weights": init})
    values = torch.cat([tensor.flatten() for tensor in ia3.tensors])
    assert values.mean() == pytest.approx(float(init), abs=0.2)
    assert values.std() == pytest.approx(float(not init), abs=0.2)


@pytest.mark.parametrize("init", [True, False])
def test_magnitudes_of_dora_begin_as_the_lengths(init: bool) -> None:
    base = oracle.random_model(BY_NAME["gpt2"].config(2))
    fields = {**DORA, "target_modules": ["c_attn"], "init_lora_weights": init}
    adapter = compiled.executor(base).add_adapter("a", fields)
    for path, weights in adapter.weights.items():
        assert isinstance(weights, LoraWeights)
        weight = base.get_submodule(path).weight.data.t()
        whole = weight + weights.scale * weights.b @ weights.a
        torch.testing.assert_close(weights.magnitude, whole.norm(dim=1))
    recipe = LoraConfig(target_modules=("q",), use_dora=True)
    with pytest.raises(AdapterError, match="give base_weights"):
        new_adapter("x", recipe, {"a.q": (4, 4)})


# ----------------------------------------------------------------------------------- one model


def test_the_factor_of_dora_is_made_once_until_the_adapter_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiled.executor(base)
    executor.add_adapter("lora", {**DORA, "use_dora": False})
    kinds = {node.op for block in executor.serving.runner.model.blocks for node in block.nodes}
    assert "scale" not in kinds  # LoRA alone is served as before
    executor.add_adapter("a", DORA)
    executor.add_adapter("b", DORA, seed=1)
    calls: list[Any] = []
    norm = LoraWeights._norm
    monkeypatch.setattr(
        LoraWeights, "_norm", lambda self, around: calls.append(self) or norm(self, around)
    )
    sequences = prompts((5, 4))
    executor.logits(sequences, ["a", "b"])
    assert len(calls) == len({*calls}) == 8  # two adapters, two modules, two layers
    executor.logits(sequences, ["b", "a"])
    executor.generate(sequences, ["a", None], max_new_tokens=3, ignore_eos=True)
    before = len(calls)
    assert before == 8
    executor.refresh_adapter("a")
    executor.logits(sequences, ["a", "b"])
    assert len(calls) == before + 4
    for name in ("a", "lora"):
        found = executor.logits(sequences[:1], name)[0]
        assert oracle.relative_error(found, oracle.logits(base, sequences[0])) < TOLERANCE
    data = [Example(s, s) for s in sequences]
    with pytest.raises(PcgError, match=r"none|rank 4 with scale 2 at .* and DoRA"):
        executor.finetune(data, "a", peft={**DORA, "use_dora": False}, max_steps=1)


def test_half_precision_scales_in_fp32() -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2), torch.bfloat16)
    executor = compiled.executor(base)
    config = {k: v for k, v in DORA.items() if k != "peft_type"}
    models = {"dora": wrap(base, peft.LoraConfig(**config)), "ia3": wrap(base, peft.IA3Config())}
    dora = executor.add_adapter("dora", DORA)
    ia3 = executor.add_adapter("ia3", {"peft_type": "IA3"})
    for path, weights in dora.weights.items():
        assert isinstance(weights, LoraWeights)
        own = models["dora"].base_model.model.get_submodule(path)
        weights.a.copy_(own.lora_A["default"].weight.data)
        weights.b.copy_(own.lora_B["default"].weight.data)
        weights.magnitude.copy_(own.lora_magnitude_vector["default"].weight.data)
    for path, weights in ia3.weights.items():
        own = models["ia3"].base_model.model.get_submodule(path).ia3_l["default"]
        weights.tensors[0].copy_(own.data.flatten())
    sequences = prompts((9, 5))
    for name, model in models.items():
        executor.refresh_adapter(name)
        for logits, sequence in zip(executor.logits(sequences, name), sequences, strict=True):
            expected = oracle.logits(model, sequence).float()
            assert oracle.relative_error(logits.float(), expected) < 0.03, name
    data = [Example(s, s) for s in sequences]
    result = executor.finetune(data, "dora", max_steps=2, progress=False)
    assert all(loss > 0 for loss in result.losses)
    prompt = executor.add_adapter("p", {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 5})
    assert prompt.tensors[0].dtype == torch.float32
    runner = executor.training_runner("p")
    runner.forward_backward(data[:1], 9)
    (parameter,) = runner.parameters.values()
    assert parameter.grad.dtype == torch.float32
    assert executor.logits(sequences[:1], "p")[0].dtype == torch.bfloat16


def test_paths_for_all_linear_that_peft_cannot_read_itself(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    config = peft.IA3Config(target_modules="all-linear", feedforward_modules=["down_proj"])
    wrapped = wrap(base, config)
    oracle.save(wrapped, tmp_path / "theirs")
    with pytest.raises(ValueError, match="should be a subset"):
        oracle.load_saved(base, tmp_path / "theirs")
    executor = compiled.executor(base, {"a": str(tmp_path / "theirs")})
    executor.save_adapter("a", tmp_path / "ours")
    (sequence,) = prompts((9,))
    expected = oracle.logits(wrapped, sequence)
    assert oracle.relative_error(executor.logits([sequence], "a")[0], expected) < TOLERANCE
    read = oracle.load_saved(base, tmp_path / "ours")
    assert torch.equal(oracle.logits(read, sequence), expected)
