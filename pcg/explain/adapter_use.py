"""The use that a model's adapters make of it: the networks at each module, and what is trained.

Where several adapters of a method meet at a module, that with the most parameters counts: a step's
tokens may all be of the adapter that needs most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pcg.ir.program.program import ModelGraph
from pcg.ir.shapes import Shape, Shapes, elements
from pcg.passes.bypasses import Bypasses, bypasses_of
from pcg.peft.method import Bypass
from pcg.peft.recipe import Recipe


@dataclass(frozen=True)
class AdapterUse:
    """The networks and the trained tensors of some recipes.

    Attributes:
        bypasses: the bypass networks to attach.
        at: the networks at each module path, of each method the largest; paths are those of
            `ModelGraph.module_shapes`.
        trained: shapes of the trained tensors, of all adapters.
        not_followed: the methods whose eager code is not followed.
    """

    bypasses: Bypasses
    at: Mapping[str, tuple[Bypass, ...]]
    trained: Shapes
    not_followed: tuple[str, ...]

    @property
    def trainable(self) -> int:
        """The number of trained parameters."""
        return elements(self.trained)


def adapter_use(
    model: ModelGraph, recipes: Mapping[str, Recipe], model_type: str, dtype: str
) -> AdapterUse:
    """The use that recipes, by adapter name, make of a folded model without bypass networks.

    Raises:
        AdapterError: a recipe fits no module of the model.
        UnsupportedError: a feature of a recipe that pcg does not do; it is named.
    """
    shapes = model.module_shapes()
    largest: dict[str, dict[type, Bypass]] = {}
    trained: list[Shape] = []
    for recipe in recipes.values():
        own = bypasses_of(model, [recipe], model_type, dtype)
        trained += {
            parameter.source.format(layer=layer): parameter.type.features
            for parameter, layer in model.parameters()
            if parameter.source in own.of(layer).biases
        }.values()
        found = recipe.bypasses_in(model, model_type)
        trained += recipe.trained_shapes(found, shapes)
        for path, bypass in found.items():
            there = largest.setdefault(path, {}).setdefault(type(bypass), bypass)
            sizes = [elements(one.trained_shapes(*shapes[path])) for one in (there, bypass)]
            if sizes[1] > sizes[0]:
                largest[path][type(bypass)] = bypass
    bypasses = bypasses_of(model, recipes.values(), model_type, dtype)
    at = {path: tuple(found.values()) for path, found in largest.items()}
    unknown = dict.fromkeys(r.method for r in recipes.values() if not r.has_eager_account)
    return AdapterUse(bypasses, at, tuple(trained), tuple(unknown))
