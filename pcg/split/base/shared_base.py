"""A base executor that shares its weights and device with an engine that serves and trains.

Its pieces run on the engine's thread, in the time that steps leave (`GuestWork`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError
from typing import TypeVar

import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.kernels.torch.products import is_remote
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.scheduling.guest_work import RowWork
from pcg.runtime.executor import Executor
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.messages import GRAPH, Message, Piece

Result = TypeVar("Result")
_LOOKS_S = 0.5


class SharedBase(BaseExecutor):
    """Runs pieces between an engine's steps; a single thread calls it, and waits."""

    def __init__(self, executor: Executor, engine: AsyncEngine) -> None:
        super().__init__(executor)
        away = [name for name, weight in self.multiplied.items() if is_remote(weight)]
        if away:
            raise SplitError(
                f"the weights of {self.name} are at a base executor, which split clients connect "
                "to themselves; leave split_port out, or serve a model of this machine"
            )
        self._engine = engine
        self._guests = engine.host()

    def publish(self, publish: object) -> None:
        """Do nothing: the engine's thread reads the tensors, and clients fetch copies."""

    def run(self, piece: Piece, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a piece; EngineError: the engine has ended."""
        rows, parts = len(inputs[0]), list[Sequence[Tensor]]()

        def act(begin: int, end: int) -> None:
            part = super(SharedBase, self).run(piece, [tensor[begin:end] for tensor in inputs])
            parts.append([tensor.cpu() for tensor in part])  # which waits for a GPU

        work: tuple[object, ...] = piece.weights
        if piece.kind != GRAPH:
            work = tuple(tuple(self.multiplied[name].shape) for name in piece.weights)
        kind = (piece.kind, *work, inputs[0].dtype)
        self._wait(self._guests.submit(RowWork(kind, rows, act)))
        return (
            parts[0]
            if len(parts) == 1
            else [torch.cat(every) for every in zip(*parts, strict=True)]
        )

    def answer(self, message: Message) -> Message:
        return self._wait(self._engine.call(lambda: super(SharedBase, self).answer(message)))

    def _wait(self, future: Future[Result]) -> Result:
        while True:
            try:
                return future.result(_LOOKS_S)
            except TimeoutError:
                if self._engine.ended is not None:
                    raise self._engine.ended from None
                # The last request may have been cancelled between two steps.
                self._guests.wake()
