"""Orders of jobs: data that one rank has read, and the options, as a message has them."""

from __future__ import annotations

import dataclasses
import itertools
import os
from array import array
from collections.abc import Sequence

from pcg.peft.registry import is_shorthand, recipe_fields, recipe_from, recipe_of_fields
from pcg.runtime.data.dataset import Dataset
from pcg.runtime.data.example import Example
from pcg.runtime.engine.ranks.orders import ExampleData, Prepare
from pcg.runtime.training.options import JobArguments

_OTHERWISE = ("data", "eval_data", "peft", "on_step")
_TUPLES = ("betas", "report_to")


def prepare_order(given: JobArguments) -> Prepare:
    """Return the order of a job whose data was read."""
    assert isinstance(given.data, Dataset)
    assert isinstance(given.eval_data, Dataset | None)
    names = [one.name for one in dataclasses.fields(given) if one.name not in _OTHERWISE]
    peft, recipe, path = given.peft, None, None
    if isinstance(peft, str | os.PathLike) and not is_shorthand(peft):
        path = str(peft)
    elif peft is not None:
        recipe = recipe_fields(recipe_from(peft))
    return Prepare(
        _data_of(given.data),
        None if given.eval_data is None else _data_of(given.eval_data),
        recipe,
        path,
        {name: getattr(given, name) for name in names},
    )


def given_by(order: Prepare) -> JobArguments:
    """Return the arguments of an order, without a callback."""
    options = dict(order.options)
    for name in _TUPLES:
        if options[name] is not None:
            options[name] = tuple(options[name])
    return JobArguments(
        _dataset_of(order.data),
        eval_data=None if order.evaluation is None else _dataset_of(order.evaluation),
        peft=order.path if order.recipe is None else recipe_of_fields(order.recipe),
        **options,
    )


def _data_of(data: Dataset) -> ExampleData:
    examples = data.examples
    return ExampleData(
        _joined([one.ids for one in examples]),
        _joined([one.labels for one in examples]),
        array("q", [len(one.ids) for one in examples]).tobytes(),
        data.format,
        data.truncated,
        data.dropped,
        tuple(data.places),
    )


def _joined(rows: Sequence[Sequence[int]]) -> bytes:
    joined = array("q")
    for row in rows:
        joined.extend(row)
    return joined.tobytes()


def _dataset_of(data: ExampleData) -> Dataset:
    ids, labels, lengths = array("q", data.ids), array("q", data.labels), array("q", data.lengths)
    ends = list(itertools.accumulate(lengths, initial=0))
    examples = tuple(
        Example(list(ids[start:end]), list(labels[start:end]))
        for start, end in itertools.pairwise(ends)
    )
    return Dataset(examples, data.format, data.truncated, data.dropped, data.places)
