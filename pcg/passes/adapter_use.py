"""What a set of recipes trains: the ranks at each module, the biases, and how many numbers.

Where several adapters meet at a module, its rank is the largest: a step's tokens may all be of the
adapter that needs most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pcg.errors import UnsupportedError
from pcg.ir.program import ModelGraph
from pcg.ir.recipe import LoraRecipe
from pcg.ir.recipes import Recipe
from pcg.passes.bypasses import Bypasses
from pcg.passes.sites import bypasses_of


@dataclass(frozen=True)
class AdapterUse:
    """What recipes train.

    Attributes:
        ranks: largest rank by module path.
        sites: the same by site, its path with `{layer}` for the layer.
        biases: sources of the base biases that are trained.
        dropout: the largest of the recipes'.
        trainable: number of trained parameters, of all adapters.
    """

    ranks: Mapping[str, int]
    sites: Mapping[str, int]
    biases: frozenset[str]
    dropout: float
    trainable: int

    def bypasses(self, dtype: str) -> Bypasses:
        """The bypass networks to attach, with parameters of this dtype."""
        return Bypasses(dict(self.sites), self.biases, dtype, self.dropout)


def lora_alone(recipes: Mapping[str, Recipe]) -> dict[str, LoraRecipe]:
    """The recipes, of which all are LoRA as eager training is accounted for.

    Raises:
        UnsupportedError: one is of another method; it is named.
    """
    found = {}
    for name, recipe in recipes.items():
        if not isinstance(recipe, LoraRecipe) or recipe.use_dora or recipe.lora_bias:
            extra = " with use_dora or lora_bias" if isinstance(recipe, LoraRecipe) else ""
            raise UnsupportedError(
                f"pcg explain accounts for LoRA alone, not {recipe.method}{extra}, which adapter "
                f"{name!r} is; pcg compiles, serves and finetunes it"
            )
        found[name] = recipe
    return found


def adapter_use(
    model: ModelGraph, recipes: Mapping[str, LoraRecipe], model_type: str
) -> AdapterUse:
    """What the recipes, by adapter name, train of a folded model without bypass networks.

    Args:
        model: the model.
        recipes: of the adapters.
        model_type: of config.json, for recipes that name no targets.
    Raises:
        AdapterError: a recipe fits no module of the model.
        UnsupportedError: a feature of a recipe that pcg does not do; it is named.
    """
    shapes = model.linear_modules()
    templates = {
        site.format(layer=layer): site
        for site in model.linear_sites()
        for layer in range(len(model.layers))
    }
    ranks: dict[str, int] = {}
    sites: dict[str, int] = {}
    biases: frozenset[str] = frozenset()
    trainable = 0
    for recipe in recipes.values():
        trained_biases = bypasses_of(model, [recipe], model_type, "f32").biases
        biases |= trained_biases
        trainable += _bias_elements(model, trained_biases)
        found = recipe.sites(tuple(shapes), model.output_module, model_type)
        for path, site in found.items():
            ranks[path] = max(site.rank, ranks.get(path, 0))
            template = templates[path]
            sites[template] = max(site.rank, sites.get(template, 0))
            trainable += site.rank * sum(shapes[path])
    dropout = max((recipe.dropout for recipe in recipes.values()), default=0.0)
    return AdapterUse(ranks, sites, biases, dropout, trainable)


def _bias_elements(model: ModelGraph, sources: frozenset[str]) -> int:
    if not sources:
        return 0
    sizes = {
        parameter.source.format(layer=layer): prod(parameter.type.features)
        for parameter, layer in model.parameters()
        if parameter.source in sources
    }
    return sum(sizes.values())
