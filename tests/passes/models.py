"""Small models after the first passes, made once for all tests that look at them."""

from __future__ import annotations

from functools import lru_cache

from pcg.compiler import Compilation, run_passes
from pcg.ir.program import ModelGraph
from pcg.passes.attach import Bypasses
from pcg.trace import Trace
from tests.families.families import BY_NAME

LAYERS = 3


def _state(name: str, dtype: str, whole: bool, layers: int) -> Compilation:
    config = BY_NAME[name].config(layers)
    return Compilation(name, config, lambda _: Bypasses(), dtype, trains=False, whole=whole)


@lru_cache(maxsize=None)
def traced(name: str, dtype: str = "float32", whole: bool = False, layers: int = LAYERS) -> Trace:
    """The family's model as traced."""
    found = run_passes(_state(name, dtype, whole, layers), last="trace").traced
    assert found is not None
    return found


@lru_cache(maxsize=None)
def folded(name: str, dtype: str = "float32", whole: bool = False, layers: int = LAYERS) -> ModelGraph:
    """The family's model, folded."""
    return _base(name, dtype, whole, layers, "fold")


@lru_cache(maxsize=None)
def raised(name: str, dtype: str = "float32", whole: bool = False, layers: int = LAYERS) -> ModelGraph:
    """The family's model, folded and raised."""
    return _base(name, dtype, whole, layers, "raise")


def _base(name: str, dtype: str, whole: bool, layers: int, last: str) -> ModelGraph:
    state = Compilation(
        name,
        BY_NAME[name].config(layers),
        lambda _: Bypasses(),
        dtype,
        trains=False,
        traced=traced(name, dtype, whole, layers),
    )
    found = run_passes(state, first="fold", last=last).base
    assert found is not None
    return found
