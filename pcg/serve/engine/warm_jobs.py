"""Parse `--warm-jobs`: expected finetuning jobs, recorded at startup."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pcg.errors import PcgError, ServeError
from pcg.peft.registry import recipe_from
from pcg.runtime.training.recorded.warm_job import WarmJob

DEFAULT_PEFT = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


def parse_warm_jobs(given: Sequence[str]) -> tuple[WarmJob, ...]:
    """Parse JSON objects with `batch`, `seq` and `peft`.

    Raises:
        ServeError: a text is not JSON or does not describe a job.
    """
    return tuple(_parse(text) for text in given)


def _parse(text: str) -> WarmJob:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ServeError(f"--warm-jobs {text} is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.keys() - {"peft", "batch", "seq"}:
        raise ServeError(
            f'--warm-jobs {text}; use {{"batch": …, "seq": …}}, and add "peft" to replace the '
            "default recipe"
        )
    try:
        job = WarmJob(**{"peft": DEFAULT_PEFT, **fields})
        recipe_from(job.peft)
    except PcgError as error:
        raise ServeError(f"--warm-jobs {text}: {error}") from error
    return job
