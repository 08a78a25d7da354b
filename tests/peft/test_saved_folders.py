"""Folders of saved adapters as peft's and transformers' Auto classes open them; tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import pcg
from pcg.errors import AdapterError, ConfigError, EngineError, ModelNotFoundError
from pcg.runtime.executor import Executor
from pcg.runtime.text.tokenizer import Tokenizer

CHECKPOINT = "examples/checkpoint"
PROMPT = "def load_file(path):"


@pytest.fixture(scope="module")
def executor() -> Executor:
    executor = pcg.compile(CHECKPOINT, dtype="float32")
    for method in ("lora", "ia3", "vera"):
        executor.add_adapter(method, method, seed=1)
        adapter = executor.adapters[method]
        with torch.no_grad():
            for weights in adapter.weights.values():
                for tensor in weights.tensors:
                    tensor.add_(0.05)
        executor.refresh_adapter(method)
    return executor


@pytest.mark.parametrize("name", ["lora", "ia3", "vera"])
def test_auto_classes_open_a_saved_adapter(name: str, executor: Executor, tmp_path: Path) -> None:
    executor.save_adapter(name, tmp_path / "saved")
    config = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == CHECKPOINT
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = tokenizer(PROMPT)["input_ids"]
    assert executor.tokenizer is not None
    assert ids == executor.tokenizer.encode(PROMPT)
    expected = executor.logits([ids], adapter=name)[0]
    models = [AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="float32")]
    if name == "lora":  # transformers itself adapts modules alone
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="float32"))
    for model in models:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -len(ids) :]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_saved_adapter_and_a_users_card_are_kept(executor: Executor, tmp_path: Path) -> None:
    executor.save_adapter("lora", tmp_path)
    assert "library_name: peft" in (tmp_path / "README.md").read_text()
    with pytest.raises(AdapterError, match=r"has a saved adapter; .* overwrite=True"):
        executor.save_adapter("ia3", tmp_path)
    (tmp_path / "README.md").write_text("mine")
    executor.save_adapter("ia3", tmp_path, overwrite=True)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "IA3"


def test_a_model_in_memory_gets_a_tokenizer(executor: Executor, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    expected = executor.generate([PROMPT], max_new_tokens=8)[0].text
    in_memory = pcg.compile(model)  # the tokenizer of model.config._name_or_path
    assert in_memory.generate([PROMPT], max_new_tokens=8)[0].text == expected
    in_memory.add_adapter("a", "lora")
    in_memory.save_adapter("a", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == CHECKPOINT
    model.config._name_or_path = ""
    for tokenizer in (AutoTokenizer.from_pretrained(CHECKPOINT), CHECKPOINT, Path(CHECKPOINT)):
        given = pcg.compile(model, tokenizer=tokenizer, verify=False)
        assert given.generate([PROMPT], max_new_tokens=8)[0].text == expected
    without = pcg.compile(model, verify=False)
    assert without.tokenizer is None
    without.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert without.generate([PROMPT], max_new_tokens=8)[0].text == expected
    assert without.state.eos_ids == executor.state.eos_ids
    with pytest.raises(ConfigError, match="a dict is no tokenizer"):
        without.tokenizer = {}
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        without.tokenizer = tmp_path.parent
    with (
        without.engine().start(),
        pytest.raises(EngineError, match="set it before the engine starts"),
    ):
        without.tokenizer = CHECKPOINT


def test_adapters_and_tokenizers_of_the_hub(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshots = []
    for name in ("typed", "docs"):
        repo = tmp_path / f"models--user--{name}"
        snapshots.append(repo / "snapshots" / ("0" * 40))
        snapshots[-1].mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs/main").write_text("0" * 40)
    for file in Path("examples/adapters/typed").iterdir():
        shutil.copy(file, snapshots[0])
    assert executor.tokenizer is not None
    executor.tokenizer.save(snapshots[1])
    executor.add_adapter("hub", "user/typed")
    executor.add_adapter("typed", "examples/adapters/typed")
    rows = [executor.logits([[1, 2, 3]], adapter=name)[0] for name in ("hub", "typed")]
    assert torch.equal(*rows)
    assert Tokenizer.of("user/docs").encode(PROMPT) == executor.tokenizer.encode(PROMPT)
    with pytest.raises(AdapterError, match="user/none is not in the local Hugging Face cache"):
        executor.add_adapter("none", "user/none")
    with pytest.raises(ModelNotFoundError, match="ships with pcg, but its weights are not in"):
        pcg.compile("meta-llama/Llama-3.1-8B")


def test_a_name_that_matches_nothing_is_refused_beside_other_adapters(
    executor: Executor, tmp_path: Path
) -> None:
    """The program already reads its modules; the next adapter's program would refuse its recipe."""
    executor.save_adapter("lora", tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rank_pattern": {"absent": 4}}))
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(AdapterError, match="rank_pattern has 'absent', which matches none of the"):
        executor.add_adapter("other", str(tmp_path))
