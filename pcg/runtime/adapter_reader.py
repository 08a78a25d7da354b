"""Read adapters in peft's format: adapter_config.json and adapter_model.safetensors.

    base_model.model.<module>.lora_A.weight      [rank, in]
    base_model.model.<module>.lora_B.weight      [out, rank]
    base_model.model.<module>.lora_B.bias        [out]   with lora_bias
    base_model.model.<module>.base_layer.bias    [out]   a trained bias of an adapted module
    base_model.model.<module>.bias               [out]   one of another module (bias="all")

Source: `PeftModel.save_pretrained` and `get_peft_model_state_dict` of peft 0.21.2.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pcg.errors import AdapterError, PcgError, UnsupportedError
from pcg.ir.recipe import LoraRecipe
from pcg.runtime.adapter_config import notes_of, recipe_from
from pcg.runtime.adapter_weights import Adapter, LoraWeights
from pcg.runtime.tensor_file import read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.(?:lora_(?P<lora>A\.weight|B\.weight|B\.bias)"
    r"|(?:base_layer\.)?bias)"
)
_FLOATS = ("F64", "F32", "F16", "BF16")


def read_adapter(path: str | os.PathLike[str], name: str) -> Adapter:
    """Read an adapter that peft or pcg saved. Its tensors are mapped, not copied.

    Args:
        path: directory.
        name: that requests and jobs will use.
    Raises:
        AdapterError: a file is missing or damaged, or config and weights do not go together.
        UnsupportedError: another PEFT method, or a feature that pcg does not do, by name.
    """
    directory = Path(path).expanduser()
    config = _read_config(directory)
    try:
        recipe = recipe_from(config, saved=True)
    except (AdapterError, UnsupportedError) as error:
        raise type(error)(f"{directory / CONFIG}: {error}") from error
    file = directory / WEIGHTS
    if not file.is_file():
        raise AdapterError(_no_weights(directory))
    parts, biases = _read_tensors(file)
    if not parts:
        raise AdapterError(f"{file} holds no LoRA weights")
    weights = {path: _weights(file, path, found, recipe) for path, found in parts.items()}
    _check_biases(file, recipe, weights, biases)
    base = config.get("base_model_name_or_path")
    return Adapter(name, recipe, weights, biases, str(base or ""), notes_of(config))


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    if not file.is_file():
        raise AdapterError(_no_config(directory))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise AdapterError(
            f"{file} is damaged at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except UnicodeDecodeError as error:
        raise AdapterError(f"{file} is damaged: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} holds a {type(config).__name__}; expected an object")
    return config


def _no_config(directory: Path) -> str:
    if not directory.is_dir():
        kind = "a file" if directory.exists() else "not there"
        return f"{directory} is {kind}; give the directory of a saved adapter"
    if (directory / "config.json").is_file():
        return f"{directory} has no {CONFIG} but a config.json: it is a model, not an adapter"
    inside = sorted(file.parent.name for file in directory.glob(f"*/{CONFIG}"))
    if inside:
        return f"{directory} has no {CONFIG}, but adapters within: {', '.join(inside)}; give one"
    return f"{directory} has no {CONFIG}; give the directory of a saved adapter"


def _no_weights(directory: Path) -> str:
    if (directory / PICKLE).is_file():
        return (
            f"{directory} has only pickled weights ({PICKLE}), and loading a pickle can run any "
            "code; convert them once, where you trust them: peft.PeftModel.from_pretrained("
            f"BASE_MODEL, {str(directory)!r}).save_pretrained(OUT)"
        )
    return f"{directory} has a {CONFIG} but no {WEIGHTS}; copy it too, or save the adapter again"


def _read_tensors(file: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The LoRA tensors by module path and part, and the biases by module path."""
    header = read_header(file, AdapterError)
    parts: dict[str, dict[str, Tensor]] = {}
    biases: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as stream:
            for key, info in header.items():
                if info.dtype not in _FLOATS:
                    raise UnsupportedError(
                        f"{file}: {key} is {info.dtype}; pcg reads {', '.join(_FLOATS)}"
                    )
                match = _KEY.fullmatch(key)
                if match is None:
                    raise _unknown_key(file, key)
                if match["lora"]:
                    parts.setdefault(match["module"], {})[match["lora"]] = stream.get_tensor(key)
                else:
                    biases[match["module"]] = stream.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} is damaged: {error}; save or download it again") from error
    return parts, biases


def _unknown_key(file: Path, key: str) -> PcgError:
    features: dict[str, tuple[type[PcgError], str]] = {
        "lora_magnitude_vector": (AdapterError, "a DoRA magnitude, though use_dora is not set"),
        "lora_embedding_": (UnsupportedError, "LoRA on an embedding"),
        "modules_to_save": (UnsupportedError, "a whole module trained beside LoRA"),
        "embed": (UnsupportedError, "a whole embedding, saved as the vocabulary was changed"),
        "lm_head.": (UnsupportedError, "the whole head, saved as the vocabulary was changed"),
    }
    for part, (error_type, meaning) in features.items():
        if part in key:
            return error_type(f"{file} has {key}: {meaning}; pcg does LoRA on linear modules alone")
    return AdapterError(f"{file} has {key}, which is no LoRA weight; pcg ignores nothing")


def _weights(file: Path, path: str, parts: Mapping[str, Tensor], recipe: LoraRecipe) -> LoraWeights:
    """The bypass of one module, checked against the recipe."""
    for part in ("A.weight", "B.weight"):
        if part not in parts:
            raise AdapterError(
                f"{file} has no {path}.lora_{part}, the partner of another tensor there"
            )
    a, b, bias = parts["A.weight"], parts["B.weight"], parts.get("B.bias")
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"{file}: {path} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; expected "
            "[rank, in] and [out, rank]"
        )
    if recipe.target_modules is not None and recipe.site(path) is None:
        raise AdapterError(
            f"{file} has weights for {path}, which {CONFIG} does not target "
            f"(target_modules={_short(recipe.target_modules)}); the two files are not of one save"
        )
    site = recipe.site_of_target(path)
    if a.shape[0] != site.rank:
        many = len(recipe.rank_pattern) > 1
        raise AdapterError(
            f"{file}: {path} has rank {a.shape[0]}, and {CONFIG} gives it {site.rank}, so that its "
            "scale is not known; the two files are not of one save"
            + (", or rank_pattern was in another order (peft sorts the keys)" if many else "")
        )
    if (bias is not None) != recipe.lora_bias or (bias is not None and bias.shape != b.shape[:1]):
        shape = "no lora_B.bias" if bias is None else f"a lora_B.bias {list(bias.shape)}"
        raise AdapterError(
            f"{file}: {path} has {shape} with lora_bias={recipe.lora_bias} and "
            f"lora_B {list(b.shape)}"
        )
    return LoraWeights(a, b, site.scale, bias)


def _check_biases(
    file: Path,
    recipe: LoraRecipe,
    weights: Mapping[str, LoraWeights],
    biases: Mapping[str, Tensor],
) -> None:
    for path, bias in biases.items():
        allowed = recipe.bias == "all" or (recipe.bias == "lora_only" and path in weights)
        if not allowed:
            raise AdapterError(
                f'{file} has the bias of {path}, which bias="{recipe.bias}" in {CONFIG} does not '
                "train; the two files are not of one save"
            )
        if bias.ndim != 1 or (path in weights and bias.shape != weights[path].b.shape[:1]):
            raise AdapterError(f"{file}: the bias of {path} has shape {list(bias.shape)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
