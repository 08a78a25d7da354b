"""The self-test of adapters: methods pass, and a weight without effect is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.kernels.torch import latent_attention
from pcg.kernels.torch.latent_attention import _decode, _Expansion
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.stacked_weights import ServedWeights
from pcg.runtime.executor import Executor
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.peft_cases import CONFIGS
from tests.support.small_job import make_model


def checking(model: Any, **options: Any) -> Executor:
    executor = compiled.executor(model, **options)
    executor.state.tests_adapters = True
    return executor


@pytest.fixture(scope="module")
def llama() -> Executor:
    return checking(oracle.random_model(BY_NAME["llama-biases"].config(2)))


METHODS = [
    "lora-bias", "dora-biases", "dora-head", "adalora", "biases", "vera", "loha-patterns", "ia3",
    "prompt", "prefix", "p-tuning",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_pass(llama: Executor, name: str) -> None:
    llama.add_adapter(name, CONFIGS["llama-biases"][name].to_dict())
    llama.remove_adapter(name)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "lfm2"])
def test_families_pass(family: str) -> None:
    checking(oracle.random_model(BY_NAME[family].config(2))).add_adapter("a", "lora")


_KV_B = "model.layers.0.self_attn.kv_b_proj"


def without_lora(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, *args: method(dataclasses.replace(self, loras=()), *args)


@pytest.mark.parametrize(
    ("backend", "owner", "name", "broken", "lost"),
    [
        ("torch", _Expansion, "absorbed", without_lora(_Expansion.absorbed), f"{_KV_B} for keys"),
        ("triton", _Expansion, "values", without_lora(_Expansion.values), f"{_KV_B} for values"),
        (
            "torch",
            latent_attention,
            "_decode",
            lambda batch, q, *args: _decode(batch, torch.ones_like(q), *args),
            "model.layers.0.self_attn.q_b_proj",
        ),
    ],
    ids=["keys", "values", "queries"],
)
def test_a_loss_in_decoding_over_latents_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: str, owner: Any, name: str, broken: Any, lost: str
) -> None:
    """Absorbed products without the adapter, which prompts never compute."""
    model = oracle.random_model(BY_NAME["minicpm3"].config(1))
    executor = checking(model, latent_cache=True, backend=backend)
    recipe = {"peft_type": "LORA", "r": 4, "target_modules": ["kv_b_proj", "q_b_proj", "o_proj"]}
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        message = f"weights of {lost} in adapter 'a' do not reach the logits of the tokens that"
        with pytest.raises(AdapterError, match=message):
            executor.add_adapter("a", recipe)
    assert not executor.adapters
    executor.add_adapter("a", recipe)


DORA = {"peft_type": "LORA", "r": 2, "use_dora": True, "target_modules": ["up_proj", "q_proj"]}
LOST = ["model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize("kind", ["lora", "lora_factor"])
@pytest.mark.parametrize("module", LOST)
def test_weights_without_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch, module: str, kind: str, tmp_path: Path
) -> None:
    """A table that loses a weight is a fault as a pass that leaves out a site would be."""
    executor = checking(make_model())
    whole = ServedWeights.part

    def part(self: ServedWeights, adapter: Adapter, path: str) -> Tensor | None:
        return None if path.startswith(f"{module}.{kind}") else whole(self, adapter, path)

    executor.add_adapter("right", DORA)
    executor.save_adapter("right", tmp_path / "right")
    with monkeypatch.context() as patched:
        patched.setattr(ServedWeights, "part", part)
        executor.state._tested.clear()
        with pytest.raises(AdapterError, match=f"weights of {module} in adapter 'wrong'"):
            executor.add_adapter("wrong", tmp_path / "right")
    assert list(executor.adapters) == ["right"]
    executor.add_adapter("wrong", tmp_path / "right")


def test_a_structure_is_tested_once(llama: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    logits = type(llama.state).logits
    monkeypatch.setattr(type(llama.state), "logits", lambda *args: steps.append(1) or logits(*args))
    for name in "ab":
        llama.add_adapter(name, {"peft_type": "LORA", "r": 3, "target_modules": ["k_proj"]})
        assert len(steps) == 1
    llama.add_adapter("c", {"peft_type": "LORA", "r": 5, "target_modules": ["k_proj"]})
    assert len(steps) == 2


def test_it_leaves_the_engine_and_its_requests_as_they_were() -> None:
    executor = compiled.executor(make_model())
    asked = [[5, 9, 2], [7] * 9]
    expected = [item.token_ids for item in executor.generate(asked, max_new_tokens=6)]
    with executor.engine(adapter_self_test=True).start() as engine:
        streams = [engine.submit(prompt, max_new_tokens=6) for prompt in asked]
        engine.add_adapter("a", "lora").result()
        assert [stream.wait().token_ids for stream in streams] == expected
    assert torch.equal(*executor.logits([asked[0]] * 2, [None, "a"]))  # B is zero
