"""A sequence: a request's state in the engine, from its submission to its end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pcg.errors import PcgError
from pcg.runtime.memory.pool import PageTable, pages_for
from pcg.runtime.memory.prefixes import Version
from pcg.runtime.model.batch import ANY_TOKEN
from pcg.runtime.requests.request import Chunk, Completion, Request
from pcg.runtime.text.detokenizer import StreamDecoder
from pcg.runtime.text.stopping import StopChecker


class State(StrEnum):
    """The state of a request; only the first two can change."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the engine; it keeps its generated tokens when it is preempted.

    Attributes:
        sampler: its random number generator; None if it is greedy.
        cached: number of its tokens whose keys and values are cached, virtual ones included.
        version: the version whose blocks it shares; None if blocks are not shared.
        digests: the digests of its blocks, as far as they are known.
        known: number of its tokens that were computed or found, up to its prompt's last.
        found: number of its prompt's tokens that were found and not computed.
    """

    id: str
    number: int
    request: Request
    limit: int
    submitted_s: float
    stop_ids: frozenset[int] = frozenset()
    decoder: StreamDecoder | None = None
    sampler: Any = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    state: State = State.WAITING
    table: PageTable | None = None
    cached: int = 0
    length: int = field(init=False)
    generated: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    latest_token_s: float | None = None
    version: Version | None = None
    digests: list[bytes] = field(default_factory=list)
    known: int = 0
    found: int = 0
    _text: list[str] = field(default_factory=list)
    _stop: StopChecker = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.request.length
        self._stop = StopChecker(self.request.params.stop)

    @property
    def is_over(self) -> bool:
        return self.state not in (State.WAITING, State.RUNNING)

    @property
    def pending(self) -> int:
        """Number of tokens that are not cached: all at first, then the latest."""
        return self.length - self.cached

    @property
    def most_pages(self) -> int:
        """The most pages that it will need: the last token is never cached."""
        return pages_for(self.request.length + self.limit - 1)

    def ids(self, start: int, stop: int) -> list[int]:
        """Return some of its tokens; virtual ones have any id."""
        virtual, prompt = self.request.virtual_tokens, self.request.prompt_ids
        if start >= self.request.length:
            return self.generated[start - self.request.length : stop - self.request.length]
        whole = [*[ANY_TOKEN] * virtual, *prompt, *self.generated]
        return whole[start:stop]

    def gap_left_s(self, now_s: float) -> float | None:
        """Return the time until the gap after its latest token exceeds its SLO; None without."""
        if self.tpot_slo_s is None or self.latest_token_s is None:
            return None
        return self.latest_token_s + self.tpot_slo_s - now_s

    def slack_s(self, now_s: float) -> float:
        """Return the time until the mean of its gaps exceeds its SLO."""
        if self.tpot_slo_s is None or self.first_token_s is None:
            return math.inf
        return self.first_token_s + self.tpot_slo_s * len(self.generated) - now_s

    def accept(self, token: int) -> Chunk:
        """Append a sampled token; its chunk carries the completion if it is the last."""
        self.generated.append(token)
        self.length += 1
        ended = token in self.stop_ids
        text = ""
        if self.decoder is not None:
            text = "" if ended else self._stop.push(self.decoder.push(token))
        full = len(self.generated) >= self.limit
        finished = ended or self._stop.matched is not None or full
        if finished and self.decoder is not None and self._stop.matched is None:
            text += self._stop.push(self.decoder.finish())
            text += self._stop.finish()
        if text:
            self._text.append(text)
        if not finished:
            return Chunk(self.number, text, token)
        self.state = State.FINISHED
        reason = "stop" if ended or self._stop.matched is not None else "length"
        return Chunk(self.number, text, token, self._completion(reason))

    def end(self, state: State, error: PcgError | None = None) -> Chunk:
        """End it before its last token."""
        self.state = state
        return Chunk(self.number, "", None, self._completion(state.value), error)

    def _completion(self, reason: str) -> Completion:
        adapter = self.request.adapter
        return Completion(
            "".join(self._text),
            tuple(self.generated),
            reason,
            None if adapter is None else adapter.name,
            len(self.request.prompt_ids),
            self.found,
        )
