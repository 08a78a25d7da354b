"""Bottleneck adapters against plain PyTorch modules hooked into the transformers model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import pcg.compiler as compiler
from pcg.errors import AdapterError, UnsupportedError
from pcg.peft.bottleneck import BottleneckConfig, BottleneckWeights
from pcg.peft.registry import recipe_from
from pcg.runtime.executor import Executor
from pcg.runtime.training.data import Example
from tests.families.test_numbers import TOLERANCE, prompts
from tests.support import oracle
from tests.support.families import BY_NAME, FAMILIES

FUNCTIONS = {
    "gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "houlsby": {"variant": "houlsby", "bottleneck_size": 4, "non_linearity": "gelu"},
    "pfeiffer": {"variant": "pfeiffer", "bottleneck_size": 6, "scaling": 0.7},
    "parallel": {"variant": "parallel", "bottleneck_size": 3, "non_linearity": "silu",
                 "scaling": 4.0},
    "tanh": {"variant": "houlsby", "bottleneck_size": 2, "non_linearity": "tanh"},
    "parallel-gelu_new": {"variant": "parallel", "bottleneck_size": 5,
                          "non_linearity": "gelu_new"},
}  # fmt: skip
FIELDS = {"peft_type": "BOTTLENECK", "bottleneck_size": 4}
FIRST_OF_AN_MLP = ("up_proj", "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h")


class Bottleneck(torch.nn.Module):
    """down, σ, up: somebody's plain adapter."""

    def __init__(self, hidden: int, recipe: dict[str, Any]) -> None:
        super().__init__()
        size = recipe["bottleneck_size"]
        self.down, self.up = torch.nn.Linear(hidden, size), torch.nn.Linear(size, hidden)
        self.function = FUNCTIONS[recipe.get("non_linearity", "relu")]
        self.scaling = recipe.get("scaling", 1.0)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaling * self.up(self.function(self.down(x)))


def hooked(base: Any, paths: list[str], recipe: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A copy of the model with an adapter at each module, and the adapters by path."""
    model = copy.deepcopy(base).requires_grad_(False)
    adapters = {path: Bottleneck(64, recipe) for path in paths}
    for path, adapter in adapters.items():
        module = model.get_submodule(path)
        if recipe["variant"] != "parallel":
            module.register_forward_hook(lambda m, args, out, a=adapter: out + a(out))
            continue
        seen: list[Tensor] = []
        parent = path.rpartition(".")[0]
        names = dict(model.get_submodule(parent).named_children())
        first = next(n for n in FIRST_OF_AN_MLP if n in names)
        names[first].register_forward_pre_hook(lambda m, args, s=seen: s.append(args[0]))
        module.register_forward_hook(lambda m, args, out, a=adapter, s=seen: out + a(s.pop()))
    return model, adapters


def case(family: str) -> tuple[Any, dict[str, Any], dict[str, Any], Executor]:
    base = oracle.random_model(BY_NAME[family].config(2))
    executor = compiler.compile(base)
    torch.manual_seed(0)
    models: dict[str, Any] = {}
    adapters: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        ours = executor.add_adapter(name, {**FIELDS, **recipe})
        models[name], adapters[name] = hooked(base, list(ours.weights), recipe)
        for path, weights in ours.weights.items():
            for tensor, theirs in zip(weights.tensors, state(adapters[name][path]), strict=True):
                tensor.copy_(theirs.data)
        executor.refresh_adapter(name)
    executor.add_adapter("lora", {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"})
    executor.add_adapter("ia3", {"peft_type": "IA3"})
    return base, models, adapters, executor


def state(adapter: Bottleneck) -> list[Tensor]:
    return [adapter.down.weight, adapter.down.bias, adapter.up.weight, adapter.up.bias]


@pytest.mark.parametrize("family", ["opt", "llama3", "gpt2"])
def test_mixed_logits_tokens_and_gradients(family: str) -> None:
    base, models, adapters, executor = case(family)
    names: list[str | None] = [None, *models, "lora", "ia3", *models]
    for lengths in ([5 + i % 4 for i in range(len(names))], [6] * len(names)):
        for chosen in (names, list(models)):
            sequences = prompts(lengths[: len(chosen)])
            found = executor.logits(sequences, chosen)
            for logits, sequence, name in zip(found, sequences, chosen, strict=True):
                expected = oracle.logits(models.get(name or "", base), sequence)
                assert oracle.relative_error(logits, expected) < TOLERANCE, name
    sequences = prompts([4] * len(names))
    done = executor.generate(sequences, names, max_new_tokens=6, ignore_eos=True)
    for completion, sequence, name in zip(done, sequences, names, strict=True):
        expected_ids = oracle.greedy(models.get(name or "", base), sequence, 6)
        assert list(completion.token_ids) == expected_ids, name

    sequences = prompts((9, 4))
    for name, model in models.items():
        runner = executor.training_runner(name)
        loss = runner.forward_backward([Example(s, s) for s in sequences], 11)
        expected_loss, _ = oracle.loss_and_gradients(model, sequences)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        ours = executor.adapters[name].weights
        assert len(runner.parameters) == 4 * len(ours)
        for path, weights in ours.items():
            for tensor, theirs in zip(weights.tensors, state(adapters[name][path]), strict=True):
                assert tensor.grad is not None
                assert theirs.grad is not None
                error = (tensor.grad - theirs.grad).norm() / theirs.grad.norm()
                assert error < TOLERANCE, (name, path)


def test_files_and_finetuning(tmp_path: Path) -> None:
    base, models, _, executor = case("gpt2")
    (sequence,) = prompts((9,))
    for name in models:
        executor.save_adapter(name, tmp_path / name)
    other = compiler.compile(base, {name: str(tmp_path / name) for name in models})
    for name, model in models.items():
        found = other.logits([sequence], name)[0]
        assert oracle.relative_error(found, oracle.logits(model, sequence)) < TOLERANCE
    config = json.loads((tmp_path / "houlsby" / "adapter_config.json").read_text())
    assert {name: config[name] for name in RECIPES["houlsby"]} == RECIPES["houlsby"]
    assert config["target_modules"] == ["attn.c_proj", "mlp.c_proj"]
    other.add_adapter("new", {**FIELDS, "variant": "houlsby"})
    plain = other.logits([sequence])[0]
    assert oracle.relative_error(other.logits([sequence], "new")[0], plain) < TOLERANCE
    data = [Example(sequence, sequence)]
    result = other.finetune(data, "new", max_steps=5, learning_rate=0.02, progress=False)
    assert result.losses[-1] < result.losses[0]

    file = tmp_path / "houlsby" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("adapter_down.bias"))
    save_file({k: v for k, v in tensors.items() if k != key}, file)
    with pytest.raises(AdapterError, match=r"adapter_down.bias, the partner of another"):
        other.add_adapter("damaged", tmp_path / "houlsby")
    save_file({**tensors, key: tensors[key][:3].clone()}, file)
    with pytest.raises(AdapterError, match=r"adapter_down.bias \[3\]; expected \[4\]"):
        other.add_adapter("damaged", tmp_path / "houlsby")


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.extra], ids=str)
def test_every_family_has_its_modules(family: Any) -> None:
    program = compiler.compile_program(family.config(2), {**FIELDS, "variant": "houlsby"})
    recipe = recipe_from({**FIELDS, "variant": "houlsby"})
    assert len(recipe.bypasses(tuple(program.base.linear_modules()))) == 4  # two in each layer
    compiler.compile_program(family.config(2), {**FIELDS, "variant": "parallel"})


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="r=8, a field it does not know"):
        recipe_from({**FIELDS, "r": 8})
    for fields, message in (
        ({"variant": "compacter"}, "variant='compacter'; use one of houlsby, parallel, pfeiffer"),
        ({"non_linearity": "swish"}, "non_linearity='swish'; use one of gelu"),
        ({"bottleneck_size": 0}, "bottleneck_size=0"),
        ({"scaling": float("nan")}, "scaling=nan"),
    ):
        with pytest.raises(AdapterError, match=message):
            BottleneckConfig(**fields)
    config = BY_NAME["llama3"].config(2)
    fields = {"variant": "parallel", "target_modules": ["o_proj"]}
    with pytest.raises(UnsupportedError, match=r"self_attn\.o_proj ends no MLP"):
        compiler.compile_program(config, {**FIELDS, **fields})
    weights = compiler.compile(oracle.random_model(config)).add_adapter("a", FIELDS).weights
    assert all(isinstance(w, BottleneckWeights) for w in weights.values())
