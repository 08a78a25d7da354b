"""Examples: tokens and labels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from pcg.errors import DataError
from pcg.units import shown
from pcg.value_checks import check_padding

IGNORED = -100
"""The label of a token that is not learned, as in transformers."""


@dataclass(frozen=True, slots=True)
class Example:
    """A training sequence.

    Attributes:
        ids: the tokens, a list or an array of ints.
        labels: the unshifted labels: `ids[i]`, or -100 if token i is not learned.
    """

    ids: Sequence[int]
    labels: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("ids", "labels"):
            values = getattr(self, name)
            if not isinstance(values, list | array):
                object.__setattr__(self, name, _listed(values))

    def cut(self, length: int) -> Example:
        """Return an example of the first tokens, at most `length`."""
        return Example(self.ids[:length], self.labels[:length])

    @property
    def targets(self) -> int:
        """The number of target tokens; the first token is never a target."""
        predicted = self.labels[1:]
        return len(predicted) - predicted.count(IGNORED)


def _listed(values: Any) -> list[int]:
    """Return the values of any library's array or tensor, a tuple, or another iterable."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    try:
        return list(listed)
    except TypeError as error:
        raise DataError(
            f"an example's ids are a {type(values).__name__}; give a list of ints"
        ) from error


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, for checking examples.

    Attributes:
        vocabulary: number of tokens of the model's vocabulary.
        max_positions: number of positions; None without bound.
        routes: number of layers with experts, of the experts that a token chooses there, and of
            all experts of a layer.
        padding: the token to which the model gives no position; None without.
    """

    vocabulary: int
    max_positions: int | None
    routes: tuple[int, int, int] = (0, 0, 0)
    padding: int | None = None


def check_example(example: object, place: str, sizes: ModelSizes) -> None:
    """Refuse an example that a model cannot learn. DataError: names its place."""
    if not isinstance(example, Example):
        raise DataError(f"{place} is a {type(example).__name__} among examples; give one kind")
    if len(example.ids) != len(example.labels):
        raise DataError(
            f"{place} has {len(example.ids)} tokens and {len(example.labels)} labels; give each "
            f"token one, {IGNORED} where it is not learned"
        )
    most = sizes.max_positions
    if most is not None and len(example.ids) > most:
        raise DataError(
            f"{place} has {len(example.ids)} tokens, more than the model's {most} positions; cut "
            f"such examples with max_length={most}, or split them"
        )
    if not example.targets:
        raise DataError(f"{place} has no token to learn; label at least one after the first")
    _check_tokens(example.ids, place, sizes.vocabulary)
    check_padding(example.ids, place, sizes.padding, DataError)
    _check_tokens(example.labels, place, sizes.vocabulary, IGNORED)


def _check_tokens(
    values: Sequence[int], place: str, vocabulary: int, ignored: int | None = None
) -> None:
    kinds = () if isinstance(values, array) else set(map(type, values))
    for kind in kinds:
        if not issubclass(kind, Integral):
            raise DataError(f"{place} has a {kind.__name__} among its tokens; tokens are ints")
    wrong = [t for t in set(values) if t != ignored and not 0 <= t < vocabulary]
    if wrong:
        raise DataError(
            f"{place} has the token {shown(wrong[0])}, which the model's vocabulary of "
            f"{vocabulary} does not; use the model's own tokenizer"
        )
