"""Training data: examples from any source, checked against the model."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import pickle
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pcg.errors import DataError, FinetuneError
from pcg.files import is_file
from pcg.ir.program.program import is_classifier, labels_of
from pcg.peft.registry import is_saved
from pcg.ranks.agreement import agreed, described, tokens_digest
from pcg.runtime.data.dataset import Dataset, ExampleReader, ReadOptions, RowKind
from pcg.runtime.data.example import Example, ModelSizes, check_example
from pcg.runtime.data.formats import FormattingFunc
from pcg.runtime.data.order import Batches, Mixture
from pcg.runtime.data.sources import (
    UNLIMITED,
    DataLimits,
    Gathered,
    NamedSources,
    Splits,
    check_tokens,
    choose_splits,
    gather,
    holds_documents,
)
from pcg.runtime.data.streaming import StreamedBatches, StreamedRows, cores, streamed
from pcg.runtime.data.tokenizing import Cancelling, load_apart
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.plain import option_facts
from pcg.runtime.text.tokenizer import Tokenizer, adapter_template
from pcg.runtime.training.options import ChatOptions, Data, FinetuneArguments, FinetuneOptions
from pcg.source import adapter_directory
from pcg.units import counted

_LOG = logging.getLogger("pcg.finetuning")

Load = Callable[[Gathered, ReadOptions, ModelSizes], Dataset]
"""A function that creates and checks examples from files or rows."""


Given = TypeVar("Given", bound=FinetuneArguments)
Rendering = TypeVar("Rendering", bound=ChatOptions)


def settled(arguments: Given, model: ModelState) -> Given:
    """Return arguments with the adapter's template, and the program's batch size by default."""
    arguments = with_own_template(arguments, model, arguments.adapter, arguments.peft)
    planned = model.program.options
    if planned.names_step and not (arguments.batch_size or arguments.max_tokens):
        return dataclasses.replace(arguments, batch_size=planned.batch)
    return arguments


def with_own_template(
    options: Rendering, model: ModelState, adapter: str, peft: object
) -> Rendering:
    """Return options with the template of the adapter to train further, unless they have one.

    Args:
        adapter: the adapter's name; its template is that of the adapter that is there.
        peft: a recipe, or a saved adapter to start from, whose folder may have a template.
    Raises:
        AdapterError: the template cannot be read, or does not compile.
    """
    template = None
    if options.chat_template is None and adapter in model.adapters:
        template = model.adapters[adapter].chat_template
    elif options.chat_template is None and is_saved(peft):
        template = adapter_template(adapter_directory(peft))
    return options if template is None else dataclasses.replace(options, chat_template=template)


def splits_of(arguments: FinetuneArguments, is_first: bool) -> Splits:
    """Choose the training and the evaluation data; rank 0 logs the choice.

    Raises:
        DataError: the data lacks a split.
    """
    sources = None if isinstance(arguments.data, Dataset) else arguments.sources
    splits = choose_splits(arguments.data, arguments.eval_data, arguments.most_rows, sources)
    if splits.chosen and is_first:
        _LOG.warning("%s: %s", arguments.adapter, splits.chosen)
    return splits


_OF_ONE_RANK = (
    "callbacks", "checkpoint_dir", "data", "eval_data", "formatting_func", "log_every", "on_step",
    "peft", "progress", "record", "report_to",
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
        read_one = functools.partial(
            training_data, options=options, model=model, formatting_func=options.formatting_func
        )
        rest = splits.evaluation
        if options.streaming:
            data = streamed_data(splits.train, options, model, options.formatting_func)
        else:
            data = Dataset.joined([*map(read_one, splits.train)])
        return data, None if rest is None else read_one(rest)

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
    if isinstance(data.examples, StreamedRows):
        return f"{counted(len(data), 'row')}, checksum {data.examples.checksum:08x}"
    weights = array("q", array("d", [example.weight for example in data.examples]).tobytes())
    tokens = (part for example in data.examples for part in (example.ids, example.labels))
    digest = tokens_digest((*tokens, weights))
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
    rows: RowKind = "samples",
    formatting_func: FormattingFunc | None = None,
) -> Dataset:
    """Read, tokenize and check examples.

    Args:
        source: files, rows (see `sources`), or tokenized examples.
        load: creates examples from files and rows; by default in this process.
        rows: the kind of rows, as of `ReadOptions`.
        formatting_func: converts each row, in this process.
    Raises:
        DataError: the data cannot be read, or a row does not fit the model; names the row.
        FinetuneError: the data is text, and the model has no tokenizer.
    """
    sizes = sizes_of(model)
    columns, most = options.columns or {}, options.max_length
    if most is not None:
        most += sizes.of_labels  # the label follows the cut text
    if isinstance(source, NamedSources):
        of_one = functools.partial(training_data, options=options, model=model, load=load)
        each = [
            of_one(value, limits=limits, rows=rows, formatting_func=formatting_func)
            for value in source.values()
        ]
        return Dataset.joined(each, tuple(source))
    gathered = source if isinstance(source, Dataset) else gather(source, columns=columns)
    if isinstance(gathered, Dataset):
        data = _cut(gathered, most)
    elif gathered and isinstance(gathered[0], Example):
        if columns or formatting_func:
            raise DataError(
                "the data is tokenized, so that columns and formatting_func have no effect; leave "
                "them out"
            )
        places = tuple(f"data[{index}]" for index in range(len(gathered)))
        data = _cut(Dataset(tuple(gathered), "tokens", places=places), most)
    elif model.tokenizer is None:
        raise FinetuneError(
            "the model came without a tokenizer.json; put one into its directory (in Python, data "
            "may be a list of pcg.runtime.data.example.Example(ids, labels))"
        )
    else:
        max_length, planned = options.max_length, model.program.options
        if max_length is None and rows == "samples" and holds_documents(gathered):
            # Documents are cut into examples of this length.
            bounds = (planned.seq if planned.names_step else None, model.max_positions)
            max_length = min(filter(None, bounds), default=None)
        read = dataclasses.replace(
            _read_options(options, formatting_func, model),
            max_length=max_length,
            limits=limits,
            rows=rows,
        )
        if formatting_func is not None or (load is None and not _is_large(gathered)):
            load = functools.partial(load_here, model.tokenizer)
        elif load is None:
            tokenizer = pickle.dumps(model.tokenizer)
            load = functools.partial(
                load_apart, tokenizer, Cancelling("finetune"), processes=cores()
            )
        data = load(gathered, read, sizes)
    if data.checked != sizes:
        for example, place in zip(data.examples, places_of(data), strict=True):
            check_example(example, place, sizes)
            check_tokens(len(example.ids), place, limits)
    return data


_LARGE_BYTES = 2**23
"""Size of files from which on a process for each core tokenizes; they start in about a second."""


def _is_large(gathered: Gathered) -> bool:
    """Return True for files that several processes tokenize faster than this one."""
    if isinstance(gathered, list) or cores() == 1:
        return False
    sizes = [path.stat().st_size for path in gathered if is_file(path)]
    return sum(sizes) >= _LARGE_BYTES and not holds_documents(gathered)


def _read_options(
    options: FinetuneOptions, formatting_func: FormattingFunc | None, model: ModelState
) -> ReadOptions:
    return ReadOptions(
        options.max_length,
        options.data_format,
        options.append_eos,
        options.empty,
        template=options.template(),
        variables=options.variables(),
        columns=options.columns or {},
        formatting_func=formatting_func,
        labels=labels_of(model.program.config),
    )


def streamed_data(
    sources: Sequence[Data],
    options: FinetuneOptions,
    model: ModelState,
    formatting_func: FormattingFunc | None = None,
    rows: RowKind = "samples",
) -> Dataset:
    """Return the examples of files that stay on disk. DataError: a file cannot be streamed."""
    if model.tokenizer is None:
        raise FinetuneError("streaming needs a tokenizer.json in the model's directory")
    read = dataclasses.replace(_read_options(options, formatting_func, model), rows=rows)
    gathered = [gather(source) for source in sources]
    return streamed(gathered, model.tokenizer, read, sizes_of(model))


def sizes_of(model: ModelState, routes: tuple[int, int, int] = (0, 0, 0)) -> ModelSizes:
    """Return the sizes of a model; `routes` as in `ModelSizes`."""
    base, program = model.program.base, model.program
    of_labels = is_classifier(program.config)
    return ModelSizes(
        base.tokens, base.vocabulary, model.max_positions, routes, program.padding, of_labels
    )


def batches_of(data: Dataset, options: FinetuneOptions) -> Batches:
    """Return the batches of a job."""
    order: dict[str, Any] = {
        "seed": options.seed,
        "shuffle": options.shuffle,
        "mixture": mixture_of(options, data),
    }
    bounds = options.batch_bounds
    if isinstance(data.examples, StreamedRows):
        assert bounds["batch_size"] is not None
        return StreamedBatches(data.examples, batch_size=bounds["batch_size"], **order)
    return Batches(data.examples, **bounds, **order)


def places_of(data: Dataset) -> Sequence[str]:
    """Return the place of each example."""
    return data.places or [f"example {index}" for index in range(len(data))]


def mixture_of(options: FinetuneOptions, data: Dataset) -> Mixture | None:
    """Return the mixture of the data's sources; None without probabilities.

    Raises:
        FinetuneError: the data was read without its sources.
    """
    if options.probabilities is None:
        return None
    if len(data.parts) != len(options.probabilities):
        raise FinetuneError(
            f"probabilities has {len(options.probabilities)} numbers, and the data is one set of "
            "tokenized examples; give a list of as many sources"
        )
    return Mixture(data.parts, tuple(options.probabilities), options.stopping_strategy)


def check_with_prompt(data: Dataset, virtual: int, max_positions: int | None) -> None:
    """Refuse an example that is too long together with the adapter's virtual tokens.

    Raises:
        DataError: names the first such example by its place.
    """
    if max_positions is None or not virtual:
        return
    most = max_positions - virtual
    if isinstance(data.examples, StreamedRows):
        if data.examples.max_length > most:
            raise DataError(
                f"max_length={data.examples.max_length}, and the adapter puts {virtual} virtual "
                f"tokens before it, more than the model's {max_positions} positions; use "
                f"max_length={max(most, 0)}"
            )
        return
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
    if options.probabilities is None and (options.max_tokens is None or not options.shuffle):
        return epochs * math.ceil(len(batches) / size)
    return sum(math.ceil(len(batches.plan(epoch)) / size) for epoch in range(epochs))
