"""From recipes to bypasses: which sites of a model's blocks adapters attach to, with what rank."""

from __future__ import annotations

from collections.abc import Iterable

from pcg.errors import UnsupportedError
from pcg.ir.program import ModelGraph
from pcg.ir.recipe import LoraRecipe
from pcg.passes.attach import Bypasses


def bypasses_of(
    model: ModelGraph, recipes: Iterable[LoraRecipe], model_type: str, dtype: str
) -> Bypasses:
    """The sites that any of the recipes adapts.

    A block serves many layers, so a site that a recipe adapts in some of them is there in all; the
    layers without it get nothing to add.

    Args:
        model: folded; without bypass networks.
        recipes: of the adapters.
        model_type: of config.json, for recipes that name no targets.
        dtype: of the adapters' parameters.
    Raises:
        AdapterError: a recipe fits no module of the model.
        UnsupportedError: a feature of a recipe that pcg does not do; it is named.
    """
    modules = tuple(model.linear_modules())
    templates = {
        site.format(layer=layer): site
        for site in model.linear_sites()
        for layer in range(len(model.layers))
    }
    ranks: dict[str, set[int]] = {}
    biases: set[str] = set()
    dropout = 0.0
    for recipe in recipes:
        if recipe.lora_bias:
            raise UnsupportedError(
                "lora_bias=True (a bias on lora_B) is not supported; set it to False"
            )
        sites = recipe.sites(modules, model.output_module, model_type)
        for path, site in sites.items():
            ranks.setdefault(templates[path], set()).add(site.rank)
        biases |= _biases(model, recipe, {templates[path] for path in sites})
        dropout = max(dropout, recipe.dropout)
    return Bypasses(
        {site: found.pop() if len(found) == 1 else None for site, found in ranks.items()},
        frozenset(biases),
        dtype,
        dropout,
    )


def _biases(model: ModelGraph, recipe: LoraRecipe, adapted: set[str]) -> set[str]:
    """Sources of the base biases that the recipe trains."""
    if recipe.bias == "none":
        return set()
    sources = {
        parameter.source
        for graph in model.graphs
        for parameter in graph.parameters
        if parameter.role == "frozen" and parameter.source.endswith(".bias")
    }
    if recipe.bias == "lora_only":
        sources = {source for source in sources if source.removesuffix(".bias") in adapted}
    return sources
