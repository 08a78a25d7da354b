"""Recorded windows without a job, from warm-ups and ended jobs, for later jobs.

A job is known in advance if the program was compiled for its recipe and step: `compile(model,
{"mine": LoraConfig(…)}, batch=4, seq=1024)`, or if the engine received a `WarmJob`. A later job
with that recipe and steps of at most that size reuses the recorded windows.

A graph reads an adapter at a fixed address. A job that reuses recorded windows therefore copies its
weights into the runner's adapter, which has the same recipe and tensor sizes. Runners also keep the
tensors that windows save for backward. Runners of a warm-up are kept for good. Among other runners,
only that of the job that ended last is kept, until a job cannot use it or the last job ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from weakref import WeakSet

import torch

from pcg.errors import FinetuneError
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.program.program import Training
from pcg.ir.program.saved_memory import training_transients, window_memory
from pcg.ir.types import CONTEXT
from pcg.peft.adapter import Adapter
from pcg.peft.recipe import Recipe
from pcg.peft.registry import recipe_of_fields
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.recorded.warm_job import WarmJob, why_not_recorded
from pcg.runtime.training.recorded.window_graphs import PassSizes
from pcg.runtime.training.runner import TrainingRunner, training_runner


class KeptRunners:
    """Runners without a job; for any thread."""

    def __init__(self) -> None:
        self._jobs = 0
        self._kept: list[TrainingRunner] = []
        self._lasting: WeakSet[TrainingRunner] = WeakSet()
        self._lock = Lock()

    def begin_job(self) -> Callable[[], None]:
        """Count a job under preparation; return a function that counts its end.

        The end of the last job frees the runners that are not kept for good.
        """
        with self._lock:
            self._jobs += 1
        return self._end_job

    def _end_job(self) -> None:
        with self._lock:
            self._jobs -= 1
            if not self._jobs:
                self._drop_others()

    def give(self, runner: TrainingRunner, lasts: bool = False) -> None:
        """Keep a runner with recorded windows, for good if `lasts`; ignore other runners."""
        if not runner.is_recorded:
            return
        with self._lock:
            if lasts:
                self._lasting.add(runner)
            if runner not in self._lasting:
                self._drop_others()
            self._kept.append(runner)

    def take(self, training: Training, adapter: Adapter) -> TrainingRunner | None:
        """Return a kept runner that can train an adapter by its program; None without one.

        The values of `adapter` are copied into the tensors of the runner's adapter.
        """
        with self._lock:
            runner = next((r for r in self._kept if _is_alike(r, training, adapter)), None)
            if runner is None:
                self._drop_others()
                return None
            self._kept.remove(runner)
        current = runner.adapter
        with torch.no_grad():
            for to, values in zip(_all_of(current), _all_of(adapter), strict=True):
                to.copy_(values)
        runner.adapter = dataclasses.replace(
            current,
            name=adapter.name,
            recipe=adapter.recipe,
            base_model_name=adapter.base_model_name,
            extra=adapter.extra,
        )
        return runner

    def _drop_others(self) -> None:
        """Drop the runners that are not kept for good."""
        self._kept = [runner for runner in self._kept if runner in self._lasting]


def _all_of(adapter: Adapter) -> list[torch.Tensor]:
    return [*adapter.tensors, *(adapter.shared[name] for name in sorted(adapter.shared))]


def _is_alike(runner: TrainingRunner, training: Training, adapter: Adapter) -> bool:
    current = runner.adapter
    return (
        runner.training is training
        and current.recipe == adapter.recipe
        and {path: weights.bypass for path, weights in current.weights.items()}
        == {path: weights.bypass for path, weights in adapter.weights.items()}
        and current.replaced.keys() == adapter.replaced.keys()
        and current.shared.keys() == adapter.shared.keys()
        and [(x.shape, x.dtype) for x in _all_of(current)]
        == [(x.shape, x.dtype) for x in _all_of(adapter)]
    )


WINDOW = 512
"""Tokens of recorded windows, or the step's if fewer. If the rule of sharing chooses another size,
windows are recorded again."""


def record_jobs(
    state: ModelState,
    cache: KvCache,
    tokens: int,
    kept: KeptRunners,
    jobs: Sequence[WarmJob] = (),
) -> int:
    """Record the windows of known jobs; return the number of graphs.

    Args:
        jobs: further jobs, for which the program was not compiled.
    Raises:
        AdapterError, UnsupportedError: a job's recipe does not fit the model.
        FinetuneError: a job does not fit into the cache, or its windows run eagerly.
    """
    count = 0
    for job in jobs:
        pages = job.batch * pages_for(job.seq)
        if pages > cache.pool.size:
            raise FinetuneError(
                f"a warm job of batch={job.batch} and seq={job.seq} takes {pages} pages of the KV "
                f"cache, which has {cache.pool.size}; use fewer tokens, or a larger cache"
            )
    told_recipes = {repr(state.recipe(job.peft)) for job in jobs}
    for name, (recipe, batch, seq) in _known(state, jobs).items():
        adapter = state.for_training(state.make_adapter("warm-up", recipe))
        runner = training_runner(state, adapter, windows=True)
        graphs = runner.window_graphs(cache)
        if graphs is not None and runner.is_recorded:
            whole = batch * seq
            sizes = PassSizes(whole, batch, pages_for(seq))
            count += graphs.warm_up(sizes, min(WINDOW, tokens, whole))
            kept.give(runner, lasts=True)
        elif name in told_recipes:
            training = runner.training
            why = why_not_recorded(training.model, training.restored, adapter.prompt_tokens)
            raise FinetuneError(
                "the windows of a warm job cannot be recorded: "
                f"{why or 'its memory budget in bytes has steps planned anew'}; leave it out"
            )
    return count


def windows_bytes(state: ModelState, jobs: Sequence[WarmJob]) -> int:
    """Return an upper bound of the GPU bytes that `record_jobs` needs for the same arguments.

    The sum of the tensors that all windows of a pass save for backward, for each window the peak of
    a layer's forward or backward, and the adapter's tensors with gradients.
    """
    size_bytes = 0
    for recipe, batch, seq in _known(state, jobs).values():
        adapter = state.make_adapter("warm-up", recipe)
        training = state.training(adapter, windows=True)
        saved = window_memory(training.model, training).total
        window = min(WINDOW, batch * seq)
        sizes = [
            moment.size_bytes(window, window)
            for pair in training_transients(training.model, training.plans, window, window)
            for moment in pair
            if moment is not None
        ]
        size_bytes += int(saved.subs({SEQUENCES: batch, CONTEXT: seq}))
        size_bytes += -(-batch * seq // window) * max(sizes) + 2 * adapter.size_bytes
    return size_bytes


def _known(state: ModelState, jobs: Sequence[WarmJob]) -> Mapping[str, tuple[Recipe, int, int]]:
    """Return recipe, sequences per step and tokens per sequence of each known job."""
    options = state.program.options
    known: dict[str, tuple[Recipe, int, int]] = {}
    if options.names_step:
        for fields in state.program.recipes.values():
            recipe = recipe_of_fields(fields)
            known[repr(recipe)] = recipe, options.batch, options.seq
    for job in jobs:
        recipe = state.recipe(job.peft)
        _, batch, seq = known.get(repr(recipe), (recipe, 0, 0))
        known[repr(recipe)] = recipe, max(batch, job.batch), max(seq, job.seq)
    return known
