"""Language models of composite checkpoints: the whole model of transformers on text is the oracle.

A checkpoint is written as transformers writes it, with a vision tower that has random weights.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import pcg
import pcg.compiler as compiler
from pcg.errors import UnsupportedError
from pcg.runtime.data.example import Example
from pcg.source import COMPOSITES
from tests.support import oracle
from tests.support.architectures import default_config
from tests.support.prompts import LENGTHS, TOLERANCE, prompts

TARGETS = ["q_proj", "v_proj"]


def whole_model(kind: str) -> Any:
    """The composite model, small, with random weights."""
    fields = default_config(kind, 4 if kind in ("gemma4", "lfm2_vl") else 2)
    config = transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields)
    classes = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in classes:
        classes = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    model = classes[type(config)]._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.data.copy_(0.2 * noise)
        else:
            parameter.data.add_(0.1 * noise)
    return model.eval()


QUICK = ("gemma3", "mistral3")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in sorted(COMPOSITES.keys() - {"gemma3n"})  # its tower is another library's
    ],
)
def test_the_language_model_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    whole = whole_model(kind)
    oracle.save_model(whole, tmp_path)
    executor = pcg.compile(str(tmp_path))
    if kind == "llama4":  # of transformers 5.24, which runs it with images alone
        whole = whole.language_model
    sequences = prompts(LENGTHS)
    for sequence, logits in zip(sequences, executor.logits(sequences), strict=True):
        assert oracle.relative_error(logits, oracle.logits(whole, sequence)) < TOLERANCE
    completions = executor.generate(sequences, max_new_tokens=4, ignore_eos=True)
    expected = [oracle.greedy(whole, sequence, 4) for sequence in sequences]
    assert [list(completion.token_ids) for completion in completions] == expected


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("gemma3")
    whole = whole_model("gemma3")
    oracle.save_model(whole, folder)
    return whole, folder


def adapted(whole: Any, targets: Any = TARGETS, **fields: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **fields)
    model = peft.get_peft_model(whole, config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in oracle.lora_parameters(model).values():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("targets", "fields"),
    [
        (TARGETS, {"rank_pattern": {"model.language_model.layers.1.self_attn.q_proj": 2}}),
        (r".*language_model\..*\.(q|v)_proj", {}),
        ([*TARGETS, "fc1"], {"rank_pattern": {"fc1": 3, "language_model.*.v_proj": 5}}),
    ],
    ids=["the tower, too", "a regex", "names of the tower"],
)
def test_an_adapter_of_the_whole_model(
    gemma: tuple[Any, Path], targets: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    whole, folder = gemma
    model = adapted(whole, targets, **fields)
    try:
        oracle.save(model, tmp_path / "adapter")
        executor = pcg.compile(str(folder), peft={"a": str(tmp_path / "adapter")})
        (sequence,) = prompts((20,))
        expected = oracle.logits(model, sequence)
        assert oracle.relative_error(executor.logits(sequence, "a"), expected) < TOLERANCE
        runner = executor.training_runner("a")
        loss = runner.forward_backward([Example(sequence, sequence)], len(sequence) - 1)
        of_peft, gradients = oracle.loss_and_gradients(model, [sequence])
        assert loss == pytest.approx(of_peft, rel=TOLERANCE)
        ours = {name: parameter.grad for name, parameter in runner.parameters.items()}
        language = {name for name in gradients if name.startswith("model.language_model.")}
        assert len(ours) == len(language)
        for name in language:
            assert oracle.relative_error(ours[name], gradients[name]) < 10 * TOLERANCE, name
        executor.save_adapter("a", tmp_path / "saved")
    finally:
        model.unload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(whole, tmp_path / "saved").eval()
    try:
        assert oracle.relative_error(oracle.logits(again, sequence), expected) < TOLERANCE
    finally:
        again.unload()


def test_an_adapter_of_the_language_model_alone(gemma: tuple[Any, Path], tmp_path: Path) -> None:
    whole, folder = gemma
    language = transformers.Gemma3ForCausalLM(whole.config.text_config).eval()
    language.model.load_state_dict(whole.model.language_model.state_dict())
    model = adapted(language, ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"])
    oracle.save(model, tmp_path)
    executor = pcg.compile(str(folder), peft={"a": str(tmp_path)})
    (sequence,) = prompts((20,))
    expected = oracle.logits(model, sequence)
    assert oracle.relative_error(executor.logits(sequence, "a"), expected) < TOLERANCE


def test_an_adapter_is_merged_into_the_whole(gemma: tuple[Any, Path], tmp_path: Path) -> None:
    whole, folder = gemma
    model = adapted(whole, r".*language_model.*\.(q|v)_proj")
    try:
        oracle.save(model, tmp_path / "adapter")
        (sequence,) = prompts((20,))
        expected = oracle.logits(model, sequence)
    finally:
        model.unload()
    pcg.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    again = type(whole).from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert oracle.relative_error(oracle.logits(again, sequence), expected) < TOLERANCE
    model = adapted(whole, TARGETS)  # and those of the tower
    oracle.save(model, tmp_path / "both")
    model.unload()
    with pytest.raises(UnsupportedError, match="outside the language model, which pcg does not"):
        pcg.merge(folder, tmp_path / "both", tmp_path / "again")


def test_a_language_model_is_quantized_on_loading(gemma: tuple[Any, Path], tmp_path: Path) -> None:
    whole, folder = gemma
    with pytest.raises(UnsupportedError, match=r"composite checkpoint \(gemma3\)"):
        pcg.quantize(str(folder), "int8_weight", tmp_path / "out")
    (sequence,) = prompts((20,))
    logits = pcg.compile(str(folder), quantization="int8_weight").logits(sequence)
    error = oracle.relative_error(logits, oracle.logits(whole, sequence))
    assert TOLERANCE < error < 0.1


def test_a_composite_module_in_memory_is_refused(gemma: tuple[Any, Path]) -> None:
    with pytest.raises(UnsupportedError, match="gemma3 is more than a language model"):
        pcg.compile(gemma[0])


def test_the_configuration_of_the_language_model_is_that_of_transformers() -> None:
    for kind in COMPOSITES:
        config = transformers.CONFIG_MAPPING[kind]()
        text = config.get_text_config()
        program = compiler.source_of(config)[0].config
        assert program["model_type"] == text.model_type, kind
        assert program["hidden_size"] == text.hidden_size, kind
