"""The use that a model's adapters make of it: the networks to attach, and what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TORCH_NAMES, Shape, Shapes, elements
from pcg.passes.attach import Bypasses, bypasses_of
from pcg.peft.adapter import Adapter, new_adapter
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


def shaped_adapters(
    model: ModelGraph, recipes: Mapping[str, Recipe], model_type: str
) -> list[Adapter]:
    """Return adapters of some recipes over a model without bypass networks, on the meta device."""
    shapes = model.module_shapes()
    dtype = getattr(torch, TORCH_NAMES[model.adapter_dtype])
    adapters = []
    with torch.device("meta"):
        base = {path: torch.empty(shape) for path, shape in shapes.items()}
        for name, recipe in recipes.items():
            fresh = new_adapter(
                name,
                recipe,
                shapes,
                dtype,
                output_layer=model.output_module,
                model_type=model_type,
                base_weights=base,
            )
            biases = {
                module: torch.empty(parameter.type.features, dtype=dtype)
                for parameter, layer in model.parameters()
                for module, _, kind in [parameter.source.format(layer=layer).rpartition(".")]
                if kind == "bias" and recipe.trains_bias(module, fresh.weights)
            }
            adapters.append(replace(fresh, biases=biases))
    return adapters
