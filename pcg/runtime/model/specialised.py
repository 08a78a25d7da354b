"""Programs that are compiled anew where adapters come at sites that no program serves yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pcg.ir.program.program import ModelGraph, Program, Serving, Training
from pcg.parallel.ranks.group import Ranks
from pcg.parallel.ranks.same_program import check_same, training_text
from pcg.peft.adapter import Adapter
from pcg.peft.recipe import Recipe
from pcg.runtime.adapters.padded_tables import PaddedTables
from pcg.runtime.adapters.sites import model_sources, trained_sources
from pcg.runtime.model.base_weights import BaseWeights
from pcg.runtime.model.runner import ModelRunner


class Specialiser(Protocol):
    """Compiles a program anew for adapters at other sites; the compiler provides one."""

    def serving(self, program: Program, recipes: Sequence[Recipe]) -> Serving: ...

    def training(self, program: Program, recipe: Recipe, windows: bool = False) -> Training: ...


@dataclass(frozen=True)
class ServingProgram:
    """A program that serves adapters at some sites, ready to run.

    `sources` are the adapter parameters that it reads.
    """

    serving: Serving
    sources: frozenset[str]
    weights: BaseWeights
    runner: ModelRunner
    tables: PaddedTables


class TrainingPrograms:
    """Training programs by adapter sites, each compiled when it is first needed."""

    def __init__(self, program: Program, specialiser: Specialiser, ranks: Ranks) -> None:
        self._program = program
        self._specialiser = specialiser
        self._ranks = ranks
        self._by_key: dict[frozenset[str], Training] = {}
        if program.training is not None:
            model = program.training.model
            self._by_key[model_sources(model) | _dropouts_of(model)] = program.training

    def get(self, adapter: Adapter, windows: bool) -> Training:
        """Return the program for an adapter's sites, for windows or for whole sequences."""
        key = trained_sources(adapter) | _dropouts(adapter.recipe.dropout)
        if windows:
            key |= {"windows"}
        if key not in self._by_key:
            training = self._specialiser.training(self._program, adapter.recipe, windows)
            check_same(self._ranks, {"the training program": training_text(training)})
            self._by_key[key] = training
        return self._by_key[key]


def _dropouts(p: float) -> frozenset[str]:
    """Return the part of a program's key that depends on its dropout."""
    return frozenset({f"dropout {p:g}"} if p else ())


def _dropouts_of(model: ModelGraph) -> frozenset[str]:
    nodes = [node for graph in model.graphs for node in graph.nodes if node.op == "dropout"]
    return frozenset().union(*(_dropouts(float(node.attribute("p"))) for node in nodes))  # type: ignore[arg-type]
