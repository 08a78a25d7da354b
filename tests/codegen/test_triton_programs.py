"""Programs for Triton in the engine, in the interpreter: tokens and adapters are PyTorch's.

Requests of several methods and ranks, decoding beside chunks of prompts, and a job whose windows
share steps with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import UnsupportedError
from pcg.kernels.torch import input_gradient
from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.triton.adapters.trained_adapters import (
    BottleneckGradients,
    LoraGradients,
    VectorGradient,
)
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import compiled, oracle
from tests.support.architectures import default_config
from tests.support.bottlenecks import hooked, state
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.interpreter.sanitizer import sanitized
from tests.support.parameters import mostly_slow
from tests.support.peft_cases import CONFIGS, check_gradients, wrap
from tests.support.prompts import TOLERANCE, prompts

bf16.install()
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
RECIPES: dict[str, dict[str, Any]] = {
    "r4": {**LORA, "target_modules": "all-linear"},
    "r20": {**LORA, "r": 20, "target_modules": ["q_proj", "v_proj"]},
    "bias": {"peft_type": "BITFIT"},
    "ia3": {
        "peft_type": "IA3",
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
}


def executor_of(base: Any, backend: str) -> Executor:
    executor = compiled.executor(base, backend=backend)
    for seed, (name, recipe) in enumerate(RECIPES.items()):
        generator = torch.Generator().manual_seed(seed)
        for tensor in executor.add_adapter(name, recipe, seed=seed).tensors:
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return executor


def served(base: Any, backend: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens of requests, and the adapter that a job beside them trained."""
    executor = executor_of(base, backend)
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    engine = executor.engine(Limits(tokens=24, least_chunk=4), kv_cache_bytes=200 * page_bytes)
    data = [Example(ids, ids) for ids in prompts((11, 7))]
    recipe = RECIPES["r4"]
    job = engine.finetune(data, "trained", peft=recipe, max_steps=1, batch_size=2, seed=1)
    for ids, name in zip(prompts((13, 20, 3, 9, 5)), (None, *RECIPES), strict=True):
        adapter = None if name is None else executor.adapters[name]
        # The one without an adapter is drawn, by the same numbers everywhere.
        drawn = {"temperature": 0.7, "top_k": 20, "seed": 5} if name is None else {}
        params = SamplingParams(max_new_tokens=3, ignore_eos=True, **drawn)
        engine.submit(Request(tuple(ids), params, adapter))
    tokens: list[list[int]] = [[] for _ in range(5)]
    while not engine.is_idle:
        for chunk in engine.step():
            assert chunk.token_id is not None
            tokens[chunk.index].append(chunk.token_id)
        engine.check_integrity()
    assert job.error is None
    return tokens, list(executor.adapters["trained"].tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama-biases",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen2.5-windows", "qwen2")),
    ],
)
def test_tokens_and_trained_adapters_are_those_of_pytorch(name: str) -> None:
    base = oracle.random_model(BY_NAME[name].config(2))
    tokens, trained = served(base, "triton")
    expected, theirs = served(base, "torch")
    assert tokens == expected
    for ours, other in zip(trained, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_jobs_that_go_back_together_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA of two jobs, (IA)³ of two, whose base products are theirs too, and two bottlenecks."""
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    data = [Example(ids, ids) for ids in prompts((11, 7))]
    recipes = {name: RECIPES[name] for name in ("r4", "r20", "ia3")}
    recipes["other ia3"] = recipes["ia3"]
    for size in (5, 16):
        of_size = {"variant": "houlsby", "bottleneck_size": size, "non_linearity": "silu"}
        recipes[f"houlsby{size}"] = {"peft_type": "BOTTLENECK", **of_size}
    together: list[int] = []
    add = LoraGradients.add

    def counted(self: Any, dz: Any, dx: Any, jobs: Any, spans: Any) -> None:
        together.append(len(jobs))
        add(self, dz, dx, jobs, spans)

    monkeypatch.setattr(LoraGradients, "add", counted)

    def counting(product: Any) -> list[int]:
        """Jobs of each call that joins."""
        jobs: list[int] = []
        run_with = product.run_with

        def counted(self: Any, others: Any) -> None:
            jobs.append(1 + len(others))
            run_with(self, others)

        monkeypatch.setattr(product, "run_with", counted)
        return jobs

    bottlenecks, vectors = counting(BottleneckGradients), counting(VectorGradient)
    tokens: list[int] = []
    product = input_gradient.linear_backward

    def of_base(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tokens.append(len(dy))
        return product(dy, weight)

    monkeypatch.setattr(input_gradient, "linear_backward", of_base)

    def trained(backend: str) -> list[torch.Tensor]:
        executor = compiled.executor(base, backend=backend)
        page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
        engine = executor.engine(kv_cache_bytes=200 * page_bytes)
        jobs = [
            engine.finetune(data, name, peft=recipe, max_steps=1, batch_size=2, seed=1)
            for name, recipe in recipes.items()
        ]
        while not engine.is_idle:
            engine.step()
        assert [job.error for job in jobs] == [None] * len(recipes)
        return [tensor for name in recipes for tensor in executor.adapters[name].tensors]

    ours = trained("triton")
    # Down, up, gate and o of the last layer, then v of both jobs, k, and q of both; then the first.
    assert together == [1] * 4 + [2] + [1] + [2] + [1] * 4
    assert bottlenecks == [2] * 4  # behind attention and the MLP of both layers
    # (IA)³ of two jobs at down, v and k of both layers; the outer biases of both bottlenecks.
    assert vectors == [2] * (6 + 4)
    # 7 products of the base, and those of the first layer that a job asks below, for all six jobs.
    assert tokens[:7] == [6 * 18] * 7
    monkeypatch.undo()
    for one, other in zip(ours, trained("torch"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_sizes_that_kernels_do_not_take_are_left_to_pytorch() -> None:
    """Heads of 12, and rows of LoRA's matrices that are no multiple of 16 bytes."""
    config = BY_NAME["llama-biases"].config(2, hidden_size=36, num_attention_heads=3, head_dim=12)
    base = oracle.random_model({**config, "num_key_value_heads": 1, "intermediate_size": 44})
    sequences, names = prompts((9, 5, 7)), [None, "r4", "r20"]
    found = executor_of(base, "triton").logits(sequences, names)
    expected = executor_of(base, "torch").logits(sequences, names)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_program_for_triton_runs_on_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UnsupportedError, match="device is cpu; compile it for PyTorch"):
        compiler.compile(base, backend="triton", device="cpu")
    with pytest.raises(UnsupportedError, match="backend='cuda'; use one of torch, triton"):
        compiler.compile(base, backend="cuda")


@pytest.mark.parametrize(
    "targets", mostly_slow([["q_proj", "v_proj"], ["k_proj"]], ["q_proj", "v_proj"]), ids=str
)
def test_lora_at_some_outputs_of_a_joined_product(
    targets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows and kernels, as nothing of PyTorch's is called; the truth is peft's."""
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    wrapped = {
        "r4": oracle.with_adapter(base, targets, rank=4),
        "r20": oracle.with_adapter(base, targets, rank=20, seed=2),
        "last": oracle.with_adapter(base, targets[-1:], rank=8, seed=3),
    }
    for name, model in wrapped.items():
        oracle.save(model, tmp_path / name)
    adapters = {name: str(tmp_path / name) for name in wrapped}
    executor = compiled.executor(base, adapters, backend="triton")
    for name in ("shrink", "expand_add", "add_lora"):
        monkeypatch.delattr(torch_ops, name)
    for lengths in [(5, 1, 7, 1, 9), (1,) * 5]:
        names, sequences = ["r20", None, "r4", "r20", "last"], prompts(lengths)
        with sanitized():
            found = executor.logits(sequences, names)
        for logits, sequence, name in zip(found, sequences, names, strict=True):
            expected = oracle.logits(base if name is None else wrapped[name], sequence)
            assert oracle.relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize(
    "recipe",
    [
        {**LORA, "target_modules": "all-linear"},
        pytest.param(
            {"peft_type": "BOTTLENECK", "variant": "houlsby", "bottleneck_size": 13},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lora", "bottleneck"],
)
def test_adapters_come_and_go_in_pages_of_the_cache(recipe: dict[str, Any]) -> None:
    """More adapters than there is room for: each is written anew where it comes to lie."""
    base = oracle.random_model(BY_NAME["llama3"].config(1))
    prompt, params = prompts((5,))[0], SamplingParams(max_new_tokens=2, ignore_eos=True)
    names = [f"a{number}" for number in range(4)]

    def tokens_of(backend: str) -> list[tuple[int, ...]]:
        executor = compiled.executor(base, backend=backend)
        for seed, name in enumerate(names):
            adapter = executor.add_adapter(name, recipe, seed=seed)
            for tensor in adapter.tensors:
                generator = torch.Generator().manual_seed(seed)
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.3)
        page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
        pages = 2 * executor.serving.tables.pages_of(executor.adapters["a0"], page_bytes) + 2
        engine = executor.engine(Limits(running=1), kv_cache_bytes=pages * page_bytes)
        engine.submit(Request(tuple(prompt), params, None))  # with nobody's rows, by itself
        for name in (*names, *names):
            engine.submit(Request(tuple(prompt), params, executor.adapters[name]))
        found = {}
        while not engine.is_idle:
            for chunk in engine.step():
                if chunk.completion is not None:
                    found[chunk.index] = tuple(chunk.completion.token_ids)
            engine.check_integrity()
        evicted = [event for event in engine.log if event.kind is Kind.EVICTED]
        assert len(evicted) >= len(names)
        return [found[index] for index in sorted(found)]

    base_tokens, *ours = tokens_of("triton")
    assert [base_tokens, *ours] == tokens_of("torch")
    assert ours[: len(names)] == ours[len(names) :]
    assert len(set(ours)) > 1


BOTTLENECKS: dict[str, dict[str, Any]] = {
    "houlsby": {"variant": "houlsby", "bottleneck_size": 4, "non_linearity": "gelu"},
    "pfeiffer": {"variant": "pfeiffer", "bottleneck_size": 21, "scaling": 0.7},
    "wide": {"variant": "houlsby", "bottleneck_size": 40, "non_linearity": "gelu"},
    "parallel": {"variant": "parallel", "bottleneck_size": 9, "non_linearity": "silu"},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_bottlenecks_of_many_adapters(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows and kernels beside LoRA's; the truth is modules of PyTorch's in transformers."""
    base = oracle.random_model(BY_NAME[family].config(2))
    executor, models = compiled.executor(base, backend="triton"), {}
    torch.manual_seed(0)
    for name, recipe in BOTTLENECKS.items():
        ours = executor.add_adapter(name, {"peft_type": "BOTTLENECK", **recipe})
        models[name], theirs = hooked(base, list(ours.weights), recipe)
        for path, weights in ours.weights.items():
            for tensor, own in zip(weights.tensors, state(theirs[path]), strict=True):
                tensor.copy_(own.data)
    executor.add_adapter("lora", {**LORA, "target_modules": "all-linear"})
    for function in ("shrink", "expand_add", "activate"):
        monkeypatch.delattr(torch_ops, function)
    names = [None, *models, "lora", "houlsby"]
    for lengths in [(3, 5, 1, 7, 1, 4, 1), (1,) * 7]:
        sequences = prompts(lengths)
        with sanitized():
            found = executor.logits(sequences, names)
        for logits, sequence, name in zip(found, sequences, names, strict=True):
            expected = oracle.logits(models.get(name or "", base), sequence)
            assert oracle.relative_error(logits, expected) < 1e-5, name


@pytest.mark.parametrize("name", [pytest.param("ia3-all", marks=pytest.mark.slow), "dora-biases"])
def test_gradients_of_vectors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over tokens by kernels: of (IA)³, DoRA's magnitudes and biases."""
    base = oracle.random_model(BY_NAME["llama-biases"].config(2))
    wrapped = wrap(base, CONFIGS["llama-biases"][name])
    wrapped.save_pretrained(tmp_path)
    executor = compiled.executor(base, {name: str(tmp_path)}, is_own=True, backend="triton")
    for function in ("inner", "sum_tokens"):
        monkeypatch.delattr(torch_ops, function)
    with sanitized():
        check_gradients(executor, name, wrapped, (12, 7, 3))


@pytest.mark.parametrize(
    "name", ["lora", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adalora", "vera"))]
)
def test_gradients_of_sites_that_run_together(name: str, tmp_path: Path) -> None:
    """Of q, k and v, and of gate and up, by one launch each; the truth is peft's."""
    base = oracle.random_model(BY_NAME["llama-biases"].config(2))
    wrapped = wrap(base, CONFIGS["llama-biases"][name])
    wrapped.save_pretrained(tmp_path)
    executor = compiled.executor(base, {name: str(tmp_path)}, is_own=True, backend="triton")
    assert executor.program.training is not None
    source = executor.program.training.source
    # VeRA's A is one for all sites, and so is the product with it.
    own = "K.expand_add(k_proj, q_proj_vera_s" if name == "vera" else "K.shrink_group("
    assert own in source
    with sanitized():
        check_gradients(executor, name, wrapped, (12, 7, 3))


def test_signs_that_backward_reads_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packed and unpacked by kernels: fc2 has no LoRA, so ReLU's signs are all that is kept."""
    base = oracle.random_model(BY_NAME["opt"].config(2))
    wrapped = oracle.with_adapter(base, ["q_proj", "v_proj"], rank=4)
    oracle.save(wrapped, tmp_path / "a")
    adapters = {"a": str(tmp_path / "a")}
    executor = compiled.executor(base, adapters, is_own=True, backend="triton")
    training = executor.program.training
    assert training is not None
    assert "K.pack_signs(" in training.source
    assert "K.relu_backward_packed(" in training.source
    for function in ("pack_signs", "relu_backward_packed"):
        monkeypatch.delattr(torch_ops, function)
    with sanitized():
        check_gradients(executor, "a", wrapped, (12, 7, 3))


def test_lora_at_the_head_of_bert() -> None:
    """The head's dense module has LoRA that no later sum can add."""
    base = oracle.random_model(default_config("bert", 1))
    executor = compiler.compile(base, backend="triton", verify=False)
    module = "cls.predictions.transform.dense"
    wrapped = oracle.with_adapter(base, [module], rank=4)
    adapter = executor.add_adapter("head", {**LORA, "target_modules": [module]})
    oracle.copy_lora(adapter, wrapped)
    executor.refresh_adapter("head")
    sequences = prompts((3, 2))
    found = executor.logits(sequences, ["head", None])
    for logits, sequence, model in zip(found, sequences, (wrapped, base), strict=True):
        assert oracle.relative_error(logits, oracle.logits(model, sequence)) < TOLERANCE
