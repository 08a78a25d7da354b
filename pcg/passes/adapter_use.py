"""What a set of recipes trains: the ranks at each module, the biases, and how many numbers.

Where several adapters meet at a module, its rank is the largest: a step's tokens may all be of the
adapter that needs most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pcg.ir.program import ModelGraph
from pcg.ir.recipe import LoraRecipe, Site
from pcg.ir.recipes import Recipe
from pcg.passes.bypasses import Bypasses
from pcg.passes.sites import bypasses_of


@dataclass(frozen=True)
class AdapterUse:
    """What recipes train.

    Attributes:
        bypasses: the bypass networks to attach.
        ranks: largest LoRA rank by module path.
        trainable: number of trained parameters, of all adapters.
        beside_lora: the methods beside plain LoRA.
    """

    bypasses: Bypasses
    ranks: Mapping[str, int]
    trainable: int
    beside_lora: tuple[str, ...]


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
    ranks: dict[str, int] = {}
    beside: dict[str, None] = {}
    trainable = 0
    for recipe in recipes.values():
        biases = bypasses_of(model, [recipe], model_type, dtype).biases
        trainable += _bias_elements(model, biases)
        found = recipe.sites(modules, model.output_module, model_type)
        trainable += recipe.trained_elements(found, shapes)
        for path, site in found.items():
            if isinstance(site, Site):
                ranks[path] = max(site.rank, ranks.get(path, 0))
        method = _beside_lora(recipe)
        if method:
            beside[method] = None
    bypasses = bypasses_of(model, recipes.values(), model_type, dtype)
    return AdapterUse(bypasses, ranks, trainable, tuple(beside))


def _beside_lora(recipe: Recipe) -> str:
    """The method's name where it is not plain LoRA, else nothing."""
    if not isinstance(recipe, LoraRecipe):
        return recipe.method
    return "DoRA" if recipe.use_dora else "lora_bias" if recipe.lora_bias else ""


def _bias_elements(model: ModelGraph, sources: frozenset[str]) -> int:
    if not sources:
        return 0
    sizes = {
        parameter.source.format(layer=layer): prod(parameter.type.features)
        for parameter, layer in model.parameters()
        if parameter.source in sources
    }
    return sum(sizes.values())
