"""Latents in the KV cache: which layers have them, their bytes, and what is refused.

Tokens and gradients of models with such a cache are in `tests/families/test_recurrent.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

import pcg.compiler as compiler
from pcg.errors import UnsupportedError
from pcg.explain import explain as explaining
from pcg.kernels.torch import latent_attention
from pcg.runtime.memory.kv_cache import bytes_of_token, kv_types
from tests.families.test_recurrent import case_of
from tests.peft import test_co_serving
from tests.support import compiled, oracle
from tests.support.architectures import default_config
from tests.support.families import BY_NAME
from tests.support.peft_cases import Models
from tests.support.prompts import prompts

CONFIG = BY_NAME["minicpm3"].config(3)
LATENT = 24 + 8
"""Numbers of a token and layer: kv_lora_rank + qk_rope_head_dim."""


def test_bytes_of_a_token() -> None:
    """Explain counts latents, as the cache of an engine has them."""
    options: dict[str, Any] = {"dtype": "float32", "latent_cache": True}
    program = compiler.compile_program(CONFIG, "lora", **options)
    assert bytes_of_token(program.serving.model) == 3 * LATENT * 4
    report = explaining.explain(CONFIG, None, batch=2, seq=32, **options)
    assert report.memory_bytes["kv_cache"] == 2 * 32 * 3 * LATENT * 4
    expanded = explaining.explain(CONFIG, None, dtype="float32", batch=2, seq=32)
    assert expanded.memory_bytes["kv_cache"] == 2 * 32 * 3 * 4 * (16 + 8 + 20) * 4


def test_other_layers_stay() -> None:
    """Kimi-Linear has delta layers beside layers of latents."""
    config = default_config("kimi_linear")
    models = [
        compiler.compile_program(config, None, latent_cache=latent).serving.model
        for latent in (False, True)
    ]
    pairs = list(zip(*map(kv_types, models), strict=True))
    sizes = [(k.features, latent.features) for (k, _), (latent, _) in pairs]
    assert sorted(set(sizes)) == [((0, 0), (0, 0)), ((4, 24), (1, 24))]


@pytest.mark.slow
def test_jobs_beside_requests() -> None:
    """Windows of finetuning and requests of all adapters share the pages of latents."""
    case: Any = case_of("minicpm3")
    models: Models = case
    test_co_serving.check(models, ["all-4", "few-3"], Random(1))


@pytest.mark.parametrize(
    ("options", "most"),
    [({"backend": "triton"}, 2**26), ({}, 2 * 40 * LATENT)],
    ids=["pages", "rows"],
)
def test_latents_are_gathered(
    options: Mapping[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of base and adapter over pages, and over rows as many as memory allows."""
    monkeypatch.setattr(latent_attention, "_MOST_GATHERED", most)
    monkeypatch.setattr(latent_attention, "attend_single_tokens", lambda *_: False)
    model = oracle.random_model(BY_NAME["minicpm3"].config(2))
    wrapped = oracle.with_adapter(model, "all-linear", rank=16)
    executor = compiled.executor(model, {"a": "lora"}, latent_cache=True, **options)
    oracle.copy_lora(executor.adapters["a"], wrapped)
    executor.refresh_adapter("a")
    sequences = prompts((9, 38, 1, 21))
    found = executor.generate(sequences, [None, "a", "a", None], max_new_tokens=6, ignore_eos=True)
    for each, sequence, of in zip(found, sequences, (model, wrapped, wrapped, model), strict=True):
        assert list(each.token_ids) == oracle.greedy(of, sequence, 6)


def test_a_quantized_expansion() -> None:
    """Tokens are those of transformers with dequantized weights."""
    model = oracle.random_model(BY_NAME["minicpm3"].config(2))
    options: dict[str, Any] = {"quantization": "int8_weight", "latent_cache": True}
    executor = compiled.executor(model, **options)
    for path, weight in executor.state.weight_store.linear().items():
        model.get_submodule(path).weight.data.copy_(weight)
    found = executor.generate(prompts((9, 21)), max_new_tokens=8, ignore_eos=True)
    expected = [oracle.greedy(model, prompt, 8) for prompt in prompts((9, 21))]
    assert [list(completion.token_ids) for completion in found] == expected


@pytest.mark.parametrize(
    ("config", "peft", "options", "message"),
    [
        ("llama3", "lora", {}, "no layer's keys and values are products of a latent"),
        ("minicpm3", "prefix", {}, "changes the keys and values of self_attn otherwise than LoRA"),
        (
            "minicpm3",
            {"peft_type": "IA3", "target_modules": ["kv_b_proj"], "feedforward_modules": []},
            {},
            "otherwise than LoRA",
        ),
        (
            "minicpm3",
            {"peft_type": "LORA", "target_modules": ["kv_b_proj"], "use_dora": True},
            {},
            "otherwise than LoRA",
        ),
    ],
)
def test_refusals(config: str, peft: object, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        compiler.compile_program(BY_NAME[config].config(2), peft, latent_cache=True, **options)


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="latent_cache=True and cp=2: ranks that share"):
        explaining.explain(CONFIG, None, latent_cache=True, cp=2)
