"""Every way to name a model, and every way to name it wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from pcg import errors, source

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return directory


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache; the hub itself is off in all tests."""
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def cached_repo(cache: Path, repo_id: str, files: dict[str, Any]) -> Path:
    """Lay out a snapshot as huggingface_hub does."""
    repo = cache / ("models--" + repo_id.replace("/", "--"))
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for name, content in files.items():
        (snapshot / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return snapshot


def write_index(directory: Path, shards: list[str]) -> None:
    weight_map = {f"tensor.{i}": name for i, name in enumerate([*shards, *shards])}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# ------------------------------------------------------------------------------------ good names


def test_directory_without_weights(model_dir: Path) -> None:
    assert source.resolve(model_dir) == source.ModelSource("tiny", LLAMA, model_dir, ())
    assert source.resolve(str(model_dir)) == source.resolve(model_dir)


def test_path_to_config(model_dir: Path) -> None:
    assert source.resolve(model_dir / "config.json") == source.resolve(model_dir)


def test_config_under_another_name(model_dir: Path) -> None:
    (model_dir / "config.json").rename(model_dir / "small.json")
    found = source.resolve(model_dir / "small.json")
    assert found == source.ModelSource("small", LLAMA, None, ())


def test_home_directory(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model_dir.parent))
    assert source.resolve("~/tiny").config == LLAMA


def test_config_in_memory() -> None:
    found = source.resolve(LLAMA)
    assert (found.name, found.config) == ("LlamaForCausalLM", LLAMA)
    assert found.config is not LLAMA


def test_a_configuration_of_transformers() -> None:
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2)
    found = source.resolve(config)
    assert found.name == "llama"
    assert {**found.config, "hidden_size": 64, "num_hidden_layers": 2} == found.config
    with pytest.raises(errors.WeightsError, match="was given as a config"):
        source.resolve(config, weights=True)


@pytest.mark.parametrize("model", [123, None, ["a"], object()])
def test_what_names_no_model(model: Any) -> None:
    with pytest.raises(
        errors.ModelNotFoundError, match="names no model; give a directory, a hub id"
    ):
        source.resolve(model)


def test_source_is_hashable() -> None:
    assert len({source.resolve(LLAMA), source.resolve(LLAMA)}) == 1


def test_single_weight_file(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"\0" * 8)
    assert source.resolve(model_dir, weights=True).weight_files == (
        model_dir / "model.safetensors",
    )


def test_shards_in_index_order_each_once(model_dir: Path) -> None:
    shards = ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"]
    write_index(model_dir, shards)
    for name in shards:
        (model_dir / name).touch()
    assert [file.name for file in source.resolve(model_dir).weight_files] == shards


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        # An alias that is a hub id of its own keeps it: its weights are its own.
        ("meta-llama/llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    ],
)
def test_shipped_names(name: str, expected: str) -> None:
    found = source.resolve(name)
    assert found.name == expected
    assert found.directory is None
    assert found.config["model_type"] in {"llama", "gpt2"}


def test_every_alias_leads_to_a_shipped_config() -> None:
    assert set(source.ALIASES.values()) <= set(source.shipped())
    assert not set(source.ALIASES) & set(source.shipped())
    for name in (*source.ALIASES, *source.shipped()):
        source.resolve(name)


def test_directory_wins_over_shipped(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir.rename(model_dir.with_name("gpt2-xl"))
    monkeypatch.chdir(model_dir.parent)
    found = source.resolve("gpt2-xl")
    assert (found.name, found.config) == ("gpt2-xl", LLAMA)


def test_cached_hub_model(hub_cache: Path) -> None:
    snapshot = cached_repo(hub_cache, "some/model", {"config.json": LLAMA, "model.safetensors": ""})
    found = source.resolve("some/model", weights=True)
    expected = (snapshot / "model.safetensors",)
    assert found == source.ModelSource("some/model", LLAMA, snapshot, expected)


def test_cached_config_is_enough_without_weights(hub_cache: Path) -> None:
    snapshot = cached_repo(hub_cache, "some/model", {"config.json": LLAMA})
    write_index(snapshot, ["model-00001-of-00002.safetensors"])
    assert source.resolve("some/model").weight_files == ()


def test_weights_of_a_shipped_model_come_from_the_cache(hub_cache: Path) -> None:
    files = {"config.json": LLAMA, "model.safetensors": ""}
    snapshot = cached_repo(hub_cache, "openai-community/gpt2-xl", files)
    assert source.resolve("GPT2-XL", weights=True).directory == snapshot
    assert source.resolve("GPT2-XL").config["model_type"] == "gpt2"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from pcg import source; source.resolve('gpt2-xl');"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------- bad names


def test_unknown_name_suggests(hub_cache: Path) -> None:
    with pytest.raises(errors.ModelNotFoundError, match=r"did you mean meta-llama/Llama-3\.1-8B"):
        source.resolve("meta-lama/Llama-3.1-8b")


def test_unknown_name_without_likeness(hub_cache: Path) -> None:
    with pytest.raises(errors.ModelNotFoundError, match=r"none of the \d\d models that ship"):
        source.resolve("qqqq/zzzz")


def test_name_that_is_no_hub_id() -> None:
    with pytest.raises(errors.ModelNotFoundError, match="neither a path nor a hub id"):
        source.resolve("two words")


@pytest.mark.parametrize("name", ["", "./nowhere", "/no/where", "a/b/c", "nowhere/", "some.json"])
def test_missing_path(name: str) -> None:
    with pytest.raises(errors.ModelNotFoundError, match="no directory or file"):
        source.resolve(name)


def test_missing_path_object(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelNotFoundError, match="no directory or file"):
        source.resolve(tmp_path / "nowhere")


def test_weight_file_instead_of_directory(model_dir: Path) -> None:
    (model_dir / "model.safetensors").touch()
    with pytest.raises(errors.ModelNotFoundError, match="give the directory it lies in"):
        source.resolve(model_dir / "model.safetensors")


# ------------------------------------------------------------------------------------ bad configs


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"has no config\.json"):
        source.resolve(tmp_path)


def test_adapter_instead_of_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(errors.ConfigError, match="it is an adapter; give its base model"):
        source.resolve(tmp_path)


def test_damaged_config_names_line_and_column(model_dir: Path) -> None:
    (model_dir / "config.json").write_text('{\n  "model_type": "llama",\n  "hidden_size": \n}')
    with pytest.raises(errors.ConfigError, match="damaged at line 4, column 1"):
        source.resolve(model_dir)


def test_config_of_other_bytes(model_dir: Path) -> None:
    (model_dir / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(errors.ConfigError, match="byte 7 is not UTF-8"):
        source.resolve(model_dir)


def test_config_that_is_a_list(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("[]")
    with pytest.raises(errors.ConfigError, match="holds a list, not an object"):
        source.resolve(model_dir)


@pytest.mark.parametrize("config", [{"hidden_size": 64}, {"model_type": ""}, {"model_type": 3}])
def test_config_without_model_type(model_dir: Path, config: dict[str, Any]) -> None:
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(errors.ConfigError, match=r'no "model_type" among its 1 keys'):
        source.resolve(model_dir)
    with pytest.raises(errors.ConfigError, match="the given config has no"):
        source.resolve(config)


# ------------------------------------------------------------------------------------ bad weights


def test_missing_shard_and_index_are_named(model_dir: Path) -> None:
    write_index(model_dir, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
    (model_dir / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(errors.MissingShardError) as caught:
        source.resolve(model_dir)
    assert "model-00002-of-00002.safetensors is missing" in str(caught.value)
    assert "1 of the 2 shards that model.safetensors.index.json names" in str(caught.value)


def test_damaged_index(model_dir: Path) -> None:
    (model_dir / "model.safetensors.index.json").write_text("{")
    with pytest.raises(errors.WeightsError, match="damaged at line 1, column 2"):
        source.resolve(model_dir)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_index_without_weight_map(model_dir: Path, index: dict[str, Any]) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(errors.WeightsError, match=r'has no "weight_map"'):
        source.resolve(model_dir)


def test_shard_outside_of_the_directory(model_dir: Path) -> None:
    write_index(model_dir, ["../other.safetensors"])
    with pytest.raises(errors.WeightsError, match="not a file beside it"):
        source.resolve(model_dir)


def test_pickles_are_refused_with_the_conversion(model_dir: Path) -> None:
    (model_dir / "pytorch_model.bin").touch()
    with pytest.raises(errors.PickleWeightsError) as caught:
        source.resolve(model_dir)
    message = str(caught.value)
    assert "pytorch_model.bin, 1 file)" in message
    assert "can run any code" in message
    assert f"from_pretrained('{model_dir}').save_pretrained(OUT)" in message


def test_pickles_beside_safetensors_are_ignored(model_dir: Path) -> None:
    (model_dir / "pytorch_model.bin").touch()
    (model_dir / "model.safetensors").touch()
    assert [file.name for file in source.resolve(model_dir).weight_files] == ["model.safetensors"]


def test_lfs_pointer(model_dir: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (model_dir / "model.safetensors").write_text(pointer)
    with pytest.raises(errors.WeightsError, match=r"LFS pointer of 63 bytes.*git lfs pull"):
        source.resolve(model_dir)


def test_weights_wanted_and_absent(model_dir: Path) -> None:
    with pytest.raises(errors.WeightsError, match="tiny has no weights"):
        source.resolve(model_dir, weights=True)
    with pytest.raises(errors.WeightsError, match="given as a config, without weights"):
        source.resolve(LLAMA, weights=True)


def test_weights_of_a_shipped_model_need_the_hub(hub_cache: Path) -> None:
    with pytest.raises(errors.ModelNotFoundError, match="not in the local Hugging Face cache"):
        source.resolve("gpt2-xl", weights=True)


def test_broken_download_needs_the_hub(hub_cache: Path) -> None:
    snapshot = cached_repo(hub_cache, "some/model", {"config.json": LLAMA})
    write_index(snapshot, ["model-00001-of-00001.safetensors"])
    with pytest.raises(errors.SourceError):
        source.resolve("some/model", weights=True)
