"""Examples: tokens and labels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from pcg.errors import DataError
from pcg.units import is_finite, shown
from pcg.value_checks import check_padding

IGNORED = -100
"""The label of a token that is not learned, as in transformers."""


@dataclass(frozen=True, slots=True)
class Example:
    """A training sequence.

    Attributes:
        ids: the tokens, a list or an array of ints.
        labels: the unshifted labels: `ids[i]`, or -100 if token i is not learned.
        weight: the factor of the loss of its tokens.
        is_desirable: the label of an output of KTO.
    """

    ids: Sequence[int]
    labels: Sequence[int]
    weight: float = field(default=1.0, kw_only=True)
    is_desirable: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("ids", "labels"):
            values = getattr(self, name)
            if not isinstance(values, list | array):
                object.__setattr__(self, name, _listed(values))

    def cut(self, length: int) -> Example:
        """Return an example of the first tokens, at most `length`."""
        return replace(self, ids=self.ids[:length], labels=self.labels[:length])

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
        tokens: number of tokens that the model reads.
        vocabulary: number of tokens, or labels, that it predicts.
        max_positions: number of positions; None without bound.
        routes: number of layers with experts, of the experts that a token chooses there, and of
            all experts of a layer.
        padding: the token to which the model gives no position; None without.
        of_labels: an example's last token is a label, which takes none of the positions.
    """

    tokens: int
    vocabulary: int
    max_positions: int | None
    routes: tuple[int, int, int] = (0, 0, 0)
    padding: int | None = None
    of_labels: bool = False


def check_example(example: object, place: str, sizes: ModelSizes) -> None:
    """Refuse an example that a model cannot learn. DataError: names its place."""
    if not isinstance(example, Example):
        raise DataError(f"{place} is a {type(example).__name__} among examples; give one kind")
    if len(example.ids) != len(example.labels):
        raise DataError(
            f"{place} has {len(example.ids)} tokens and {len(example.labels)} labels; give each "
            f"token one, {IGNORED} where it is not learned"
        )
    most, length = sizes.max_positions, len(example.ids) - sizes.of_labels
    if most is not None and length > most:
        raise DataError(
            f"{place} has {length} tokens, more than the model's {most} positions; cut "
            f"such examples with max_length={most}, or split them"
        )
    check_weight(example.weight, place)
    if not example.targets:
        raise DataError(f"{place} has no token to learn; label at least one after the first")
    _check_tokens(example.ids, place, sizes.tokens)
    check_padding(example.ids, place, sizes.padding, DataError)
    _check_tokens(example.labels, place, sizes.vocabulary, IGNORED)


def check_weight(weight: object, place: str) -> None:
    """Refuse a weight that is no finite number above 0. DataError: names its place."""
    if not is_finite(weight) or weight <= 0:  # type: ignore[operator]
        raise DataError(
            f"{place} has 'weight' {shown(weight)}; use a number above 0, or leave the row out"
        )


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
