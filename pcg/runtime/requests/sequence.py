"""A sequence: a request's state in the engine, from its submission to its end."""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from pcg.errors import PcgError
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.guided.grammar import Grammar
from pcg.runtime.memory.pool import PageTable, pages_for
from pcg.runtime.memory.prefixes import Version
from pcg.runtime.model.batch import ANY_TOKEN
from pcg.runtime.requests.request import Chunk, Completion, Request
from pcg.runtime.sampling.logprobs import TokenLogprobs, not_a_number
from pcg.runtime.sampling.sampler import Sampler
from pcg.runtime.sampling.sampling import UNDRAWN, undrawn_error
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
        admitted_s: when it was first admitted; None before.
        cached: number of its tokens whose keys and values are cached, virtual ones included, or
            are being computed.
        length: number of its tokens, those ahead included.
        ahead: number of its last tokens that the device chooses and the host has not read, 0 or 1.
        due_s: when that one is expected.
        begun: how often it began to run, as it is computed again after it was preempted.
        version: the version whose blocks it shares; None if blocks are not shared.
        digests: the digests of its blocks, as far as they are known.
        known: number of its tokens that were computed or found, up to its prompt's last.
        found: number of its prompt's tokens that were found and not computed.
        logprobs: those of the generated tokens, if the request asks for them.
        likeliest: the number of likeliest tokens to find for each; None for no logprobs.
        prompt_logprobs: those of the prompt's tokens behind the first, as far as they are computed.
        read: number of its tokens whose rows need not be computed to be read: those that were, and
            virtual ones.
        last_read: number of its tokens whose rows the request reads, and those before them.
        pooled: the sum of the last hidden states that it has read; None before the first.
        echoed: text that its first chunk begins with.
        choice: its place among the continuations of its prompt.
        adapter_version: the version of its adapter that answers; None for the base.
        followers: the other continuations, while they wait for the prompt to be computed.
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
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    admitted_s: float | None = None
    first_token_s: float | None = None
    latest_token_s: float | None = None
    ahead: int = 0
    due_s: float = 0.0
    begun: int = 0
    version: Version | None = None
    digests: list[bytes] = field(default_factory=list)
    known: int = 0
    found: int = 0
    likeliest: int | None = field(init=False)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    read: int = field(init=False)
    last_read: int = 0
    pooled: Tensor | None = None
    echoed: str = ""
    choice: int = 0
    adapter_version: AdapterVersion | None = None
    followers: list[Sequence] = field(default_factory=list)
    _name: str = field(init=False)
    _text: list[str] = field(default_factory=list)
    _stop: StopChecker = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.request.length
        self._name = self.request.named(self.number)
        self.likeliest = self.request.params.of_tokens
        params = self.request.params
        self.read = self.request.virtual_tokens
        if params.of_prompt is not None:
            self.last_read = self.length - 1
        if self.request.pooling is not None:
            self.last_read = self.length
            self.read = self.read if self.request.pooling == "mean" else self.length - 1
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)

    @property
    def is_over(self) -> bool:
        return self.state not in (State.WAITING, State.RUNNING)

    @property
    def grammar(self) -> Grammar | None:
        """The state of its guided output; None without a guide."""
        return None if self.sampler is None else self.sampler.grammar

    @property
    def pending(self) -> int:
        """Number of tokens that are not cached: all at first, then the latest."""
        return self.length - self.cached

    @property
    def told(self) -> int:
        """Number of its tokens that the host knows."""
        return self.length - self.ahead

    @property
    def is_spent(self) -> bool:
        """True if it ends, at the latest, with a token that is not read yet."""
        return self.ahead > 0 and len(self.generated) + self.ahead >= self.limit

    @property
    def has_prompt(self) -> bool:
        """True if its prompt is computed."""
        return self.cached >= self.request.length

    @property
    def most_pages(self) -> int:
        """The most pages that it will need: the last token is never cached."""
        return pages_for(self.request.length + max(self.limit, 1) - 1)

    @property
    def skippable(self) -> int:
        """The most of its first tokens that need not be computed if their blocks are found."""
        return self.read if self.reads else self.length - 1

    @property
    def reads(self) -> bool:
        """True if its request reads rows of the prompt that it has not read yet."""
        return self.read < self.last_read

    def unread(self, start: int, stop: int) -> range:
        """Return those of some tokens whose rows the request reads, and has not read yet."""
        return range(max(start, self.read), min(stop, self.last_read))

    def begin(self, now_s: float) -> None:
        """Run from now on, for the first time or again."""
        self.state = State.RUNNING
        self.begun += 1
        if self.admitted_s is None:
            self.admitted_s = now_s

    def launched(self, count: int, due_s: float) -> None:
        """Note that its next tokens run, and with the last of them a token is chosen.

        Args:
            due_s: when the step is expected to end.
        """
        self.cached += count
        if self.limit and not self.pending:
            self.length, self.ahead, self.due_s = self.length + 1, self.ahead + 1, due_s

    def forget_cached(self) -> None:
        """Have none of its tokens cached, and none ahead: what runs of them is not read."""
        self.cached, self.ahead = 0, 0
        self.length = self.request.length + len(self.generated)

    def ids(self, start: int, stop: int) -> list[int]:
        """Return some of its tokens; virtual ones have any id."""
        virtual, prompt = self.request.virtual_tokens, self.request.prompt_ids
        if start >= self.request.length:
            return self.generated[start - self.request.length : stop - self.request.length]
        whole = [*[ANY_TOKEN] * virtual, *prompt, *self.generated]
        return whole[start:stop]

    def gap_left_s(self, now_s: float) -> float | None:
        """Return the time until the gap after its latest token exceeds its SLO; None without."""
        latest_s = self.due_s if self.ahead else self.latest_token_s
        if self.tpot_slo_s is None or latest_s is None:
            return None
        return latest_s + self.tpot_slo_s - now_s

    def slack_s(self, now_s: float) -> float:
        """Return the time until the mean of its gaps exceeds its SLO."""
        first_s = self.first_token_s
        if first_s is None and self.ahead:
            first_s = self.due_s
        if self.tpot_slo_s is None or first_s is None:
            return math.inf
        return first_s + self.tpot_slo_s * (len(self.generated) + self.ahead) - now_s

    def described(self) -> dict[str, object]:
        """Return the details of the event of its submission."""
        request = self.request
        found = {"continues": self._name} if self.choice else {}
        return {
            **found,
            "prompt_tokens": len(request.prompt_ids),
            "choices": 1 + len(self.followers),
            "max_new_tokens": self.limit,
            "adapter": self._adapter_name,
            "adapter_version": None
            if self.adapter_version is None
            else self.adapter_version.number,
            "tenant": request.tenant or None,
            "priority": request.priority,
            "ttft_slo_s": self.ttft_slo_s,
            "tpot_slo_s": self.tpot_slo_s,
        }

    def take(
        self,
        token: int | None,
        logprobs: TokenLogprobs | None = None,
        prompt: List[TokenLogprobs] = (),
    ) -> Chunk | None:
        """Take what a step computed; None while tokens are pending.

        Args:
            token: the next token; None where none is due.
            logprobs: the token's, if they are asked for.
            prompt: those of the prompt's next tokens.
        Raises:
            GenerationError: a log-probability is not a number, or there is no next token.
        """
        if prompt:
            if not all(one.is_number for one in prompt):
                raise not_a_number(self._adapter_name)
            self.prompt_logprobs += prompt
            self.read += len(prompt)
        if token is not None:
            return self.accept(token, logprobs)
        if self.limit or self.pending:
            return None
        self.state = State.FINISHED
        return self._chunk(self._said(""), None, self._completion("length"))

    def pool(self, states: Tensor, count: int) -> None:
        """Take the sum of so many further last hidden states.

        GenerationError: they are not finite.
        """
        if not states.isfinite().all():
            raise not_a_number(self._adapter_name)
        self.pooled = states if self.pooled is None else self.pooled + states
        self.read += count

    def _embedding(self) -> Tensor | None:
        if self.pooled is None or self.reads:
            return None
        is_mean = self.request.pooling == "mean"
        state = self.pooled / len(self.request.prompt_ids) if is_mean else self.pooled
        return state / state.norm() if self.request.normalize else state

    def follow(self, first: Sequence) -> None:
        """Take over what another continuation has read of the prompt."""
        self.read, self.prompt_logprobs = first.read, first.prompt_logprobs
        self.known, self.found = first.known, first.found

    @property
    def cumulative_logprob(self) -> float:
        return sum(one.logprob for one in self.logprobs)

    @property
    def _adapter_name(self) -> str | None:
        adapter = self.request.adapter
        return None if adapter is None else adapter.name

    def _said(self, text: str) -> str:
        """Return a chunk's text, the first one's behind what is echoed, and note it."""
        if self.echoed:
            text, self.echoed = self.echoed + text, ""
        if text:
            self._text.append(text)
        return text

    def accept(self, token: int, logprobs: TokenLogprobs | None = None) -> Chunk:
        """Append a sampled token; its chunk carries the completion if it is the last.

        Raises:
            GenerationError: there is no token, or its log-probability is not a number.
        """
        if token == UNDRAWN:
            raise undrawn_error(self.sampler, self._adapter_name)
        if logprobs is not None:
            if not logprobs.is_number:
                raise not_a_number(self._adapter_name)
            self.logprobs.append(logprobs)
        if self.sampler is not None:
            self.sampler.commit(token)
        self.generated.append(token)
        if self.ahead:
            self.ahead -= 1
        else:
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
        text = self._said(text)
        if not finished:
            return self._chunk(text, token, logprobs=logprobs)
        self.state = State.FINISHED
        named = token if token in params.stop_token_ids else None
        stopped_by = self._stop.matched or named
        reason = "stop" if is_whole or self._stop.matched is not None else "length"
        return self._chunk(text, token, self._completion(reason, stopped_by), logprobs=logprobs)

    def end(self, state: State, error: PcgError | None = None) -> Chunk:
        """End it before its last token."""
        self.state = state
        return self._chunk("", None, self._completion(state.value), error)

    def _chunk(
        self,
        text: str,
        token: int | None,
        completion: Completion | None = None,
        error: PcgError | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> Chunk:
        choice, name = self.choice, self._name
        prompt = self._all_prompt_logprobs() if len(self.generated) < 2 else None
        return Chunk(
            self.number, text, token, completion, error, name, logprobs, choice, 0, prompt,
            self.adapter_version,
        )  # fmt: skip

    def _all_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        if self.request.params.of_prompt is None:
            return None
        return (None, *self.prompt_logprobs)

    def _completion(self, reason: str, stop_reason: str | int | None = None) -> Completion:
        params = self.request.params
        return Completion(
            "".join(self._text),
            tuple(self.generated),
            reason,
            self._adapter_name,
            len(self.request.prompt_ids),
            self.found,
            stop_reason,
            None if params.logprobs is None else tuple(self.logprobs),
            self._all_prompt_logprobs(),
            self.choice,
            self._embedding(),
            self.adapter_version,
            None if self.admitted_s is None else self.admitted_s - self.submitted_s,
        )
