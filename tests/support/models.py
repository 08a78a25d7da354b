"""Small models after the first passes, made once for all tests that look at them."""

from __future__ import annotations

from functools import cache

from pcg.ir.program.program import ModelGraph
from pcg.options import PlanOptions
from pcg.passes.pipeline import Pipeline, Settings, pipeline
from pcg.passes.stages import Base, Traced
from pcg.trace import TracedModel
from tests.support.families import BY_NAME

LAYERS = 3


def _passes(dtype: str, whole: bool) -> Pipeline:
    return pipeline(Settings(PlanOptions(dtype=dtype), whole=whole))


@cache
def traced(name: str, dtype: str = "float32", whole: bool = False) -> TracedModel:
    """The family's model as traced."""
    return _passes(dtype, whole).trace.run(BY_NAME[name].config(LAYERS)).trace


@cache
def folded(name: str, dtype: str = "float32", whole: bool = False) -> ModelGraph:
    """The family's model, folded."""
    return _passes(dtype, whole).fold.run(Traced(traced(name, dtype, whole))).model


@cache
def raised(name: str, dtype: str = "float32", whole: bool = False) -> ModelGraph:
    """The family's model, folded and raised."""
    folded_model = Base(folded(name, dtype, whole))
    return _passes(dtype, whole).raise_operators.run(folded_model).model
