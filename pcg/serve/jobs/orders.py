"""Orders of jobs to the engine, made of their rows."""

from __future__ import annotations

from typing import Any

from pcg.serve.adapters.engine_names import engine_name
from pcg.serve.engine.jobs.news import REINFORCEMENT, SUPERVISED, JobOrder
from pcg.serve.jobs.folders import JobFolder
from pcg.serve.jobs.records import JobRecord


def order_of(job: JobRecord, folder: JobFolder) -> JobOrder:
    """Return the order of a job."""
    resolved = job.resolved
    method, options = resolved.get("method", SUPERVISED), resolved["options"]
    told = {"seed": job.seed, "progress": False, "record": str(folder.record)}
    made: dict[str, Any] = {**options, **told}
    if method == REINFORCEMENT:
        grpo = {**options["grpo"], "seed": job.seed}
        made = {**options, "grpo": grpo, "record": told["record"]}
    return JobOrder(
        engine_name(job.tenant, job.name),
        str(folder.training),
        str(folder.validation) if job.validation_file else None,
        resolved["peft"],
        str(folder.checkpoints),
        str(folder.model),
        made,
        method,
        None if resolved.get("start") is None else str(folder.start),
    )
