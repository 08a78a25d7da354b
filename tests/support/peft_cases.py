"""Adapters of every method over small random models, made by peft: what the tests compare with."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FIRST = {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0]}
CAUSAL = {"task_type": "CAUSAL_LM"}
"""What peft needs to know where it puts virtual tokens."""
GPT2 = ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # not every machine draws the same numbers
    DRAWN = peft.VeraConfig(
        r=3,
        target_modules=["down_proj", "q_proj"],
        save_projection=False,
        projection_prng_key=7,
        bias="all",
        d_initial=0.5,
    )

CONFIGS: Mapping[str, Mapping[str, peft.PeftConfig]] = {
    "llama-biases": {
        "lora": peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
        "lora-first": peft.LoraConfig(r=3, **FIRST),
        "lora-bias": peft.LoraConfig(r=3, target_modules=ALL, lora_bias=True, lora_alpha=5),
        "dora": peft.LoraConfig(r=4, lora_alpha=6, target_modules=ALL, use_dora=True),
        "dora-first": peft.LoraConfig(r=3, use_dora=True, **FIRST),
        "dora-biases": peft.LoraConfig(
            r=2, target_modules=["q_proj", "o_proj"], use_dora=True, bias="lora_only"
        ),
        "dora-head": peft.LoraConfig(r=2, target_modules=["lm_head", "v_proj"], use_dora=True),
        "embedding": peft.LoraConfig(r=3, lora_alpha=5, target_modules=["embed_tokens"]),
        "saved": peft.LoraConfig(
            r=3, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens", "norm"]
        ),
        "adalora": peft.AdaLoraConfig(
            init_r=5, target_r=3, total_step=20, lora_alpha=9, target_modules=ALL
        ),
        "adalora-first": peft.AdaLoraConfig(init_r=3, target_r=2, total_step=9, **FIRST),
        "biases": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], bias="all"),
        "vera": peft.VeraConfig(r=5, target_modules=ALL),
        "vera-drawn": DRAWN,
        "vera-first": peft.VeraConfig(r=4, **FIRST),
        "loha": peft.LoHaConfig(r=3, alpha=5, target_modules=ALL),
        "loha-first": peft.LoHaConfig(r=2, **FIRST),
        "loha-patterns": peft.LoHaConfig(
            r=4,
            target_modules=["q_proj", "down_proj", "lm_head"],
            rank_pattern={"down_proj": 2},
            alpha_pattern={r".*\.1\..*": 3},
        ),
        "ia3": peft.IA3Config(),
        "ia3-all": peft.IA3Config(target_modules=ALL, feedforward_modules=["o_proj", "up_proj"]),
        "ia3-head": peft.IA3Config(
            target_modules=["lm_head", "q_proj", "gate_proj"], feedforward_modules=["lm_head"]
        ),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
        "prompt-short": peft.PromptTuningConfig(num_virtual_tokens=1, **CAUSAL),
        "prefix": peft.PrefixTuningConfig(num_virtual_tokens=7, **CAUSAL),
        "prefix-projected": peft.PrefixTuningConfig(
            num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=24, **CAUSAL
        ),
        "prefix-short": peft.PrefixTuningConfig(num_virtual_tokens=1, **CAUSAL),
        "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=3, **CAUSAL),
        "p-tuning-lstm": peft.PromptEncoderConfig(
            num_virtual_tokens=4,
            encoder_reparameterization_type="LSTM",
            encoder_hidden_size=20,
            encoder_num_layers=3,
            **CAUSAL,
        ),
    },
    "gpt2": {
        "lora": peft.LoraConfig(r=4, target_modules=GPT2),
        "lora-bias": peft.LoraConfig(r=4, target_modules=GPT2, lora_bias=True, use_rslora=True),
        "embedding": peft.LoraConfig(r=4, target_modules=["wte", "c_fc", "lm_head"]),
        "saved": peft.LoraConfig(r=4, target_modules=GPT2, modules_to_save=["lm_head", "ln_f"]),
        "dora": peft.LoraConfig(r=4, target_modules=GPT2, use_dora=True),
        "ia3": peft.IA3Config(),
        "adalora": peft.AdaLoraConfig(total_step=20, target_modules=GPT2, bias="lora_only"),
        "vera": peft.VeraConfig(r=4, target_modules=GPT2, bias="vera_only"),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
        "prefix": peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
        "ia3-regex": peft.IA3Config(
            target_modules=r".*\.(attn|mlp)\.c_.*", feedforward_modules=r".*c_fc"
        ),
    },
    "opt": {
        "lora": peft.LoraConfig(r=4, target_modules="all-linear"),
        "dora": peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True),
        "adalora": peft.AdaLoraConfig(total_step=20, init_r=4, target_r=2),
        "vera": peft.VeraConfig(r=6),
        "loha": peft.LoHaConfig(r=2, target_modules="all-linear"),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=6, **CAUSAL),
        "p-tuning": peft.PromptEncoderConfig(
            num_virtual_tokens=2, encoder_hidden_size=40, **CAUSAL
        ),
        "prefix": peft.PrefixTuningConfig(num_virtual_tokens=2, **CAUSAL),
        "ia3": peft.IA3Config(),
    },
}
"""By family and by the adapter's name."""


@dataclasses.dataclass(frozen=True)
class Models:
    """A base, peft's model of each adapter, and an executor that has them all.

    Attributes:
        base: a transformers model.
        wrapped: peft's models, by the adapter's name.
        saved: directory of the adapters as peft saved them.
        executor: that read them.
    """

    base: Any
    wrapped: Mapping[str, Any]
    saved: Path
    executor: Executor

    def model(self, adapter: str | None) -> Any:
        return self.base if adapter is None else self.wrapped[adapter]


def make_models(family: str, directory: Path) -> Models:
    base = oracle.random_model(BY_NAME[family].config(2))
    wrapped = {name: wrap(base, config) for name, config in CONFIGS[family].items()}
    for name, model in wrapped.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Else peft saves the whole head where it is adapted.
            model.save_pretrained(directory / name, save_embedding_layers=False)
    executor = compiled.executor(base, {name: str(directory / name) for name in wrapped})
    for name, model in wrapped.items():
        give_encoder(executor, name, model)
    return Models(base, wrapped, directory, executor)


def wrap(base: Any, config: peft.PeftConfig, seed: int = 1) -> Any:
    """A copy of the base wrapped by peft, whose adapter does something."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2's Conv1D stores its weight the other way round
        wrapped = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(config)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            # What is a matrix that starts at zero is drawn; the rest moves from where it starts.
            is_drawn = re.search(r"lora_(embedding_)?[AB]", name) is not None
            start = 0.0 if is_drawn else parameter.data
            parameter.data.copy_(start + 0.1 * noise)
    return wrapped


def give_encoder(executor: Executor, name: str, wrapped: Any) -> None:
    """Let an adapter that was read from a file have peft's encoder, if there is one."""
    adapter = executor.adapters[name]
    if adapter.recipe.encoder is not None:
        own = wrapped.prompt_encoder["default"].named_parameters()
        encoder = {key: parameter.detach().clone() for key, parameter in own}
        executor.state.put_adapter(dataclasses.replace(adapter, encoder=encoder))


def trained(wrapped: Any) -> dict[str, Tensor]:
    """The parameters that peft trains, by pcg's name of each."""
    return {
        our_name(name, parameter, wrapped.active_peft_config): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }


def has_encoder(config: peft.PeftConfig) -> bool:
    return config.peft_type == "P_TUNING" or getattr(config, "prefix_projection", False)


def our_name(name: str, parameter: Tensor, config: peft.PeftConfig) -> str:
    if name.startswith("prompt_encoder."):
        own = name.removeprefix("prompt_encoder.default.")
        return f"encoder.{own}" if has_encoder(config) else "prompt_embeddings"
    path = name.removeprefix("base_model.model.").replace(".default", "")
    if ".modules_to_save" in path:
        return path.replace(".modules_to_save", "")
    path = path.removesuffix(".weight").replace(".base_layer.bias", ".bias")
    path = path.replace(".lora_B.bias", ".lora_B_bias")
    path = path.replace(".lora_embedding_", ":embedding.lora_")
    if isinstance(config, peft.AdaLoraConfig):
        path = path.replace(".lora_", ".adalora_")
    is_input = path.endswith(".ia3_l") and parameter.shape[0] == 1
    return f"{path}_in" if is_input else path


def trained_gradients(wrapped: Any) -> dict[str, Tensor]:
    """What peft's parameters have as gradients, by pcg's name of each."""
    gradients: dict[str, Any] = {name: p.grad for name, p in trained(wrapped).items()}
    config = wrapped.active_peft_config
    if config.peft_type == "PREFIX_TUNING" and not has_encoder(config):
        return prefix_parts(gradients["prompt_embeddings"], config.num_layers)
    return gradients


def check_gradients(executor: Executor, name: str, wrapped: Any, lengths: Sequence[int]) -> None:
    """The loss of sequences, and the gradient of every parameter of an adapter, are peft's."""
    sequences = prompts(lengths)
    runner = executor.training_runner(name)
    for parameter in runner.parameters.values():
        parameter.grad = None
    examples = [Example(s, s) for s in sequences]
    loss = runner.forward_backward(examples, runner.count_targets(examples))
    wrapped.zero_grad()
    expected_loss, _ = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    expected = trained_gradients(wrapped)
    assert runner.parameters.keys() == expected.keys()
    for path, parameter in runner.parameters.items():
        theirs = expected[path].reshape(parameter.shape)
        error = (parameter.grad - theirs).norm() / theirs.norm()
        assert error < TOLERANCE, path


def check_batch(executor: Executor, models: Mapping[str | None, Any], name: str) -> None:
    """A batch of the base and adapters, by name, is theirs; so are the gradients of one of them."""
    names, sequences = [*models, name], prompts((9, 4, 7, 1))
    by_row = [models[row] for row in names]
    found = executor.logits(sequences, names)
    for logits, sequence, model in zip(found, sequences, by_row, strict=True):
        assert oracle.relative_error(logits, oracle.logits(model, sequence)) < TOLERANCE
    done = executor.generate(sequences, names, max_new_tokens=12, ignore_eos=True)
    expected = [oracle.greedy(m, s, 12) for m, s in zip(by_row, sequences, strict=True)]
    assert [list(completion.token_ids) for completion in done] == expected
    check_gradients(executor, name, models[name], (9, 4, 7, 1))


def prefix_parts(whole: Tensor, layers: int) -> dict[str, Tensor]:
    """What peft has in one tensor for all layers, by pcg's name of each part."""
    parts = whole.chunk(2 * layers, -1)
    names = [f"layers.{layer}.prefix_{kind}" for layer in range(layers) for kind in KINDS]
    return dict(zip(names, parts, strict=True))


KINDS = ("keys", "values")
