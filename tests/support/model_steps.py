"""Steps of models of the sizes that ship, for `tests.support.interpreter.launched`.

They have one layer of each kind and a small vocabulary; kernels are specialised by all other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pcg.compiler as compiler
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.source import resolve

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


def config(model: str) -> dict[str, Any]:
    """Of a model that ships, with few layers and tokens."""
    fields = {**resolve(model).config, "vocab_size": 2048}
    layers = 2 if fields["model_type"] == "gemma2" else 1  # sliding and full
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    for name in ("num_hidden_layers", "n_layer", "n_layers"):
        if name in fields:
            fields[name] = layers
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    return fields | {name: 1 for name in special if name in fields}


def of_lora(model: str) -> None:
    _serve_and_train(model, {"lora": LORA})


def of_every_method(model: str) -> None:
    _serve_and_train(model, RECIPES)


def _serve_and_train(model: str, recipes: Mapping[str, Mapping[str, Any]]) -> None:
    """Requests of adapters decode, prompts of some in chunks, while a job of each is trained."""
    executor = compiler.compile_random(
        config(model), backend="triton", device="cuda", dtype="bfloat16"
    )
    for name, recipe in recipes.items():
        executor.add_adapter(name, recipe)
    engine = executor.engine(Limits(tokens=160), kv_cache_bytes=2**28)
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
