"""Checkpoints of runs of GRPO: the trainer's state behind whole generations, and its numbers.

Prompts, seeds and the schedule follow from the number of updates, so a run that goes on from a
checkpoint has those that it would have had. Completions in flight are not saved: with a staleness
they are sampled again, by later weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pcg.errors import FinetuneError
from pcg.files import damage_of, read_json
from pcg.runtime.engine.trainers.async_trainer import AsyncTrainer
from pcg.runtime.executor import Executor
from pcg.runtime.model.weight_digests import base_digest
from pcg.runtime.training.checkpoints import STATE
from pcg.train.grpo.loop import total_updates
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.prompts import Prompt
from pcg.train.run_states import RunStates
from pcg.units import shown


@dataclass(frozen=True, kw_only=True)
class ResumableOptions(GrpoOptions):
    """Options of GRPO with checkpoints.

    Attributes:
        checkpoint_dir: the directory of the checkpoints; None for none.
        save_every: updates between checkpoints, which are behind the last update of a generation.
            The last update is always saved.
        keep_last: the number of checkpoints that are kept.
        resume: demand a checkpoint to go on from (True), start anew (False), or go on from the
            latest one if there is one (auto, the default).
    """

    title: ClassVar[str] = "Checkpoints"

    checkpoint_dir: str | Path | None = None
    save_every: int = 10
    keep_last: int = 2
    resume: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("save_every", "keep_last"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FinetuneError(f"{name}={shown(value)}; use an int of at least 1")
        if self.resume != "auto" and not isinstance(self.resume, bool):
            raise FinetuneError(f"resume={shown(self.resume)}; use 'auto', True or False")
        if self.checkpoint_dir is None and self.resume is True:
            raise FinetuneError("resume=True needs checkpoint_dir, where the checkpoints are")


class GrpoCheckpoints:
    """The checkpoints of one run.

    Attributes:
        step: updates of the checkpoint that the run goes on from; 0 without one.
        history: the numbers of these updates.
        latest: the latest checkpoint; None without one.
    """

    def __init__(
        self, executor: Executor, prompts: Sequence[Prompt], options: ResumableOptions
    ) -> None:
        """Look for the checkpoint to go on from.

        Raises:
            FinetuneError: there is none, and one is demanded; it is damaged, or of another run; or
                the directory cannot be written.
        """
        self._options = options
        self._total = total_updates(len(prompts), options)
        self._trajectory = _trajectory(executor, prompts, options)
        assert options.checkpoint_dir is not None
        self._states = RunStates(options.checkpoint_dir, options.keep_last, "GRPO")
        self.latest = self._states.resumable(options.resume, self._trajectory, self._total)
        self.step = 0
        self.history: list[dict[str, float]] = []
        if self.latest is not None:
            self._read(self.latest)

    def _read(self, path: Path) -> None:
        fix = "; use an older one, or start anew with resume=False"
        with damage_of(f"the checkpoint {path}", FinetuneError, fix):
            notes = read_json(path / STATE, FinetuneError)["state"]["position"]
            self.step = int(notes["step"])
            self.history = [dict(one) for one in notes["history"]]
            if len(self.history) != self.step:
                raise ValueError("it has not the numbers of each update")

    def begin(self, trainer: AsyncTrainer) -> None:
        """Keep other runs from saving there, and load the checkpoint, if there is one."""
        self._states.lock()
        if self.latest is not None:
            trainer.load_state(self.latest).wait()

    def end(self) -> None:
        """Let other runs save there."""
        self._states.unlock()

    def stepped(self, trainer: AsyncTrainer, step: int, numbers: Mapping[str, float]) -> None:
        """Note an update, and save behind it if it is time."""
        self.history.append(dict(numbers))
        options = self._options
        whole = options.updates_per_generation
        every = -(-options.save_every // whole) * whole
        if step % every and step != self._total:
            return
        notes = {"trajectory": self._trajectory, "step": step, "history": self.history}

        def write(path: Path, **given: Any) -> None:
            trainer.save_state(path, **given).wait()

        self.latest = self._states.save(write, step, notes)


def _trajectory(
    executor: Executor, prompts: Sequence[Prompt], options: ResumableOptions
) -> dict[str, Any]:
    """Return what the resulting weights depend on, reward functions left out."""
    own = {field.name for field in dataclasses.fields(GrpoOptions)}
    given = {name: value for name, value in dataclasses.asdict(options).items() if name in own}
    given["stop"] = list(options.stop)
    ids = repr([one.ids for one in prompts]).encode()
    state = executor.state
    return {
        **given,
        "prompts": len(prompts),
        "prompts_checksum": hashlib.sha256(ids).hexdigest(),
        "base_dtype": state.program.dtype,
        "base_weights_checksum": base_digest(state.weight_store),
    }
