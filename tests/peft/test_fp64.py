"""fp64: every method's gradients are those of transformers and peft to 1e-10, at every budget.

transformers computes RMSNorm, rotary angles and BLOOM's softmax in fp32 in a model of any dtype;
pcg computes norms and attention in the model's own, so that an fp64 model differs by fp32's
rounding, 1e-7. Both run here without fp32 (`wide.widen`): eager autograd of transformers' model in
fp64, and what pcg traces from the same code. ALiBi's slopes alone stay in fp32, where they are
exact: they are powers of two where the number of heads is one.

Each case runs as whole sequences, and in windows of random sizes over pages of the KV cache that
lie apart.

peft has neither BitFit nor bottlenecks. Their oracle is transformers' model whose biases alone are
trained, and one into which plain modules are hooked.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from pcg.ir.program.program import ModelGraph
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import KvCache, kv_types
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.training.runner import TrainingPass, TrainingRunner, training_runner
from pcg.runtime.training.work_units import Part
from tests.support import compiled as programs
from tests.support import oracle
from tests.support.biases import biases
from tests.support.bottlenecks import FIELDS as BOTTLENECK
from tests.support.bottlenecks import RECIPES as BOTTLENECKS
from tests.support.bottlenecks import hooked, state
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, prefix_parts, trained, wrap
from tests.support.prompts import prompts
from tests.support.wide import widen

TOLERANCE = 1e-10
LAYERS = 3
BUDGETS = (1.0, 0.5, 0.0)
FAMILIES: Mapping[str, Mapping[str, int]] = {
    "llama-biases": {},
    "qwen2": {},
    "gemma2": {},
    "opt": {},
    "gpt2": {},
    "gpt_neox": {},
    "falcon-40b": {},
    "bloom": {"hidden_size": 64, "n_head": 4},
    "phi": {},
    "phi3": {},
}
"""By name, what the configuration has otherwise than elsewhere."""
WITHOUT_BIASES = ("gemma2", "falcon-40b", "phi3")
OTHER_PREFIXES = ("falcon-40b",)
"""transformers keeps keys of every query head there, and pcg those of the key heads."""
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
PEFT: Mapping[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(**LORA),
    "rslora": lambda: peft.LoraConfig(use_rslora=True, **LORA),
    "dora": lambda: peft.LoraConfig(use_dora=True, **LORA),
    "lora_bias": lambda: peft.LoraConfig(lora_bias=True, **LORA),
    "bias": lambda: peft.LoraConfig(bias="all", **LORA),
    "ia3": peft.IA3Config,
    "vera": lambda: peft.VeraConfig(r=5, target_modules="all-linear", d_initial=0.5),
    # peft has the scale in fp32, which 6 / 4 is.
    "loha": lambda: peft.LoHaConfig(r=4, alpha=6, target_modules="all-linear"),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=7, **CAUSAL),
}
IA3_OF_PHI3 = {"target_modules": ["qkv_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
"""peft has no defaults for it."""


DEFAULT = [
    *(("llama-biases", m, 0.5)
      for m in ("rslora", "lora_bias", "ia3", "vera", "prompt", "prefix", "pfeiffer", "parallel")),
    ("qwen2", "lora", 0.0),
    ("falcon-40b", "lora", 0.0),
]  # fmt: skip


def cases() -> Iterator[Any]:
    """Every method in every family, at every budget; few by default."""
    for family in FAMILIES:
        for method in (*PEFT, "bitfit", *BOTTLENECKS):
            if method in ("bitfit", "bias") and family in WITHOUT_BIASES:
                continue
            if method == "prefix" and family in OTHER_PREFIXES:
                continue
            if method == "loha" and family == "gpt2":  # whose Conv1D peft does not adapt with it
                continue
            for budget in BUDGETS:
                marks = [] if (family, method, budget) in DEFAULT else [pytest.mark.slow]
                yield pytest.param(family, method, budget, marks=marks)


@functools.cache
def compiled(family: str, budget: float) -> tuple[Any, Executor]:
    """A base in fp64, and an executor of it."""
    config = BY_NAME[family].config(LAYERS, **FAMILIES[family])
    base = oracle.random_model(config, torch.float64)
    return base, programs.executor(base, memory_budget=budget)


def with_peft(family: str, method: str, base: Any, executor: Executor) -> tuple[Any, Any]:
    """peft's model with the adapter, and what it trains by pcg's name."""
    is_ia3_of_phi3 = (family, method) == ("phi3", "ia3")
    config = peft.IA3Config(**IA3_OF_PHI3) if is_ia3_of_phi3 else PEFT[method]()
    executor.add_adapter(method, config)
    wrapped = wrap(base, config).double()
    return wrapped, trained(wrapped)


def with_biases(method: str, base: Any, executor: Executor) -> tuple[Any, Any]:
    """The base with other biases, and them."""
    executor.add_adapter(method, {"peft_type": "BITFIT"})
    tuned = copy.deepcopy(base).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in biases(tuned).values():
        parameter.requires_grad_(True)
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return tuned, biases(tuned)


def with_bottleneck(method: str, base: Any, executor: Executor) -> tuple[Any, Any]:
    """The base with plain adapters hooked in, and their parameters by pcg's name."""
    ours = executor.add_adapter(method, {**BOTTLENECK, **BOTTLENECKS[method]}).weights
    torch.manual_seed(0)
    model, adapters = hooked(base, list(ours), BOTTLENECKS[method])
    names = {id(t): name for name, t in executor.training_runner(method).parameters.items()}
    tensors = {
        names[id(tensor)]: theirs
        for path, weights in ours.items()
        for tensor, theirs in zip(weights.tensors, state(adapters[path].double()), strict=True)
    }
    return model, tensors


def named(method: str, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Trained tensors, or their gradients, as pcg has them."""
    if method == "prefix":
        return prefix_parts(values["prompt_embeddings"], LAYERS)
    return values


@pytest.mark.parametrize(("family", "method", "budget"), list(cases()))
def test_gradients_of_every_parameter(
    family: str, method: str, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    widen(monkeypatch, BY_NAME[family].model_type)
    base, executor = compiled(family, budget)
    if method in PEFT:
        model, tensors = with_peft(family, method, base, executor)
    elif method == "bitfit":
        model, tensors = with_biases(method, base, executor)
    else:
        model, tensors = with_bottleneck(method, base, executor)
    runner = executor.training_runner(method)
    values = named(method, {name: tensor.data for name, tensor in tensors.items()})
    assert runner.parameters.keys() == values.keys()
    for name, parameter in runner.parameters.items():
        assert parameter.dtype == torch.float64
        parameter.copy_(values[name].reshape(parameter.shape))
    executor.refresh_adapter(method)

    sequences = prompts((13, 7, 21))
    examples = [Example(s, s) for s in sequences]
    targets = runner.count_targets(examples)
    expected_loss, _ = oracle.loss_and_gradients(model, sequences)
    expected = named(method, {name: tensor.grad for name, tensor in tensors.items()})
    loss = runner.forward_backward(examples, targets)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    check_gradients(runner, expected)
    draw = random.Random(f"{family} {method} {budget}")
    runner = training_runner(executor.state, executor.adapters[method], windows=True)
    loss = in_windows(runner, examples, targets, lambda: draw.choice((1, 2, 5, 9, 17)))
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    check_gradients(runner, expected)


def check_gradients(runner: TrainingRunner, expected: Mapping[str, Tensor]) -> None:
    """The gradients of an adapter are these; they are dropped then."""
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, parameter in runner.parameters.items():
        theirs = expected[name].reshape(parameter.shape)
        # A key's bias that moves all scores of a token alike has a gradient of rounding alone.
        least = 1e-3 * largest if "bias" in name else 0.0
        scale = max(float(theirs.norm()), least)
        assert parameter.grad is not None
        assert float((parameter.grad - theirs).norm()) < TOLERANCE * scale, name
        parameter.grad = None


def in_windows(
    runner: TrainingRunner,
    examples: Sequence[Example],
    targets: int,
    size: Callable[[], int],
    served: ModelGraph | None = None,
) -> float:
    """The gradients of examples whose tokens go forward so many at a time; returns the loss."""
    virtual = runner.adapter.prompt_tokens
    needs = [pages_for(virtual + len(example.ids)) for example in examples]
    model = runner.training.model if served is None else served  # whose cache it is
    cache = KvCache(kv_types(model), sum(needs), torch.device("cpu"))
    tables = [cache.pool.open(f"example {i}") for i in range(len(needs))]
    for page in range(max(needs)):  # in turn, so that no sequence's pages lie together
        for table, need in zip(tables, needs, strict=True):
            cache.pool.extend(table, int(page < need))
    windows = TrainingPass(runner, examples, targets, cache=cache, tables=tables)
    while windows.forwarded < windows.tokens:
        windows.forward(size())
    while not windows.is_done:
        Part(windows).run()
    return windows.loss
