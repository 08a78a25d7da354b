"""Combinations of LoRA adapters have the weights of peft's `add_weighted_adapter`."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, get_args
from unittest.mock import Mock

import huggingface_hub
import peft
import pytest
import torch
from safetensors.torch import load_file

import pcg
from pcg.errors import AdapterConflictError, AdapterError, UnsupportedError
from pcg.peft.arithmetic import Combination
from tests.support import oracle
from tests.support.command_line import assert_one_error, output_of, run
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts

RECIPES = {
    "first": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"]),
    "second": peft.LoraConfig(r=4, lora_alpha=3, target_modules=["q_proj", "v_proj"]),
    "third": peft.LoraConfig(r=4, lora_alpha=3, use_rslora=True, target_modules=["q_proj"]),
    "wide": peft.LoraConfig(r=6, target_modules=["q_proj"], rank_pattern={"0.*.q_proj": 2}),
    "tokens": peft.LoraConfig(r=4, lora_alpha=6, target_modules=["embed_tokens", "q_proj"]),
}
WEIGHTS = {"first": 0.7, "second": -0.4, "third": 1.3, "wide": 0.5, "tokens": 0.9}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model in peft with all adapters, and an executor with them."""
    folder = tmp_path_factory.mktemp("adapters")
    model = oracle.random_model(BY_NAME["llama-biases"].config(2))
    oracle.save_model(model, folder / "base")
    wrapped = peft.get_peft_model(model, RECIPES["first"], "first").eval()
    for name in [*RECIPES][1:]:
        wrapped.add_adapter(name, RECIPES[name])
    generator = torch.Generator().manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    executor = pcg.compile(folder / "base", {name: str(folder / name) for name in RECIPES})
    return wrapped, executor


def check(models: tuple[Any, Any], adapters: list[str], kind: str, **options: Any) -> None:
    wrapped, executor = models
    weights = [WEIGHTS[name] for name in adapters]
    prepare = wrapped.base_model.inject_adapter

    def prepare_and_seed(*arguments: Any) -> None:
        prepare(*arguments)  # draws an adapter, which is then overwritten
        torch.manual_seed(11)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapped.base_model, "inject_adapter", prepare_and_seed)
        wrapped.add_weighted_adapter(adapters, weights, "sum", kind, **options)
    made = executor.combine_adapters(
        "sum", adapters, weights, combination_type=kind, seed=11, replace=True, **options
    )
    try:
        modules = {
            name.removeprefix("base_model.model.") + end: module
            for name, module in wrapped.named_modules()
            for end, kind in (("", "lora_A"), (":embedding", "lora_embedding_A"))
            if "sum" in getattr(module, kind, {})
        }
        assert made.weights.keys() == modules.keys()
        for name, ours in made.weights.items():
            assert ours.scale == 1.0
            theirs = modules[name].get_delta_weight("sum")
            theirs = theirs.t() if ours.embeds else theirs
            error = oracle.relative_error(ours.b @ ours.a, theirs)
            assert error < TOLERANCE, name
            assert len(ours.a) == made.recipe.r == wrapped.peft_config["sum"].r
    finally:
        wrapped.delete_adapter("sum")


@pytest.mark.parametrize("kind", get_args(Combination))
def test_weights_are_pefts(models: tuple[Any, Any], kind: str) -> None:
    density = {} if kind in ("svd", "linear", "cat") else {"density": 0.6}
    check(models, ["first", "second"], kind, **density)


@pytest.mark.parametrize(
    ("adapters", "kind", "options"),
    [
        (["first", "second", "wide"], "cat", {}),
        (["first", "wide"], "svd", {"svd_rank": 3}),
        (["second", "wide"], "svd", {"svd_clamp": 0.9}),
        (["first", "second"], "ties", {"density": 0.3, "majority_sign_method": "frequency"}),
        (["second", "first"], "dare_ties_svd", {"density": 0.5}),
        (["second"], "ties", {"density": 0.5}),
        (["first", "tokens"], "dare_linear", {"density": 0.5}),
    ],
    ids=str,
)
def test_options(
    models: tuple[Any, Any], adapters: list[str], kind: str, options: dict[str, Any]
) -> None:
    check(models, adapters, kind, **options)


def test_a_sum_serves_and_saves(models: tuple[Any, Any], tmp_path: Path) -> None:
    """The third adapter's scale is alpha / √rank, which peft keeps for the sum, too."""
    wrapped, executor = models
    made = executor.combine_adapters("sum", ["third", "first"], [1.0, 2.0], "cat", replace=True)
    third, first = (executor.adapters[name].weights for name in ("third", "first"))
    for name, ours in made.weights.items():
        parts = [(third.get(name), 1.0), (first.get(name), 2.0)]
        theirs = sum(w * each.scale * each.b @ each.a for each, w in parts if each is not None)
        assert oracle.relative_error(ours.b @ ours.a, theirs) < TOLERANCE
    executor.save_adapter("sum", tmp_path / "sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.load_adapter(tmp_path / "sum", "again")
    (sequence,) = prompts((9,))
    wrapped.set_adapter("again")
    expected = oracle.logits(wrapped, sequence)
    assert oracle.relative_error(executor.logits(sequence, "sum"), expected) < TOLERANCE


def test_the_command_line_combines_files(models: tuple[Any, Any], tmp_path: Path) -> None:
    executor, folders = models[1], [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        executor.save_adapter(folder.name, folder)
    (folders[0] / "chat_template.jinja").write_text("{{ messages }}")
    output_of("adapters", "combine", *folders, "--weights", "1,0.5", "-o", tmp_path / "both")
    executor.combine_adapters("both", ["first", "second"], [1.0, 0.5], replace=True)
    executor.save_adapter("both", tmp_path / "expected")
    found, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("both", "expected")
    )
    executor.remove_adapter("both")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    assert (tmp_path / "both" / "chat_template.jinja").read_text() == "{{ messages }}"
    again = run("adapters", "combine", *folders, "--weights", "1,1", "-o", tmp_path / "both")
    assert_one_error(again, "has a saved adapter; give another directory, or --overwrite")


class Hub:
    """Records the calls of huggingface_hub.HfApi."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self, **given: Any) -> None:
        self.calls.append(("api", given))

    def create_repo(self, repo: str, **given: Any) -> Any:
        self.calls.append((repo, given))
        return SimpleNamespace(repo_id=f"me/{repo}")

    def upload_folder(self, **given: Any) -> Any:
        paths = sorted(path.name for path in given.pop("folder_path").iterdir())
        chosen = huggingface_hub.utils.filter_repo_objects(
            paths, allow_patterns=given.pop("allow_patterns")
        )
        self.calls.append((",".join(chosen), given))
        return SimpleNamespace(commit_url="https://hub/me/mine/commit/1")


def test_an_adapter_is_pushed_without_records(
    models: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    executor = models[1]
    url = executor.push_to_hub("first", "mine", private=True, token="hf_x", message="Hello")
    assert url == "https://hub/me/mine/commit/1"
    executor.save_adapter("first", tmp_path / "a")
    (tmp_path / "a" / "record").mkdir()
    (tmp_path / "a" / "samples.jsonl").write_text("secret")
    assert "commit/1" in run("push", tmp_path / "a", "mine", "--json").stdout
    files = "README.md,adapter_config.json,adapter_model.safetensors"
    assert Hub.calls[:3] == [
        ("api", {"token": "hf_x"}),
        ("mine", {"private": True, "exist_ok": True}),
        (files, {"repo_id": "me/mine", "commit_message": "Hello"}),
    ]
    assert Hub.calls[5][0] == files
    monkeypatch.setattr(Hub, "create_repo", lambda *_, **__: 1 / 0)
    assert_one_error(run("push", tmp_path / "a", "mine"), "mine cannot be written on the hub")
    for status, fix in (
        (None, "go online"),
        (403, "log in by"),
        (409, "correct OWNER"),
        (503, "try"),
    ):
        error = ConnectionError("no")
        if status is not None:
            error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
        monkeypatch.setattr(Hub, "create_repo", Mock(side_effect=error))
        assert_one_error(run("push", tmp_path / "a", "mine"), f"(ConnectionError: no); {fix}")
    assert_one_error(run("push", tmp_path, "mine"), "has no adapter_config.json")


def test_refusals(models: tuple[Any, Any]) -> None:
    _, executor = models
    combine = executor.combine_adapters
    for arguments, words in [
        ((["first", "second"], [1.0]), "2 adapters and 1 weights"),
        ((["first", "second"], [1.0, 1.0], "mean"), "combination_type='mean'; use one of svd"),
        ((["first", "second"], [1.0, 1.0], "ties"), "density=None with ties"),
        ((["first", "wide"], [1.0, 1.0], "linear"), r"have \[4, 6\]; use svd, or cat"),
        ((["first", "wide"], [1.0, float("nan")], "svd"), "use finite numbers"),
    ]:
        with pytest.raises(AdapterError, match=words):
            combine("new", *arguments)
    executor.add_adapter("dora", "dora")
    with pytest.raises(UnsupportedError, match="'dora' is DoRA"):
        combine("new", ["first", "dora"], [1.0, 1.0])
    with pytest.raises(AdapterConflictError, match="there is an adapter 'first' already"):
        combine("first", ["first", "second"], [1.0, 1.0])
