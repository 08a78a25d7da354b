"""The bypass networks that recipes ask for, by the sites at which `attach` adds them.

A site is a module path with `{layer}` for the layer's index; of what a method has once for the
model or for each layer's attention, it is `WHOLE_MODEL` or `EACH_LAYER`.

What serves has at a site, in every layer, all that adapters have there in any layer, as adapters of
any shape meet in a batch. What trains has in each layer what the recipe asks for in that layer.
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
class LayerBypasses:
    """The bypass networks of one layer.

    Attributes:
        at: the networks at each site, in order, one of each kind.
        biases: sources of the base biases that adapters have their own of.
    """

    at: Mapping[str, tuple[Bypass, ...]] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()

    @property
    def key(self) -> object:
        """A hashable key, equal for layers with the same networks."""
        return frozenset(self.at.items()), self.biases


@dataclass(frozen=True)
class Bypasses:
    """The bypass networks of a model.

    Attributes:
        at: the networks at each site, in order, one of each kind; those of all layers united.
        biases: sources of the base biases that adapters have their own of, in any layer.
        layers: the networks of each layer; empty where every layer has all of them.
        dtype: dtype of the adapters' parameters.
        dropout: probability that an element of a network's input is dropped in training.
        serving: True if what can be made once of an adapter is a parameter.
    """

    at: Mapping[str, tuple[Bypass, ...]] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()
    dtype: str = "f32"
    dropout: float = 0.0
    serving: bool = False
    layers: tuple[LayerBypasses, ...] = ()

    def of(self, layer: int | None) -> LayerBypasses:
        """The networks of a layer; of None, those outside the layers."""
        if layer is None or not self.layers:
            return LayerBypasses(self.at, self.biases)
        return self.layers[layer]

    def __bool__(self) -> bool:
        return bool(self.at or self.biases)

    def for_serving(self) -> Bypasses:
        """The networks as serving has them, where adapters of any size meet, without dropout."""
        at = {site: _united(each.served() for each in found) for site, found in self.at.items()}
        return dataclasses.replace(self, at=at, dropout=0.0, serving=True, layers=())


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

    Args:
        model: the folded model, without bypass networks.
        recipes: the adapters' recipes.
        model_type: the one of config.json, for recipes that name no targets.
        dtype: the dtype of the adapters' parameters.
    Raises:
        AdapterError: a recipe fits no module of the model, or trains nothing of it.
    """
    places = _places(model)
    found: dict[str, list[Bypass]] = {}
    layers = [_Layer() for _ in model.layers]
    biases: set[str] = set()
    dropout = 0.0
    order = list(RECIPES)
    for recipe in sorted(recipes, key=lambda recipe: order.index(recipe.peft_type)):
        adapted = recipe.bypasses_in(model, model_type)
        for path, bypass in adapted.items():
            site, layer = places[path]
            found.setdefault(site, []).append(bypass)
            # Of a module whose rank was pruned to 0 there is nothing to train.
            if layer is not None and getattr(bypass, "rank", None) != 0:
                layers[layer].found.setdefault(site, []).append(bypass)
        own = [
            (source, layer)
            for source, layer in _base_biases(model)
            if recipe.trains_bias(source.format(layer=layer).removesuffix(".bias"), adapted)
        ]
        if not adapted and not own:
            raise AdapterError(
                f"{recipe.method} trains nothing of this {model_type}, which has no biases; "
                "use LoRA"
            )
        for source, layer in own:
            biases.add(source)
            if layer is not None:
                layers[layer].biases.add(source)
        dropout = max(dropout, recipe.dropout)
    at = {site: _united(bypasses) for site, bypasses in found.items()}
    of_layers = tuple(layer.united() for layer in layers)
    return Bypasses(at, frozenset(biases), dtype, dropout, layers=of_layers)


@dataclass
class _Layer:
    """The networks of one layer, by site, as recipes ask for them one after the other."""

    found: dict[str, list[Bypass]] = field(default_factory=dict)
    biases: set[str] = field(default_factory=set)

    def united(self) -> LayerBypasses:
        at = {site: _united(bypasses) for site, bypasses in self.found.items()}
        return LayerBypasses(at, frozenset(self.biases))


def _places(model: ModelGraph) -> dict[str, tuple[str, int | None]]:
    """The site of each path that recipes may name, and its layer; None outside the layers."""
    layers = {layer_path(layer): (EACH_LAYER, layer) for layer in range(len(model.layers))}
    return {WHOLE_MODEL: (WHOLE_MODEL, None), **layers, **model.linear_places()}


def _base_biases(model: ModelGraph) -> list[tuple[str, int | None]]:
    """The sources of the base's biases, each with every layer that has one."""
    return [
        (parameter.source, layer if "{layer}" in parameter.source else None)
        for parameter, layer in model.parameters()
        if parameter.role == "frozen" and parameter.source.endswith(".bias")
    ]
