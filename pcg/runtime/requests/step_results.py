"""Step results: what a step computed of its sequences, on the device and then on the host."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from pcg.kernels.devices import downloaded
from pcg.runtime.requests.request import Chunk
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.sampling.logprobs import Logprobs, TokenLogprobs


@dataclass(slots=True)
class Results:
    """The results of a step, for its sequences.

    Attributes:
        tokens: the token after each sequence all of whose tokens ran; `UNDRAWN` where there is
            none.
        logprobs: theirs, for sequences that ask for them.
        prompts: the logprobs of further tokens of prompts, for sequences that ask for these.
        states: the sum of last hidden states of prompts, in host memory, and how many these are.
        first_ns: over ranks, the first one's `time.monotonic_ns` when it had chosen the tokens.
    """

    tokens: dict[Sequence, int] = field(default_factory=dict)
    logprobs: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    prompts: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    states: dict[Sequence, tuple[Tensor, int]] = field(default_factory=dict)
    first_ns: int | None = None

    def give(self, sequence: Sequence) -> Chunk | None:
        """Give a sequence its results; return its chunk, or None while tokens are pending.

        Raises:
            GenerationError: a number is not finite, or there is no token.
        """
        logprobs = None
        if self.logprobs or self.prompts or self.states:
            if sequence in self.states:
                sequence.pool(*self.states[sequence])
            if sequence in self.prompts:
                sequence.read_prompt(self.prompts[sequence])
            logprobs = self.logprobs.get(sequence)
        token = self.tokens.get(sequence)
        return sequence.end_without_token() if token is None else sequence.accept(token, logprobs)


@dataclass(frozen=True)
class DrawnTokens:
    """The tokens after sequences, on the device or sent to the host.

    Attributes:
        tokens: [sequences], int64.
        logprobs: those of the sequences that ask for them; None if none does.
        first_ns: over ranks, the first one's time [1] that came with the tokens.
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
        """Add the tokens to a step's results, once they are on the host."""
        results.tokens.update(zip(self.sequences, self.tokens.tolist(), strict=True))
        if self.first_ns is not None:
            results.first_ns = int(self.first_ns)
        if self.logprobs is not None:
            asking = [one for one in self.sequences if one.likeliest is not None]
            counts = [one.likeliest or 0 for one in asking]
            results.logprobs.update(zip(asking, self.logprobs.read(counts), strict=True))


@dataclass(frozen=True)
class PromptLogprobs:
    """The logprobs of tokens of prompts, on the device or sent to the host.

    Attributes:
        counts: sequences, and how many tokens of each in turn.
        logprobs: those of all these tokens.
        cells: how many further tokens each one's place has; empty without any.
    """

    counts: List[tuple[Sequence, int]]
    logprobs: Logprobs
    cells: List[int] = ()

    def sent(self) -> PromptLogprobs:
        """Return them as they will be on the host; see `downloaded`."""
        return PromptLogprobs(self.counts, self.logprobs.sent(), self.cells)

    def read(self, results: Results) -> None:
        """Add them to a step's results, once they are on the host."""
        likeliest = [n for one, n_tokens in self.counts for n in [_of_prompt(one)] * n_tokens]
        found = self.logprobs.read_cells(likeliest, self.cells or [0] * len(likeliest))
        start = 0
        for sequence, count in self.counts:
            results.prompts[sequence] = found[start : start + count]
            start += count


def _of_prompt(sequence: Sequence) -> int:
    return sequence.request.params.of_prompt or 0


@dataclass(frozen=True)
class PooledStates:
    """The sums of last hidden states, on the device or sent to the host.

    Attributes:
        counts: sequences, and how many states of each in turn.
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


Computed: TypeAlias = DrawnTokens | PromptLogprobs | PooledStates
"""A part of a step's results, on the device or sent to the host."""
