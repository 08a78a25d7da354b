"""The plan of a step: the sequences that it serves, and how many of their tokens run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pcg.runtime.model.load import Load, keys_of
from pcg.runtime.requests.sequence import Sequence


@dataclass
class StepPlan:
    """The sequences that one step serves, and their load.

    Attributes:
        slack_s: time until the first of these SLOs is violated; it grows with faster steps.
        chunks: sequences, and how many of their pending tokens run.
        awaits_first_token: True if a request waits for its first token, running or queued.
    """

    tpot_slo_s: float | None = None
    slack_s: float = math.inf
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    tokens: int = 0
    keys: int = 0
    sampled: int = 0
    awaits_first_token: bool = False

    @property
    def load(self) -> Load:
        return Load(self.tokens, self.keys, self.sampled)

    def add(self, sequence: Sequence, tokens: int) -> None:
        self.chunks.append((sequence, tokens))
        self.tokens += tokens
        self.keys += keys_of(tokens, sequence.cached)
        self.sampled += tokens == sequence.pending
        if sequence.reads:
            self.sampled += len(sequence.unread(sequence.cached, sequence.cached + tokens))
        self.awaits_first_token |= sequence.first_token_s is None
