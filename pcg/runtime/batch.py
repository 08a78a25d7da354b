"""A token-flat batch: the tokens of one step, of whatever sequence, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcg.runtime.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's tokens in a batch.

    Attributes:
        start: index of its first token in the batch.
        length: tokens in the batch.
        context: tokens before them, in the KV cache.
        row: first row of the sequence in the KV cache; 0 without one.
    """

    start: int
    length: int
    context: int = 0
    row: int = 0


class Batch:
    """Tokens, positions and spans of one step; what emitted attention asks of a batch.

    Attributes:
        input_ids: [T], int64.
        positions: of each token in its sequence, [T], int64.
        spans: cover all tokens, in order.
        layer: the layer that runs; the runner sets it.
        uniform_length: the spans' length where all are whole sequences of one length, else 0.
    """

    def __init__(
        self, input_ids: Tensor, spans: Sequence[Span], cache: KvCache | None = None
    ) -> None:
        self.input_ids = input_ids
        self.spans = tuple(spans)
        self.layer = 0
        self._cache = cache
        positions = [s.context + i for s in self.spans for i in range(s.length)]
        self.positions = torch.tensor(positions, device=input_ids.device)
        if cache is not None:
            rows = [s.row + s.context + i for s in self.spans for i in range(s.length)]
            self._rows = torch.tensor(rows, device=input_ids.device)
        lengths = {span.length for span in self.spans}
        whole = not any(span.context for span in self.spans)
        self.uniform_length = lengths.pop() if len(lengths) == 1 and whole else 0

    @property
    def last_tokens(self) -> Tensor:
        """Index of each span's last token, [spans]."""
        ends = [span.start + span.length - 1 for span in self.spans]
        return torch.tensor(ends, device=self.input_ids.device)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write this layer's keys and values of the tokens; returns all rows, or None uncached."""
        if self._cache is None:
            return None
        keys, values = self._cache.keys[self.layer], self._cache.values[self.layer]
        keys.index_copy_(0, self._rows, k)
        values.index_copy_(0, self._rows, v)
        return keys, values


def whole_sequences(sequences: Sequence[Sequence[int]], device: torch.device) -> Batch:
    """A batch of whole sequences without a KV cache, for logits and finetuning."""
    spans, start = [], 0
    for sequence in sequences:
        spans.append(Span(start, len(sequence)))
        start += len(sequence)
    ids = torch.tensor([token for s in sequences for token in s], dtype=torch.long, device=device)
    return Batch(ids, spans)
