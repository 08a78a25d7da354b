"""Reading and writing of adapters in peft's format: adapter_config.json and safetensors.

    base_model.model.<module>.<part of the method>       `ModuleWeights.suffixes`
    base_model.model.<module>.weight             a parameter of `modules_to_save`
    base_model.model.<module>.base_layer.bias    [out]   a trained bias of an adapted module
    base_model.model.<module>.bias               [out]   of another module (bias="all")
    base_model.model.<module>.base_layer.weight  [out, in]   the base's own, with LoRA on a head
    base_model.model.<module>.weight             the base's own, by save_embedding_layers=True
    base_model.<name>                                    `ModuleWeights.shared_names`
    base_model.model.<module>[.base_layer…].<part>       of a parameter of a module: peft wraps the
                                                         module once for each, inside out
    <name>                                               `ModuleWeights.whole_keys`

A crash or a full disk never leaves a partial adapter. The configuration's fields are those of the
recipe; peft's model card, README.md, is not written.

Source: `PeftModel.save_pretrained` and `get_peft_model_state_dict` of peft 0.21.2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pcg.errors import AdapterError, ModelNotFoundError, PcgError, UnsupportedError
from pcg.files import (
    SUMS,
    check_sums,
    check_writable,
    damage_of,
    expanded,
    is_directory,
    is_file,
    is_there,
    read_json,
    read_sums,
    seal,
    sha256_of,
    shown_path,
    sync_names,
    verified,
    write_sums,
    write_text,
)
from pcg.ir.module_paths import (
    embedding_path,
    first_match,
    module_name,
    parameter_of,
    parameter_path,
)
from pcg.peft.adapter import Adapter
from pcg.peft.lora import LoraConfig
from pcg.peft.recipe import HEADS_OF_LABELS, Recipe
from pcg.peft.registry import SHORTHANDS, is_saved, learning_labels, recipe_from
from pcg.peft.targets import TargetedRecipe
from pcg.peft.weights import ModuleWeights
from pcg.source import COMPOSITES, TEMPLATE, adapter_directory
from pcg.tensor_file import read_header
from pcg.units import shown

_LOG = logging.getLogger("pcg.peft")
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
SHARED_PREFIX = "base_model."

_FIX = f"; copy or save the adapter again, or remove {SUMS} if you changed it yourself"
_FLOATS = ("F64", "F32", "F16", "BF16")
_Read = TypeVar("_Read")
IsBase: TypeAlias = Callable[[str, Tensor], bool]
"""Returns whether a tensor is the base's own weight or bias of a module, by its name."""


def read_adapter(
    path: str | os.PathLike[str], name: str, is_base: IsBase | None = None, composite: str = ""
) -> Adapter:
    """Read an adapter of peft or pcg; tensors are memory-mapped.

    Args:
        path: a directory, or a hub id.
        composite: the type of the base's checkpoint, if that is composite: the adapter may be of
            its language model alone, or of the whole, of which other modules are then left out.
        is_base: returns whether a tensor is the base's weight or bias of a module, which peft may
            also save with LoRA on a head; None refuses all of them.
    Raises:
        AdapterError: a file is missing, damaged or differs from SHA256SUMS in the directory, or
            config and weights do not match.
        UnsupportedError: another PEFT method, or a feature that pcg lacks, by name.
    """
    try:
        directory = adapter_directory(path)
    except ModelNotFoundError as error:
        raise AdapterError(f"{path} is not there; {error}") from error
    with verified(partial(check_sums, directory, (CONFIG, WEIGHTS), AdapterError, _FIX)):
        return _read_adapter(directory, name, is_base, composite)


def _read_adapter(directory: Path, name: str, is_base: IsBase | None, composite: str) -> Adapter:
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
        tensors = _read_tensors(file, recipe)
        for key, (copied, copy) in tensors.copies.items():
            if is_base is None or not is_base(copied, copy):
                raise _unknown_key(file, key, recipe)
        if composite and isinstance(recipe, TargetedRecipe):
            recipe = _of_language_model(file, tensors, recipe, COMPOSITES[composite] or "model")
        recipe = _with_parameters(file, tensors.parts, recipe)
        tensors.parts = _by_path(file, tensors.parts, recipe)
        return _of_weights(file, name, tensors, recipe, config)


_IN_LANGUAGE_MODEL = re.compile(
    r"(?:model\.)?(?:(?:language_model|text_model)\.)?(?:model\.)?(?=layers\.\d|(?:embed_tokens|norm)$)"
    r"|(?:language_model\.)?(?=(?:lm_head|classifier|score)$)"
)
"""Paths in a composite checkpoint, or in its language model, of modules of the language model."""
_HEADS = ("lm_head", *HEADS_OF_LABELS)


def _of_language_model(
    file: Path, tensors: _Tensors, recipe: TargetedRecipe, base_path: str
) -> TargetedRecipe:
    """Keep and rename tensors of the language model; return a recipe that names its modules."""
    paths = {}
    for path in (*tensors.parts, *(name.rpartition(".")[0] for name in tensors.replaced)):
        match = _IN_LANGUAGE_MODEL.match(path)
        if match is not None:
            rest = path[match.end() :]
            paths[path] = rest if rest in _HEADS else f"{base_path}.{rest}"
    others = {*tensors.parts, *(name.rpartition(".")[0] for name in tensors.replaced)}
    others -= paths.keys()
    if others:
        _LOG.warning(
            "%s also adapts %d modules outside the language model, such as %s; they are left out",
            file, len(others), min(others),
        )  # fmt: skip
    elif all(path == new for path, new in paths.items()):
        return recipe
    patterns = {
        name: {
            new: value
            for path, new in paths.items()
            if (value := first_match(getattr(recipe, name), path, None)) is not None
        }
        for name in recipe.patterns
    }
    tensors.parts = {new: tensors.parts[p] for p, new in paths.items() if p in tensors.parts}
    tensors.replaced = {
        f"{paths[module]}.{kind}": tensor
        for name, tensor in tensors.replaced.items()
        for module, _, kind in [name.rpartition(".")]
        if module in paths
    }
    parameters = (".experts", ".base_layer")
    modules = tuple(path for path in tensors.parts if not path.endswith(parameters))
    fixed = dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
    names = {field.name for field in dataclasses.fields(recipe)}
    return dataclasses.replace(
        recipe,
        target_modules=modules,
        **{name: value for name, value in fixed.items() if name in names},
        **patterns,
    )


_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
_PARAMETERS = {
    "experts": _OF_EXPERTS,
    "mamba": ("x_proj_weight", "dt_proj_weight"),  # of Zamba
    "rg_lru": ("input_gate_weight", "recurrent_gate_weight"),
}
"""Parameters, by a module's name, that adapters may adapt, in transformers' order."""


def _parameters_of(module: str) -> tuple[str, ...]:
    """Return the parameters of a module that an adapter may adapt as such."""
    names = _PARAMETERS.get(module.rpartition(".")[2], ("weight",))
    return tuple(f"{module}.{name}" for name in names)


def _with_parameters(file: Path, parts: Collection[str], recipe: Recipe) -> Recipe:
    """Return a recipe with target_parameters for a file of experts that has none, as vLLM's."""
    outside = [path for path in parts if path.endswith(".experts")]
    if not outside or not isinstance(recipe, LoraConfig) or recipe.target_parameters:
        return recipe
    lone = next((path for path in outside if f"{path}.base_layer" not in parts), None)
    if lone is not None:
        raise AdapterError(
            f"{file} has weights for one parameter of {lone}, and {CONFIG} does not say which; "
            "name it: target_parameters=['experts.gate_up_proj'] or ['experts.down_proj']"
        )
    targets = recipe.target_modules
    if isinstance(targets, tuple):
        targets = tuple(name for name in targets if name not in ("experts", *_OF_EXPERTS))
    names = "experts.gate_up_proj", "experts.down_proj"
    return dataclasses.replace(recipe, target_modules=targets, target_parameters=names)


def _by_path(
    file: Path, parts: Mapping[str, dict[str, Tensor]], recipe: Recipe
) -> dict[str, dict[str, Tensor]]:
    """Return a file's tensors by path, also those of parameters, whose modules are wrapped."""
    wrapped: dict[str, list[str]] = {}
    for module in parts:
        wrapped.setdefault(module.replace(".base_layer", ""), []).append(module)
    by_path: dict[str, dict[str, Tensor]] = {}
    for module, wrappers in wrapped.items():
        names = [name for name in _parameters_of(module) if recipe.adapts(name)]
        if not names:
            for each in wrappers:
                embeds = any(part.startswith("lora_embedding_") for part in parts[each])
                by_path[embedding_path(each) if embeds else each] = parts[each]
            continue
        if len(names) != len(wrappers):
            raise AdapterError(
                f"{file} has weights for {len(wrappers)} parameters of {module}, and {CONFIG} "
                f"targets {', '.join(names)}; the two files are not of one save"
            )
        for name, wrapper in zip(reversed(names), sorted(wrappers, key=len), strict=True):
            down = parts[wrapper].get("lora_A.weight")
            rank = recipe.bypass_at(name).rank  # type: ignore[attr-defined]
            by_path[parameter_path(name, 1 if down is None else len(down) // rank or 1)] = parts[
                wrapper
            ]
    return by_path


def _wrapper(path: str, paths: Collection[str]) -> str:
    """Return the module of a path in a file's keys: a wrapper for each of its parameters."""
    parameter = parameter_of(path)
    if parameter is None:
        return module_name(path)
    name, _ = parameter
    module = name.rpartition(".")[0]
    adapted = {other[0] for other in map(parameter_of, paths) if other is not None}
    inside = [other for other in _parameters_of(module) if other in adapted]
    return module + ".base_layer" * (len(inside) - 1 - inside.index(name))


def _of_weights(
    file: Path, name: str, tensors: _Tensors, recipe: Recipe, config: Mapping[str, Any]
) -> Adapter:
    kind = recipe.weights
    if not (tensors.parts or tensors.whole) and (kind.suffixes or kind.whole_keys):
        raise AdapterError(f"{file} holds no {recipe.method} weights")
    weights = {path: _weights(file, path, each, recipe) for path, each in tensors.parts.items()}
    if tensors.whole:
        weights |= _checked(file, lambda: kind.read_whole(tensors.whole, recipe))
    _check_replaced(file, recipe, weights, tensors.replaced)
    base = str(config.get("base_model_name_or_path") or "")
    return Adapter(
        name, recipe, weights, tensors.replaced, base, recipe.notes_of(config), tensors.shared
    )


def recipes_of(peft: object, composite: str = "", *, of_labels: bool = False) -> dict[str, Recipe]:
    """Return the recipes that `peft` names; a recipe without a name is called `default`.

    Args:
        composite: as in `read_adapter`.
        of_labels: the model is a sequence classifier.
    """
    if peft is None or (isinstance(peft, str) and peft.lower() == "none"):
        return {}
    if isinstance(peft, Mapping) and not is_recipe(peft):
        named = {str(name): value for name, value in peft.items()}
    else:
        named = {"default": peft}
    return {name: _recipe_of(value, composite, of_labels) for name, value in named.items()}


def is_recipe(peft: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has the fields of a recipe, as opposed to recipes by name."""
    return "peft_type" in peft


def _recipe_of(value: object, composite: str, of_labels: bool) -> Recipe:
    if is_saved(value):
        if isinstance(value, str) and os.sep not in value and not is_there(expanded(value)):
            raise AdapterError(
                f"{shown(value)} is neither one of {', '.join(SHORTHANDS)}, nor the directory of a "
                "saved adapter"
            )
        # `read_adapter` of the adapter itself compares copies of the base's weights.
        return read_adapter(value, "adapter", lambda *_: True, composite).recipe
    return learning_labels(recipe_from(value)) if of_labels else recipe_from(value)


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
    """A file's tensors: by module and part, replaced ones by name, shared ones, and whole keys.

    `copies` are names and the supposed weights and biases of the base, by key.
    """

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, Tensor]] = {}
        self.replaced: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}
        self.copies: dict[str, tuple[str, Tensor]] = {}


def _read_tensors(file: Path, recipe: Recipe) -> _Tensors:
    kind, tensors = recipe.weights, _Tensors()
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
                    tensors.shared[shared_keys[key]] = tensor
                elif key in kind.whole_keys:
                    tensors.whole[key] = tensor
                elif match is None and (copied := _COPY.fullmatch(key)):
                    if recipe.saves(copied["module"]):
                        tensors.replaced[f"{copied['module']}.weight"] = tensor
                    else:
                        tensors.copies[key] = f"{copied['module']}.weight", tensor
                elif match is None:
                    raise _unknown_key(file, key, recipe)
                elif match["part"]:
                    tensors.parts.setdefault(match["module"], {})[match["part"]] = tensor
                elif recipe.bias == "none" and key.endswith("lm_head.base_layer.bias"):
                    tensors.copies[key] = f"{match['module']}.bias", tensor
                else:
                    tensors.replaced[f"{match['module']}.bias"] = tensor
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} is damaged: {error}; save or download it again") from error
    shared = tensors.shared
    if kind.shared_is_stored(recipe) != bool(shared) or len(shared) not in (0, len(shared_keys)):
        raise AdapterError(
            f"{file} has {', '.join(shared) or 'nothing'} of {', '.join(kind.shared_names)}, which "
            f"does not go with {CONFIG}; the two files are not of one save"
        )
    return tensors


_COPY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?!.*(lora|modules_to_save)).+?)(?:\.base_layer)?\.weight"
)


def _unknown_key(file: Path, key: str, recipe: Recipe) -> PcgError:
    features: dict[str, tuple[type[PcgError], str]] = {
        "modules_to_save": (UnsupportedError, "a whole module trained beside the adapter"),
        "embed": (UnsupportedError, "a whole embedding, saved as the vocabulary was changed"),
        "lm_head.": (UnsupportedError, "the whole head, saved as the vocabulary was changed"),
    }
    for part, (error_type, meaning) in features.items():
        if part in key:
            return error_type(
                f"{file} has {key}: {meaning}; pcg takes copies of weights that are the base's "
                "own, and with LoRA those of modules that modules_to_save names"
            )
    return AdapterError(
        f"{file} has {key}, which is no {recipe.method} weight; pcg ignores nothing"
    )


def _weights(file: Path, path: str, parts: Mapping[str, Tensor], recipe: Recipe) -> ModuleWeights:
    names_some = isinstance(recipe, LoraConfig) and bool(recipe.target_parameters)
    if (recipe.target_modules is not None or names_some) and recipe.bypass(path) is None:
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


def _check_replaced(
    file: Path, recipe: Recipe, weights: Mapping[str, ModuleWeights], replaced: Mapping[str, Tensor]
) -> None:
    for name, tensor in replaced.items():
        if not recipe.replaces(name, weights):
            raise AdapterError(
                f'{file} has {name}, which bias="{recipe.bias}" in {CONFIG} does not train; the '
                "two files are not of one save"
            )
        module, _, kind = name.rpartition(".")
        out = weights[module].module_shape[0] if module in weights else None
        if kind == "bias" and (tensor.ndim != 1 or out not in (None, len(tensor))):
            raise AdapterError(f"{file}: {name} has shape {list(tensor.shape)}")


def has_adapter(directory: Path) -> bool:
    """Return True if a directory has a saved adapter."""
    return any(is_there(directory / name) for name in (CONFIG, WEIGHTS, PICKLE))


def write_adapter(adapter: Adapter, path: str | os.PathLike[str]) -> None:
    """Save an adapter in a directory in peft's format.

    The files are written to a temporary directory, then renamed: each file at `path` is always the
    old or the new adapter's, and matches SHA256SUMS in the directory. An equal config is kept, so
    that saving an adapter again replaces only the weights' file, atomically. Other files in the
    directory are kept.

    Raises:
        AdapterError: the directory cannot be written, or the weights do not match the recipe.
    """
    directory = expanded(path)
    files = _files_of(adapter)
    check_writable(directory, f"adapter {adapter.name!r}", AdapterError)
    if directory.is_symlink():  # rename its target, not the link
        directory = directory.resolve()
    is_new = not directory.exists()
    # Within the directory if it exists, as it may be a whole file system.
    parent = directory.parent if is_new else directory
    beside = parent / f".saving-{secrets.token_hex(4)}"
    state = "nothing was left there" if is_new else "the files there are as they were"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        _write_files(files, beside)
        seal(beside)
        if is_new:
            beside.rename(directory)
        else:
            before = _sums_before(directory)
            sums = read_sums(beside, AdapterError) or {}
            if is_file(directory / SUMS):
                write_sums(directory, {**before, **{n: sums[n] | before[n] for n in sums}})
            (beside / WEIGHTS).replace(directory / WEIGHTS)
            if not _holds(directory / CONFIG, files.config):
                state = f"{WEIGHTS} there is the new one, {CONFIG} is not: save again"
                (beside / CONFIG).replace(directory / CONFIG)
            sync_names(directory)
            write_sums(directory, {**before, **sums})
        write_template(adapter, directory)
        sync_names(parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        size_bytes = sum(tensor.nbytes for tensor in files.tensors.values())
        raise AdapterError(
            f"adapter {adapter.name!r} ({size_bytes} bytes) cannot be saved in {directory}: "
            f"{reason}; {state}"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_template(adapter: Adapter, directory: Path) -> None:
    """Write the chat template of an adapter that has its own. OSError: it cannot be written.

    SHA256SUMS has no line for it, as a tokenizer's template may replace it.
    """
    if adapter.chat_template is not None:
        write_text(directory / TEMPLATE, adapter.chat_template)


def _sums_before(directory: Path) -> dict[str, set[str]]:
    """Return the digests of the adapter in a directory, and of other names in SHA256SUMS."""
    try:
        sums = read_sums(directory, AdapterError) or {}
    except AdapterError:  # damaged, and will be replaced
        sums = {}
    for name in (WEIGHTS, CONFIG):
        file = directory / name
        sums.setdefault(name, {sha256_of(file)} if is_file(file) else set())
    return sums


def write_adapter_files(adapter: Adapter, directory: Path) -> None:
    """Write an adapter's files into a larger directory, which the caller seals.

    Raises:
        AdapterError: its weights are not those of its recipe.
        OSError, SafetensorError: it cannot be written.
    """
    files = _files_of(adapter)
    directory.mkdir(parents=True, exist_ok=True)
    _write_files(files, directory)
    write_template(adapter, directory)


@dataclass(frozen=True)
class _Files:
    """The contents of an adapter's two files; tensors by peft's keys."""

    config: str
    tensors: Mapping[str, Tensor]


def _files_of(adapter: Adapter) -> _Files:
    tensors = _tensors_to_write(adapter)
    # The keys of the patterns stay in order: the first match counts.
    return _Files(json.dumps(dict(sorted(_config_to_write(adapter).items())), indent=2), tensors)


def _write_files(files: _Files, directory: Path) -> None:
    write_tensors(directory / WEIGHTS, files.tensors, {"format": "pt"})
    (directory / CONFIG).write_text(files.config, encoding="utf-8")


def digest_of(adapter: Adapter) -> str:
    """Return `sha256:` and the hexadecimal SHA-256 of the files that `write_adapter` writes.

    The hash covers the fields of adapter_config.json, as JSON with sorted keys and sorted lists of
    names, then the tensors in the order of their keys: key, dtype and shape as JSON, and the bytes.
    The digest depends neither on the path nor on the adapter's name.
    """
    fields = {
        key: sorted(value) if isinstance(value, list) and all(map(_is_text, value)) else value
        for key, value in _config_to_write(adapter).items()
    }
    digest = hashlib.sha256(json.dumps(dict(sorted(fields.items()))).encode())
    for key, tensor in sorted(_tensors_to_write(adapter).items()):
        shape = [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
        digest.update(json.dumps([key, *shape]).encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _config_to_write(adapter: Adapter) -> dict[str, Any]:
    """Return the fields with names of modules, or their paths if the recipe names no modules."""
    recipe = adapter.recipe
    targets = recipe.target_modules
    if targets is None or recipe.is_all_linear:
        targets = sorted(module_name(p) for p in adapter.weights if parameter_of(p) is None)
    return recipe.config_fields(targets, adapter.base_model_name, adapter.extra)


def _tensors_to_write(adapter: Adapter) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path, weights in adapter.weights.items():
        _check_bypass(adapter, path, weights)
        for suffix, tensor in weights.stored.items():
            tensors[f"{PREFIX}{_wrapper(path, adapter.weights)}.{suffix}"] = tensor
    for name, tensor in adapter.replaced.items():
        module, _, last = name.rpartition(".")
        layer = ".base_layer" if module in adapter.weights else ""
        tensors[f"{PREFIX}{module}{layer}.{last}"] = tensor
    kind = adapter.recipe.weights
    tensors |= kind.stored_whole(adapter.weights)
    if kind.shared_is_stored(adapter.recipe):
        for name, tensor in adapter.shared.items():
            tensors[f"{SHARED_PREFIX}{name}"] = tensor
    return tensors


def _check_bypass(adapter: Adapter, path: str, weights: ModuleWeights) -> None:
    """Raise an error for weights that a reader of the config would use differently."""
    recipe = adapter.recipe
    names_some = isinstance(recipe, LoraConfig) and bool(recipe.target_parameters)
    if (recipe.target_modules is not None or names_some) and recipe.bypass(path) is None:
        raise AdapterError(
            f"adapter {adapter.name!r} has weights for {path}, which its recipe does not target"
        )
    bypass = recipe.bypass_at(path)
    if weights.bypass != bypass:
        raise AdapterError(
            f"adapter {adapter.name!r} has {weights.bypass} at {path}, its recipe gives {bypass}"
        )


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file; `seal` of its folder waits for the disk."""
    save_file({key: _own_copy(tensor) for key, tensor in tensors.items()}, file, metadata)


def _own_copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to("cpu").contiguous()
    # safetensors refuses shared storages, such as a pool's.
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
