"""The use that a model's adapters make of it: the networks to attach, and what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pcg.ir.program.program import ModelGraph
from pcg.ir.shapes import Shape, Shapes, elements
from pcg.passes.bypasses import Bypasses, bypasses_of
from pcg.peft.recipe import Recipe


@dataclass(frozen=True)
class AdapterUse:
    """The networks and the trained tensors of some recipes.

    Attributes:
        bypasses: the bypass networks to attach.
        trained: shapes of the trained tensors, of all adapters.
    """

    bypasses: Bypasses
    trained: Shapes

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
    bypasses = bypasses_of(model, recipes.values(), model_type, dtype)
    return AdapterUse(bypasses, tuple(trained))
