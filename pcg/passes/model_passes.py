"""The passes that make a model with bypass networks of a configuration: trace, fold and attach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pcg.ir.program.program import ModelGraph
from pcg.passes.attach import attach
from pcg.passes.bypasses import Bypasses
from pcg.passes.fold import Fold
from pcg.passes.pass_base import Pass
from pcg.passes.stages import Attached, Base, Traced
from pcg.trace import ToTrace, trace_once


@dataclass(frozen=True)
class Trace(Pass[ToTrace, Traced]):
    """Trace the model of a config.json, or a module.

    Attributes:
        dtype: torch's name of the dtype; None for the model's own.
        whole: True to trace every layer instead of one of each kind (and one more).
    """

    name = "trace"
    dtype: str | None = None
    whole: bool = False

    def run(self, before: ToTrace) -> Traced:
        return Traced(trace_once(before, self.dtype, self.whole))


class FoldTrace(Pass[Traced, Base]):
    """Fold a traced model."""

    name = Fold.name

    def run(self, before: Traced) -> Base:
        trace = before.trace
        return Base(Fold(trace.layers_path, tuple(trace.schedule)).run(trace.graph))


@dataclass(frozen=True)
class Attach(Pass[Base, Attached]):
    """Attach bypass networks, for what serves and, if that is asked for, for what trains."""

    name = "attach"
    bypasses: Callable[[ModelGraph], Bypasses]
    trains: bool = True

    def run(self, before: Base) -> Attached:
        bypasses = self.bypasses(before.model)
        serving = attach(before.model, bypasses.for_serving())
        training = attach(before.model, bypasses) if self.trains and bypasses else None
        return Attached(before.model, serving, training)
