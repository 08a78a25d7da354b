"""Compiling a program's base anew, for adapters at other sites and for larger steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pcg.ir.program.program import ModelGraph, Program, Serving, Training
from pcg.kernels import attention_libraries
from pcg.options import CompileOptions
from pcg.parallel.costs.catalog import find_cost_model
from pcg.passes.bypasses import Bypasses, bypasses_of
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.placement.call_pieces import CallPieces
from pcg.passes.stages import Base, Emitted
from pcg.peft.recipe import Recipe


def settings_of(
    name: str,
    config: Mapping[str, Any],
    recipes: Collection[Recipe],
    options: CompileOptions,
    place: CallPieces | None = None,
) -> Settings:
    """Return the settings of a pipeline for a program's own options.

    Args:
        place: cuts the layers between a base and a client; None for one process.
    """
    model_type = str(config["model_type"])

    def bypasses(base: ModelGraph) -> Bypasses:
        return bypasses_of(base, recipes, model_type, base.adapter_dtype)

    costs = None if options.costs is None else find_cost_model(options.costs)
    libraries = attention_libraries.libraries_of(options.attention)
    return Settings(options, name, bypasses, costs, options.backend, libraries, place=place)


@dataclasses.dataclass(frozen=True)
class BaseSpecialiser:
    """Compiles a program's base anew.

    Attributes:
        place: cuts the layers between a base and a client; None for one process.
    """

    place: CallPieces | None = None

    def serving(self, program: Program, recipes: Sequence[Recipe]) -> Serving:
        return self._emitted(program, recipes, trains=False).serving

    def training(
        self,
        program: Program,
        recipe: Recipe,
        windows: bool = False,
        step: tuple[int, int] | None = None,
    ) -> Training:
        training = self._emitted(program, [recipe], windows=windows, step=step).training
        assert training is not None  # a recipe attaches somewhere, or is refused
        return training

    def _emitted(self, program: Program, recipes: Sequence[Recipe], **changed: Any) -> Emitted:
        settings = settings_of(program.name, program.config, recipes, program.options, self.place)
        return pipeline(dataclasses.replace(settings, **changed)).emitted(Base(program.base))
