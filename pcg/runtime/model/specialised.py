"""Programs compiled for adapters at new sites, and for steps larger than planned.

A memory budget in bytes holds for every step. The bytes that a plan saves grow with the step's
tokens, so a step that would save more than the budget is planned for its own size, or refused:

    saved(plan, tokens) <= budget    that plan runs
    otherwise                        the budget is planned for that number of tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import sympy

from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.program.program import ModelGraph, Program, Serving, Training
from pcg.ir.program.saved_memory import saved_memory, window_memory
from pcg.ir.types import CONTEXT
from pcg.peft.adapter import Adapter
from pcg.peft.recipe import Recipe
from pcg.ranks.agreement import check_same, training_text
from pcg.ranks.group import Ranks
from pcg.runtime.adapters.padded_tables import PaddedTables
from pcg.runtime.adapters.sites import model_sources, trained_sources
from pcg.runtime.model.runner import ModelRunner


class Specialiser(Protocol):
    """Compiles a program for other sites or steps; provided by the compiler.

    `step` is the number of sequences, and the tokens of each, that the memory budget is planned
    for; those of the program's options by default.
    """

    def serving(self, program: Program, recipes: Sequence[Recipe]) -> Serving: ...

    def training(
        self,
        program: Program,
        recipe: Recipe,
        windows: bool = False,
        step: tuple[int, int] | None = None,
    ) -> Training: ...


@dataclass(frozen=True)
class ServingProgram:
    """A program that serves adapters at some sites, ready to run.

    `sources` are the adapter parameters that it reads.
    """

    serving: Serving
    sources: frozenset[str]
    runner: ModelRunner
    tables: PaddedTables


@dataclass(frozen=True)
class _SizedTraining:
    training: Training
    tokens: int
    windows: bool

    @cached_property
    def _saved_bytes(self) -> sympy.Expr:
        account = window_memory if self.windows else saved_memory
        return account(self.training.model, self.training).total

    def holds(self, sequences: int, seq: int, limit_bytes: int) -> bool:
        """Return True if a step of this program saves at most `limit_bytes`."""
        at = {SEQUENCES: sequences, CONTEXT: seq}
        return sequences * seq <= self.tokens or self._saved_bytes.subs(at) <= limit_bytes


class TrainingPrograms:
    """Training programs by adapter sites and step, each compiled when it is first needed."""

    def __init__(self, program: Program, specialiser: Specialiser, ranks: Ranks) -> None:
        self._program = program
        self._specialiser = specialiser
        self._ranks = ranks
        self._planned_tokens = program.options.batch * program.options.seq
        self._by_key: dict[frozenset[str], list[_SizedTraining]] = {}
        if program.training is not None:
            model = program.training.model
            planned = _SizedTraining(program.training, self._planned_tokens, windows=False)
            self._by_key[model_sources(model) | _dropouts_of(model)] = [planned]

    def get(self, adapter: Adapter, windows: bool, step: tuple[int, int] | None = None) -> Training:
        """Return the program for an adapter's sites, for windows or for whole sequences.

        Args:
            step: the sequences of a step and the tokens of each, for which a memory budget in bytes
                has to hold; the step that the program was compiled for by default.
        Raises:
            MemoryBudgetError: such a step needs more than the budget.
        """
        key = trained_sources(adapter) | _dropouts(adapter.recipe.dropout)
        if windows:
            key |= {"windows"}
        planned = self._by_key.setdefault(key, [])
        if not planned:
            planned.append(self._specialised(adapter, windows, None))
        limit = self._program.options.budget.size_bytes
        if step is None or limit is None:
            return planned[0].training
        for sized in planned:
            if sized.holds(*step, limit):
                return sized.training
        planned.append(self._specialised(adapter, windows, step))
        return planned[-1].training

    def _specialised(
        self, adapter: Adapter, windows: bool, step: tuple[int, int] | None
    ) -> _SizedTraining:
        training = self._specialiser.training(self._program, adapter.recipe, windows, step)
        check_same(self._ranks, "the program", {"the training program": training_text(training)})
        tokens = self._planned_tokens if step is None else step[0] * step[1]
        return _SizedTraining(training, tokens, windows)


def _dropouts(p: float) -> frozenset[str]:
    return frozenset({f"dropout {p:g}"} if p else ())


def _dropouts_of(model: ModelGraph) -> frozenset[str]:
    nodes = [node for graph in model.graphs for node in graph.nodes if node.op == "dropout"]
    return frozenset().union(*(_dropouts(float(node.attribute("p"))) for node in nodes))  # type: ignore[arg-type]
