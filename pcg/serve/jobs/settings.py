"""Request bodies of jobs, and the resolution of `auto` and missing settings."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from pydantic import ConfigDict, Field

from pcg.errors import AdapterError, DataError, FinetuneError, PcgError, UnsupportedError
from pcg.keywords import check_names
from pcg.peft.registry import recipe_from
from pcg.runtime.data.dataset import converted
from pcg.runtime.data.formats import FORMATS, detect, parse, parse_pair, take_label
from pcg.runtime.data.sources import DataLimits, read_rows
from pcg.runtime.text.chat import check_messages
from pcg.runtime.training.options import DEFAULT_BATCH_SIZE, FinetuneOptions
from pcg.runtime.training.schedules import make_schedule
from pcg.serve.engine.messages import DPO, KTO, REINFORCEMENT, SUPERVISED
from pcg.serve.engine.warm_jobs import DEFAULT_PEFT
from pcg.serve.http.errors import UNSUPPORTED, ApiError
from pcg.serve.http.wire import WireModel
from pcg.train.config_file import converted as as_field
from pcg.train.grpo.checkpoints import ResumableOptions
from pcg.train.grpo.options import GrpoOptions
from pcg.train.preference.options import LEARNING_RATE, DpoOptions, KtoOptions

Auto = Literal["auto"]
_OPTIONS: Mapping[str, type] = {
    SUPERVISED: FinetuneOptions,
    DPO: DpoOptions,
    KTO: KtoOptions,
    REINFORCEMENT: ResumableOptions,
}
"""The options of each method, which are the keys of `pcg`."""
METHODS = tuple(_OPTIONS)
_OF_SERVER = "the server sets it; leave it out"
_ONE_FILE = "a job learns one file, which it reads first; leave it out"
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("epochs", "max_steps", "num_train_epochs"), "give n_epochs instead"),
    "max_tokens": "a job counts its batches in rows; give batch_size instead",
    "num_generations": "give compute_multiplier instead",
    "seed": "give seed beside pcg instead",
    **dict.fromkeys(
        ("checkpoint_dir", "keep_last", "resume", "record", "report_to", "log_every", "progress"),
        _OF_SERVER,
    ),
    **dict.fromkeys(("streaming", "probabilities", "stopping_strategy"), _ONE_FILE),
    "eval_samples": "only executor.finetune continues prompts; leave it out",
    **dict.fromkeys(
        ("steps_per_generation", "num_iterations"),
        "a job saves its state after any update; leave it out",
    ),
}
"""Options that no job takes from `pcg`, and the fix."""
MOST_EVAL_DATA = 16
"""The most files of evaluation data of a job."""
MOST_STEPS = 1_000_000
"""The most steps of a job."""

_RATES = {SUPERVISED: 2e-4, DPO: LEARNING_RATE, KTO: LEARNING_RATE, REINFORCEMENT: 2e-5}
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
_MOST_PROMPTS, _MOST_ROW_BYTES, _MOST_DEPTH = 2**16, 2**16, 32
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
    """OpenAI's hyperparameters of the method `dpo`, and those of `kto`."""

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
    """The method `dpo`, or pcg's `kto`."""

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
    kto: Dpo | None = None
    reinforcement: Reinforcement | None = None


_EvalName = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


class PcgSettings(WireModel):
    """Settings beyond OpenAI's API.

    `peft` has the fields of peft's adapter_config.json, such as peft_type, r and target_modules.
    `eval_data` has file ids by name, instead of `validation_file`. The other keys are options of
    the method in Python, with the same values: those of `executor.finetune`, `DpoArguments`,
    `KtoArguments` or `GrpoOptions`. `learning_rate` replaces the multiplier.
    """

    model_config = ConfigDict(extra="allow")

    peft: dict[str, Any] | None = None
    eval_data: (
        Annotated[
            dict[_EvalName, Annotated[str, Field(max_length=128)]],
            Field(min_length=1, max_length=MOST_EVAL_DATA),
        ]
        | None
    ) = None

    def options(self, method: str, hyperparameters: type[WireModel]) -> dict[str, Any]:
        """Return the options of a method.

        Args:
            hyperparameters: the class of the job's hyperparameters, which are not options.
        Raises:
            ApiError: an option is unknown, or not one of a job, or has a value of another type.
        """
        kind, values = _OPTIONS[method], dict[str, Any]()
        hints = get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        for name, value in (self.model_extra or {}).items():
            param = f"pcg.{name}"
            try:
                check_names((name,), names)
                fix = _ELSEWHERE.get(name)
                if name in hyperparameters.model_fields:
                    fix = "give it among the hyperparameters instead"
                elif name == "eval_every" and method == REINFORCEMENT:
                    fix = "give eval_interval instead"
                elif name == "reference" and value not in ("base", "start"):
                    fix = "use base or start"
                elif name == "chat_template" and "{" not in str(value):
                    fix = "give the template's text"  # never a path of the server
                if fix is not None:
                    raise FinetuneError(f"the job cannot take it; {fix}")
                if isinstance(value, float) and not math.isfinite(value):
                    raise ValueError(f"{value}; use a finite number")
                if _is_deeper(value, _MOST_DEPTH):
                    raise FinetuneError(
                        f"it is nested more than {_MOST_DEPTH} deep; write a flatter value"
                    )
                values[name] = as_field(value, hints[name], Path())
                msgspec.msgpack.encode(values[name])  # as it is sent to the engine
            except UnicodeEncodeError:
                message = f"{param} has an unpaired surrogate; repair it"
                raise ApiError(400, message, param=param) from None
            except OverflowError:
                message = f"{param} has an integer of more than 64 bits; use less"
                raise ApiError(400, message, param=param) from None
            except ValueError as error:
                raise ApiError(400, f"{param}={error}", param=param) from None
            except PcgError as error:
                raise ApiError(400, f"{param}: {error}", param=param) from None
        return values


def _is_deeper(value: object, most: int) -> bool:
    """Return whether a JSON value has more than `most` objects and lists around a part."""
    inner = list(value.values()) if isinstance(value, dict) else value
    return isinstance(inner, list) and (
        most == 0 or any(_is_deeper(part, most - 1) for part in inner)
    )


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
        options: Supervised | Dpo | None = getattr(method, method.type)
        hyperparameters = None if options is None else options.hyperparameters
        if hyperparameters is not None and self.hyperparameters is not None:
            message = f"Give hyperparameters or method.{method.type}.hyperparameters, not both."
            raise ApiError(400, message, param="hyperparameters")
        kind = Hyperparameters if method.type == SUPERVISED else DpoHyperparameters
        shared = {} if self.hyperparameters is None else self.hyperparameters.model_dump()
        return method.type, hyperparameters or kind(**shared)


def count_rows(path: Path, param: str, method: str, options: Mapping[str, Any]) -> int:
    """Check each row of a data file for a method, and count the rows.

    Args:
        options: options of the job, of which `columns` and `data_format` count.
    Raises:
        ApiError: a line is invalid; the message names the line and the reason.
    """
    examples = _Examples(options.get("data_format", "auto"), has_labels=method == KTO)
    check: Callable[[Any, str], object] = {DPO: parse_pair, REINFORCEMENT: _check_prompt}.get(
        method, examples.check
    )
    count = 0
    try:
        for row in read_rows((path,), DataLimits()):
            check(converted(row.value, row.where, options.get("columns")), row.where)
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

    def __init__(self, format: str, *, has_labels: bool) -> None:
        self._format = FORMATS.get(format)
        self._has_labels = has_labels

    def check(self, row: Any, where: str) -> None:
        if self._has_labels:
            row, _ = take_label(row, where)
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
    hyper: Hyperparameters,
    settings: PcgSettings,
    overrides: Mapping[str, Any],
    examples: int,
    method: str,
    start: str | None,
    *,
    evaluates: bool,
) -> dict[str, Any]:
    """Return the resolved configuration of a supervised job, or of a job on preferences.

    Args:
        overrides: the options in the settings.
        examples: number of rows of the training data.
        method: supervised, dpo or kto.
        start: the model that the job continues; None for the base.
        evaluates: True for a job with validation data.
    Raises:
        ApiError: a value is invalid.
    """
    epochs = _epochs(examples) if hyper.n_epochs == "auto" else hyper.n_epochs
    least = DEFAULT_BATCH_SIZE if method == KTO else 1  # kto compares the rows of a batch
    batch = max(least, min(_MOST_BATCH, round(_BATCH_SHARE * examples)))
    if hyper.batch_size != "auto":
        batch = hyper.batch_size
    rate, multiplier = _rate(hyper, overrides, _RATES[method])
    options: dict[str, Any] = {
        **overrides,
        "epochs": epochs,
        "batch_size": min(batch, examples),
        "learning_rate": rate,
    }
    hyperparameters: dict[str, Any] = {
        "n_epochs": epochs,
        "batch_size": min(batch, examples),
        "learning_rate_multiplier": multiplier,
    }
    if isinstance(hyper, DpoHyperparameters):
        beta = DpoOptions.beta if hyper.beta == "auto" else hyper.beta
        options["beta"] = hyperparameters["beta"] = beta
        options.setdefault("reference", "base" if start is None else "start")
    peft = checked_peft(settings.peft, start)
    try:
        checked = {"checkpoint_dir": "checked", "eval_data": "checked" if evaluates else None}
        _OPTIONS[method](**{**options, **checked})
        if settings.eval_data is not None and method != SUPERVISED:
            raise FinetuneError("eval_data is for the method supervised; give validation_file")
    except PcgError as error:
        raise ApiError(400, str(error), param="pcg") from None
    updates = math.ceil(math.ceil(examples / batch) / options.get("gradient_accumulation_steps", 1))
    steps = epochs * updates
    if steps > MOST_STEPS:
        raise ApiError(
            400,
            f"The job would have {steps} steps, and has at most {MOST_STEPS}: use a greater "
            "batch_size, or fewer n_epochs.",
            param="n_epochs",
        )
    return {
        "method": method,
        "hyperparameters": hyperparameters,
        "options": options,
        "peft": peft,
        "start": start,
        "eval_data": settings.eval_data,
        "examples": examples,
        "total_steps": steps,
    }


def resolve_reinforcement(
    method: Reinforcement,
    settings: PcgSettings,
    overrides: Mapping[str, Any],
    examples: int,
    tests: int,
    *,
    most_tokens: int | None,
    start: str | None,
) -> dict[str, Any]:
    """Return the resolved configuration of a reinforcement job.

    Args:
        overrides: the options in the settings.
        examples: number of rows of the training data.
        tests: number of rows of the validation data.
        most_tokens: the most tokens of a prompt and its completion; None without a limit.
        start: the model that the job continues; None for the base.
    Raises:
        ApiError: a value is invalid.
    """
    hyper = method.hyperparameters or ReinforcementHyperparameters()
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
    rate, multiplier = _rate(hyper, overrides, _RATES[REINFORCEMENT])
    tokens = min(_COMPLETION_TOKENS, (most_tokens or 512) // 2)
    completion = overrides.get("max_completion_length", tokens)
    prompt = (most_tokens or _NO_BOUND) - completion
    if prompt < 1:
        raise ApiError(
            400,
            f"pcg.max_completion_length={completion} leaves no room for a prompt in {most_tokens} "
            "tokens; use less.",
            param="pcg.max_completion_length",
        )
    grpo: dict[str, Any] = {
        **overrides,
        "num_generations": generations,
        "batch_size": batch * generations,
        "max_completion_length": completion,
        "max_steps": steps,
        "learning_rate": rate,
    }
    try:
        save_every = ResumableOptions(**{"save_every": steps_of_epoch, **grpo}).save_every
        grpo.pop("save_every", None)
        options = GrpoOptions(**grpo)
        warmup = options.warmup_steps or None
        make_schedule(options.lr_scheduler_type, total_steps=steps, warmup_steps=warmup)
        if options.beta and start is not None:
            raise FinetuneError(
                f"beta={options.beta:g}; a job that continues a model has no reference, leave it "
                "out"
            )
        if settings.eval_data is not None:
            raise FinetuneError("eval_data is for the method supervised; give validation_file")
    except PcgError as error:
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
            "save_every": save_every,
            "eval_interval": interval,
            "eval_samples": samples,
            "reasoning_effort": None if effort == "default" else effort,
        },
        "peft": checked_peft(settings.peft, start),
        "start": start,
        "examples": examples,
        "total_steps": steps,
    }


def _rate(hyper: Hyperparameters, overrides: Mapping[str, Any], unit: float) -> tuple[float, float]:
    """Return the learning rate, and its multiple of `unit`. ApiError: both are set."""
    multiplier = hyper.learning_rate_multiplier
    if "learning_rate" not in overrides:
        multiple = 1.0 if multiplier == "auto" else multiplier
        return unit * multiple, multiple
    if multiplier != "auto":
        raise ApiError(
            400,
            "Give learning_rate_multiplier or pcg.learning_rate, not both.",
            param="learning_rate_multiplier",
        )
    return overrides["learning_rate"], overrides["learning_rate"] / unit


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
