"""Warm jobs: windows of jobs that are recorded before the jobs come.

A job is known where the program was compiled for its recipe and step: `compile(model, {"mine":
LoraConfig(…)}, batch=4, seq=1024)`, or where an engine is told of it (`warm_job.py`). A later job
with that recipe, whose steps are no larger, finds its windows recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from pcg.errors import FinetuneError
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
    options, count = state.program.options, 0
    known: dict[str, tuple[Recipe, int, int]] = {}
    if options.names_step:
        for fields in state.program.recipes.values():
            recipe = recipe_of_fields(fields)
            known[repr(recipe)] = recipe, options.batch, options.seq
    given: set[str] = set()
    for job in jobs:
        pages = job.batch * pages_for(job.seq)
        if pages > cache.pool.size:
            raise FinetuneError(
                f"a warm job of batch={job.batch} and seq={job.seq} takes {pages} pages of the KV "
                f"cache, which has {cache.pool.size}; use fewer tokens, or a larger cache"
            )
        recipe = recipe_from(job.peft)
        given.add(repr(recipe))
        _, batch, seq = known.get(repr(recipe), (recipe, 0, 0))
        known[repr(recipe)] = recipe, max(batch, job.batch), max(seq, job.seq)
    for name, (recipe, batch, seq) in known.items():
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
