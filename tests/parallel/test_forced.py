"""Whole executors over ranks with each candidate of each site forced, against transformers + peft.

All else is as chosen. Programs that serve and that train are searched each by itself, so each of
their candidates runs once: logits by what serves, loss and gradients by what trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import pcg.compiler as compiler
from pcg.ir.program.program import Program, Serving, Training
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.search import Candidate, Search
from pcg.passes.pipeline import BaseSpecialiser
from pcg.peft.adapter_files import read_adapter
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import StateDictCheckpoint
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts
from tests.support.threads import ThreadRanks, run_ranks, tp_mesh

LAYERS = 2
RANK = 4
SEQUENCES = prompts((9, 4, 7))
USED = ("a", None, "a")
SITES: Mapping[str, tuple[str, ...]] = {
    "llama3": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen2": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "falcon-7b": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gemma2": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
FAST = {
    ("llama3", "down_proj"),
    ("qwen2", "k_proj"),
    ("falcon-7b", "query_key_value"),
}
"""At two ranks; the others in the slow run."""


@dataclass(frozen=True)
class Theirs:
    """What transformers and peft make of a family's model with LoRA on every linear module."""

    state: Mapping[str, Tensor]
    config: Mapping[str, Any]
    saved: Path
    logits: list[Tensor]
    loss: float
    gradients: Mapping[str, Tensor]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def theirs(name: str) -> Theirs:
        base = oracle.random_model(BY_NAME[name].config(LAYERS))
        wrapped = oracle.with_adapter(base, "all-linear", rank=RANK)
        saved = tmp_path_factory.mktemp(name)
        oracle.save(wrapped, saved)
        logits = [
            oracle.logits(base if used is None else wrapped, sequence)
            for sequence, used in zip(SEQUENCES, USED, strict=True)
        ]
        loss, gradients = oracle.loss_and_gradients(wrapped, SEQUENCES)
        return Theirs(base.state_dict(), base.config.to_dict(), saved, logits, loss, gradients)

    return theirs


class Forcing:
    """Plans a site of every layer by one of its candidates, where else it would be the cheapest."""

    def __init__(self, program: Program, recipe: LoraConfig, site: str) -> None:
        self._program = program
        self._recipe = recipe
        self._site = site
        self._free = Search.plan
        self._known: dict[tuple[str, bool], tuple[ParallelPlan, tuple[Candidate, ...]]] = {}
        self._index = 0
        self._is_training = False
        self.strategies: list[str] = []

    def serving(self) -> Iterator[Serving]:
        """What serves, by each candidate."""
        for _ in self._each(is_training=False):
            yield BaseSpecialiser().serving(self._program, [self._recipe])

    def training(self) -> Iterator[Training]:
        """What trains, by each candidate."""
        for _ in self._each(is_training=True):
            yield BaseSpecialiser().training(self._program, self._recipe)

    def _each(self, *, is_training: bool) -> Iterator[int]:
        self._is_training = is_training
        self._index, count = 0, 1
        while self._index < count:
            self.strategies = []
            yield self._index
            found = [c for (_, trains), (_, c) in self._known.items() if trains == is_training]
            assert found
            count = max(map(len, found))
            self._index += 1

    def plan(self, search: Search) -> ParallelPlan:
        sites = [site for site in search.sites if site.name.endswith(self._site)]
        # A program that trains has adapters' own weights, one that serves has stacks of any rank.
        sizes = {n for site in sites for w in site.weights for n in search.graph.types[w].shape}
        if not sites or self._is_training != (RANK in sizes):
            return self._free(search)
        (site,) = sites
        key = (search.graph.name, self._is_training)
        if key not in self._known:
            best = self._free(search)
            search.plan = lambda: best  # type: ignore[method-assign]
            (choice,) = (c for c in search.find().sites if c.site == site)
            self._known[key] = best, choice.candidates
        best, candidates = self._known[key]
        candidate = candidates[self._index % len(candidates)]
        self.strategies.append(candidate.strategy)
        plan = search.force(best, site, candidate.layouts, candidate.gathered)
        assert candidate.layouts.items() <= plan.held.items()
        return plan


def executor_of(program: Program, theirs: Theirs, ranks: ThreadRanks) -> Executor:
    weights = StateDictCheckpoint(theirs.state, program.base_prefix)
    executor = compiler.make_executor(program, weights, None, None, "cpu", tp_mesh(ranks))
    executor.add_adapter("a", theirs.saved)
    return executor


def logits(program: Program, theirs: Theirs, ranks: ThreadRanks) -> list[Tensor]:
    return executor_of(program, theirs, ranks).logits(SEQUENCES, USED)


def gradients(
    program: Program, theirs: Theirs, ranks: ThreadRanks
) -> tuple[float, dict[str, Tensor]]:
    runner = executor_of(program, theirs, ranks).training_runner("a")
    targets = sum(len(ids) - 1 for ids in SEQUENCES)
    loss = runner.forward_backward([Example(ids, ids) for ids in SEQUENCES], targets)
    runner.sum_gradients()
    found = {n: t.grad for n, t in runner.parameters.items() if t.grad is not None}
    return loss, runner.shards.joined(found)


@pytest.mark.parametrize(
    ("name", "site", "degree"),
    [
        pytest.param(
            *(name, site, degree),
            marks=() if degree == 2 and (name, site) in FAST else pytest.mark.slow,
        )
        for name, sites in SITES.items()
        for site in sites
        for degree in (2, 4)
    ],
)
def test_every_candidate_forced(
    name: str, site: str, degree: int, oracles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = oracles(name)
    program = compiler.compile_program(theirs.config, None, tp=degree, dtype="float32")
    recipe = read_adapter(theirs.saved, "a").recipe
    forcing = Forcing(program, recipe, site)
    monkeypatch.setattr(Search, "plan", lambda search: forcing.plan(search))
    seen = []
    for serving in forcing.serving():
        forced = dataclasses.replace(program, serving=serving)
        for found in run_ranks(degree, lambda ranks: logits(forced, theirs, ranks)):  # noqa: B023
            for own, expected in zip(found, theirs.logits, strict=True):
                assert oracle.relative_error(own, expected) < TOLERANCE, forcing.strategies
        seen.append(forcing.strategies)
    assert len(seen) > 1
    seen = []
    for training in forcing.training():
        forced = dataclasses.replace(program, serving=serving, training=training)
        for loss, found in run_ranks(degree, lambda ranks: gradients(forced, theirs, ranks)):  # noqa: B023
            assert loss == pytest.approx(theirs.loss, rel=TOLERANCE), forcing.strategies
            assert found.keys() == theirs.gradients.keys()
            for path, expected in theirs.gradients.items():
                error = (found[path] - expected).norm() / expected.norm()
                assert error < TOLERANCE, (forcing.strategies, path)
        seen.append(forcing.strategies)
    assert len(seen) > 4
