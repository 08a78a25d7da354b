"""Training data: examples from any source, checked against the model."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pcg.errors import DataError, FinetuneError
from pcg.ranks.agreement import agreed, described, tokens_digest
from pcg.runtime.data.dataset import Dataset, ExampleReader, ReadOptions
from pcg.runtime.data.example import Example, ModelSizes, check_example
from pcg.runtime.data.order import Batches
from pcg.runtime.data.sources import (
    UNLIMITED,
    DataLimits,
    Gathered,
    Splits,
    check_tokens,
    choose_splits,
    gather,
    holds_documents,
)
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.plain import option_facts
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.options import Data, FinetuneArguments, FinetuneOptions
from pcg.units import counted

_LOG = logging.getLogger("pcg.finetuning")

Load = Callable[[Gathered, ReadOptions, ModelSizes], Dataset]
"""A function that creates and checks examples from files or rows."""


Given = TypeVar("Given", bound=FinetuneOptions)


def with_planned_batch(options: Given, model: ModelState) -> Given:
    """Return options with the program's batch size, unless the options bound batches."""
    planned = model.program.options
    if planned.names_step and not (options.batch_size or options.max_tokens):
        return dataclasses.replace(options, batch_size=planned.batch)
    return options


def splits_of(arguments: FinetuneArguments, is_first: bool) -> Splits:
    """Choose the training and the evaluation data; rank 0 logs the choice.

    Raises:
        DataError: the data lacks a split.
    """
    splits = choose_splits(arguments.data, arguments.eval_data, arguments.most_rows)
    if splits.chosen and is_first:
        _LOG.warning("%s: %s", arguments.adapter, splits.chosen)
    return splits


_OF_ONE_RANK = (
    "checkpoint_dir", "data", "eval_data", "log_every", "on_step", "peft", "progress", "record",
    "report_to",
)  # fmt: skip
"""Fields that may differ between ranks, or whose content is compared instead."""


def job_data(options: FinetuneArguments, model: ModelState) -> tuple[Dataset, Dataset | None]:
    """Read the training and evaluation data of a job; ranks compare the data and all options.

    Raises:
        DataError, FinetuneError: see `training_data`.
        ParallelError: on every rank: the data differ, or a rank could not read its data.
    """

    def read() -> tuple[Dataset, Dataset | None]:
        splits = splits_of(options, model.world.rank == 0)
        data = training_data(splits.train, options, model)
        rest = splits.evaluation
        return data, None if rest is None else training_data(rest, options, model)

    def facts(read_data: tuple[Dataset, Dataset | None]) -> Mapping[str, str]:
        is_given = {
            name: getattr(options, name) is not None for name in ("checkpoint_dir", "record")
        }
        return {
            **option_facts(options, _OF_ONE_RANK),
            **{name: described(value) for name, value in is_given.items()},
            "the training data": _data_text(read_data[0]),
            "the evaluation data": "none" if read_data[1] is None else _data_text(read_data[1]),
        }

    return agreed(model.world, f"finetune({options.adapter!r})", read, facts)


def _data_text(data: Dataset) -> str:
    """Return the number of examples, and the start of a digest of their tokens and labels."""
    digest = tokens_digest(
        part for example in data.examples for part in (example.ids, example.labels)
    )
    return f"{counted(len(data), 'example')}, digest {digest[:16]}"


def load_here(
    tokenizer: Tokenizer, data: Gathered, options: ReadOptions, sizes: ModelSizes
) -> Dataset:
    """Create and check examples in this process. DataError: names the row."""
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
    *,
    pairs: bool = False,
) -> Dataset:
    """Read, tokenize and check examples.

    Args:
        source: files, rows (see `sources`), or tokenized examples.
        load: creates examples from files and rows; by default in this process.
        pairs: rows have two outputs each (`pcg.runtime.data.formats`), and become two examples.
    Raises:
        DataError: the data cannot be read, or a row does not fit the model; names the row.
        FinetuneError: the data is text, and the model has no tokenizer.
    """
    program = model.program
    sizes = ModelSizes(program.base.vocabulary, model.max_positions, padding=program.padding)
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
        if max_length is None and not pairs and holds_documents(gathered):
            # Documents are cut into examples of this length.
            bounds = (planned.seq if planned.names_step else None, model.max_positions)
            max_length = min(filter(None, bounds), default=None)
        read = ReadOptions(
            max_length, options.data_format, options.append_eos, options.empty, limits, pairs
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
    """Refuse an example that is too long together with the adapter's virtual tokens.

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


def total_steps(batches: Batches, options: FinetuneOptions) -> int:
    """Return the number of steps of a job; the last step of an epoch may have fewer batches."""
    if options.max_steps is not None:
        return options.max_steps
    size, epochs = options.gradient_accumulation_steps, options.epochs or 1
    if options.max_tokens is None or not options.shuffle:
        return epochs * math.ceil(len(batches) / size)
    return sum(math.ceil(len(batches.plan(epoch)) / size) for epoch in range(epochs))
