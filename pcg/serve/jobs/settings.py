"""Settings of jobs: what a client leaves to us is resolved, and told in the job."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pcg.errors import AdapterError, DataError, FinetuneError, UnsupportedError
from pcg.peft.registry import recipe_from
from pcg.runtime.data.formats import detect, parse, parse_pair
from pcg.runtime.data.limits import DataLimits
from pcg.runtime.data.sources import read_rows
from pcg.runtime.training.options import FinetuneOptions
from pcg.serve.engine.news import DPO
from pcg.serve.engine.warm_jobs import DEFAULT_PEFT
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel
from pcg.train.preference.options import LEARNING_RATE as DPO_RATE
from pcg.train.preference.options import DpoOptions

Auto = Literal["auto"]

LEARNING_RATE = 2e-4
"""The learning rate of a multiplier of 1: QLoRA, table 9."""
_EPOCHS, _LEAST_EXAMPLES, _MOST_EXAMPLES, _MOST_EPOCHS = 3, 100, 25_000, 25
"""Epochs by default, fewer or more where the examples are very many or few.

Source: OpenAI's cookbook, "Data preparation and analysis for chat model fine-tuning".
"""
_BATCH_SHARE, _MOST_BATCH = 0.002, 16
MOST_STEPS = 1_000_000
"""The most steps of a job."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MOST_NUMBER = 1024
"""The greatest integer of a PEFT configuration, such as a rank: it takes the server's memory."""


class Hyperparameters(WireModel):
    """OpenAI's hyperparameters; what is `auto` or left out is resolved."""

    n_epochs: Annotated[int, Field(ge=1, le=1000)] | Auto = "auto"
    batch_size: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1e4)] | Auto = "auto"


class DpoHyperparameters(Hyperparameters):
    """OpenAI's hyperparameters of the method `dpo`."""

    beta: Annotated[float, Field(gt=0, le=100)] | Auto = "auto"


class PcgSettings(WireModel):
    """Settings of our own.

    `peft` has the fields of peft's adapter_config.json, such as peft_type, r and target_modules.
    `learning_rate` is absolute, in place of the multiplier. `save_every` counts steps between
    checkpoints, by default those of an epoch. `max_completion_length` is of reinforcement alone.
    """

    peft: dict[str, Any] | None = None
    learning_rate: Annotated[float, Field(gt=0, le=100)] | None = None
    max_seq_len: Annotated[int, Field(ge=2, le=2**24)] | None = None
    max_completion_length: Annotated[int, Field(ge=1, le=2**20)] | None = None
    save_every: Annotated[int, Field(ge=1, le=2**31)] | None = None
    schedule: Annotated[str, Field(max_length=32)] | None = None
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0, le=10)] | None = None


def count_examples(path: Path, param: str, method: str) -> int:
    """Count the rows of a file of data, each of which is looked at.

    Args:
        method: that of the job, which the rows are for.
    Raises:
        ApiError: a line is not as it has to be; which one, and why.
    """
    count, format = 0, None
    try:
        for row in read_rows((path,), DataLimits()):
            count += 1
            if method == DPO:
                parse_pair(row.value, row.where)
                continue
            format = detect(row.value, row.where) if format is None else format
            parse(format, row.value, row.where)
        if not count:
            raise DataError("the file has no rows")
    except DataError as error:
        text = str(error).replace(f"{path.parent}/", "")
        raise ApiError(400, text, param=param, code="invalid_file_format") from None
    return count


def resolve(
    given: Hyperparameters, own: PcgSettings, examples: int, method: str, start: str | None
) -> dict[str, Any]:
    """Return the resolved configuration of a job.

    Args:
        examples: rows of the training data.
        method: supervised, or dpo.
        start: the model that the job goes on from; None for the base.
    Raises:
        ApiError: a value cannot be.
    """
    if own.max_completion_length is not None:
        name = "pcg.max_completion_length"
        said = f"{name} is of the method 'reinforcement' alone; leave it out."
        raise ApiError(400, said, param=name)
    epochs = _epochs(examples) if given.n_epochs == "auto" else given.n_epochs
    batch = max(1, min(_MOST_BATCH, round(_BATCH_SHARE * examples)))
    if given.batch_size != "auto":
        batch = given.batch_size
    multiplier = given.learning_rate_multiplier
    if own.learning_rate is not None and multiplier != "auto":
        raise ApiError(
            400,
            "Give learning_rate_multiplier or pcg.learning_rate, not both.",
            param="learning_rate_multiplier",
        )
    rate, of_one = own.learning_rate, DPO_RATE if method == DPO else LEARNING_RATE
    multiplier = 1.0 if multiplier == "auto" else multiplier
    if rate is None:
        rate = of_one * multiplier
    else:
        multiplier = rate / of_one
    steps = epochs * math.ceil(examples / batch)
    if steps > MOST_STEPS:
        raise ApiError(
            400,
            f"The job would have {steps} steps, and has at most {MOST_STEPS}: use a greater "
            "batch_size, or fewer n_epochs.",
            param="n_epochs",
        )
    further = {name: getattr(own, name) for name in ("schedule", "warmup_ratio", "weight_decay")}
    options = {
        "epochs": epochs,
        "batch_size": min(batch, examples),
        "learning_rate": rate,
        "max_length": own.max_seq_len,
        "save_every": own.save_every,
        **{name: value for name, value in further.items() if value is not None},
    }
    hyperparameters = {
        "n_epochs": epochs,
        "batch_size": min(batch, examples),
        "learning_rate_multiplier": multiplier,
    }
    if isinstance(given, DpoHyperparameters):
        beta = DpoOptions.beta if given.beta == "auto" else given.beta
        options["beta"] = hyperparameters["beta"] = beta
        options["reference"] = "base" if start is None else "start"
    peft = checked_peft(own.peft, start)
    try:
        kind = DpoOptions if method == DPO else FinetuneOptions
        kind(**{**options, "checkpoint_dir": "checked"})
    except FinetuneError as error:
        raise ApiError(400, str(error), param="pcg") from None
    return {
        "method": method,
        "hyperparameters": hyperparameters,
        "options": options,
        "peft": peft,
        "start": start,
        "examples": examples,
        "total_steps": steps,
    }


def _epochs(examples: int) -> int:
    if _EPOCHS * examples < _LEAST_EXAMPLES:
        return min(_MOST_EPOCHS, max(_EPOCHS, _LEAST_EXAMPLES // examples))
    if _EPOCHS * examples > _MOST_EXAMPLES:
        return max(1, _MOST_EXAMPLES // examples)
    return _EPOCHS


def _check_plain(value: Any, where: str, depth: int = 0) -> None:
    """Refuse numbers that take too much, and names that are patterns, which may take for ever."""
    if isinstance(value, str) and not _NAME.fullmatch(value):
        said = f"{where}: use names of up to 128 letters, digits, dots, - and _, and no patterns"
        raise ApiError(400, said, param=where)
    if isinstance(value, int | float) and not abs(value) <= _MOST_NUMBER:
        raise ApiError(400, f"{where}={value}; use at most {_MOST_NUMBER}", param=where)
    if isinstance(value, dict | list):
        if depth > 3 or len(value) > _MOST_NUMBER:
            raise ApiError(400, f"{where} has too many values, or lists in lists", param=where)
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in entries:
            if isinstance(name, str):
                _check_plain(name, f"{where}'s names", depth)
            inner = f"{where}.{name}" if isinstance(name, str) else where
            _check_plain(one, inner, depth + 1)


def checked_peft(given: dict[str, Any] | None, start: str | None) -> dict[str, Any]:
    """Return a PEFT configuration.

    Args:
        start: the model that the job goes on from; None for the base.
    Raises:
        ApiError: it cannot be, takes too much, or is given beside a model to go on from.
    """
    if start is not None and given is not None:
        said = f"pcg.peft: the job goes on from {start}, which has a recipe; leave peft out."
        raise ApiError(400, said, param="pcg.peft")
    peft = DEFAULT_PEFT if given is None else given
    _check_plain(peft, "pcg.peft")
    try:
        recipe_from(peft)
    except (AdapterError, UnsupportedError) as error:
        raise ApiError(400, f"pcg.peft: {error}", param="pcg.peft") from None
    return peft
