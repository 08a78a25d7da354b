"""Kinds of layers: layers of a kind are equal except for their weights, and are exported once."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Hashable, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from pcg.errors import TraceError, UnsupportedError

_INDICES = ("layer_idx", "layer_id", "layer_number")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configurations that a model and its modules hold, each once."""
    held = [vars(module).get("config") for module in model.modules()]
    configs = {id(config): config for config in held if hasattr(config, "to_dict")}
    return list(configs.values())


def layer_kinds(model: nn.Module) -> tuple[str, list[Hashable]]:
    """Return the path of the list of layers, and for each layer a value equal within its kind."""
    name = type(model).__name__
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            if len({id(layer) for layer in module}) < len(module):
                raise UnsupportedError(f"{path} of {name} holds one layer more than once")
            parent = model.get_submodule(path.rpartition(".")[0])
            of_places = [_of_place(model, parent, place, count) for place in range(count)]
            shared = _shared_weights(model, path, count)
            return path, list(zip(map(fingerprint, module), of_places, shared, strict=True))
    lists = [
        (len(module), path)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    most, path = max(lists, default=(0, ""))
    longest = f"{path} has {most}" if lists else "it has no ModuleList"
    raise TraceError(
        f"{name} has no list of config.num_hidden_layers={count} layers; {longest}. Where layers "
        "were removed, set model.config.num_hidden_layers, and its lists of layers, to those there"
    )


def _shared_weights(model: nn.Module, path: str, count: int) -> list[Hashable]:
    """Return for each of the layers at a path its parameters of an earlier layer, by their names.

    Such a layer is of another kind than one with weights of its own.
    """
    first: dict[int, str] = {}
    shared: list[list[tuple[str, str]]] = [[] for _ in range(count)]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place, owner = (
            layer_of(each, path) for each in (name, first.setdefault(id(parameter), name))
        )
        if place is not None and owner is not None and owner[0] != place[0]:
            shared[place[0]].append((place[1], first[id(parameter)]))
    return list(map(tuple, shared))


def layer_of(name: str, path: str) -> tuple[int, str] | None:
    """Return the index of the layer of a parameter, and its name there; None outside the layers."""
    index, _, rest = name.removeprefix(f"{path}.").partition(".")
    return (int(index), rest) if name.startswith(f"{path}.") and index.isdecimal() else None


def _of_place(model: nn.Module, parent: nn.Module, place: int, count: int) -> Hashable:
    """Return the entries for an index in per-layer lists of the model.

    A layer of Gemma 3 has the mask of its index, so that a moved layer is of another kind.
    """
    lists = (
        (key, value[place])
        for holder in (parent, *configs_of(model))
        for key, value in vars(holder).items()
        if isinstance(value, list | tuple) and len(value) == count and "token" not in key
    )
    # Zamba 2's shared layers look up the part for each layer by its index.
    parts = [vars(m)["layer_dic"].get(place) for m in parent.modules() if "layer_dic" in vars(m)]
    return (*((key, _described(value, {})) for key, value in lists), tuple(parts))


def fingerprint(layer: nn.Module) -> Hashable:
    """Return classes, attributes, hooks and tensor shapes of a layer's modules, without its index.

    Values of tensors that no checkpoint holds are included.
    """
    names = {id(module): name for name, module in layer.named_modules()}
    rows = []
    for name, module in layer.named_modules():
        attributes = [
            (key, _described(value, names))
            for key, value in vars(module).items()
            if key not in _OF_EVERY_MODULE and key not in _INDICES
        ]
        held: list[Hashable] = [
            (key, tuple(value.shape), value.dtype)
            for key, value in module._parameters.items()
            if value is not None
        ]
        for key, value in module._buffers.items():
            is_saved = key not in module._non_persistent_buffers_set
            shape = None if value is None else (tuple(value.shape), value.dtype)
            held.append((key, shape if is_saved else _described(value, names)))
        rows.append((name, type(module), tuple(attributes), tuple(held)))
    return tuple(rows)


def schedule_of(kinds: list[Hashable]) -> tuple[tuple[int, ...], list[int]]:
    """Return the schedule over a few layers, and their indices.

    These are a layer of each kind in order of appearance, then another layer, which shows the fold
    that a block's output is the next block's input.
    """
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    chosen = sorted(first.values())
    slot = {kinds[index]: position for position, index in enumerate(chosen)}
    others = [index for index in range(len(kinds)) if index not in chosen]
    again = [index for index in others if kinds[index] == kinds[0]]
    return tuple(slot[kind] for kind in kinds), chosen + (again or others)[:1]


def _described(value: object, names: Mapping[int, str], depth: int = 4) -> Hashable:
    """Return a value that is equal for attributes with the same meaning in two layers.

    Args:
        names: names of the layer's modules by id, which bound methods and closures may hold.
        depth: number of described levels of objects; deeper objects are compared by identity.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value).__name__, value
    if id(value) in names:
        return "module", names[id(value)]
    if isinstance(value, FakeTensor):
        return type(value)  # kept by a hook during the trace; its sizes are symbols
    if isinstance(value, torch.Tensor):
        digest = None
        if not value.is_meta:
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest = hashlib.sha256(data.numpy().tobytes()).digest()
        return tuple(value.shape), value.dtype, digest
    if depth:
        inner = functools.partial(_described, names=names, depth=depth - 1)
        if isinstance(value, list | tuple):
            return type(value), tuple(map(inner, value))
        if isinstance(value, Set):
            return type(value), frozenset(map(inner, value))
        if isinstance(value, Mapping):
            return type(value), tuple((inner(key), inner(item)) for key, item in value.items())
        if isinstance(value, types.MethodType):
            return inner(value.__func__), inner(value.__self__)
        if isinstance(value, functools.partial):
            return inner(value.func), inner(value.args), inner(value.keywords)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return value.__code__, inner(value.__defaults__), inner(cells)
    return type(value), id(value)
