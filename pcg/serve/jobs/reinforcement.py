"""The method `reinforcement`: its options on the wire, resolved, and its data looked at."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from pcg.errors import DataError, FinetuneError
from pcg.runtime.data.limits import DataLimits
from pcg.runtime.data.sources import read_rows
from pcg.runtime.text.chat import check_messages
from pcg.runtime.training.options import make_schedule
from pcg.serve.engine.news import REINFORCEMENT
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel
from pcg.serve.jobs.settings import MOST_STEPS, Auto, PcgSettings, checked_peft
from pcg.train.grpo.options import GrpoOptions

RL_LEARNING_RATE = 2e-5
"""The learning rate of a multiplier of 1: adapters take 1e-5 to 1e-4 (docs/grpo.md)."""
_GENERATIONS, _MOST_GENERATIONS = 8, 64
"""Completions of a prompt with a compute_multiplier of 1, TRL's number, and at most."""
_BATCH = 8
_MOST_COMPLETIONS = 4096
_COMPLETION_TOKENS = 256
_MOST_PROMPTS, _MOST_ROW_BYTES = 2**16, 2**16
_NO_BOUND = 2**20


class ReinforcementHyperparameters(WireModel):
    """OpenAI's hyperparameters; what is `auto` or left out is resolved."""

    n_epochs: Annotated[int, Field(ge=1, le=1000)] | Auto = "auto"
    batch_size: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1e4)] | Auto = "auto"
    compute_multiplier: Annotated[float, Field(ge=0.00001, le=10)] | Auto = "auto"
    eval_interval: Annotated[int, Field(ge=1, le=2**31)] | Auto = "auto"
    eval_samples: Annotated[int, Field(ge=1, le=16)] | Auto = "auto"
    reasoning_effort: Literal["default", "low", "medium", "high"] = "default"


class Reinforcement(WireModel):
    """The method `reinforcement`: a grader gives the rewards."""

    grader: dict[str, Any]
    hyperparameters: ReinforcementHyperparameters | None = None


def count_prompts(path: Path, param: str) -> int:
    """Count the rows of a file of prompts, each of which is looked at.

    Raises:
        ApiError: a line is not as it has to be; which one, and why.
    """
    count = 0
    try:
        for row in read_rows((path,), DataLimits()):
            _check_row(row.value, row.where)
            count += 1
        if not 0 < count <= _MOST_PROMPTS:
            raise DataError(f"the file has {count} rows; use 1 to {_MOST_PROMPTS}")
    except DataError as error:
        text = str(error).replace(f"{path.parent}/", "")
        raise ApiError(400, text, param=param, code="invalid_file_format") from None
    return count


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{where}: use an object with 'messages' or 'prompt'")
    try:
        size = len(json.dumps(row))
        msgspec.msgpack.encode(row)  # as the engine has it graded
    except UnicodeEncodeError:
        raise DataError(f"{where} has a text with half a character; write all of it") from None
    except OverflowError:
        said = "an integer of more than 64 bits; write it as a text"
        raise DataError(f"{where} has {said}") from None
    except RecursionError:
        raise DataError(f"{where} is nested too deeply; write a flat row") from None
    if size > _MOST_ROW_BYTES:
        raise DataError(f"{where} has {size} bytes; use at most {_MOST_ROW_BYTES}")
    if ("messages" in row) == ("prompt" in row):
        raise DataError(f"{where}: give 'messages' or 'prompt', and not both")
    for name in ("tools", "functions"):
        if row.get(name):
            raise DataError(f"{where} has {name!r}, which rollouts do not have; leave it out")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise DataError(f"{where}: 'prompt' has to be a text")
        return
    messages = check_messages(row["messages"], "'messages'", where)
    if messages[-1]["role"] not in ("user", "tool"):
        raise DataError(f"{where}: the last message is the assistant's to answer; end in a user's")


def resolve_reinforcement(
    given: Reinforcement,
    own: PcgSettings,
    examples: int,
    tests: int,
    most_tokens: int | None,
    start: str | None,
) -> dict[str, Any]:
    """Return the resolved configuration of a job.

    Args:
        examples: rows of the training data.
        tests: rows of the validation data.
        most_tokens: the most tokens of a prompt and its completion; None for no bound.
        start: the model that the job goes on from; None for the base.
    Raises:
        ApiError: a value cannot be.
    """
    asked = given.hyperparameters or ReinforcementHyperparameters()
    for name in ("max_seq_len", "warmup_ratio"):
        if getattr(own, name) is not None:
            said = f"pcg.{name} is not of the method 'reinforcement'; leave it out."
            raise ApiError(400, said, param=f"pcg.{name}")
    epochs = 1 if asked.n_epochs == "auto" else asked.n_epochs
    batch = min(_BATCH if asked.batch_size == "auto" else asked.batch_size, examples)
    compute = 1.0 if asked.compute_multiplier == "auto" else asked.compute_multiplier
    generations = min(_MOST_GENERATIONS, max(2, round(_GENERATIONS * compute)))
    if batch * generations > _MOST_COMPLETIONS:
        raise ApiError(
            400,
            f"A step would have {batch * generations} completions, and has at most "
            f"{_MOST_COMPLETIONS}: use a smaller batch_size or compute_multiplier.",
            param="batch_size",
        )
    evaluated = 1 if asked.eval_samples == "auto" else asked.eval_samples
    if tests * evaluated > _MOST_COMPLETIONS:
        raise ApiError(
            400,
            f"An evaluation would have {tests * evaluated} completions, and has at most "
            f"{_MOST_COMPLETIONS}: use fewer rows in validation_file, or fewer eval_samples.",
            param="validation_file",
        )
    each = math.ceil(examples / batch)
    steps = epochs * each
    if steps > MOST_STEPS:
        said = f"The job would have {steps} steps, and has at most {MOST_STEPS}."
        raise ApiError(400, said, param="n_epochs")
    rate, multiplier = _rate(asked, own)
    completion = own.max_completion_length or min(_COMPLETION_TOKENS, (most_tokens or 512) // 2)
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
        **({} if own.schedule is None else {"lr_scheduler_type": own.schedule}),
        **({} if own.weight_decay is None else {"weight_decay": own.weight_decay}),
    }
    try:
        GrpoOptions(**grpo)
        make_schedule(grpo.get("lr_scheduler_type", "linear"), total_steps=steps)
    except FinetuneError as error:
        raise ApiError(400, str(error), param="pcg") from None
    hyperparameters = {
        "n_epochs": epochs,
        "batch_size": batch,
        "learning_rate_multiplier": multiplier,
        "compute_multiplier": compute,
        "eval_interval": each if asked.eval_interval == "auto" else asked.eval_interval,
        "eval_samples": evaluated,
        "reasoning_effort": asked.reasoning_effort,
    }
    effort = asked.reasoning_effort
    return {
        "method": REINFORCEMENT,
        "grader": given.grader,
        "hyperparameters": hyperparameters,
        "options": {
            "grpo": grpo,
            "prompt_tokens": prompt,
            "save_every": own.save_every or each,
            "eval_interval": hyperparameters["eval_interval"],
            "eval_samples": hyperparameters["eval_samples"],
            "reasoning_effort": None if effort == "default" else effort,
        },
        "peft": checked_peft(own.peft, start),
        "start": start,
        "examples": examples,
        "total_steps": steps,
    }


def _rate(asked: ReinforcementHyperparameters, own: PcgSettings) -> tuple[float, float]:
    """Return the learning rate, and its multiplier. ApiError: both are given."""
    multiplier = asked.learning_rate_multiplier
    if own.learning_rate is None:
        found = 1.0 if multiplier == "auto" else multiplier
        return RL_LEARNING_RATE * found, found
    if multiplier != "auto":
        raise ApiError(
            400,
            "Give learning_rate_multiplier or pcg.learning_rate, not both.",
            param="learning_rate_multiplier",
        )
    return own.learning_rate, own.learning_rate / RL_LEARNING_RATE
