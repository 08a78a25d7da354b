"""Continuations of a prompt (`n` or `best_of` above 1), and deadlines of requests.

The first continuation computes the prompt. Further continuations start at the end of the prompt,
share its pages (`Scheduler.fork`), and have their own samplers. With `best_of`, the n continuations
with the highest log-probability of all their tokens are returned, the best first, after all end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import replace
from itertools import count

from pcg.runtime.requests.request import Chunk, Completion
from pcg.runtime.requests.sequence import Sequence


class Groups:
    """The groups of continuations in an engine.

    Attributes:
        of_all: the group of each continuation.
    """

    def __init__(self) -> None:
        self.of_all: dict[Sequence, _Group] = {}
        self._first: dict[str, Sequence] = {}

    def add(self, first: Sequence) -> None:
        """Add the continuations of a request: the first, and its followers."""
        if first.followers:
            group = _Group([first, *first.followers])
            self.of_all.update(dict.fromkeys(group.sequences, group))
            self._first[first.id] = first

    def first(self, request: str) -> Sequence | None:
        """Return the first continuation of a request with several, even if it has ended."""
        return self._first.get(request)

    def of(self, sequence: Sequence) -> List[Sequence]:
        """Return all continuations of a sequence's request."""
        group = self.of_all.get(sequence)
        return (sequence,) if group is None else group.sequences

    def handed_out(self, sequence: Sequence, chunk: Chunk) -> List[Chunk]:
        """Return the chunks to deliver for a continuation's new chunk."""
        group = self.of_all.get(sequence)
        if group is None:
            return (chunk,)
        chunks = group.handed_out(sequence, chunk)
        if not group.left:
            for continuation in group.sequences:
                self.of_all.pop(continuation, None)
                self._first.pop(continuation.id, None)
        return chunks


class _Group:
    def __init__(self, sequences: List[Sequence]) -> None:
        params = sequences[0].request.params
        self.sequences = sequences
        self.left = len(sequences)
        self._chosen = params.n if params.width > params.n else None
        self._completions: list[tuple[Completion, float]] = []
        self._has_failed = False

    def handed_out(self, sequence: Sequence, chunk: Chunk) -> List[Chunk]:
        if sequence.is_over:  # rare: the last chunk of a continuation
            self.left = sum(not continuation.is_over for continuation in self.sequences)
        if self._has_failed:
            return ()
        if chunk.error is not None:
            self._has_failed = True
            return (chunk,)
        if self._chosen is None:
            is_end = chunk.completion is not None
            return (replace(chunk, left=self.left) if is_end else chunk,)
        if chunk.completion is not None:
            self._completions.append((chunk.completion, sequence.cumulative_logprob))
        return () if self.left else self._best(chunk, self._chosen)

    def _best(self, last: Chunk, count: int) -> list[Chunk]:
        """Return whole continuations, with regularly ended continuations first."""
        ranked = sorted(
            self._completions,
            key=lambda pair: (
                pair[0].finish_reason not in ("stop", "length"),
                -pair[1],
                pair[0].index,
            ),
        )
        return [
            replace(
                last,
                text=completion.text,
                token_id=None,
                logprobs=None,
                completion=replace(completion, index=choice),
                choice=choice,
                left=count - 1 - choice,
            )
            for choice, (completion, _) in enumerate(ranked[:count])
        ]


class Deadlines:
    """The requests with a timeout, earliest first; finished requests are dropped."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, List[Sequence]]] = []
        self._number = count()
        self._most = 64

    def __len__(self) -> int:
        return len(self._due)

    def add(self, due_s: float, request: List[Sequence]) -> None:
        """Add a request's continuations, with their deadline on the engine's clock."""
        heapq.heappush(self._due, (due_s, next(self._number), request))
        if len(self._due) > self._most:
            self._due = [entry for entry in self._due if not all(each.is_over for each in entry[2])]
            heapq.heapify(self._due)
            self._most = 2 * len(self._due) + 64

    def passed(self, now_s: float) -> Iterator[List[Sequence]]:
        """Yield the requests that have timed out; some of them may have ended."""
        while self._due and self._due[0][0] < now_s:
            yield self._due[0][2]
            heapq.heappop(self._due)  # after the request is ended, so that an error keeps the entry
