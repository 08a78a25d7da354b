"""Training data: examples from any source, checked against the model."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

from pcg.errors import DataError, FinetuneError
from pcg.runtime.data.dataset import Dataset, ExampleReader, ReadOptions
from pcg.runtime.data.example import Example, ModelSizes, check_example
from pcg.runtime.data.limits import UNLIMITED, DataLimits, check_tokens
from pcg.runtime.data.rows import holds_documents
from pcg.runtime.data.sources import Gathered, Splits, choose_splits, gather
from pcg.runtime.model.state import ModelState
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.options import Data, FinetuneArguments, FinetuneOptions

_LOG = logging.getLogger("pcg.finetuning")

Load = Callable[[Gathered, ReadOptions, ModelSizes], Dataset]
"""Makes examples of files or rows, and checks them."""


def splits_of(given: FinetuneArguments, is_first: bool) -> Splits:
    """Choose the data to learn and that to evaluate on; the first rank says what was chosen.

    Raises:
        DataError: there is no such split.
    """
    splits = choose_splits(given.data, given.eval_data)
    if splits.chosen and is_first:
        _LOG.warning("%s: %s", given.adapter, splits.chosen)
    return splits


def load_here(
    tokenizer: Tokenizer, data: Gathered, options: ReadOptions, sizes: ModelSizes
) -> Dataset:
    """Make examples in this process, and check them. DataError: names the row."""
    reader = ExampleReader(data, tokenizer, options)
    examples, places = [], []
    for example, place in reader:
        check_example(example, place, sizes)
        examples.append(example)
        places.append(place)
    facts = (reader.format, reader.truncated, reader.dropped, tuple(places))
    return Dataset(tuple(examples), *facts, checked=sizes)


def training_data(
    source: Data,
    options: FinetuneOptions,
    model: ModelState,
    load: Load | None = None,
    limits: DataLimits = UNLIMITED,
) -> Dataset:
    """Read, tokenize and check examples.

    Args:
        source: files, rows as `sources` has them, or examples, which are tokens already.
        model: whose tokenizer makes tokens of text; examples need none.
        load: makes examples of files and rows; this process by default.
    Raises:
        DataError: the data cannot be read, or do not fit the model; the row is named.
        FinetuneError: text, and no tokenizer.
    """
    sizes = ModelSizes(model.program.base.vocabulary, model.max_positions)
    gathered = source if isinstance(source, Dataset) else gather(source)
    if isinstance(gathered, Dataset):
        data = _cut(gathered, options.max_length)
    elif gathered and isinstance(gathered[0], Example):
        places = tuple(f"data[{index}]" for index in range(len(gathered)))
        data = _cut(Dataset(tuple(gathered), "tokens", places=places), options.max_length)
    elif model.tokenizer is None:
        raise FinetuneError(
            "the model came without a tokenizer.json; put one into its directory, or give data "
            "as a list of pcg.runtime.data.dataset.Example(ids, labels)"
        )
    else:
        max_length, planned = options.max_length, model.program.options
        if max_length is None and holds_documents(gathered):
            # Documents are cut into examples of that length.
            bounds = (planned.seq if planned.names_step else None, model.max_positions)
            max_length = min(filter(None, bounds), default=None)
        read = ReadOptions(
            max_length, options.data_format, options.append_eos, options.empty, limits
        )
        load = load or functools.partial(load_here, model.tokenizer)
        data = load(gathered, read, sizes)
    if data.checked != sizes:
        for example, place in zip(data.examples, places_of(data), strict=True):
            check_example(example, place, sizes)
            check_tokens(len(example.ids), place, limits)
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
    if max_length is None or all(len(example.ids) <= max_length for example in data.examples):
        return data
    examples = tuple(example.cut(max_length) for example in data.examples)
    truncated = sum(len(example.ids) > max_length for example in data.examples)
    return dataclasses.replace(
        data, examples=examples, truncated=data.truncated + truncated, checked=None
    )
