"""Read adapters in peft's format: adapter_config.json and adapter_model.safetensors.

    base_model.model.<module>.<part of the method>       `ModuleWeights.suffixes`
    base_model.model.<module>.base_layer.bias    [out]   a trained bias of an adapted module
    base_model.model.<module>.bias               [out]   one of another module (bias="all")
    base_model.model.<module>.base_layer.weight  [out, in]   the base's own, beside LoRA on a head
    base_model.model.<module>.weight             the base's own, by save_embedding_layers=True
    base_model.<name>                                    `ModuleWeights.shared_names`
    <name>                                               `ModuleWeights.whole_keys`

Source: `PeftModel.save_pretrained` and `get_peft_model_state_dict` of peft 0.21.2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pcg.errors import AdapterError, PcgError, UnsupportedError
from pcg.files import (
    SUMS,
    check_sums,
    damage_of,
    expanded,
    is_directory,
    is_file,
    is_there,
    read_json,
    shown_path,
    verified,
)
from pcg.peft.adapter import Adapter
from pcg.peft.recipe import Recipe
from pcg.peft.registry import SHORTHANDS, is_shorthand, recipe_from
from pcg.peft.weights import ModuleWeights
from pcg.tensor_file import read_header
from pcg.units import shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
SHARED_PREFIX = "base_model."

_FIX = f"; copy or save the adapter again, or remove {SUMS} if you changed it yourself"
_FLOATS = ("F64", "F32", "F16", "BF16")
_Read = TypeVar("_Read")
IsBase: TypeAlias = Callable[[str, Tensor], bool]
"""Tells whether a tensor is the base's own weight of a module, by its path."""


def read_adapter(path: str | os.PathLike[str], name: str, is_base: IsBase | None = None) -> Adapter:
    """Read an adapter of that name, which peft or pcg saved, from a directory; tensors are mapped.

    Args:
        is_base: tells whether a tensor is the base's own weight of a module, of which peft saves a
            copy beside LoRA on a head; None refuses all of them.
    Raises:
        AdapterError: a file is missing, damaged or not the one of which SHA256SUMS there tells, or
            config and weights do not go together.
        UnsupportedError: another PEFT method, or a feature that pcg does not do, by name.
    """
    directory = expanded(path)
    with verified(partial(check_sums, directory, (CONFIG, WEIGHTS), AdapterError, _FIX)):
        return _read_adapter(directory, name, is_base)


def _read_adapter(directory: Path, name: str, is_base: IsBase | None) -> Adapter:
    config = _read_config(directory)
    try:
        with damage_of("it", AdapterError, "; save the adapter again"):
            recipe = recipe_from(config, saved=True)
    except (AdapterError, UnsupportedError) as error:
        raise type(error)(f"{directory / CONFIG}: {error}") from error
    file = directory / WEIGHTS
    if not is_file(file):
        raise AdapterError(_no_weights(directory))
    with damage_of(str(file), AdapterError, "; save or download it again"):
        found = _read_tensors(file, recipe)
        for key, (module, copy) in found.copies.items():
            if is_base is None or not is_base(module, copy):
                raise _unknown_key(file, key, recipe)
        return _of_weights(file, name, found, recipe, config)


def _of_weights(
    file: Path, name: str, found: _Tensors, recipe: Recipe, config: Mapping[str, Any]
) -> Adapter:
    kind = recipe.weights
    if not (found.parts or found.whole) and (kind.suffixes or kind.whole_keys):
        raise AdapterError(f"{file} holds no {recipe.method} weights")
    weights = {path: _weights(file, path, each, recipe) for path, each in found.parts.items()}
    if found.whole:
        weights |= _checked(file, lambda: kind.read_whole(found.whole, recipe))
    _check_biases(file, recipe, weights, found.biases)
    base = str(config.get("base_model_name_or_path") or "")
    return Adapter(name, recipe, weights, found.biases, base, recipe.notes_of(config), found.shared)


def recipes_of(peft: object) -> dict[str, Recipe]:
    """The recipes that `peft` names; one without a name is called `default`."""
    if peft is None or (isinstance(peft, str) and peft.lower() == "none"):
        return {}
    if isinstance(peft, Mapping) and not is_recipe(peft):
        return {str(name): _recipe_of(value) for name, value in peft.items()}
    return {"default": _recipe_of(peft)}


def is_recipe(peft: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is one recipe's fields, and not recipes by name."""
    return "peft_type" in peft


def _recipe_of(value: object) -> Recipe:
    if isinstance(value, str | os.PathLike) and not is_shorthand(value):
        if isinstance(value, str) and os.sep not in value and not is_there(expanded(value)):
            raise AdapterError(
                f"{shown(value)} is neither one of {', '.join(SHORTHANDS)}, nor the directory of a "
                "saved adapter"
            )
        # Copies of the base's weights are compared where the adapter itself is read.
        return read_adapter(value, "adapter", is_base=lambda *_: True).recipe
    return recipe_from(value)


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    if not is_file(file):
        raise AdapterError(_no_config(directory))
    return read_json(file, AdapterError)


def _no_config(directory: Path) -> str:
    if not is_directory(directory):
        kind = "a file" if is_there(directory) else "not there"
        return f"{shown_path(directory)} is {kind}; give the directory of a saved adapter"
    if is_file(directory / "config.json"):
        return f"{directory} has no {CONFIG} but a config.json: it is a model, not an adapter"
    inside = sorted(file.parent.name for file in directory.glob(f"*/{CONFIG}"))
    if inside:
        return f"{directory} has no {CONFIG}, but adapters within: {', '.join(inside)}; give one"
    return f"{directory} has no {CONFIG}; give the directory of a saved adapter"


def _no_weights(directory: Path) -> str:
    if is_file(directory / PICKLE):
        return (
            f"{directory} has only pickled weights ({PICKLE}), and loading a pickle can run any "
            "code; convert them once, where you trust them: peft.PeftModel.from_pretrained("
            f"BASE_MODEL, {str(directory)!r}).save_pretrained(OUT)"
        )
    return f"{directory} has {CONFIG} but no {WEIGHTS}; copy it too, or save the adapter again"


class _Tensors:
    """A file's tensors: by module and part, biases by module, shared ones, and whole keys.

    `copies` are modules and what should be their base's weights, by key.
    """

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, Tensor]] = {}
        self.biases: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}
        self.copies: dict[str, tuple[str, Tensor]] = {}


def _read_tensors(file: Path, recipe: Recipe) -> _Tensors:
    kind, found = recipe.weights, _Tensors()
    suffixes = "|".join(map(re.escape, kind.suffixes)) or "(?!)"
    shared_keys = {f"{SHARED_PREFIX}{name}": name for name in kind.shared_names}
    expected = re.compile(
        rf"(?:base_model\.model\.)?(?P<module>.+?)\.(?:(?P<part>{suffixes})|(?:base_layer\.)?bias)"
    )
    header = read_header(file, AdapterError)
    try:
        with safe_open(file, framework="pt") as stream:
            for key, info in header.items():
                if info.dtype not in _FLOATS:
                    raise UnsupportedError(
                        f"{file}: {key} is {info.dtype}; pcg reads {', '.join(_FLOATS)}"
                    )
                match, tensor = expected.fullmatch(key), stream.get_tensor(key)
                if key in shared_keys:
                    found.shared[shared_keys[key]] = tensor
                elif key in kind.whole_keys:
                    found.whole[key] = tensor
                elif match is None and (copied := _COPY.fullmatch(key)):
                    found.copies[key] = copied["module"], tensor
                elif match is None:
                    raise _unknown_key(file, key, recipe)
                elif match["part"]:
                    found.parts.setdefault(match["module"], {})[match["part"]] = tensor
                else:
                    found.biases[match["module"]] = tensor
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} is damaged: {error}; save or download it again") from error
    shared = found.shared
    if kind.shared_is_stored(recipe) != bool(shared) or len(shared) not in (0, len(shared_keys)):
        raise AdapterError(
            f"{file} has {', '.join(shared) or 'nothing'} of {', '.join(kind.shared_names)}, which "
            f"does not go with {CONFIG}; the two files are not of one save"
        )
    return found


_COPY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?!.*(lora|modules_to_save)).+?)(?:\.base_layer)?\.weight"
)


def _unknown_key(file: Path, key: str, recipe: Recipe) -> PcgError:
    features: dict[str, tuple[type[PcgError], str]] = {
        "lora_embedding_": (UnsupportedError, "LoRA on an embedding"),
        "modules_to_save": (UnsupportedError, "a whole module trained beside the adapter"),
        "embed": (UnsupportedError, "a whole embedding, saved as the vocabulary was changed"),
        "lm_head.": (UnsupportedError, "the whole head, saved as the vocabulary was changed"),
    }
    for part, (error_type, meaning) in features.items():
        if part in key:
            return error_type(
                f"{file} has {key}: {meaning}; pcg does {recipe.method} on linear modules alone, "
                "and takes copies of weights that are the base's own"
            )
    return AdapterError(
        f"{file} has {key}, which is no {recipe.method} weight; pcg ignores nothing"
    )


def _weights(file: Path, path: str, parts: Mapping[str, Tensor], recipe: Recipe) -> ModuleWeights:
    """The weights of one module, checked against the recipe."""
    if recipe.target_modules is not None and recipe.bypass(path) is None:
        raise AdapterError(
            f"{file} has weights for {path}, which {CONFIG} does not target "
            f"(target_modules={shown(recipe.target_modules)}); the two files are not of one save"
        )
    return _checked(file, lambda: recipe.weights.read(path, parts, recipe))


def _checked(file: Path, read: Callable[[], _Read]) -> _Read:
    try:
        return read()
    except AdapterError as error:
        raise AdapterError(f"{file}: {error}") from error


def _check_biases(
    file: Path, recipe: Recipe, weights: Mapping[str, ModuleWeights], biases: Mapping[str, Tensor]
) -> None:
    for path, bias in biases.items():
        if not recipe.trains_bias(path, weights):
            raise AdapterError(
                f'{file} has the bias of {path}, which bias="{recipe.bias}" in {CONFIG} does not '
                "train; the two files are not of one save"
            )
        out = weights[path].module_shape[0] if path in weights else None
        if bias.ndim != 1 or out not in (None, len(bias)):
            raise AdapterError(f"{file}: the bias of {path} has shape {list(bias.shape)}")
