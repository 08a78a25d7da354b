"""Small models after the first passes, made once for all tests that look at them."""

from __future__ import annotations

from functools import cache

from pcg.ir.program.program import ModelGraph
from pcg.passes.bypasses import Bypasses
from pcg.passes.pipeline import Compilation, run_passes
from pcg.trace import Trace
from tests.support.families import BY_NAME

LAYERS = 3


def _state(name: str, dtype: str, whole: bool) -> Compilation:
    config = BY_NAME[name].config(LAYERS)
    return Compilation(name, config, lambda _: Bypasses(), dtype, trains=False, whole=whole)


@cache
def traced(name: str, dtype: str = "float32", whole: bool = False) -> Trace:
    """The family's model as traced."""
    found = run_passes(_state(name, dtype, whole), last="trace").traced
    assert found is not None
    return found


@cache
def folded(name: str, dtype: str = "float32", whole: bool = False) -> ModelGraph:
    """The family's model, folded."""
    return _base(name, dtype, whole, "fold")


@cache
def raised(name: str, dtype: str = "float32", whole: bool = False) -> ModelGraph:
    """The family's model, folded and raised."""
    return _base(name, dtype, whole, "raise")


def _base(name: str, dtype: str, whole: bool, last: str) -> ModelGraph:
    state = Compilation(
        name,
        BY_NAME[name].config(LAYERS),
        lambda _: Bypasses(),
        dtype,
        trains=False,
        traced=traced(name, dtype, whole),
    )
    found = run_passes(state, first="fold", last=last).base
    assert found is not None
    return found
