"""Kinds of layers: layers of one kind are equal but for their weights, and are exported once."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from pcg.errors import TraceError


def layer_kinds(model: nn.Module) -> tuple[str, list[object]]:
    """Path of the list of layers, and for each layer a value equal for layers of one kind."""
    count = model.config.num_hidden_layers  # type: ignore[union-attr]
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path, [fingerprint(layer) for layer in module]
    raise TraceError(f"{type(model).__name__} has no list of its {count} layers")


def fingerprint(layer: nn.Module) -> object:
    """Classes, constants and tensor shapes of all modules of a layer, but not its index."""
    rows = []
    for name, module in layer.named_modules():
        constants = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str)
            and key not in ("layer_idx", "layer_id", "layer_number")
        )
        tensors = [
            (key, tuple(value.shape), value.dtype)
            for key, value in [*module._parameters.items(), *module._buffers.items()]
            if value is not None
        ]
        rows.append((name, type(module).__name__, tuple(constants), tuple(tensors)))
    return tuple(rows)


def shorten(config: Any, kinds: list[object]) -> tuple[tuple[int, ...], list[int], Any]:
    """The schedule over, the indices of, and the configuration with a few layers.

    They are one layer of each kind in order of appearance, then one of the first kind again, which
    lets the fold see that a block's output is the next one's input.
    """
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    chosen = sorted(first.values())
    slot = {kinds[index]: position for position, index in enumerate(chosen)}
    schedule = tuple(slot[kind] for kind in kinds)
    if len(kinds) > len(chosen):
        chosen.append(chosen[0])
    shortened = copy.deepcopy(config)
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == len(kinds):
            setattr(shortened, key, [value[index] for index in chosen])
    shortened.num_hidden_layers = len(chosen)
    return schedule, chosen, shortened
