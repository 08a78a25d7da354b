"""Segments: layers that share one saved input, for budgets below one input a layer.

    save x_i;   backward of layer i+k:   x_{i+1} = layer i(x_i), …, x_{i+k} = layer i+k-1(x_{i+k-1})

Where every layer saves its input alone, a layer whose input is recomputed saves nothing. That
spares one input's bytes and costs one more forward of the layer before, however the segments lie;
so every further recomputed input moves along one straight line of bytes against operations. The
length g of a segment does change what backward holds at once: up to g - 1 recomputed inputs,
against L / g saved ones. The longest segment is as short as it can be, and none is longer than
sqrt(L), where the two are equal; the first layers share first, as their recomputed inputs are held
when the others' saved inputs are gone.

Source: the square root is that of Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt

from pcg.ir.analysis.storages import Storages
from pcg.ir.program.program import ModelGraph, TrainingGraph


def restorable(
    model: ModelGraph, plans: Sequence[TrainingGraph], layers: Sequence[int]
) -> list[bool]:
    """True for each layer whose input can be recomputed by the layer before.

    Both must save their one carried input, and nothing of their own beside it. `layers` has the
    index of each layer's plan.
    """
    alone = [_saves_its_input_alone(model, plan) for plan in plans]
    return [False, *(alone[before] and alone[layer] for before, layer in pairwise(layers))]


def shared_inputs(restorable: Sequence[bool], count: int) -> tuple[int, ...] | None:
    """So many layers whose input is recomputed, of those that can be; None if there are fewer."""
    for longest in range(1, max(isqrt(len(restorable)), 1) + 1):
        found = _in_segments(restorable, longest)
        if len(found) >= count:
            return tuple(found[:count])
    return None


def most_shared(restorable: Sequence[bool]) -> tuple[int, ...]:
    """The layers whose input is recomputed where as many are as can be."""
    return tuple(_in_segments(restorable, max(isqrt(len(restorable)), 1)))


def _in_segments(restorable: Sequence[bool], longest: int) -> list[int]:
    """All layers but the first of each segment, with segments of this length at most."""
    found, length = [], 1
    for layer, can_be in enumerate(restorable):
        length = length + 1 if can_be and length < longest else 1
        if length > 1:
            found.append(layer)
    return found


def _saves_its_input_alone(model: ModelGraph, plan: TrainingGraph) -> bool:
    block = model.blocks[plan.block]
    if plan.backward is None or len(block.outputs) != 1:
        return False
    storages = Storages.of(plan.forward)
    resident = {value.name for value in block.inputs[1:]}
    own = {storages[name] for name in plan.saved}
    own = {s for s in own if not s.is_parameter and s.name not in resident}
    return own == {storages[block.inputs[0].name]}
