"""Emit the functions of a program as one Python file, for PyTorch or for Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pcg.codegen import torch_emitter, triton_emitter
from pcg.codegen.functions import Function


class Emitter(Protocol):
    """The module that writes programs for one backend."""

    SERVING: Sequence[str]

    def emit_function(self, function: Function) -> str: ...

    def emit_module(self, title: str, note: str, functions: Sequence[str]) -> str: ...


EMITTERS: Mapping[str, Emitter] = {"torch": torch_emitter, "triton": triton_emitter}


def emit_serving(name: str, functions: Sequence[Function], backend: str) -> str:
    """The source of the functions that serve, and of what else serving calls."""
    emitter = EMITTERS[backend]
    sources = [*map(emitter.emit_function, functions), *emitter.SERVING]
    return emitter.emit_module(
        name, "It generates, for adapters of any rank in one batch.", sources
    )


def emit_training(name: str, functions: Sequence[Function], backend: str) -> str:
    """The source of the functions that train."""
    emitter = EMITTERS[backend]
    sources = list(map(emitter.emit_function, functions))
    return emitter.emit_module(name, "It finetunes one adapter at a time.", sources)
