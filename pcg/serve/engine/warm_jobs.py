"""The finetuning jobs that a server is told of when it starts, so that it records their windows."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pcg.errors import PcgError, ServeError
from pcg.peft.registry import recipe_from
from pcg.runtime.training.recorded.warm_job import WarmJob

DEFAULT_PEFT = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


def parse_warm_jobs(given: Sequence[str]) -> tuple[WarmJob, ...]:
    """Read JSON objects of `batch`, `seq` and `peft`.

    Raises:
        ServeError: a text is none, or names what is no job.
    """
    return tuple(_parse(text) for text in given)


def _parse(text: str) -> WarmJob:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ServeError(f"--warm-jobs {text} is no JSON: {error}") from error
    if not isinstance(fields, dict) or fields.keys() - {"peft", "batch", "seq"}:
        raise ServeError(
            f'--warm-jobs {text}; use {{"batch": …, "seq": …}}, and with "peft" a recipe that is '
            "not the default one"
        )
    try:
        job = WarmJob(**{"peft": DEFAULT_PEFT, **fields})
        recipe_from(job.peft)
    except PcgError as error:
        raise ServeError(f"--warm-jobs {text}: {error}") from error
    return job
