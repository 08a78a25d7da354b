"""Programs compiled anew for the sites of adapters, and which adapters one is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pcg.ir.module_paths import WHOLE_MODEL
from pcg.ir.program.program import ModelGraph, Program, Serving, Training
from pcg.parallel.ranks.group import Ranks
from pcg.parallel.ranks.same_program import check_same, training_text
from pcg.peft.adapter import Adapter
from pcg.peft.recipe import Recipe
from pcg.runtime.adapters.padded_tables import PaddedTables
from pcg.runtime.model.base_weights import BaseWeights
from pcg.runtime.model.runner import ModelRunner


class Specialiser(Protocol):
    """Compiles a program anew for adapters at other sites; the compiler gives one to executors."""

    def serving(self, program: Program, recipes: Sequence[Recipe]) -> Serving: ...

    def training(self, program: Program, recipe: Recipe, windows: bool = False) -> Training: ...


@dataclass(frozen=True)
class ServingProgram:
    """A program that serves adapters at some sites, ready to run.

    Attributes:
        serving: as it was compiled.
        sources: of the adapters' parameters that it reads.
        weights: of the base.
        runner: of both.
        stacks: of the adapters that run.
    """

    serving: Serving
    sources: frozenset[str]
    weights: BaseWeights
    runner: ModelRunner
    stacks: PaddedTables


class TrainingPrograms:
    """Those that train adapters, each compiled when the first adapter of its sites is trained."""

    def __init__(self, program: Program, specialiser: Specialiser, ranks: Ranks) -> None:
        self._program = program
        self._specialiser = specialiser
        self._ranks = ranks
        self._by_sites: dict[frozenset[str], Training] = {}
        if program.training is not None:
            model = program.training.model
            self._by_sites[model_sources(model) | _model_dropouts(model)] = program.training

    def of(self, adapter: Adapter, windows: bool) -> Training:
        """The one for an adapter's sites, of whole sequences or windows."""
        trained = _sources((path, w.parameters) for path, w in adapter.weights.items())
        sites = trained | {*adapter.shared} | _bias_sources(adapter)
        key = sites | _dropouts(adapter.recipe.dropout) | ({"windows"} if windows else set())
        if key not in self._by_sites:
            training = self._specialiser.training(self._program, adapter.recipe, windows)
            check_same(self._ranks, {"the training program": training_text(training)})
            self._by_sites[key] = training
        return self._by_sites[key]


def served_sources(adapter: Adapter) -> frozenset[str]:
    """Sources of the parameters that a program needs to serve an adapter."""
    served = _sources((path, w.served) for path, w in adapter.weights.items())
    return served | _bias_sources(adapter)


def model_sources(model: ModelGraph) -> frozenset[str]:
    """Sources of the adapter parameters that a program reads, in all layers."""
    return frozenset(
        parameter.source.format(layer=layer)
        for parameter, layer in model.parameters()
        if parameter.role == "adapter"
    )


def _sources(parts: Iterable[tuple[str, Iterable[str]]]) -> frozenset[str]:
    """Sources of the parameters that an adapter has, of modules with the kinds of each."""
    return frozenset(
        kind if path == WHOLE_MODEL else f"{path}.{kind}" for path, kinds in parts for kind in kinds
    )


def _bias_sources(adapter: Adapter) -> frozenset[str]:
    return frozenset(f"{path}.bias" for path in adapter.biases)


def _dropouts(p: float) -> frozenset[str]:
    """What tells a training program with dropout from one without."""
    return frozenset({f"dropout {p:g}"} if p else ())


def _model_dropouts(model: ModelGraph) -> frozenset[str]:
    """The same of a program's bypass networks."""
    nodes = [node for graph in model.graphs for node in graph.nodes if node.op == "dropout"]
    return frozenset().union(*(_dropouts(float(node.attribute("p"))) for node in nodes))  # type: ignore[arg-type]
