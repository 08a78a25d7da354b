"""Pairs of examples, as a run takes them from its data."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pcg.runtime.data.dataset import Dataset
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.training.trainer.datum import Datum


@dataclass(frozen=True, slots=True)
class Pair(Example):
    """Two outputs to one prompt; its tokens and labels are those of both, one after the other.

    Attributes:
        number: the pair's place among the data, from 0.
        chosen: the preferred output behind its prompt.
        rejected: the other one.
    """

    number: int
    chosen: Example
    rejected: Example

    @property
    def examples(self) -> tuple[Example, Example]:
        return self.chosen, self.rejected


def pairs_of(data: Dataset) -> list[Pair]:
    """Return the pairs of data whose examples are preferred and not in turns."""
    found = []
    for number, (chosen, rejected) in enumerate(
        zip(data.examples[::2], data.examples[1::2], strict=True)
    ):
        ids = array("q", [*chosen.ids, *rejected.ids])
        labels = array("q", [*chosen.labels, *rejected.labels])
        found.append(Pair(ids, labels, number, chosen, rejected))
    return found


def targets_of(example: Example) -> list[int]:
    """Return the target of each token but the last; -100 where nothing is learned."""
    return list(example.labels[1:])


def data_of(pairs: Sequence[Pair], references: Sequence[Sequence[float]] | None) -> list[Datum]:
    """Return the data of pairs, chosen and rejected in turns.

    Args:
        references: the reference's log-probability of each target, of each datum; None for data of
            a loss that reads none.
    """
    examples = [example for pair in pairs for example in pair.examples]
    given = [None] * len(examples) if references is None else references
    return [
        Datum(list(example.ids[:-1]), targets_of(example), logprobs=logprobs)
        for example, logprobs in zip(examples, given, strict=True)
    ]


def target_sums(pairs: Sequence[Pair], logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Return the sum of the log-probabilities of each datum's targets."""
    examples = [example for pair in pairs for example in pair.examples]
    return [
        sum(x for x, target in zip(values, targets_of(one), strict=True) if target != IGNORED)
        for one, values in zip(examples, logprobs, strict=True)
    ]
