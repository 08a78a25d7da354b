"""From recipes to bypasses: which sites of a model's blocks adapters attach to, and what there."""

from __future__ import annotations

from collections.abc import Iterable

from pcg.ir.program.program import ModelGraph
from pcg.passes.bypasses import Bottleneck, Bypasses
from pcg.peft.adalora import AdaLoraSite
from pcg.peft.bottleneck import BottleneckSite
from pcg.peft.ia3 import Ia3Site
from pcg.peft.lora import Site
from pcg.peft.prefix import PrefixSite
from pcg.peft.prompt import PromptSite
from pcg.peft.registry import Recipe
from pcg.peft.vera import VeraSite


def bypasses_of(
    model: ModelGraph, recipes: Iterable[Recipe], model_type: str, dtype: str
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
    """
    modules = tuple(model.linear_modules())
    templates = {
        site.format(layer=layer): site
        for site in model.linear_sites()
        for layer in range(len(model.layers))
    }
    ranks: dict[str, set[int]] = {}
    vera: dict[str, int] = {}
    adalora: dict[str, int] = {}
    bottlenecks: dict[Bottleneck, int | None] = {}
    magnitudes: set[str] = set()
    lora_biases: set[str] = set()
    scaled: dict[bool, set[str]] = {False: set(), True: set()}
    biases: set[str] = set()
    dropout = 0.0
    prompt = prefix = 0
    for recipe in recipes:
        sites = recipe.sites(modules, model.output_module, model_type)
        for path, site in sites.items():
            match site:
                case Site():
                    ranks.setdefault(templates[path], set()).add(site.rank)
                    magnitudes |= {templates[path]} if site.use_dora else set()
                    lora_biases |= {templates[path]} if site.has_bias else set()
                case VeraSite():
                    vera[templates[path]] = max(site.rank, vera.get(templates[path], 0))
                case AdaLoraSite():
                    adalora[templates[path]] = max(site.rank, adalora.get(templates[path], 0))
                case BottleneckSite():
                    key = Bottleneck(templates[path], site.non_linearity, site.is_parallel)
                    bottlenecks[key] = max(site.size, bottlenecks.get(key) or 0)
                case Ia3Site():
                    scaled[site.is_feedforward].add(templates[path])
                case PromptSite():
                    prompt = max(site.tokens, prompt)
                case PrefixSite():
                    prefix = max(site.tokens, prefix)
        biases |= _biases(model, recipe, {templates[path] for path in sites if path in templates})
        dropout = max(dropout, recipe.dropout)
    return Bypasses(
        {site: max(found) for site, found in ranks.items()},
        frozenset(biases),
        dtype,
        dropout,
        vera=vera,
        adalora=adalora,
        bottlenecks=bottlenecks,
        magnitudes=frozenset(magnitudes),
        lora_biases=frozenset(lora_biases),
        scaled=frozenset(scaled[False]),
        scaled_inputs=frozenset(scaled[True]),
        prompt=prompt,
        prefix=prefix,
    )


def _biases(model: ModelGraph, recipe: Recipe, adapted: set[str]) -> set[str]:
    """Sources of the base biases that the recipe trains."""
    sources = {
        parameter.source
        for graph in model.graphs
        for parameter in graph.parameters
        if parameter.role == "frozen" and parameter.source.endswith(".bias")
    }
    return {s for s in sources if recipe.trains_bias(s.removesuffix(".bias"), adapted)}
