"""The engine of any rank but the first: does what the first one orders, until that is closed.

with executor.engine(limits).start() as running:  # on every rank
    if executor.ranks.rank == 0:
        …                                         # the others wait at the end of the `with`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from pcg.errors import EngineError
from pcg.parallel.ranks.line import Line
from pcg.runtime.data.limits import DataLimits
from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.ranks.follower import Follower
from pcg.runtime.engine.ranks.ranked_engine import RankedEngine
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.stream import Stream
from pcg.runtime.training.options import JobArguments

Result = TypeVar("Result")


class FollowingEngine(RankedEngine):
    """The async engine of a rank that follows: it can be waited for, and tells how it goes."""

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: Callable[[JobArguments], Job],
        line: Line,
        free: Callable[[], None],
    ) -> None:
        self._follower = Follower(line, engine, state, prepare_job)
        super().__init__(engine, state, prepare_job, DataLimits(), line, free)

    def follow(self) -> None:
        """Wait until the first rank closes its engine.

        Raises:
            EngineError: it ended by an error, as where a rank is lost; the engine is over here.
        """
        error = self.join()
        if error.__cause__ is not None:
            raise error

    def close(self) -> None:
        """Wait until the first rank closes its engine. EngineError: as of `follow`."""
        self.follow()

    def __exit__(self, *raised: object) -> None:
        self._leave(raised[1])

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self._leave, raised[1])

    def _leave(self, raised: object) -> None:
        """Wait for the end; after an error on this rank, tell the others that it has left."""
        if raised is None:
            self.follow()
        else:
            self._line.leave_word(f"{type(raised).__name__}: {raised}")

    def _run_steps(self) -> None:
        rank = self._line.rank
        try:
            why = self._follower.follow()
            ended = EngineError(f"rank 0, which rank {rank} follows, ended its engine: {why}")
        except BaseException as error:
            ended = EngineError(
                f"the engine's thread on rank {rank} ended by {type(error).__name__}: {error}"
            )
            ended.__cause__ = error
        self._follower.close()
        self._end(ended)

    # ------------------------------------------------------------------------------- refused

    def _refuse(self) -> NoReturn:
        if self.ended is not None:
            raise self.ended
        raise EngineError(
            f"this is rank {self._line.rank} of an engine over {self._line.size} ranks, which "
            "follows rank 0 and takes nothing itself; make the call on rank 0 alone, and follow() "
            "on the others"
        )

    def _check_open(self) -> None:
        self._refuse()

    def submit_request(self, request: Request, make: Any = Stream) -> Stream:
        self._refuse()

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        self._refuse()

    def stream_all(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        self._refuse()

    def remove_adapter(self, name: str) -> Future[None]:
        self._refuse()

    def drain(self, timeout_s: float | None = None) -> Future[None]:
        self._refuse()
