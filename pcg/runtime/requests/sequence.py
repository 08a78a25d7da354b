"""A sequence: a request's state in the engine, from its submission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pcg.errors import PcgError
from pcg.runtime.guided.grammar import Grammar
from pcg.runtime.memory.pool import PageTable, pages_for
from pcg.runtime.memory.prefixes import Version
from pcg.runtime.model.batch import ANY_TOKEN
from pcg.runtime.requests.request import Chunk, Completion, Request
from pcg.runtime.sampling.sampler import Sampler
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
        sampler: what chooses its tokens; None in simulated time.
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
    sampler: Sampler | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    state: State = State.WAITING
    table: PageTable | None = None
    cached: int = 0
    length: int = field(init=False)
    generated: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    version: Version | None = None
    digests: list[bytes] = field(default_factory=list)
    known: int = 0
    found: int = 0
    _text: list[str] = field(default_factory=list)
    _stop: StopChecker = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.request.length
        params = self.request.params
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)

    @property
    def is_over(self) -> bool:
        return self.state not in (State.WAITING, State.RUNNING)

    @property
    def grammar(self) -> Grammar | None:
        """Where its output stands in what a guide allows; None without a guide."""
        return None if self.sampler is None else self.sampler.grammar

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

    def tpot_slack(self, now_s: float) -> tuple[float, float] | None:
        """Return its TPOT SLO, and the time until its next token violates it; None before any."""
        slo = self.tpot_slo_s
        if slo is None or self.first_token_s is None:
            return None
        return slo, self.first_token_s + slo * len(self.generated) - now_s

    def described(self) -> dict[str, object]:
        """Return the details of the event of its submission."""
        request = self.request
        return {
            "prompt_tokens": len(request.prompt_ids),
            "max_new_tokens": self.limit,
            "adapter": None if request.adapter is None else request.adapter.name,
            "tenant": request.tenant or None,
            "priority": request.priority,
            "ttft_slo_s": self.ttft_slo_s,
            "tpot_slo_s": self.tpot_slo_s,
        }

    def accept(self, token: int) -> Chunk:
        """Append a sampled token; its chunk carries the completion if it is the last."""
        if self.sampler is not None:
            self.sampler.commit(token)
        self.generated.append(token)
        self.length += 1
        params = self.request.params
        ended = token in self.stop_ids
        is_whole = ended or (self.grammar is not None and self.grammar.is_complete)
        may_end = len(self.generated) > params.min_tokens
        text = ""
        if self.decoder is not None and (params.include_stop_str_in_output or not ended):
            text = self._stop.push(self.decoder.push(token), may_end)
        full = len(self.generated) >= self.limit
        finished = is_whole or self._stop.matched is not None or full
        if finished and self.decoder is not None and self._stop.matched is None:
            text += self._stop.push(self.decoder.finish(), may_end)
            text += self._stop.finish()
        if text:
            self._text.append(text)
        if not finished:
            return Chunk(self.number, text, token, request_id=self.id)
        self.state = State.FINISHED
        named = token if token in params.stop_token_ids else None
        stopped_by = self._stop.matched or named
        reason = "stop" if is_whole or self._stop.matched is not None else "length"
        completion = self._completion(reason, stopped_by)
        return Chunk(self.number, text, token, completion, request_id=self.id)

    def end(self, state: State, error: PcgError | None = None) -> Chunk:
        """End it before its last token."""
        self.state = state
        return Chunk(self.number, "", None, self._completion(state.value), error, self.id)

    def _completion(self, reason: str, stop_reason: str | int | None = None) -> Completion:
        adapter = self.request.adapter
        return Completion(
            "".join(self._text),
            tuple(self.generated),
            reason,
            None if adapter is None else adapter.name,
            len(self.request.prompt_ids),
            self.found,
            stop_reason,
        )
