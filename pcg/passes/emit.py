"""Emit the source of a program: first the list of its functions, at last their text."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.codegen.emit import emit_serving, emit_training
from pcg.ir.program.program import Serving
from pcg.passes.pass_base import Pass
from pcg.passes.stages import Emitted, Functions, Trained, functions_of


class ListFunctions(Pass[Trained, Functions]):
    """List the functions of a program: of which graph each is, and what it is given and returns."""

    name = "functions"

    def run(self, before: Trained) -> Functions:
        return Functions(before, *functions_of(before))


@dataclass(frozen=True)
class Emit(Pass[Functions, Emitted]):
    """Write the functions of a model as Python, for a backend, "torch" or "triton"."""

    name = "emit"
    model: str
    backend: str

    def run(self, before: Functions) -> Emitted:
        source = emit_serving(self.model, before.serving, self.backend)
        serving = Serving(before.trained.serving, source)
        found = before.trained.training
        if found is None:
            return Emitted(before, serving, None)
        training = emit_training(self.model, before.training, self.backend)
        return Emitted(before, serving, found.with_source(training))
