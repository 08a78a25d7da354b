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
        tpot_slo_s: the least SLO per token of the sequences that run; None if none has any.
        gap_s: time until the first gap of those that decode exceeds its SLO.
        stretched_s: the most that it may be predicted to take with chunks of prompts where a
            sequence decodes without an SLO, or none does; infinite elsewhere.
        decoded: the load of the sequences that decode.
        is_late: True if even without chunks no gap would be kept.
        chunks: sequences, and how many of their pending tokens run.
        longer: the number of those of which more than one runs.
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
        """True if it has more than the tokens of sequences that decode."""
        return self.tokens > self.decoded.tokens

    @property
    def load(self) -> Load:
        return Load(self.tokens, self.keys, self.sampled, chunks=self.longer, read=self.read)

    def add(self, sequence: Sequence, tokens: int) -> None:
        self.chunks.append((sequence, tokens))
        self.tokens += tokens
        self.keys += keys_of(tokens, sequence.cached)
        self.read += sequence.cached + tokens
        self.sampled += tokens == sequence.pending
        self.longer += tokens > 1
        if sequence.reads:
            self.sampled += len(sequence.unread(sequence.cached, sequence.cached + tokens))

    def promise(self, now_s: float, least_s: float, stretched_s: float) -> None:
        """Note how long the step may take for those that decode, who are all it has.

        Args:
            least_s: the predicted time of the step as it is.
            stretched_s: the time that prompts may make it take where nothing is promised.
        """
        self.decoded = self.load
        decoding = [sequence for sequence, _ in self.chunks]
        # It begins when the step that is under way ends, whose tokens are ahead.
        now_s = max([now_s, *(one.due_s for one in decoding if one.ahead)])
        gaps = [left for one in decoding if (left := one.gap_left_s(now_s)) is not None]
        if len(gaps) < len(decoding) or not decoding:
            self.stretched_s = stretched_s
        if not gaps:
            return
        kept = [left for left in gaps if left >= least_s]
        self.is_late = not kept
        self.gap_s = min(kept or gaps)
