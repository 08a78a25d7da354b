"""LoRA dropout in training: peft in train mode with our masks, replay, seeds, and no cost."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.triton import elementwise as kernels
from pcg.passes.attach import attach
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.batch import whole_sequences
from pcg.runtime.training.runner import TrainingRunner
from tests.support import compiled, oracle
from tests.support.bypasses import lora
from tests.support.families import BY_NAME
from tests.support.mlp import inner_plan, mlp_model
from tests.support.parameters import mostly_slow
from tests.support.peft_cases import trained
from tests.support.prompts import TOLERANCE, prompts
from tests.support.wide import widen

SEED = 11
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.25}
CASES = {
    "llama3": r".*(_proj|lm_head)",
    "gpt2": r".*(c_attn|c_proj|c_fc)",
    "opt": r".*(q_proj|v_proj|fc1|fc2)",
}


METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora_bias": {**LORA, "lora_bias": True, "use_rslora": True},
    "dora": {**LORA, "use_dora": True},
    "vera": {"peft_type": "VERA", "r": 4, "vera_dropout": 0.25},
}
PARAMETERS = {"lora": 2, "lora_bias": 3, "dora": 3, "vera": 2}
"""Trained tensors of a module."""


def pair(
    name: str,
    p: float = 0.25,
    method: str = "lora",
    dtype: torch.dtype = torch.float32,
    budget: float = 1.0,
    backend: str = "torch",
) -> tuple[Any, Executor]:
    """peft's model, and an executor with the same adapter `a`."""
    base = oracle.random_model(BY_NAME[name].config(2), dtype)
    fields = {**METHODS[method], "target_modules": CASES[name]}
    if method != "vera":
        fields["lora_dropout"] = p
    executor = compiled.executor(base, dtype=dtype, memory_budget=budget, backend=backend)
    kind = peft.VeraConfig if method == "vera" else peft.LoraConfig
    config = kind(**{k: v for k, v in fields.items() if k != "peft_type"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2's Conv1D stores its weight the other way round
        wrapped = peft.get_peft_model(base, config).to(dtype)
    executor.add_adapter("a", fields)
    ours = executor.training_runner("a").parameters
    theirs = trained(wrapped)
    assert ours.keys() == theirs.keys()
    generator = torch.Generator().manual_seed(1)
    for path, parameter in theirs.items():
        start = 0.0 if "lora_A" in path or "lora_B" in path else parameter.data
        parameter.data.copy_(start + 0.1 * torch.randn(parameter.shape, generator=generator))
        ours[path].copy_(parameter.data)
    return wrapped, executor


def masks(
    runner: TrainingRunner, ids: list[list[int]], seed: int, backend: str = "torch"
) -> Mapping[str, Tensor]:
    """What our program multiplies the input of each module by, [tokens, in]."""
    drop = (torch_ops if backend == "torch" else kernels).dropout
    batch = whole_sequences(ids, torch.device("cpu"))
    batch.dropout_seed = seed
    learned = [i for s in batch.spans for i in range(s.start, s.start + s.length - 1)]
    model = runner.training.model
    dtype = next(iter(runner.parameters.values())).dtype
    found = {}
    graphs = [(model.blocks[block], layer) for layer, block in enumerate(model.layers)]
    for graph, layer in [*graphs, (model.epilogue, len(model.layers))]:
        for node in graph.nodes:
            if node.op == "dropout":
                source = next(
                    p.source
                    for p in graph.parameters
                    if p.role == "adapter" and p.name.startswith(f"{node.scope}.")
                )
                is_layer = graph is not model.epilogue
                # The head sees the tokens with a target alone.
                rows = torch.arange(len(batch.input_ids)) if is_layer else torch.tensor(learned)
                batch.layer = layer
                ones = torch.ones(len(rows), node.output.type.features[0], dtype=dtype)
                p, key = node.attribute("p"), node.attribute("key")
                mask = torch.ones(len(batch.input_ids), ones.shape[1], dtype=dtype)
                batch.chosen = None if is_layer else rows
                mask[rows] = drop(batch, ones, p, key)
                found[source.format(layer=layer).rpartition(".")[0]] = mask
    return found


def replace_dropouts(wrapped: Any, by_path: Mapping[str, Tensor]) -> None:
    """Let peft drop what our program drops, sequence after sequence."""
    modules = dict(wrapped.base_model.model.named_modules())
    for path, mask in by_path.items():
        is_vera = hasattr(modules[path], "vera_dropout")
        dropouts = modules[path].vera_dropout if is_vera else modules[path].lora_dropout
        dropout = dropouts["default"]
        assert isinstance(dropout, torch.nn.Dropout)
        rows = iter(mask)

        def forward(x: Tensor, rows: Any = rows) -> Tensor:
            return x * torch.stack([next(rows) for _ in range(x.shape[-2])])

        dropout.forward = forward


def check_gradients(
    name: str, method: str, dtype: torch.dtype, budget: float, backend: str = "torch"
) -> None:
    wrapped, executor = pair(name, method=method, dtype=dtype, budget=budget, backend=backend)
    tolerance = 1e-10 if dtype == torch.float64 else TOLERANCE
    sequences = prompts((12, 5, 9))
    runner = executor.training_runner("a")
    by_path = masks(runner, sequences, SEED, backend)
    assert len(by_path) == len(runner.parameters) // PARAMETERS[method]
    replace_dropouts(wrapped.eval(), by_path)
    for module in wrapped.modules():  # not the base's own dropout, which pcg does not have
        module.training = isinstance(module, peft.tuners.lora.LoraLayer)
    for parameter in runner.parameters.values():
        parameter.grad = None
    targets = sum(len(s) - 1 for s in sequences)
    loss = runner.forward_backward([Example(s, s) for s in sequences], targets, SEED)
    expected_loss, _ = oracle.loss_and_gradients(wrapped, sequences)
    expected = {path: p.grad for path, p in trained(wrapped).items()}
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    for path, parameter in runner.parameters.items():
        assert parameter.dtype == dtype
        error = (parameter.grad - expected[path]).norm() / expected[path].norm()
        assert error < tolerance, path


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", mostly_slow(CASES, "opt"))
def test_gradients_are_pefts_with_the_same_masks(name: str, method: str) -> None:
    check_gradients(name, method, torch.float32, 1.0)


@pytest.mark.slow
def test_gradients_by_kernels_are_pefts_with_the_same_masks() -> None:
    """A kernel makes the gradient of queries before rotation, and reads it for what was dropped."""
    check_gradients("llama3", "dora", torch.float32, 1.0, backend="triton")


@pytest.mark.parametrize(
    "budget", [0.0, *(pytest.param(b, marks=pytest.mark.slow) for b in (0.5, 1.0))]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", ["llama3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "opt"))]
)
def test_fp64_with_the_same_masks(
    name: str, method: str, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-10; in Llama where fp32 is widened, see test_fp64.py."""
    widen(monkeypatch, BY_NAME[name].model_type)
    check_gradients(name, method, torch.float64, budget)


def test_what_is_dropped_has_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """DoRA asks for a product of a linear with a bias, and without; in fp64 none is packed."""
    widen(monkeypatch, BY_NAME["gpt2"].model_type)
    check_gradients("gpt2", "dora", torch.float64, 1.0)


def test_masks_differ_by_seed_layer_and_module_and_are_drawn_again() -> None:
    _, executor = pair("llama3")
    runner = executor.training_runner("a")
    sequences = prompts((30,))
    first, again = (masks(runner, sequences, SEED) for _ in range(2))
    assert all(torch.equal(first[path], again[path]) for path in first)
    dropped = torch.cat([mask.flatten() for mask in first.values()])
    assert dropped.unique().tolist() == pytest.approx([0.0, 1.0, 1 / 0.75])  # 1: not the head's
    assert (dropped == 0).float().mean() == pytest.approx(0.25, abs=0.02)
    other = masks(runner, sequences, SEED + 1)
    alike = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    alike.append("model.layers.1.self_attn.q_proj")
    different = [first[path] for path in alike] + [other[alike[0]]]
    for i, mask in enumerate(different):
        assert not any(torch.equal(mask, later) for later in different[i + 1 :])


def test_nothing_more_is_kept_for_backward() -> None:
    """The mask is drawn again, and what it drops from is what LoRA keeps anyway."""
    sites = dict.fromkeys(mlp_model().linear_sites(), 2)
    plain = inner_plan(attach(mlp_model(), lora(sites)))
    dropping = inner_plan(attach(mlp_model(), lora(sites, dropout=0.5)))
    assert dropping.saved == plain.saved
    assert dropping.backward is not None
    assert [n.op for n in dropping.backward.nodes].count("dropout") == 4  # x again, and dx


def test_evaluation_and_serving_drop_nothing() -> None:
    wrapped, executor = pair("llama3")
    (sequence,) = prompts((14,))
    expected = oracle.logits(wrapped.eval(), sequence)
    assert oracle.relative_error(executor.logits([sequence], "a")[0], expected) < TOLERANCE
    loss, count = executor.training_runner("a").evaluate([Example(sequence, sequence)])
    targets = torch.tensor(sequence[1:])
    mean = torch.nn.functional.cross_entropy(expected[:-1], targets)
    assert loss / count == pytest.approx(float(mean), rel=TOLERANCE)


def test_all_is_dropped_at_one() -> None:
    _, executor = pair("llama3", 1.0)
    runner = executor.training_runner("a")
    (sequence,) = prompts((14,))
    loss = runner.forward_backward([Example(sequence, sequence)], 13, SEED)
    logits = executor.logits([sequence])[0]
    targets = torch.tensor(sequence[1:])
    mean = torch.nn.functional.cross_entropy(logits[:-1], targets)
    assert loss / 13 == pytest.approx(float(mean), rel=TOLERANCE)


def test_half_precision_is_dropped_in_the_adapters_dtype() -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2), torch.bfloat16)
    executor = compiled.executor(base)
    executor.add_adapter("a", {**LORA, "target_modules": ["q_proj"]})
    runner = executor.training_runner("a")
    (node,) = (n for n in runner.training.model.blocks[0].nodes if n.op == "dropout")
    assert str(node.output.type) == "f32[T, 64]"
    sequences = prompts((14, 3))
    runner.forward_backward([Example(s, s) for s in sequences], 15, SEED)
    assert all(p.grad is not None for p in runner.parameters.values())
