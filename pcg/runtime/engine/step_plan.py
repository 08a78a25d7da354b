"""What the scheduler has one step serve."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pcg.runtime.engine.sequence import Sequence
from pcg.runtime.model.load import Load, keys_of


@dataclass
class StepPlan:
    """What one step serves.

    Attributes:
        promised_s: the least promised time a token; None where nothing is promised.
        slack_s: until the first promise is broken; it grows with steps that took less.
        chunks: sequences, and how many of their pending tokens run.
        admitted: those that begin, or begin again.
        tokens: of all of them.
        keys: that attention reads for these.
        sampled: rows of logits: of sequences whose pending tokens all run.
        is_awaited: whether a request waits for its first token, in the step or for its turn.
    """

    promised_s: float | None = None
    slack_s: float = math.inf
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    tokens: int = 0
    keys: int = 0
    sampled: int = 0
    is_awaited: bool = False

    @property
    def load(self) -> Load:
        """Of all chunks."""
        return Load(self.tokens, self.keys, self.sampled)

    def add(self, sequence: Sequence, tokens: int) -> None:
        """Have a sequence's next tokens run."""
        self.chunks.append((sequence, tokens))
        self.tokens += tokens
        self.keys += keys_of(tokens, sequence.cached)
        self.sampled += tokens == sequence.pending
        self.is_awaited |= sequence.first_token_s is None
