"""Jobs of methods with a state of their own: step by step as peft, and resumed to the same bits."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from pcg.errors import FinetuneError
from pcg.runtime.data.example import Example
from tests.support import compiled, oracle
from tests.support.adalora import DICT as ADALORA
from tests.support.adalora import OPTIONS as ADALORA_OPTIONS
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, give_encoder, trained
from tests.support.prompts import TOLERANCE, prompts

OPTIONS: dict[str, Any] = {
    "batch_size": 1, "learning_rate": 0.01, "schedule": "constant", "progress": False,
}  # fmt: skip
LSTM = {"encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 24}
MLP = peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=40, **CAUSAL)
VIRTUAL: dict[str, peft.PeftConfig] = {
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
    "mlp": MLP,
    "lstm": peft.PromptEncoderConfig(num_virtual_tokens=4, **LSTM, **CAUSAL),
    "projection": peft.PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, **CAUSAL),
}
CASES = [
    pytest.param(name, family, marks=() if fast else pytest.mark.slow)
    for name in VIRTUAL
    for family in ("gpt2", "qwen3")
    for fast in [(family == "gpt2") == (name != "projection")]
]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_finetuning_follows_peft_step_by_step(name: str, family: str, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME[family].config(2))
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(VIRTUAL[name])).eval()
    wrapped.save_pretrained(tmp_path / "p")
    executor = compiled.executor(base, {"p": str(tmp_path / "p")})
    give_encoder(executor, "p", wrapped)
    sequences = prompts((8, 5))
    # Of AdamW's, the first steps move by the gradient's sign, which rounding decides near zero.
    options = {**OPTIONS, "batch_size": 2, "eps": 1e-3, "max_grad_norm": None}
    parameters = [*trained(wrapped).values()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(4):
        loss, _ = oracle.loss_and_gradients(wrapped, sequences)
        losses.append(loss)
        optimizer.step()
    data = [Example(s, s) for s in sequences]
    result = executor.finetune(data, "p", max_steps=4, **options)
    targets = executor.training_runner("p").count_targets(data)
    assert [loss * targets for loss in result.losses] == pytest.approx(losses, rel=TOLERANCE)
    executor.save_adapter("p", tmp_path / "ours")
    (ours,) = load_file(tmp_path / "ours" / "adapter_model.safetensors").values()
    theirs = wrapped.get_prompt_embedding_to_save("default")
    assert (ours - theirs).norm() / theirs.norm() < TOLERANCE
    (found,) = executor.logits(sequences[:1], "p")
    for model in (wrapped, oracle.load_saved(base, tmp_path / "ours")):
        assert oracle.relative_error(found, oracle.logits(model, sequences[0])) < TOLERANCE


VERA = {"peft_type": "VERA", "r": 4, "target_modules": ["q_proj", "down_proj"]}
LOHA = {"peft_type": "LOHA", "r": 3, "alpha": 5, "target_modules": ["q_proj", "down_proj"]}
LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear", "lora_dropout": 0.5}
DRAWN_ADALORA = {**ADALORA, "init_lora_weights": False, "lora_dropout": 0.1}
DATA = [Example(s, s) for s in prompts((9, 12, 5))]
EVALUATED = {"eval_data": DATA[:1], "restore_best": True}
"""After each epoch of three steps, at which a job of these is stopped, too."""
RESUMED: list[tuple[str, Any, tuple[int, int], dict[str, Any]]] = [
    ("mlp", MLP, (3, 5), EVALUATED),
    ("lstm", VIRTUAL["lstm"], (3, 5), EVALUATED),
    ("projection", VIRTUAL["projection"], (3, 5), EVALUATED),
    # While AdaLoRA warms up, between two allocations, and when the ranks are final.
    *((f"adalora-{stop}", DRAWN_ADALORA, (stop, 12), ADALORA_OPTIONS) for stop in (2, 5, 8, 10)),
    ("vera", {**VERA, "save_projection": False, "vera_dropout": 0.2}, (2, 4), {}),
    ("loha", LOHA, (1, 3), {}),
    ("dropout", LORA, (2, 6), {"batch_size": 2, "gradient_accumulation_steps": 2}),
]
FAST = ("lstm", "adalora-5", "vera", "loha", "dropout")


@pytest.mark.parametrize(
    ("recipe", "stops", "options"),
    [
        pytest.param(*case, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, *case in RESUMED
    ],
)
def test_a_resumed_job_ends_with_the_same_bits(
    recipe: Any, stops: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    options = {**OPTIONS, **options}
    whole = compiled.executor(base)
    result = whole.finetune(DATA, "a", peft=recipe, max_steps=stops[-1], **options)
    for steps in stops:
        parts = compiled.executor(base)
        last = parts.finetune(
            DATA, "a", peft=recipe, max_steps=steps, checkpoint_dir=tmp_path, **options
        )
    assert last.resumed_from == stops[0]
    assert (last.losses, last.eval_losses) == (result.losses, result.eval_losses)
    one, other = (executor.adapters["a"] for executor in (whole, parts))
    assert one.recipe == other.recipe
    if one.encoder:
        assert all(map(torch.equal, one.tensors, other.tensors))
    else:  # modules of a checkpoint are in any order
        assert one.weights.keys() == other.weights.keys()
        for path, weights in one.weights.items():
            assert all(map(torch.equal, weights.tensors, other.weights[path].tensors)), path
    (found,), (expected,) = (executor.logits([DATA[0].ids], "a") for executor in (parts, whole))
    assert torch.equal(found, expected)


def test_a_checkpoint_of_another_encoder(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    data = [Example(s, s) for s in prompts((9,))]
    options = {**OPTIONS, "checkpoint_dir": tmp_path, "max_steps": 1}
    compiled.executor(base).finetune(data, "p", peft=MLP, **options)
    other = dataclasses.replace(MLP, encoder_hidden_size=8)
    with pytest.raises(FinetuneError, match=r"the encoder MLP with 40 features .* with 8 features"):
        compiled.executor(base).finetune(data, "p", peft=other, **options)
    (checkpoint,) = tmp_path.glob("step-*")
    (checkpoint / "encoder.safetensors").unlink()
    with pytest.raises(FinetuneError, match=r"encoder\.safetensors cannot be read"):
        compiled.executor(base).finetune(data, "p", peft=MLP, **options)
