"""Suspects: the requests and jobs of a failed step, which run separately to find the faulty one.

A step is a single batch, so an error does not name its owner. A request or job that fails by itself
is dropped, and the others continue: results of a step are kept only once the whole step has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias
from weakref import WeakKeyDictionary

from pcg.errors import GenerationError
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence

Owner: TypeAlias = Sequence | Job | Adapter


def owner_of(error: BaseException) -> Owner | None:
    """Guess the owner of the work that raised an error, from the local variables of its frames.

    Loop variables outlive their loops, so the guess may be wrong: the owner runs by itself before
    it is dropped.
    """
    owner, trace = None, error.__traceback__
    while trace is not None:
        local = trace.tb_frame.f_locals
        owners = [value for value in local.values() if isinstance(value, Sequence | Job | Adapter)]
        owner = owners[-1] if owners else owner
        trace = trace.tb_next
    return owner


class Suspects:
    """Requests and jobs that have to run by themselves, in turn."""

    def __init__(self) -> None:
        # The tokens that each had drawn before; a job has none.
        self._waiting: dict[Sequence | Job, int] = {}
        self._broken: WeakKeyDictionary[ServedAdapter, str] = WeakKeyDictionary()

    @property
    def current(self) -> Sequence | Job | None:
        """The request or job that runs by itself now; None for none."""
        for over in [suspect for suspect in self._waiting if not _goes_on(suspect)]:
            del self._waiting[over]
        return next(iter(self._waiting), None)

    def add(self, ran: Iterable[Sequence | Job]) -> None:
        """Add the requests and jobs of a failed step."""
        for suspect in ran:
            self._waiting.setdefault(suspect, _drawn(suspect))

    def clear(self) -> None:
        """Remove all suspects."""
        self._waiting.clear()

    def ran(self, suspect: Sequence | Job | None, has_tokens: bool) -> None:
        """Remove a suspect that ran by itself without an error, or had no room to run.

        Args:
            has_tokens: True if tokens ran. A sequence stays a suspect until it has drawn a token.
        """
        if suspect is None or self.current is not suspect:
            return
        is_sequence = isinstance(suspect, Sequence)
        if not (is_sequence and has_tokens and _drawn(suspect) == self._waiting[suspect]):
            del self._waiting[suspect]

    def condemn(self, adapter: Adapter, error: Exception) -> None:
        """Refuse further requests of an adapter whose weights cannot be served."""
        self._broken[adapter] = (
            f"adapter {adapter.name!r} cannot be served, as it failed by {type(error).__name__}: "
            f"{error}; repair its files and load it again"
        )

    def forgive(self, adapter: ServedAdapter) -> None:
        """Accept an adapter's requests again, after its weights have changed."""
        self._broken.pop(adapter, None)

    def why_broken(self, request: Request) -> GenerationError | None:
        """Return the error that refuses a request of a failed adapter; None to accept it."""
        why = None if request.adapter is None else self._broken.get(request.adapter)
        return None if why is None else GenerationError(why)


def _drawn(suspect: Sequence | Job) -> int:
    return len(suspect.generated) if isinstance(suspect, Sequence) else 0


def _goes_on(suspect: Sequence | Job) -> bool:
    return not (suspect.is_over or suspect.state is JobState.PAUSED)
