"""A sequence: a request's state in the engine, from its submission to its end."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from pcg.errors import PcgError
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.memory.pool import PageTable, pages_for
from pcg.runtime.model.batch import ANY_TOKEN
from pcg.runtime.requests.request import Chunk, Completion, Request
from pcg.runtime.sampling.grammars import Grammar
from pcg.runtime.sampling.logprobs import TokenLogprobs, not_a_number
from pcg.runtime.sampling.sampling import UNDRAWN, Sampler, undrawn_error
from pcg.runtime.text.output_text import OutputText


class State(StrEnum):
    """The state of a request; only the first two can change."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(eq=False)
class Version:
    """The blocks of a version of an adapter, or of the base: pages by digest.

    Attributes:
        states: slots of the recurrent states after a block, by the block's digest.
    """

    pages: dict[bytes, int] = field(default_factory=dict)
    states: dict[bytes, int] = field(default_factory=dict)
    is_current: bool = True


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of a sequence.

    Attributes:
        version: the version that the sequence shares blocks with; None if blocks are not shared.
        digests: the digests of the first blocks, as far as known.
        known: number of the prompt's tokens that were computed or found.
        found: number of the prompt's tokens that were found and not computed.
        common: number of the prompt's tokens in blocks that were there, with recurrent states.
        restored: the slot of the recurrent states to go on from; -1 for none.
    """

    version: Version | None = None
    digests: list[bytes] = field(default_factory=list)
    known: int = 0
    found: int = 0
    common: int = 0
    restored: int = -1

    def copy(self) -> SequenceBlocks:
        return SequenceBlocks(self.version, self.digests.copy(), self.known, self.found)


@dataclass(slots=True)
class Times:
    """The times of a request, seconds on the engine's clock, and its SLOs.

    Attributes:
        admitted_s: time of the first admission; None before.
        due_s: expected time of the token `ahead`.
    """

    submitted_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    latest_token_s: float | None = None
    due_s: float = 0.0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


@dataclass(slots=True)
class PromptRows:
    """The prompt rows that a request reads, as log-probabilities or hidden states.

    Attributes:
        read: number of first tokens without rows left to read: virtual tokens, and tokens with rows
            that were read.
        stop: number of tokens up to the last row to read.
        logprobs: log-probabilities of the prompt's tokens after the first, as far as computed.
        pooled: the sum of the hidden states read so far; None before the first.
    """

    read: int
    stop: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: Tensor | None = None

    @property
    def are_left(self) -> bool:
        """True if rows are left to read."""
        return self.read < self.stop

    def unread(self, start: int, stop: int) -> range:
        """Return the tokens `start` to `stop - 1` with rows left to read."""
        return range(max(start, self.read), min(stop, self.stop))

    @classmethod
    def of(cls, request: Request) -> PromptRows | None:
        """Return the rows that a request reads; None for none."""
        virtual = request.virtual_tokens
        if request.pooling is not None:
            return cls(virtual if request.pooling == "mean" else request.length - 1, request.length)
        if request.params.of_prompt is not None:
            return cls(virtual, request.length - 1)
        return None


@dataclass(slots=True)
class TokenRoutes:
    """The experts that a sequence's tokens chose, [layers, k] each, as far as computed.

    Attributes:
        prompt: those of the prompt's tokens, which all continuations share.
    """

    prompt: list[Tensor] = field(default_factory=list)
    further: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.further)

    def rows(self) -> list[Tensor]:
        return [*self.prompt, *self.further]

    def add(self, start: int, chosen: Tensor, length: int) -> None:
        """Add the choices of tokens from `start` on, [n, layers, k]; computed ones stay.

        Args:
            length: number of the prompt's tokens.
        """
        for row in chosen[max(len(self) - start, 0) :]:
            (self.prompt if len(self.prompt) < length else self.further).append(row)


@dataclass(eq=False, slots=True)
class Sequence:
    """A request, or a continuation of a request, in the engine.

    A preempted sequence keeps its generated tokens.

    Attributes:
        id: the name of this continuation in events; `request_id` is the request's name.
        number: the request's number in the engine, which is the index of its chunks.
        limit: the maximum number of tokens to generate.
        choice: the index among the continuations of the prompt.
        text: the text of the output.
        stop_ids: tokens that end the output.
        sampler: the sampler of the output; None in simulated time.
        adapter_version: the version of the adapter; None for the base.
        followers: the other continuations, until the prompt is computed.
        cached: number of tokens with cached keys and values, including virtual tokens and tokens of
            the running step.
        length: number of all tokens, including the token ahead.
        ahead: number of last tokens that the device draws and the host has not read, 0 or 1.
        begun: number of starts, as a preempted sequence starts again.
        rows: the rows of the prompt that the request reads; None for none.
        routes: the experts of the tokens, if requested.
        likeliest: the number of likeliest tokens to find for each token; None for no logprobs.
        logprobs: log-probabilities of the generated tokens, if requested.
    """

    id: str
    number: int
    request: Request
    _: KW_ONLY
    limit: int
    choice: int = 0
    text: OutputText = field(default_factory=OutputText)
    stop_ids: frozenset[int] = frozenset()
    sampler: Sampler | None = None
    adapter_version: AdapterVersion | None = None
    followers: list[Sequence] = field(default_factory=list)
    state: State = State.WAITING
    times: Times = field(default_factory=Times)
    table: PageTable | None = None
    blocks: SequenceBlocks = field(default_factory=SequenceBlocks)
    cached: int = 0
    length: int = field(init=False)
    request_id: str = field(init=False)
    ahead: int = 0
    begun: int = 0
    rows: PromptRows | None = field(init=False)
    generated: list[int] = field(default_factory=list)
    routes: TokenRoutes | None = field(init=False)
    likeliest: int | None = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = self.request.length
        self.request_id = self.request.named(self.number)
        self.rows = PromptRows.of(self.request)
        self.routes = TokenRoutes() if self.request.params.routed_experts else None
        self.likeliest = self.request.params.of_tokens

    @property
    def is_over(self) -> bool:
        return self.state not in (State.WAITING, State.RUNNING)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of a guided output; None without a guide."""
        return None if self.sampler is None else self.sampler.grammar

    @property
    def pending(self) -> int:
        """Number of uncached tokens: all tokens at first, then the latest."""
        return self.length - self.cached

    @property
    def is_spent(self) -> bool:
        """True if the output ends at the latest with the token ahead."""
        return self.ahead > 0 and len(self.generated) + self.ahead >= self.limit

    @property
    def has_prompt(self) -> bool:
        """True if the prompt is computed."""
        return self.cached >= self.request.length

    @property
    def most_pages(self) -> int:
        """The maximum number of pages; the last token is never cached."""
        return pages_for(self.request.length + max(self.limit, 1) - 1)

    @property
    def reads(self) -> bool:
        """True if rows of the prompt are left to read."""
        return self.rows is not None and self.rows.are_left

    @property
    def skippable(self) -> int:
        """The maximum number of first tokens that blocks found in the cache may replace."""
        rows = self.rows
        most = self.length - 1 if rows is None or not rows.are_left else rows.read
        return most if self.routes is None else min(most, len(self.routes))

    def begin(self, now_s: float) -> None:
        """Start running, for the first time or again."""
        self.state = State.RUNNING
        self.begun += 1
        if self.times.admitted_s is None:
            self.times.admitted_s = now_s

    def launched(self, count: int, due_s: float) -> None:
        """Record the launch of the next tokens; the last of all tokens draws a token ahead.

        Args:
            due_s: the expected end of the step.
        """
        self.cached += count
        if self.cached == self.length and self.limit:
            self.length += 1
            self.ahead += 1
            self.times.due_s = due_s

    def forget_cached(self) -> None:
        """Discard the cached tokens and the token ahead; results of a running step are not read."""
        self.cached, self.ahead = 0, 0
        self.length = self.request.length + len(self.generated)

    def ids(self, start: int, stop: int) -> list[int]:
        """Return tokens `start` to `stop - 1`; virtual tokens have placeholder ids."""
        virtual, prompt = self.request.virtual_tokens, self.request.prompt_ids
        if start >= self.request.length:
            return self.generated[start - self.request.length : stop - self.request.length]
        whole = [*[ANY_TOKEN] * virtual, *prompt, *self.generated]
        return whole[start:stop]

    def described(self) -> dict[str, object]:
        """Return the details of the event SUBMITTED."""
        request, version = self.request, self.adapter_version
        details = {"continues": self.request_id} if self.choice else {}
        return {
            **details,
            "prompt_tokens": len(request.prompt_ids),
            "choices": 1 + len(self.followers),
            "max_new_tokens": self.limit,
            "adapter": self._adapter_name,
            "adapter_version": None if version is None else version.number,
            "tenant": request.tenant or None,
            "priority": request.priority,
            "ttft_slo_s": self.times.ttft_slo_s,
            "tpot_slo_s": self.times.tpot_slo_s,
        }

    def read_prompt(self, logprobs: List[TokenLogprobs]) -> None:
        """Append log-probabilities of the prompt's next tokens. GenerationError: NaN."""
        assert self.rows is not None
        if not all(token.is_number for token in logprobs):
            raise not_a_number(self._adapter_name)
        self.rows.logprobs += logprobs
        self.rows.read += len(logprobs)

    def pool(self, states: Tensor, count: int) -> None:
        """Add the sum of `count` further last hidden states.

        Raises:
            GenerationError: a state is not finite.
        """
        rows = self.rows
        assert rows is not None
        if not states.isfinite().all():
            raise not_a_number(self._adapter_name)
        rows.pooled = states if rows.pooled is None else rows.pooled + states
        rows.read += count

    def follow(self, first: Sequence) -> None:
        """Copy the prompt's rows and blocks of the continuation that has computed them."""
        self.rows, self.blocks = first.rows, first.blocks.copy()
        if first.routes is not None:
            self.routes = TokenRoutes(first.routes.prompt)

    @property
    def cumulative_logprob(self) -> float:
        return sum(token.logprob for token in self.logprobs)

    @property
    def _adapter_name(self) -> str | None:
        adapter = self.request.adapter
        return None if adapter is None else adapter.name

    def end_without_token(self) -> Chunk | None:
        """End a request without tokens to generate, after its prompt; else return None."""
        if self.limit or self.pending:
            return None
        self.state = State.FINISHED
        return self._last_chunk(self.text.take_echo(), self._completion("length"))

    def accept(self, token: int, logprobs: TokenLogprobs | None = None) -> Chunk:
        """Append a sampled token; return its chunk, with the completion if the output ends.

        Raises:
            GenerationError: no token could be drawn, or its log-probability is NaN.
        """
        if token == UNDRAWN:
            raise undrawn_error(self.sampler, self._adapter_name)
        if logprobs is not None:
            if not logprobs.is_number:
                raise not_a_number(self._adapter_name)
            self.logprobs.append(logprobs)
        sampler, params, output = self.sampler, self.request.params, self.text
        is_whole = token in self.stop_ids
        keeps_text = not is_whole or params.include_stop_str_in_output
        if sampler is not None and not (sampler.is_greedy and sampler.is_plain):
            sampler.commit(token)
            is_whole |= sampler.grammar is not None and sampler.grammar.is_complete
        self.generated.append(token)
        count = len(self.generated)
        if self.ahead:
            self.ahead -= 1
        else:
            self.length += 1
        may_end = count > params.min_tokens
        text = output.push(token, may_end) if keeps_text else ""
        if is_whole or count >= self.limit or output.matched is not None:
            if output.matched is None:
                text += output.finish(may_end)
            self.state = State.FINISHED
            stop_reason: str | int | None = output.matched
            if stop_reason is None and token in params.stop_token_ids:
                stop_reason = token
            reason = "length" if output.matched is None and not is_whole else "stop"
            completion = self._completion(reason, stop_reason)
            return self._last_chunk(text, completion, token=token, logprobs=logprobs)
        return Chunk(
            self.number,
            text,
            token,
            request_id=self.request_id,
            choice=self.choice,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs() if count < 2 else None,
            adapter_version=self.adapter_version,
        )

    def end(self, state: State, error: PcgError | None = None) -> Chunk:
        """End the sequence before its last token; return the last chunk."""
        self.state = state
        return self._last_chunk("", self._completion(state.value), error=error)

    def _last_chunk(
        self,
        text: str,
        completion: Completion,
        *,
        token: int | None = None,
        logprobs: TokenLogprobs | None = None,
        error: PcgError | None = None,
    ) -> Chunk:
        return Chunk(
            self.number,
            text,
            token,
            completion=completion,
            error=error,
            request_id=self.request_id,
            choice=self.choice,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs() if len(self.generated) < 2 else None,
            adapter_version=self.adapter_version,
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        if self.rows is None or self.request.params.of_prompt is None:
            return None
        return (None, *self.rows.logprobs)

    def _completion(self, reason: str, stop_reason: str | int | None = None) -> Completion:
        request, times = self.request, self.times
        queued_s = None if times.admitted_s is None else times.admitted_s - times.submitted_s
        return Completion(
            "".join(self.text.parts),
            tuple(self.generated),
            reason,
            adapter=self._adapter_name,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=self.blocks.found,
            stop_reason=stop_reason,
            logprobs=None if request.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self._prompt_logprobs(),
            index=self.choice,
            routed_experts=None if self.routes is None else self._routed(),
            embedding=self._embedding(),
            adapter_version=self.adapter_version,
            queued_s=queued_s,
        )

    def _routed(self) -> Tensor | None:
        assert self.routes is not None
        rows = self.routes.rows()
        return torch.stack(rows) if rows else None

    def _embedding(self) -> Tensor | None:
        rows, request = self.rows, self.request
        if rows is None or rows.pooled is None or rows.are_left:
            return None
        is_mean = request.pooling == "mean"
        state = rows.pooled / len(request.prompt_ids) if is_mean else rows.pooled
        return state / state.norm() if request.normalize else state
