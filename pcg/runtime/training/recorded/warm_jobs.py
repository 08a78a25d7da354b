"""Warm jobs: windows of jobs that are recorded before the jobs come.

A job is known where the program was compiled for its recipe and step: `compile(model, {"mine":
LoraConfig(…)}, batch=4, seq=1024)`. A later job with that recipe, whose steps are no larger, finds
its windows recorded.
"""

from __future__ import annotations

from pcg.peft.registry import recipe_of_fields
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.recorded.kept_runners import KeptRunners
from pcg.runtime.training.recorded.window_graphs import PassSizes
from pcg.runtime.training.runner import TrainingRunner, training_runner

WINDOW = 512
"""Tokens of the windows, unless a step has fewer. Where the rule of sharing asks for others, they
are recorded again."""


def record_jobs(
    state: ModelState, cache: KvCache, tokens: int, kept: KeptRunners[TrainingRunner]
) -> int:
    """Record the windows of the jobs that a program was compiled for; returns the graphs.

    Args:
        tokens: the most tokens of a step of the engine.
        kept: where their runners go.
    """
    options, count = state.program.options, 0
    if not options.names_step:
        return count
    recipes = {repr(sorted(one.items())): one for one in state.program.recipes.values()}
    for fields in recipes.values():
        adapter = state.for_training(state.make_adapter("warm-up", recipe_of_fields(fields)))
        runner = training_runner(state, adapter, windows=True)
        graphs = runner.window_graphs(cache)
        if graphs is not None and runner.is_recorded:
            whole = options.batch * options.seq
            sizes = PassSizes(whole, options.batch, pages_for(options.seq))
            count += graphs.warm_up(sizes, min(WINDOW, tokens, whole))
            kept.give(runner, lasts=True)
    return count
