"""The plan of a step: the sequences that it serves, and how many of their tokens run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pcg.runtime.model.load import Load, keys_of
from pcg.runtime.requests.sequence import Sequence


@dataclass
class Plan:
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
        """Note how long the step may take for those that decode, who are all it has.

        Args:
            least_s: the predicted time of the step as it is.
            stretched_s: the time that prompts may make it take where nothing is promised.
        """
        self.decoded = self.load
        due_s, began_s = [], now_s
        for sequence, _ in self.chunks:
            times = sequence.times
            latest_s = times.latest_token_s
            if sequence.ahead:
                latest_s = times.due_s
                began_s = max(began_s, latest_s)  # when the step that is under way ends
            if times.tpot_slo_s is not None and latest_s is not None:
                due_s.append(latest_s + times.tpot_slo_s)
        if len(due_s) < len(self.chunks) or not self.chunks:
            self.stretched_s = stretched_s
        if not due_s:
            return
        kept_s = [due for due in due_s if due - began_s >= least_s]
        self.is_late = not kept_s
        self.gap_s = min(kept_s or due_s) - began_s
