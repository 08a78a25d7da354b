"""The bypass networks that recipes ask for, by the sites at which `attach` adds them.

A site is a module path with `{layer}` for the layer's index; of what a method has once for the
model or for each layer's attention, it is `WHOLE_MODEL` or `EACH_LAYER`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pcg.errors import AdapterError
from pcg.ir.module_paths import EACH_LAYER, WHOLE_MODEL, layer_path
from pcg.ir.program.program import ModelGraph
from pcg.peft.method import Bypass
from pcg.peft.recipe import Recipe
from pcg.peft.registry import RECIPES


@dataclass(frozen=True)
class Bypasses:
    """The bypass networks of a model.

    Attributes:
        at: the networks at each site, in order, one of each kind.
        biases: sources of the base biases that adapters have their own of.
        dtype: dtype of the adapters' parameters.
        dropout: probability that an element of a network's input is dropped in training.
        serving: True if what can be made once of an adapter is a parameter.
    """

    at: Mapping[str, tuple[Bypass, ...]] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()
    dtype: str = "f32"
    dropout: float = 0.0
    serving: bool = False

    def __bool__(self) -> bool:
        return bool(self.at or self.biases)

    def for_serving(self) -> Bypasses:
        """The networks as serving has them, where adapters of any size meet, without dropout."""
        at = {site: _united(each.served() for each in found) for site, found in self.at.items()}
        return dataclasses.replace(self, at=at, dropout=0.0, serving=True)


def _united(bypasses: Iterable[Bypass]) -> tuple[Bypass, ...]:
    """The union of those of each kind, in the order in which kinds come."""
    found: dict[object, Bypass] = {}
    for bypass in bypasses:
        kind = bypass.kind
        found[kind] = found[kind].union(bypass) if kind in found else bypass
    return tuple(found.values())


def bypasses_of(
    model: ModelGraph, recipes: Iterable[Recipe], model_type: str, dtype: str
) -> Bypasses:
    """The bypass networks of all recipes.

    A block serves many layers, so a site that a recipe adapts in some of them is there in all; the
    layers without it get nothing to add.

    Args:
        model: the folded model, without bypass networks.
        recipes: the adapters' recipes.
        model_type: the one of config.json, for recipes that name no targets.
        dtype: the dtype of the adapters' parameters.
    Raises:
        AdapterError: a recipe fits no module of the model, or trains nothing of it.
    """
    layers = range(len(model.layers))
    templates = {site.format(layer=n): site for site in model.linear_sites() for n in layers}
    others = {WHOLE_MODEL: WHOLE_MODEL, **{layer_path(n): EACH_LAYER for n in layers}}
    order = list(RECIPES)
    found: dict[str, list[Bypass]] = {}
    biases: set[str] = set()
    dropout = 0.0
    for recipe in sorted(recipes, key=lambda recipe: order.index(recipe.peft_type)):
        adapted = recipe.bypasses_in(model, model_type)
        for path, bypass in adapted.items():
            found.setdefault((templates | others)[path], []).append(bypass)
        own = _biases(model, recipe, {templates[path] for path in adapted if path in templates})
        if not adapted and not own:
            raise AdapterError(
                f"{recipe.method} trains nothing of this {model_type}, which has no biases; "
                "use LoRA"
            )
        biases |= own
        dropout = max(dropout, recipe.dropout)
    at = {site: _united(bypasses) for site, bypasses in found.items()}
    return Bypasses(at, frozenset(biases), dtype, dropout)


def _biases(model: ModelGraph, recipe: Recipe, adapted: set[str]) -> set[str]:
    frozen = {p.source for graph in model.graphs for p in graph.parameters if p.role == "frozen"}
    biases = {source for source in frozen if source.endswith(".bias")}
    return {s for s in biases if recipe.trains_bias(s.removesuffix(".bias"), adapted)}
