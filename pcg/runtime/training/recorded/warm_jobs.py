"""Warm jobs: windows of jobs that are recorded before the jobs come.

A job is known where the program was compiled for its recipe and step: `compile(model, {"mine":
LoraConfig(…)}, batch=4, seq=1024)`, or where an engine is told of it (`warm_job.py`). A later job
with that recipe, whose steps are no larger, finds its windows recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pcg.errors import FinetuneError
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.program.saved_memory import training_transients, window_memory
from pcg.ir.types import CONTEXT
from pcg.peft.recipe import Recipe
from pcg.peft.registry import recipe_from, recipe_of_fields
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.recorded.kept_runners import KeptRunners
from pcg.runtime.training.recorded.obstacles import why_not_recorded
from pcg.runtime.training.recorded.warm_job import WarmJob
from pcg.runtime.training.recorded.window_graphs import PassSizes
from pcg.runtime.training.runner import TrainingRunner, training_runner

WINDOW = 512
"""Tokens of the windows, unless a step has fewer. Where the rule of sharing asks for others, they
are recorded again."""


def record_jobs(
    state: ModelState,
    cache: KvCache,
    tokens: int,
    kept: KeptRunners[TrainingRunner],
    jobs: Sequence[WarmJob] = (),
) -> int:
    """Record the windows of jobs that are known; returns the graphs.

    Args:
        tokens: the most tokens of a step of the engine.
        kept: where their runners go.
        jobs: those beside the ones that the program was compiled for.
    Raises:
        AdapterError, UnsupportedError: a job's recipe is not for the model.
        FinetuneError: one of `jobs` does not fit into the cache, or its windows run eagerly.
    """
    count = 0
    for job in jobs:
        pages = job.batch * pages_for(job.seq)
        if pages > cache.pool.size:
            raise FinetuneError(
                f"a warm job of batch={job.batch} and seq={job.seq} takes {pages} pages of the KV "
                f"cache, which has {cache.pool.size}; use fewer tokens, or a larger cache"
            )
    given = {repr(recipe_from(job.peft)) for job in jobs}
    for name, (recipe, batch, seq) in _known(state, jobs).items():
        adapter = state.for_training(state.make_adapter("warm-up", recipe))
        runner = training_runner(state, adapter, windows=True)
        graphs = runner.window_graphs(cache)
        if graphs is not None and runner.is_recorded:
            whole = batch * seq
            sizes = PassSizes(whole, batch, pages_for(seq))
            count += graphs.warm_up(sizes, min(WINDOW, tokens, whole))
            kept.give(runner, lasts=True)
        elif name in given:
            training = runner.training
            why = why_not_recorded(training.model, training.restored, adapter.prompt_tokens)
            raise FinetuneError(
                "the windows of a warm job cannot be recorded: "
                f"{why or 'its memory budget in bytes has steps planned anew'}; leave it out"
            )
    return count


def windows_bytes(state: ModelState, jobs: Sequence[WarmJob]) -> int:
    """Return the bytes of a GPU that `record_jobs` needs at most; the arguments are the same.

    They are what all windows of a pass save for backward, for each of them the fullest moment of a
    layer forward or back, and the adapter's tensors with their gradients.
    """
    size_bytes = 0
    for recipe, batch, seq in _known(state, jobs).values():
        adapter = state.make_adapter("warm-up", recipe)
        training = state.training(adapter, windows=True)
        saved = window_memory(training.model, training).total
        window = min(WINDOW, batch * seq)
        sizes = [
            one.size_bytes(window, window)
            for pair in training_transients(training.model, training.plans, window, window)
            for one in pair
            if one is not None
        ]
        size_bytes += int(saved.subs({SEQUENCES: batch, CONTEXT: seq}))
        size_bytes += -(-batch * seq // window) * max(sizes) + 2 * adapter.size_bytes
    return size_bytes


def _known(state: ModelState, jobs: Sequence[WarmJob]) -> Mapping[str, tuple[Recipe, int, int]]:
    """Return the recipes, sequences and tokens of each of the jobs that are known, by recipe."""
    options = state.program.options
    known: dict[str, tuple[Recipe, int, int]] = {}
    if options.names_step:
        for fields in state.program.recipes.values():
            recipe = recipe_of_fields(fields)
            known[repr(recipe)] = recipe, options.batch, options.seq
    for job in jobs:
        recipe = recipe_from(job.peft)
        _, batch, seq = known.get(repr(recipe), (recipe, 0, 0))
        known[repr(recipe)] = recipe, max(batch, job.batch), max(seq, job.seq)
    return known
