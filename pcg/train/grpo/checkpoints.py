"""Checkpoints of GRPO runs: options, and the values that must be equal in a resumed run."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pcg.errors import FinetuneError
from pcg.runtime.executor import Executor
from pcg.runtime.model.base_weights import base_digest
from pcg.runtime.training.options import ChatOptions, check_fields
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.rollouts import Prompt
from pcg.units import shown


@dataclass(frozen=True, kw_only=True)
class ResumableOptions(GrpoOptions):
    """Options of GRPO with checkpoints.

    Attributes:
        checkpoint_dir: the directory of the checkpoints; None for no checkpoints.
        save_every: updates between checkpoints, rounded up to whole generations. The last update is
            always saved.
        keep_last: number of checkpoints to keep.
        resume: resume from the latest checkpoint and fail without it (True), start from step 0
            (False), or resume if a checkpoint exists (auto, the default).
    """

    title: ClassVar[str] = "Checkpoints"

    checkpoint_dir: str | Path | None = None
    save_every: int = 10
    keep_last: int = 2
    resume: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"save_every": 1, "keep_last": 1})
        if self.resume != "auto" and not isinstance(self.resume, bool):
            raise FinetuneError(f"resume={shown(self.resume)}; use 'auto', True or False")
        if self.checkpoint_dir is None and self.resume is True:
            raise FinetuneError("resume=True needs checkpoint_dir, where the checkpoints are")


def grpo_trajectory(
    executor: Executor, prompts: Sequence[Prompt], options: ResumableOptions
) -> dict[str, Any]:
    """Return all values that the weights depend on, except reward functions, as JSON."""
    fields = {field.name for field in dataclasses.fields(GrpoOptions)}
    fields -= {field.name for field in dataclasses.fields(ChatOptions)}  # the prompts have them
    fields -= {"columns", "eval_data", "eval_every"}
    values = {name: value for name, value in dataclasses.asdict(options).items() if name in fields}
    values["stop"] = list(options.stop)
    ids = repr([prompt.ids for prompt in prompts]).encode()
    state = executor.state
    return {
        **values,
        "prompts": len(prompts),
        "prompts_checksum": hashlib.sha256(ids).hexdigest(),
        "base_dtype": state.program.dtype,
        "base_weights_checksum": base_digest(state.weight_store),
    }
