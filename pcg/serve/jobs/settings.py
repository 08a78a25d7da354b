"""Request bodies of jobs, and the resolution of `auto` and missing settings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from pcg.errors import AdapterError, DataError, FinetuneError, UnsupportedError
from pcg.peft.registry import recipe_from
from pcg.runtime.data.formats import detect, parse, parse_pair
from pcg.runtime.data.sources import DataLimits, read_rows
from pcg.runtime.text.chat import check_messages
from pcg.runtime.training.options import FinetuneOptions, make_schedule
from pcg.serve.engine.messages import DPO, REINFORCEMENT, SUPERVISED
from pcg.serve.engine.warm_jobs import DEFAULT_PEFT
from pcg.serve.http.errors import UNSUPPORTED, ApiError
from pcg.serve.http.wire import WireModel
from pcg.train.grpo.options import GrpoOptions
from pcg.train.preference.options import LEARNING_RATE as DPO_RATE
from pcg.train.preference.options import DpoOptions

Auto = Literal["auto"]
METHODS = (SUPERVISED, DPO, REINFORCEMENT)
MOST_STEPS = 1_000_000
"""The most steps of a job."""

_RATES = {SUPERVISED: 2e-4, DPO: DPO_RATE, REINFORCEMENT: 2e-5}
"""Learning rates at a multiplier of 1: QLoRA, table 9; for rewards, from the range 1e-5 to 1e-4
(docs/finetuning.md)."""
_EPOCHS, _LEAST_EXAMPLES, _MOST_EXAMPLES, _MOST_EPOCHS = 3, 100, 25_000, 25
"""Default number of epochs, and the bounds beyond which it is reduced or raised.

Source: OpenAI's cookbook, "Data preparation and analysis for chat model fine-tuning".
"""
_BATCH_SHARE, _MOST_BATCH = 0.002, 16
_GENERATIONS, _MOST_GENERATIONS = 8, 64
"""Completions of a prompt at a compute_multiplier of 1, as in TRL, and their maximum."""
_PROMPTS_OF_STEP = 8
_MOST_COMPLETIONS = 4096
_COMPLETION_TOKENS = 256
_MOST_PROMPTS, _MOST_ROW_BYTES = 2**16, 2**16
_NO_BOUND = 2**20
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MOST_NUMBER = 1024
"""The greatest number in a PEFT configuration, such as a rank, as it needs the server's memory."""


class Hyperparameters(WireModel):
    """OpenAI's hyperparameters; `auto` and missing values are resolved."""

    n_epochs: Annotated[int, Field(ge=1, le=1000)] | Auto = "auto"
    batch_size: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1e4)] | Auto = "auto"


class DpoHyperparameters(Hyperparameters):
    """OpenAI's hyperparameters of the method `dpo`."""

    beta: Annotated[float, Field(gt=0, le=100)] | Auto = "auto"


class ReinforcementHyperparameters(Hyperparameters):
    """OpenAI's hyperparameters of the method `reinforcement`."""

    compute_multiplier: Annotated[float, Field(ge=0.00001, le=10)] | Auto = "auto"
    eval_interval: Annotated[int, Field(ge=1, le=2**31)] | Auto = "auto"
    eval_samples: Annotated[int, Field(ge=1, le=16)] | Auto = "auto"
    reasoning_effort: Literal["default", "low", "medium", "high"] = "default"


class Supervised(WireModel):
    """The method `supervised`."""

    hyperparameters: Hyperparameters | None = None


class Dpo(WireModel):
    """The method `dpo`."""

    hyperparameters: DpoHyperparameters | None = None


class Reinforcement(WireModel):
    """The method `reinforcement`: a grader gives the rewards."""

    grader: dict[str, Any]
    hyperparameters: ReinforcementHyperparameters | None = None


class Method(WireModel):
    """The training method of a job, with the options of its type."""

    type: Annotated[str, Field(max_length=64)]
    supervised: Supervised | None = None
    dpo: Dpo | None = None
    reinforcement: Reinforcement | None = None


class PcgSettings(WireModel):
    """Settings beyond OpenAI's API.

    `peft` has the fields of peft's adapter_config.json, such as peft_type, r and target_modules.
    `learning_rate` is absolute and replaces the multiplier. `save_every` is the number of steps
    between checkpoints, by default those of an epoch. `max_completion_length` is only for
    reinforcement.
    """

    peft: dict[str, Any] | None = None
    learning_rate: Annotated[float, Field(gt=0, le=100)] | None = None
    max_seq_len: Annotated[int, Field(ge=2, le=2**24)] | None = None
    max_completion_length: Annotated[int, Field(ge=1, le=2**20)] | None = None
    save_every: Annotated[int, Field(ge=1, le=2**31)] | None = None
    schedule: Annotated[str, Field(max_length=32)] | None = None
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0, le=10)] | None = None

    def refuse(self, names: tuple[str, ...], because: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                message = f"pcg.{name} is {because}; leave it out."
                raise ApiError(400, message, param=f"pcg.{name}")


Metadata = dict[
    Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]
]


class JobBody(WireModel):
    """A job to create. `pcg` has settings beyond OpenAI's API; `integrations` must be empty."""

    model: Annotated[str, Field(max_length=512)]
    training_file: Annotated[str, Field(max_length=128)]
    validation_file: Annotated[str, Field(max_length=128)] | None = None
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None
    integrations: list[Any] | None = None
    pcg: PcgSettings | None = None

    def method_options(self) -> tuple[str, Hyperparameters | Reinforcement]:
        """Return the method and its options, which may be in either of two places.

        Raises:
            ApiError: both places have options, or the method is unknown.
        """
        method = self.method or Method(type=SUPERVISED)
        if method.type not in METHODS:
            message = f"'{method.type}' is not one of {list(METHODS)}."
            raise ApiError(400, f"Invalid value for 'method.type': {message}", param="method.type")
        for name in METHODS:
            if name != method.type and getattr(method, name) is not None:
                message = f"method.{name} has no effect on a job of the type '{method.type}'."
                raise ApiError(400, message, param=f"method.{name}")
        if self.integrations:
            message = "integrations are not supported; leave them out."
            raise ApiError(400, message, param="integrations", code=UNSUPPORTED)
        if method.type == REINFORCEMENT:
            name = f"method.{REINFORCEMENT}"
            if method.reinforcement is None:
                raise ApiError(400, f"Missing required parameter: '{name}'.", param=name)
            if self.hyperparameters is not None:
                message = f"Give {name}.hyperparameters in place of hyperparameters."
                raise ApiError(400, message, param="hyperparameters")
            return method.type, method.reinforcement
        options = method.dpo if method.type == DPO else method.supervised
        hyperparameters = None if options is None else options.hyperparameters
        if hyperparameters is not None and self.hyperparameters is not None:
            message = f"Give hyperparameters or method.{method.type}.hyperparameters, not both."
            raise ApiError(400, message, param="hyperparameters")
        kind = DpoHyperparameters if method.type == DPO else Hyperparameters
        shared = {} if self.hyperparameters is None else self.hyperparameters.model_dump()
        return method.type, hyperparameters or kind(**shared)


def count_rows(path: Path, param: str, method: str) -> int:
    """Check each row of a data file for a method, and count the rows.

    Raises:
        ApiError: a line is invalid; the message names the line and the reason.
    """
    check: Callable[[Any, str], object] = {DPO: parse_pair, REINFORCEMENT: _check_prompt}.get(
        method, _Examples().check
    )
    count = 0
    try:
        for row in read_rows((path,), DataLimits()):
            check(row.value, row.where)
            count += 1
        if not count and method != REINFORCEMENT:
            raise DataError("the file has no rows")
        if method == REINFORCEMENT and not 0 < count <= _MOST_PROMPTS:
            raise DataError(f"the file has {count} rows; use 1 to {_MOST_PROMPTS}")
    except DataError as error:
        text = str(error).replace(f"{path.parent}/", "")
        raise ApiError(400, text, param=param, code="invalid_file_format") from None
    return count


class _Examples:
    """Checks rows of examples, which must all have the first row's format."""

    def __init__(self) -> None:
        self._format: Any = None

    def check(self, row: Any, where: str) -> None:
        self._format = self._format or detect(row, where)
        parse(self._format, row, where)


def _check_prompt(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{where}: use an object with 'messages' or 'prompt'")
    try:
        size = len(json.dumps(row))
        msgspec.msgpack.encode(row)  # rows are sent to the engine and back for grading
    except UnicodeEncodeError:
        raise DataError(f"{where} has a text with an unpaired surrogate; repair it") from None
    except OverflowError:
        message = "an integer of more than 64 bits; write it as a text"
        raise DataError(f"{where} has {message}") from None
    except RecursionError:
        raise DataError(f"{where} is nested too deeply; write a flat row") from None
    if size > _MOST_ROW_BYTES:
        raise DataError(f"{where} has {size} bytes; use at most {_MOST_ROW_BYTES}")
    if ("messages" in row) == ("prompt" in row):
        raise DataError(f"{where}: give 'messages' or 'prompt', and not both")
    for name in ("tools", "functions"):
        if row.get(name):
            raise DataError(f"{where} has {name!r}, which rollouts do not support; leave it out")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise DataError(f"{where}: 'prompt' must be a text")
        return
    messages = check_messages(row["messages"], "'messages'", where)
    if messages[-1]["role"] not in ("user", "tool"):
        raise DataError(f"{where}: the last message must be of the role 'user' or 'tool'")


def resolve(
    hyper: Hyperparameters, settings: PcgSettings, examples: int, method: str, start: str | None
) -> dict[str, Any]:
    """Return the resolved configuration of a supervised or DPO job.

    Args:
        examples: number of rows of the training data.
        method: supervised, or dpo.
        start: the model that the job continues; None for the base.
    Raises:
        ApiError: a value is invalid.
    """
    settings.refuse(("max_completion_length",), "only for the method 'reinforcement'")
    epochs = _epochs(examples) if hyper.n_epochs == "auto" else hyper.n_epochs
    batch = max(1, min(_MOST_BATCH, round(_BATCH_SHARE * examples)))
    if hyper.batch_size != "auto":
        batch = hyper.batch_size
    rate, multiplier = _rate(hyper, settings, _RATES[method])
    steps = epochs * math.ceil(examples / batch)
    if steps > MOST_STEPS:
        raise ApiError(
            400,
            f"The job would have {steps} steps, and has at most {MOST_STEPS}: use a greater "
            "batch_size, or fewer n_epochs.",
            param="n_epochs",
        )
    options: dict[str, Any] = {
        "epochs": epochs,
        "batch_size": min(batch, examples),
        "learning_rate": rate,
        "max_length": settings.max_seq_len,
        "save_every": settings.save_every,
    }
    for name in ("schedule", "warmup_ratio", "weight_decay"):
        if (value := getattr(settings, name)) is not None:
            options[name] = value
    hyperparameters: dict[str, Any] = {
        "n_epochs": epochs,
        "batch_size": min(batch, examples),
        "learning_rate_multiplier": multiplier,
    }
    if isinstance(hyper, DpoHyperparameters):
        beta = DpoOptions.beta if hyper.beta == "auto" else hyper.beta
        options["beta"] = hyperparameters["beta"] = beta
        options["reference"] = "base" if start is None else "start"
    peft = checked_peft(settings.peft, start)
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


def resolve_reinforcement(
    method: Reinforcement,
    settings: PcgSettings,
    examples: int,
    tests: int,
    *,
    most_tokens: int | None,
    start: str | None,
) -> dict[str, Any]:
    """Return the resolved configuration of a reinforcement job.

    Args:
        examples: number of rows of the training data.
        tests: number of rows of the validation data.
        most_tokens: the most tokens of a prompt and its completion; None without a limit.
        start: the model that the job continues; None for the base.
    Raises:
        ApiError: a value is invalid.
    """
    hyper = method.hyperparameters or ReinforcementHyperparameters()
    settings.refuse(("max_seq_len", "warmup_ratio"), "not for the method 'reinforcement'")
    epochs = 1 if hyper.n_epochs == "auto" else hyper.n_epochs
    batch = min(_PROMPTS_OF_STEP if hyper.batch_size == "auto" else hyper.batch_size, examples)
    compute = 1.0 if hyper.compute_multiplier == "auto" else hyper.compute_multiplier
    generations = min(_MOST_GENERATIONS, max(2, round(_GENERATIONS * compute)))
    if batch * generations > _MOST_COMPLETIONS:
        raise ApiError(
            400,
            f"A step would have {batch * generations} completions, and has at most "
            f"{_MOST_COMPLETIONS}: use a smaller batch_size or compute_multiplier.",
            param="batch_size",
        )
    samples = 1 if hyper.eval_samples == "auto" else hyper.eval_samples
    if tests * samples > _MOST_COMPLETIONS:
        raise ApiError(
            400,
            f"An evaluation would have {tests * samples} completions, and has at most "
            f"{_MOST_COMPLETIONS}: use fewer rows in validation_file, or fewer eval_samples.",
            param="validation_file",
        )
    steps_of_epoch = math.ceil(examples / batch)
    steps = epochs * steps_of_epoch
    if steps > MOST_STEPS:
        message = f"The job would have {steps} steps, and has at most {MOST_STEPS}."
        raise ApiError(400, message, param="n_epochs")
    rate, multiplier = _rate(hyper, settings, _RATES[REINFORCEMENT])
    tokens = min(_COMPLETION_TOKENS, (most_tokens or 512) // 2)
    completion = settings.max_completion_length or tokens
    prompt = (most_tokens or _NO_BOUND) - completion
    if prompt < 1:
        raise ApiError(
            400,
            f"pcg.max_completion_length={completion} leaves no room for a prompt in {most_tokens} "
            "tokens; use less.",
            param="pcg.max_completion_length",
        )
    grpo: dict[str, Any] = {
        "num_generations": generations,
        "batch_size": batch * generations,
        "max_completion_length": completion,
        "max_steps": steps,
        "learning_rate": rate,
    }
    if settings.schedule is not None:
        grpo["lr_scheduler_type"] = settings.schedule
    if settings.weight_decay is not None:
        grpo["weight_decay"] = settings.weight_decay
    try:
        GrpoOptions(**grpo)
        make_schedule(grpo.get("lr_scheduler_type", "linear"), total_steps=steps)
    except FinetuneError as error:
        raise ApiError(400, str(error), param="pcg") from None
    interval = steps_of_epoch if hyper.eval_interval == "auto" else hyper.eval_interval
    effort = hyper.reasoning_effort
    return {
        "method": REINFORCEMENT,
        "grader": method.grader,
        "hyperparameters": {
            "n_epochs": epochs,
            "batch_size": batch,
            "learning_rate_multiplier": multiplier,
            "compute_multiplier": compute,
            "eval_interval": interval,
            "eval_samples": samples,
            "reasoning_effort": effort,
        },
        "options": {
            "grpo": grpo,
            "prompt_tokens": prompt,
            "save_every": settings.save_every or steps_of_epoch,
            "eval_interval": interval,
            "eval_samples": samples,
            "reasoning_effort": None if effort == "default" else effort,
        },
        "peft": checked_peft(settings.peft, start),
        "start": start,
        "examples": examples,
        "total_steps": steps,
    }


def _rate(hyper: Hyperparameters, settings: PcgSettings, unit: float) -> tuple[float, float]:
    """Return the learning rate, and its multiple of `unit`. ApiError: both are set."""
    multiplier = hyper.learning_rate_multiplier
    if settings.learning_rate is None:
        multiple = 1.0 if multiplier == "auto" else multiplier
        return unit * multiple, multiple
    if multiplier != "auto":
        raise ApiError(
            400,
            "Give learning_rate_multiplier or pcg.learning_rate, not both.",
            param="learning_rate_multiplier",
        )
    return settings.learning_rate, settings.learning_rate / unit


def _epochs(examples: int) -> int:
    if _EPOCHS * examples < _LEAST_EXAMPLES:
        return min(_MOST_EPOCHS, max(_EPOCHS, _LEAST_EXAMPLES // examples))
    if _EPOCHS * examples > _MOST_EXAMPLES:
        return max(1, _MOST_EXAMPLES // examples)
    return _EPOCHS


def checked_peft(config: dict[str, Any] | None, start: str | None) -> dict[str, Any]:
    """Return a checked PEFT configuration, or the default.

    Args:
        start: the model that the job continues; None for the base.
    Raises:
        ApiError: it is invalid or too large, or the job continues a model.
    """
    if start is not None and config is not None:
        message = f"pcg.peft: the job continues {start}, which has a recipe; leave peft out."
        raise ApiError(400, message, param="pcg.peft")
    peft = DEFAULT_PEFT if config is None else config
    _check_plain(peft, "pcg.peft")
    try:
        recipe_from(peft)
    except (AdapterError, UnsupportedError) as error:
        raise ApiError(400, f"pcg.peft: {error}", param="pcg.peft") from None
    return peft


def _check_plain(value: Any, where: str, depth: int = 0) -> None:
    """Refuse large numbers, and regular expressions as names: matching them may never end."""
    if isinstance(value, str) and not _NAME.fullmatch(value):
        message = f"{where}: use names of up to 128 letters, digits, dots, - and _, and no patterns"
        raise ApiError(400, message, param=where)
    if isinstance(value, int | float) and not abs(value) <= _MOST_NUMBER:
        raise ApiError(400, f"{where}={value}; use at most {_MOST_NUMBER}", param=where)
    if isinstance(value, dict | list):
        if depth > 3 or len(value) > _MOST_NUMBER:
            raise ApiError(400, f"{where} has too many values, or lists in lists", param=where)
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for name, entry in entries:
            if isinstance(name, str):
                _check_plain(name, f"{where}'s names", depth)
            inner = f"{where}.{name}" if isinstance(name, str) else where
            _check_plain(entry, inner, depth + 1)
