"""Steps of a model with the sizes of Llama-3.1-8B, for `tests.interpreter.launched`.

It has one layer and a small vocabulary; kernels are specialised by their other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig

import pcg.compiler as compiler
from pcg.runtime.data import Example
from pcg.runtime.engine.scheduler import Limits

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}
RECIPES: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "r8": {**LORA, "r": 8, "target_modules": ["q_proj", "v_proj"]},
    "dora": {**LORA, "use_dora": True, "lora_dropout": 0.1},
    "ia3": {
        "peft_type": "IA3",
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "houlsby": {"peft_type": "BOTTLENECK", "variant": "houlsby", "bottleneck_size": 64},
}


def config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=2048,
        rope_theta=5e5,
        max_position_embeddings=8192,
    )


def of_lora() -> None:
    _serve_and_train({"lora": LORA})


def of_every_method() -> None:
    _serve_and_train(RECIPES)


def _serve_and_train(recipes: Mapping[str, Mapping[str, Any]]) -> None:
    """Requests of adapters decode, prompts of some in chunks, while a job of each is trained."""
    executor = compiler.compile_random(
        config().to_dict(), backend="triton", device="cuda", dtype="bfloat16"
    )
    for name, recipe in recipes.items():
        executor.add_adapter(name, recipe)
    engine = executor.engine(Limits(tokens=160), kv_cache_bytes=2**25)
    example = Example([1] * 80, [1] * 80)
    jobs = [
        engine.finetune([example], f"trained {name}", peft=recipe, max_steps=1)
        for name, recipe in recipes.items()
    ]
    for number, name in enumerate((None, *recipes, *recipes)):
        prompt = [1] * (3 + 9 * number)
        engine.submit(executor.request(prompt, name, max_new_tokens=8, ignore_eos=True))
    while not engine.is_idle:
        engine.step()
    for job in jobs:
        # Of zeros, what kernels did not make, DoRA's weights have no length.
        if job.error is not None and "gradients is nan" not in str(job.error):
            raise job.error
