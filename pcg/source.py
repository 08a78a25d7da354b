"""Source of a model: its config, and the files of its weights.

A model is named by a directory, by a path to a config.json or to a GGUF file, by a config in
memory, by the id of a config that ships with pcg, or by a hub id. `resolve` turns each into a
`ModelSource`. This file imports neither torch nor transformers, so a wrong name is reported within
milliseconds.
"""

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pcg.errors import (
    AdapterError,
    ConfigError,
    MissingShardError,
    ModelNotFoundError,
    PickleWeightsError,
    WeightsError,
)
from pcg.files import (
    check_no_lfs_pointer,
    expanded,
    is_directory,
    is_file,
    is_there,
    read_json,
    shown_path,
)
from pcg.gguf_file import SUFFIX as GGUF
from pcg.gguf_model import converted
from pcg.units import shown

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHIPPED = Path(__file__).with_name("configs")
MODEL_TYPES = Path(__file__).with_name("trace") / "model_types.json"
"""What pcg makes of every causal LM of transformers, written by tests/support/model_table.py."""
_LONGEST_ID = 96  # of the hub
_HUB_ID = r"[\w.-]+(/[\w.-]+)?"
_INHERITED = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id",
    "quantization_config", "tie_word_embeddings", "torch_dtype",
)  # fmt: skip
"""Fields that a language model takes from its composite checkpoint's config."""
_OF_LABELS = ("id2label", "label2id", "num_labels", "problem_type")
"""Fields of a composite checkpoint's classifier, which its language model's config has, too."""
_REPAIR = "; repair or download it again"

# Other names of shipped configs: hub ids of models with the same architecture, dtype and context
# (their special tokens may differ; those belong to the weights' own config), and short names.
# Excluded because they differ: Qwen2.5-*-Instruct (context, epsilon), gemma-2-27b-it (dtype).
ALIASES: Mapping[str, str] = {
    "HuggingFaceTB/SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen3-Next-80B-A3B-Thinking": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-ai/DeepSeek-V3",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "ibm-granite/granite-20b-code-base-8k": "ibm-granite/granite-20b-code-base",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-2-13b-chat-hf": "meta-llama/Llama-2-13b-hf",
    "meta-llama/Llama-2-70b-chat-hf": "meta-llama/Llama-2-70b-hf",
    "meta-llama/Llama-2-7b-chat-hf": "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Llama-3.1-70B",
    "meta-llama/Meta-Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
    "meta-llama/Meta-Llama-3.1-70B-Instruct": "meta-llama/Llama-3.1-70B",
    "meta-llama/Meta-Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mosaicml/mpt-7b-instruct": "mosaicml/mpt-7b",
    "tiiuae/falcon-40b-instruct": "tiiuae/falcon-40b",
    "tiiuae/falcon-7b-instruct": "tiiuae/falcon-7b",
    "zai-org/GLM-4.5-Air-Base": "zai-org/GLM-4.5-Air",
}

TEMPLATE = "chat_template.jinja"
"""The file of the chat template beside a tokenizer or an adapter."""
COMPOSITES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "aria", "deepseek_vl", "exaone4_5", "fuyu", "gemma3", "gemma3n", "gemma4",
            "gemma4_unified", "got_ocr2", "hyperclovax_vision_v2", "internvl", "janus",
            "kimi_k25", "lfm2_vl", "lighton_ocr", "llava", "llava_next", "llava_onevision",
            "mistral3", "mllama", "moss_transcribe_diarize", "ovis2", "qianfan_ocr",
            "video_llama_3", "vipllava",
        ),
        "model.language_model",
    ),
    **dict.fromkeys(("emu3", "idefics2", "idefics3", "smolvlm"), "model.text_model"),
    **dict.fromkeys(("dots3_note", "llama4", "qwen3_5", "qwen3_5_moe"), ""),
}  # fmt: skip
"""Types of composite checkpoints whose language model pcg compiles, and its path in the class that
transformers loads; empty if transformers loads the language model's own class."""
COMPOSITE = "composite_type"
"""The field of a language model's config with the type of the checkpoint that contains it."""

# Files of a hub repository that a run needs; `model*` excludes copies such as `consolidated.*`.
TOKENIZER_FILES = (
    "*.model",
    "added_tokens.json",
    "chat_template*",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
DOWNLOADED = (*TOKENIZER_FILES, "model*.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class ModelSource:
    """A model's config and files.

    Attributes:
        name: the hub id, or the directory's name.
        config: the parsed config.json; of a composite checkpoint, that of its language model.
        directory: the place of config and tokenizer; None for a config without files.
        weight_files: safetensors files in the order of the index, or a GGUF file; empty if there
            are none.
        location: the hub id, or the path as it was given; adapters name their base by it.
    """

    name: str
    config: dict[str, Any] = field(hash=False)
    directory: Path | None = None
    weight_files: tuple[Path, ...] = ()
    location: str = field(default="", compare=False)


def shipped() -> tuple[str, ...]:
    """Return the hub ids of the configs that ship with pcg, sorted."""
    return tuple(sorted(path.stem.replace("--", "/", 1) for path in SHIPPED.glob("*.json")))


class ModelConfig(Protocol):
    """A transformers configuration (`PreTrainedConfig`)."""

    model_type: str

    def to_dict(self) -> dict[str, Any]: ...


def resolve(
    model: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig, *, weights: bool = False
) -> ModelSource:
    """Find the model that `model` names.

    The search order is: an existing directory or file, the configs that ship, the local Hugging
    Face cache, the hub.

    Args:
        model: directory with a config.json, path to a config.json or to a GGUF file, hub id, parsed
            config, or a transformers configuration.
        weights: True if the weights are also needed: for a shipped config they are then taken from
            the cache or downloaded.
    Raises:
        ModelNotFoundError: nothing has that name, or it names no model.
        ConfigError: config.json is missing, damaged, or has no model_type.
        WeightsError: a shard is missing, there are only pickles, or `weights` and none exist.
    """
    if isinstance(model, Mapping):
        return _from_config(dict(model), weights=weights)
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return _from_config(model.to_dict(), weights=weights)
    if not isinstance(model, str | os.PathLike):
        raise ModelNotFoundError(
            f"an object of type {type(model).__name__} names no model; give a directory, a hub id, "
            "a configuration, or a transformers model"
        )
    name = os.fsdecode(model).strip()
    path = expanded(name)
    if name and is_there(path):
        source = dataclasses.replace(_from_path(path), location=os.fspath(path))
    elif not isinstance(model, str) or _looks_like_path(name):
        raise ModelNotFoundError(
            f"no directory or file {shown(name)}; give a directory with a {CONFIG}, "
            "a hub id, or a model that ships with pcg" + _suggestions(name)
        )
    else:
        source = _from_id(name, weights=weights)
        source = dataclasses.replace(source, location=source.name)
    if weights and not source.weight_files:
        raise WeightsError(
            f"{source.name} has no weights: neither {WEIGHTS} nor {INDEX} in {source.directory}; "
            "explain and compile work without them, everything else needs them"
        )
    return source


def _from_config(config: dict[str, Any], *, weights: bool) -> ModelSource:
    config = _checked(config, "the given config")
    named = config.get("architectures")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    name = str(config.get("_name_or_path") or next(iter(names), config["model_type"]))
    if weights:
        raise WeightsError(f"{name} was given as a config, without weights; give its directory")
    return ModelSource(name, config, location=str(config.get("_name_or_path") or ""))


def _from_path(path: Path) -> ModelSource:
    if is_file(path) and path.suffix == GGUF:
        directory = converted(path)
        config = _read_config(directory / CONFIG)
        return ModelSource(path.stem, config, directory, (path.resolve(),))
    if is_file(path) and path.suffix != ".json":
        raise ModelNotFoundError(
            f"{path} is neither a directory, a {CONFIG} nor a {GGUF} file; give the directory it "
            "lies in"
        )
    if is_file(path) and path.name != CONFIG:
        return ModelSource(path.stem, _read_config(path))
    directory = path.parent if is_file(path) else path
    return ModelSource(
        directory.resolve().name,
        _read_config(directory / CONFIG),
        directory,
        _weight_files(directory),
    )


def _from_id(name: str, *, weights: bool) -> ModelSource:
    hub_id, config_id = _names().get(name.lower(), (name, None))
    if config_id is not None and not weights:
        path = SHIPPED / (config_id.replace("/", "--", 1) + ".json")
        return ModelSource(hub_id, _read_config(path))
    if len(hub_id) > _LONGEST_ID or not re.fullmatch(_HUB_ID, hub_id):
        raise ModelNotFoundError(
            f"{shown(name)} is neither a path nor a hub id (owner/name)" + _suggestions(name)
        )
    return _from_hub(hub_id, weights=weights)


# ------------------------------------------------------------------------------------- shipped


@functools.cache
def _names() -> dict[str, tuple[str, str | None]]:
    """Map every known name, in lower case, to (hub id of the weights, id of the config)."""
    names: dict[str, tuple[str, str | None]] = {}
    for alias, config_id in ALIASES.items():
        hub_id = alias if "/" in alias else config_id
        names[alias.lower()] = names[_bare(alias)] = (hub_id, config_id)
    for config_id in shipped():
        names[config_id.lower()] = names[_bare(config_id)] = (config_id, config_id)
    return names


def _bare(hub_id: str) -> str:
    return hub_id.rsplit("/", 1)[-1].lower()


def _suggestions(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), _names(), n=6, cutoff=0.6)
    close += difflib.get_close_matches(_bare(name), _names(), n=6, cutoff=0.6)
    ids = list(dict.fromkeys(_names()[key][0] for key in close))[:3]
    if ids:
        return f"; did you mean {', '.join(ids)}?"
    return f"; none of the {len(shipped())} models that ship with pcg has a name like it"


def _looks_like_path(name: str) -> bool:
    return (
        not name
        or name.startswith((".", "~", os.sep))
        or name.endswith((os.sep, ".json", GGUF))
        or name.count("/") > 1
        or "\\" in name
    )


# ----------------------------------------------------------------------------------------- hub


def _from_hub(hub_id: str, *, weights: bool) -> ModelSource:
    # The import takes 0.1 s and more.
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(hub_id, CONFIG)
    if isinstance(cached, str):
        directory = Path(cached).parent
        config = _read_config(directory / CONFIG)
        try:
            files = _weight_files(directory)
        except WeightsError:  # an interrupted download, which the hub completes
            files = ()
        if files or not weights:
            return ModelSource(hub_id, config, directory, files)
    directory = _download(hub_id, DOWNLOADED if weights else (CONFIG,))
    return ModelSource(
        hub_id,
        _read_config(directory / CONFIG),
        directory,
        _weight_files(directory) if weights else (),
    )


def _download(hub_id: str, patterns: Sequence[str]) -> Path:
    """Fetch files of a hub repository; return its folder in the cache."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        # A single request, without the downloader's half minute of retries, to see if the model
        # exists.
        huggingface_hub.HfApi().model_info(hub_id, timeout=10)
        if patterns == (CONFIG,):  # hf_hub_download reports a missing file
            return Path(huggingface_hub.hf_hub_download(hub_id, CONFIG)).parent
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=[*patterns]))
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{hub_id} is gated on the hub; accept its licence there, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no {hub_id}, or it is private (`hf auth login`)" + _suggestions(hub_id)
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise ConfigError(f"{hub_id} has no {CONFIG} on the hub; is it an adapter?") from error
    except Exception as error:  # the type depends on the HTTP library of huggingface_hub
        is_shipped = hub_id.lower() in _names()
        known = f"the configuration of {hub_id} ships with pcg, but its weights are"
        suggestions = "" if is_shipped or patterns == ADAPTER_FILES else _suggestions(hub_id)
        raise ModelNotFoundError(
            f"{known if is_shipped else f'{hub_id} is'} not in the local Hugging Face cache, and "
            f"the hub cannot be reached ({type(error).__name__}); go online, or give a directory"
            + suggestions
        ) from error


def tokenizer_directory(model: str | os.PathLike[str], *, downloads: bool) -> Path | None:
    """Return the directory with the tokenizer of a model; None if there is none.

    Args:
        model: a directory, a GGUF file, or a hub id.
        downloads: False to look only in the local Hugging Face cache.
    Raises:
        ModelNotFoundError: the hub has no such model, or cannot be reached.
    """
    path = expanded(model)
    if is_file(path) and path.suffix == GGUF:
        path = converted(path)
    if is_directory(path):
        return path if is_file(path / "tokenizer.json") else None
    name = os.fspath(model)
    if not isinstance(model, str) or not re.fullmatch(_HUB_ID, name):
        return None
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    if isinstance(cached, str):
        return Path(cached).parent
    return _download(name, TOKENIZER_FILES) if downloads else None


def adapter_directory(adapter: str | os.PathLike[str]) -> Path:
    """Return an adapter's directory: a path, or the folder of a hub id in the cache.

    Raises:
        ModelNotFoundError: there is no such directory, and the hub has no such adapter or cannot be
            reached.
    """
    path, name = expanded(adapter), os.fspath(adapter)
    if is_there(path) or name.count("/") != 1 or not re.fullmatch(_HUB_ID, name):
        return path
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(name, ADAPTER_FILES[0])
    if isinstance(cached, str):
        return Path(cached).parent
    return _download(name, ADAPTER_FILES)


# --------------------------------------------------------------------------------------- files


def push_adapter(
    adapter: str | os.PathLike[str],
    repo: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    message: str = "Upload an adapter",
) -> str:
    """Upload a saved adapter with its model card and tokenizer; return the address of the commit.

    Other files of the directory, such as checkpoints and the record with its samples, stay.

    Args:
        repo: the hub's OWNER/NAME; created if it does not exist.
        private: create a private repository; None for the owner's default.
        token: the hub's token; by default that of `hf auth login` or HF_TOKEN.
        message: the message of the commit.
    Raises:
        AdapterError: the directory has no adapter, or the hub refuses the upload.
    """
    directory = expanded(adapter)
    absent = [name for name in ADAPTER_FILES if not is_file(directory / name)]
    if absent:
        raise AdapterError(f"{shown_path(directory)} has no {absent[0]}; give a saved adapter")
    import huggingface_hub
    from huggingface_hub import errors

    api = huggingface_hub.HfApi(token=token)
    patterns = [*ADAPTER_FILES, "README.md", "tokenizer*.json", "special_tokens_map.json"]
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=directory,
            commit_message=message,
            allow_patterns=[*patterns, TEMPLATE],
        )
    except Exception as error:  # the type depends on the HTTP library of huggingface_hub
        reason = str(error).strip().partition("\n")[0]
        status = getattr(getattr(error, "response", None), "status_code", None)
        fix = "correct OWNER/NAME"
        if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            fix = "log in by `hf auth login` as one who may write there"
        elif status is None and not isinstance(error, ValueError):
            fix = "go online"
        elif status is not None and status >= 500:
            fix = "try again later"
        raise AdapterError(
            f"{repo} cannot be written on the hub ({type(error).__name__}: {reason}); {fix}"
        ) from error
    return str(commit.commit_url)


def _read_config(path: Path) -> dict[str, Any]:
    if not is_file(path):
        if is_file(path.parent / "adapter_config.json"):
            raise ConfigError(
                f"{path.parent} has no {CONFIG} but an adapter_config.json: it is an adapter; "
                "give its base model, and the adapter as peft"
            )
        blocks = sorted(path.parent.glob(f"*{GGUF}"))
        if blocks:
            raise ConfigError(f"{path.parent} has no {CONFIG}; give its GGUF file, {blocks[0]}")
        raise ConfigError(f"{path.parent} has no {CONFIG}; give a Hugging Face model directory")
    return _checked(read_json(path, ConfigError, _REPAIR), str(path))


def _checked(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a config, or that of the language model of a composite checkpoint."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(
            f'{where} has no "model_type" among its {len(config)} keys; '
            'add the one of its family, such as "model_type": "llama"'
        )
    text = config.get("text_config")
    if model_type not in COMPOSITES or not isinstance(text, dict):
        return config
    inherited = {key: config[key] for key in _INHERITED if config.get(key) is not None}
    of_labels = {key: config[key] for key in _OF_LABELS if config.get(key) is not None}
    language_model = {**inherited, **text, **of_labels, COMPOSITE: model_type}
    if COMPOSITES[model_type] and "tie_word_embeddings" in config:
        language_model["tie_word_embeddings"] = config["tie_word_embeddings"]
    return _checked(language_model, f"text_config of {where}")


def _weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model directory, all or none."""
    if is_file(directory / WEIGHTS):
        files = [directory / WEIGHTS]
    elif is_file(directory / INDEX):
        files = _shards(directory)
    else:
        pickles = sorted(directory.glob("pytorch_model*.bin"))
        if pickles:
            raise PickleWeightsError(
                f"{directory} has only pickled weights ({pickles[0].name}, {len(pickles)} "
                f"file{'s' * (len(pickles) > 1)}), and loading a pickle can run any code; "
                "convert them once, where you trust them: AutoModelForCausalLM"
                f".from_pretrained({str(directory)!r}).save_pretrained(OUT)"
            )
        return ()
    for file in files:
        check_no_lfs_pointer(file, WeightsError)
    return tuple(files)


def _shards(directory: Path) -> list[Path]:
    index = directory / INDEX
    weight_map = read_json(index, WeightsError, _REPAIR).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f'{index} has no "weight_map"; download it again')
    names = list(dict.fromkeys(str(name) for name in weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise WeightsError(f"{index} names {outside[0]!r}, which is not a file beside it")
    missing = [name for name in names if not is_file(directory / name)]
    if missing:
        raise MissingShardError(
            f"{missing[0]} is missing from {directory}: {len(missing)} of the {len(names)} shards "
            f"that {INDEX} names are not there; download them again"
        )
    return [directory / name for name in names]
