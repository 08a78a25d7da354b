"""Users of a model's state: engines over it, and the thread of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from pcg.peft.adapter import Adapter
from pcg.runtime.model.specialised import ServingProgram

Result = TypeVar("Result")


class StateListener(Protocol):
    """Is told when the state changes; every engine over it is one."""

    def use_program(self, program: ServingProgram) -> None:
        """Serve by another program from now on."""

    def forget(self, adapter: Adapter, *, is_gone: bool) -> None:
        """Drop what is kept of an adapter that changed; if `is_gone`, nobody can name it now."""


class EngineThread(Protocol):
    """A thread that runs an engine's steps; nothing else may run the model meanwhile."""

    def run(self, act: Callable[[], Result]) -> Result:
        """Run a function between two steps, and wait for it."""
