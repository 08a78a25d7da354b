"""Training data: examples from any source, checked against the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pcg.errors import DataError, FinetuneError
from pcg.runtime.data.dataset import Dataset, load_examples
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.data.rows import holds_documents
from pcg.runtime.data.sources import gather
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.options import Data, FinetuneOptions


def training_data(
    source: Data,
    options: FinetuneOptions,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    max_positions: int | None,
    planned_seq: int | None = None,
) -> Dataset:
    """Read, tokenize and check examples.

    Args:
        source: files, rows as `sources` has them, or examples, which are tokens already.
        tokenizer: the model's tokenizer; examples need none.
        max_positions: number of positions of the model, if it has a bound.
        planned_seq: tokens of a sequence that memory is planned for, if it is for a certain step.
    Raises:
        DataError: the data cannot be read, or do not fit the model; the row is named.
        FinetuneError: text, and no tokenizer.
    """
    gathered = source if isinstance(source, Dataset) else gather(source)
    if isinstance(gathered, Dataset):
        data = _cut(gathered, options.max_length)
    elif gathered and isinstance(gathered[0], Example):
        places = tuple(f"data[{index}]" for index in range(len(gathered)))
        data = _cut(Dataset(tuple(gathered), "tokens", places=places), options.max_length)
    elif tokenizer is None:
        raise FinetuneError(
            "the model came without a tokenizer.json; put one into its directory, or give data "
            "as a list of pcg.runtime.data.dataset.Example(ids, labels)"
        )
    else:
        max_length = options.max_length
        if max_length is None and holds_documents(gathered):
            # Documents are cut into examples of that length.
            max_length = min(filter(None, (planned_seq, max_positions)), default=None)
        data = load_examples(
            gathered,
            tokenizer,
            max_length=max_length,
            format=options.data_format,
            append_eos=options.append_eos,
            empty=options.empty,
        )
    for example, place in zip(data.examples, places_of(data), strict=True):
        _check(example, place, vocabulary, max_positions)
    return data


def places_of(data: Dataset) -> Sequence[str]:
    """Return the place of each example."""
    return data.places or [f"example {index}" for index in range(len(data))]


def check_with_prompt(data: Dataset, virtual: int, max_positions: int | None) -> None:
    """Refuse an example that is too long with the adapter's virtual tokens before it.

    Raises:
        DataError: names the first such example by its place.
    """
    if max_positions is None or not virtual:
        return
    most = max_positions - virtual
    for example, place in zip(data.examples, places_of(data), strict=True):
        if len(example.ids) > most:
            raise DataError(
                f"{place} has {len(example.ids)} tokens, and the adapter puts {virtual} virtual "
                f"ones before them, more than the model's {max_positions} positions; cut such "
                f"examples with max_length={max(most, 0)}, or split them"
            )


def _cut(data: Dataset, max_length: int | None) -> Dataset:
    if max_length is None:
        return data
    examples = tuple(example.cut(max_length) for example in data.examples)
    truncated = sum(len(example.ids) > max_length for example in data.examples)
    return dataclasses.replace(data, examples=examples, truncated=data.truncated + truncated)


def _check(example: object, place: str, vocabulary: int, max_positions: int | None) -> None:
    if not isinstance(example, Example):
        raise DataError(f"{place} is a {type(example).__name__} among examples; give one kind")
    if len(example.ids) != len(example.labels):
        raise DataError(
            f"{place} has {len(example.ids)} tokens and {len(example.labels)} labels; give each "
            f"token one, {IGNORED} where it is not learned"
        )
    if max_positions is not None and len(example.ids) > max_positions:
        raise DataError(
            f"{place} has {len(example.ids)} tokens, more than the model's {max_positions} "
            f"positions; cut such examples with max_length={max_positions}, or split them"
        )
    if not example.targets:
        raise DataError(f"{place} has no token to learn; label at least one after the first")
    wrong = [token for token in example.ids if not 0 <= token < vocabulary]
    wrong += [t for t in example.labels if t != IGNORED and not 0 <= t < vocabulary]
    if wrong:
        raise DataError(
            f"{place} has the token {wrong[0]}, which the model's vocabulary of {vocabulary} does "
            "not; use the model's own tokenizer"
        )
