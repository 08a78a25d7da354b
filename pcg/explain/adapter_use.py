"""What a set of recipes trains: what is at each module, the biases, and how many numbers.

Where several adapters of a method meet at a module, that with the most parameters counts: a step's
tokens may all be of the adapter that needs most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcg.ir.program.program import ModelGraph
from pcg.ir.shapes import Shape, Shapes, elements
from pcg.passes.bypasses import Bypasses
from pcg.passes.sites import bypasses_of
from pcg.peft.adalora import AdaLoraRecipe
from pcg.peft.bottleneck import BottleneckRecipe
from pcg.peft.registry import Recipe


@dataclass(frozen=True)
class AdapterUse:
    """What recipes train.

    Attributes:
        bypasses: the bypass networks to attach.
        sites: what is at each module path, of each kind of site the largest; paths are those of
            `pcg.ir.program.program.ModelGraph.module_shapes`.
        trained: shapes of the trained tensors, of all adapters.
        not_followed: the methods whose eager code is not followed.
    """

    bypasses: Bypasses
    sites: Mapping[str, tuple[Any, ...]]
    trained: Shapes
    not_followed: tuple[str, ...]

    @property
    def trainable(self) -> int:
        """Number of trained parameters."""
        return elements(self.trained)


def adapter_use(
    model: ModelGraph, recipes: Mapping[str, Recipe], model_type: str, dtype: str
) -> AdapterUse:
    """What the recipes, by adapter name, train of a folded model without bypass networks.

    Args:
        model: the model.
        recipes: of the adapters.
        model_type: of config.json, for recipes that name no targets.
        dtype: of the adapters' parameters.
    Raises:
        AdapterError: a recipe fits no module of the model.
        UnsupportedError: a feature of a recipe that pcg does not do; it is named.
    """
    shapes, modules = model.module_shapes(), tuple(model.linear_modules())
    sites: dict[str, dict[type, Any]] = {}
    beside: dict[str, None] = {}
    trained: list[Shape] = []
    for recipe in recipes.values():
        biases = bypasses_of(model, [recipe], model_type, dtype).biases
        trained += _bias_shapes(model, biases)
        found = recipe.sites(modules, model.output_module, model_type)
        trained += recipe.trained_shapes(found, shapes)
        for path, site in found.items():
            of_path = sites.setdefault(path, {})
            largest = of_path.get(type(site))
            size = elements(site.trained_shapes(*shapes[path]))
            if largest is None or size > elements(largest.trained_shapes(*shapes[path])):
                of_path[type(site)] = site
        if isinstance(recipe, AdaLoraRecipe | BottleneckRecipe):
            beside[recipe.method] = None
    bypasses = bypasses_of(model, recipes.values(), model_type, dtype)
    of_paths = {path: tuple(of_path.values()) for path, of_path in sites.items()}
    return AdapterUse(bypasses, of_paths, tuple(trained), tuple(beside))


def _bias_shapes(model: ModelGraph, sources: frozenset[str]) -> list[Shape]:
    if not sources:
        return []
    shapes = {
        parameter.source.format(layer=layer): parameter.type.features
        for parameter, layer in model.parameters()
        if parameter.source in sources
    }
    return [*shapes.values()]
