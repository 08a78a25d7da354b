"""The plan of a step, its load, and the results that it computes for its sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from pcg.kernels.devices import downloaded
from pcg.runtime.requests.request import Chunk
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.sampling.logprobs import Logprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Load:
    """An amount of work.

    Attributes:
        tokens: tokens that run through the program.
        keys: keys that attention reads, summed over tokens.
        sampled: rows of logits.
        trained: tokens with a loss.
        windows: windows of finetuning.
        ends: last backward units of a pass, which need no gradient of the inputs; an update may
            follow.
        chunks: sequences with more than a single token to run.
        read: keys that attention reads, counted once per sequence.
    """

    tokens: int = 0
    keys: int = 0
    sampled: int = 0
    trained: int = 0
    windows: int = 0
    ends: int = 0
    chunks: int = 0
    read: int = 0

    @property
    def only_decodes(self) -> bool:
        """True if each sequence runs a single token, and no other work runs."""
        return not (self.chunks or self.windows)

    def __add__(self, other: Load) -> Load:
        return Load(
            self.tokens + other.tokens,
            self.keys + other.keys,
            self.sampled + other.sampled,
            self.trained + other.trained,
            self.windows + other.windows,
            self.ends + other.ends,
            self.chunks + other.chunks,
            self.read + other.read,
        )

    @classmethod
    def of(cls, tokens: int, context: int) -> Load:
        return cls(tokens, keys_of(tokens, context), read=context + tokens)

    @classmethod
    def of_rows(cls, tokens: int, row: int) -> Load:
        """Return the load of `tokens` tokens of sequences of `row` tokens each."""
        whole, rest = divmod(tokens, row)
        return cls(tokens, whole * keys_of(row, 0) + keys_of(rest, 0), read=tokens)


def keys_of(tokens: int, context: int) -> int:
    """Count the keys that attention reads for new tokens after a context."""
    return tokens * context + tokens * (tokens + 1) // 2


@dataclass
class Plan:
    """The sequences that a step serves, and their load.

    Attributes:
        tpot_slo_s: the minimum SLO per token of the running sequences; None without an SLO.
        gap_s: time until the first gap of a decoding sequence exceeds its SLO.
        stretched_s: limit of the predicted time with chunks of prompts, if a sequence decodes
            without an SLO or no sequence decodes; else infinite.
        decoded: the load of the decoding sequences.
        is_late: True if gaps would exceed their SLOs even without chunks.
        chunks: sequences, and the number of their pending tokens to run.
        longer: the number of sequences with more than a single token to run.
    """

    tpot_slo_s: float | None = None
    gap_s: float = math.inf
    stretched_s: float = math.inf
    decoded: Load = field(default_factory=Load)
    is_late: bool = False
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    tokens: int = 0
    keys: int = 0
    read: int = 0
    sampled: int = 0
    longer: int = 0

    @property
    def has_prompts(self) -> bool:
        """True if the plan has tokens of prompts."""
        return self.tokens > self.decoded.tokens

    @property
    def load(self) -> Load:
        return Load(self.tokens, self.keys, self.sampled, chunks=self.longer, read=self.read)

    def add(self, sequence: Sequence, tokens: int) -> None:
        cached, rows = sequence.cached, sequence.rows
        end = cached + tokens
        self.chunks.append((sequence, tokens))
        self.tokens += tokens
        self.read += end
        if tokens == 1:
            self.keys += end
        else:
            self.keys += keys_of(tokens, cached)
            self.longer += 1
        self.sampled += end == sequence.length
        if rows is not None:
            self.sampled += len(rows.unread(cached, end))

    def promise(self, now_s: float, least_s: float, stretched_s: float) -> None:
        """Set the step's time limits for its decoding sequences, before prompts are added.

        Args:
            least_s: the predicted time of the step without prompts.
            stretched_s: the limit of the time with prompts, without SLOs.
        """
        self.decoded = self.load
        due_s, began_s = [], now_s
        for sequence, _ in self.chunks:
            times = sequence.times
            latest_s = times.latest_token_s
            if sequence.ahead:
                latest_s = times.due_s
                began_s = max(began_s, latest_s)  # the end of the running step
            if times.tpot_slo_s is not None and latest_s is not None:
                due_s.append(latest_s + times.tpot_slo_s)
        if len(due_s) < len(self.chunks) or not self.chunks:
            self.stretched_s = stretched_s
        if not due_s:
            return
        kept_s = [due for due in due_s if due - began_s >= least_s]
        self.is_late = not kept_s
        self.gap_s = min(kept_s or due_s) - began_s


@dataclass(slots=True)
class Results:
    """The results of a step, by sequence.

    Attributes:
        tokens: the next token of each sequence without pending tokens; `UNDRAWN` if no token could
            be drawn.
        logprobs: log-probabilities of these tokens, where requested.
        prompts: log-probabilities of further tokens of prompts, where requested.
        states: the sum of last hidden states of prompts, in host memory, and their number.
        routes: the first token, and the experts of the tokens from there on, where requested.
        first_ns: over ranks, rank 0's `time.monotonic_ns` after drawing the tokens.
    """

    tokens: dict[Sequence, int] = field(default_factory=dict)
    logprobs: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    prompts: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    states: dict[Sequence, tuple[Tensor, int]] = field(default_factory=dict)
    routes: dict[Sequence, tuple[int, Tensor]] = field(default_factory=dict)
    first_ns: int | None = None

    def give(self, sequence: Sequence) -> Chunk | None:
        """Give a sequence its results; return its chunk, or None while tokens are pending.

        Raises:
            GenerationError: a number is not finite, or no token could be drawn.
        """
        logprobs = None
        if self.logprobs or self.prompts or self.states or self.routes:
            if sequence in self.routes:
                assert sequence.routes is not None
                sequence.routes.add(*self.routes[sequence], sequence.request.length)
            if sequence in self.states:
                sequence.pool(*self.states[sequence])
            if sequence in self.prompts:
                sequence.read_prompt(self.prompts[sequence])
            logprobs = self.logprobs.get(sequence)
        token = self.tokens.get(sequence)
        return sequence.end_without_token() if token is None else sequence.accept(token, logprobs)


@dataclass(frozen=True)
class DrawnTokens:
    """The next tokens of sequences, on the device or in a copy to the host.

    Attributes:
        tokens: [sequences], int64.
        logprobs: log-probabilities for the sequences that request them; None if no sequence does.
        first_ns: over ranks, rank 0's time, [1], sent with the tokens.
    """

    sequences: List[Sequence]
    tokens: Tensor
    logprobs: Logprobs | None = None
    first_ns: Tensor | None = None

    def sent(self) -> DrawnTokens:
        """Return them as they will be on the host; see `downloaded`."""
        logprobs = None if self.logprobs is None else self.logprobs.sent()
        first_ns = None if self.first_ns is None else downloaded(self.first_ns)
        return DrawnTokens(self.sequences, downloaded(self.tokens), logprobs, first_ns)

    def read(self, results: Results) -> None:
        """Add the tokens to a step's results, after their copy to the host."""
        results.tokens.update(zip(self.sequences, self.tokens.tolist(), strict=True))
        if self.first_ns is not None:
            results.first_ns = int(self.first_ns)
        if self.logprobs is not None:
            asking = [sequence for sequence in self.sequences if sequence.likeliest is not None]
            counts = [sequence.likeliest or 0 for sequence in asking]
            results.logprobs.update(zip(asking, self.logprobs.read(counts), strict=True))


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of tokens of prompts, on the device or in a copy to the host.

    Attributes:
        counts: sequences in order, with their numbers of tokens.
        logprobs: log-probabilities of all these tokens.
        cells: the number of further tokens at each place; empty without further tokens.
    """

    counts: List[tuple[Sequence, int]]
    logprobs: Logprobs
    cells: List[int] = ()

    def sent(self) -> PromptLogprobs:
        """Return them as they will be on the host; see `downloaded`."""
        return PromptLogprobs(self.counts, self.logprobs.sent(), self.cells)

    def read(self, results: Results) -> None:
        """Add them to a step's results, once they are on the host."""
        likeliest: list[int] = []
        for sequence, count in self.counts:
            likeliest += [sequence.request.params.of_prompt or 0] * count
        of_tokens = self.logprobs.read_cells(likeliest, self.cells or [0] * len(likeliest))
        start = 0
        for sequence, count in self.counts:
            results.prompts[sequence] = of_tokens[start : start + count]
            start += count


@dataclass(frozen=True)
class PooledStates:
    """The sums of last hidden states, on the device or sent to the host.

    Attributes:
        counts: sequences in order, with their numbers of states.
        sums: [sequences, hidden], fp32.
    """

    counts: List[tuple[Sequence, int]]
    sums: Tensor

    def sent(self) -> PooledStates:
        """Return them as they will be on the host; see `downloaded`."""
        return PooledStates(self.counts, downloaded(self.sums))

    def read(self, results: Results) -> None:
        """Add them to a step's results, once they are on the host."""
        for (sequence, count), total in zip(self.counts, self.sums.clone(), strict=True):
            results.states[sequence] = total, count


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that tokens chose, on the device or sent to the host.

    Attributes:
        places: sequences with their first token, and their rows.
        chosen: [T, layers, k], int16.
    """

    places: List[tuple[Sequence, int, slice]]
    chosen: Tensor

    def sent(self) -> RoutedExperts:
        """Return them as they will be on the host; see `downloaded`."""
        return RoutedExperts(self.places, downloaded(self.chosen))

    def read(self, results: Results) -> None:
        """Add them to a step's results, once they are on the host."""
        for sequence, start, rows in self.places:
            results.routes[sequence] = start, self.chosen[rows].clone()


Computed: TypeAlias = DrawnTokens | PromptLogprobs | PooledStates | RoutedExperts
"""A part of a step's results, on the device or sent to the host."""
