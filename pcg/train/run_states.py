"""States of a run: directories of a trainer's state, with the run's own numbers as its notes.

    <directory>/step-00000040/      what `Trainer.save_state` writes
    <directory>/latest              the name of the last one, so that no other job takes the
                                    directory for its own, and removes what is there

The last one is that of the highest step. Each is written beside its place and renamed, so it is
whole; one that was damaged since is passed over. One job has the directory at a time.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pcg.errors import FinetuneError
from pcg.files import SUMS, is_file, read_json
from pcg.runtime.training.checkpoints import STATE, CheckpointStore, check_checkpoint, last_good
from pcg.units import shown

_NAME = re.compile(r"step-(\d{8,})")


class RunStates:
    """The states of one run in a directory, of which the last `keep_last` stay.

    Args:
        what: what the run does, in words.
    """

    def __init__(self, directory: str | Path, keep_last: int, what: str) -> None:
        self._what = what
        self._store = CheckpointStore(directory)
        self._directory = self._store.directory
        self._keep_last = keep_last
        self._kept: list[Path] = []
        self._damaged: list[Path] = []
        self._store.check_writable()

    def lock(self) -> None:
        """Keep other jobs from saving here. FinetuneError: one does."""
        self._store.lock()

    def unlock(self) -> None:
        """Let other jobs save here."""
        self._store.unlock()

    def resumable(
        self, resume: str | bool, trajectory: Mapping[str, Any], total_steps: int
    ) -> Path | None:
        """Return the state to go on from; None to start anew.

        Raises:
            FinetuneError: there is none, and one is demanded; all are damaged, or the newest that
                is not is of another run.
        """
        saved = {} if resume is False else self._saved()
        if not saved:
            if resume is True:
                raise FinetuneError(
                    f"resume=True, but there is no checkpoint in {self._directory}; give the "
                    'directory of the run to go on with, or resume="auto" to start one'
                )
            return None
        steps = sorted(saved, reverse=True)
        path, notes = last_good([saved[step] for step in steps], _notes)
        step, before = next(one for one in steps if saved[one] == path), notes.get("trajectory")
        if not isinstance(before, Mapping):
            raise FinetuneError(
                f"{path} is no checkpoint of {self._what}; give another checkpoint_dir"
            )
        different = [
            f"{name} was {shown(before.get(name))}, is {shown(trajectory.get(name))}"
            for name in dict.fromkeys([*before, *trajectory])
            if before.get(name) != trajectory.get(name)
        ]
        if different:
            raise FinetuneError(
                f"{path} is a checkpoint of another run: {'; '.join(different)}. Give what it had, "
                "another checkpoint_dir, or resume=False to start anew"
            )
        if step > total_steps:
            raise FinetuneError(
                f"{path} is beyond the {total_steps} steps of this run; ask for more, or give "
                "another checkpoint_dir"
            )
        self._kept = [saved[one] for one in sorted(saved) if one <= step]
        self._damaged = [saved[one] for one in steps if one > step]
        return path

    def save(self, write: Callable[..., object], step: int, notes: Mapping[str, Any]) -> Path:
        """Write the state behind a step, and remove those beyond `keep_last`.

        Args:
            write: the trainer's `save_state`, which returns once it is written.
        Raises:
            FinetuneError: it cannot be written; the one before is still good.
        """
        path = self._directory / f"step-{step:08d}"
        write(path, overwrite=True, notes=notes)
        try:
            self._store.point_to(path)
        except OSError as error:
            raise FinetuneError(
                f"{self._directory} cannot be written: {error.strerror}; make room"
            ) from error
        kept = [one for one in self._kept if one != path]
        self._kept = [*kept, path][-self._keep_last :]
        for old in self._saved().values():
            if old not in (*self._kept, *self._damaged):
                shutil.rmtree(old, ignore_errors=True)
        return path

    def _saved(self) -> dict[int, Path]:
        """Return the states that are there, by step."""
        if not self._directory.is_dir():
            return {}
        found = ((_NAME.fullmatch(path.name), path) for path in self._directory.iterdir())
        return {int(name[1]): path for name, path in found if name and _is_state(path)}


def _is_state(path: Path) -> bool:
    return is_file(path / STATE) or is_file(path / SUMS)  # or one that was damaged


def _notes(path: Path) -> dict[str, Any]:
    """Return the notes of a state; empty where it is none. FinetuneError: it is damaged."""
    check_checkpoint(path)
    state = read_json(path / STATE, FinetuneError).get("state")
    notes = state.get("position") if isinstance(state, dict) else None
    return notes if isinstance(notes, dict) else {}
