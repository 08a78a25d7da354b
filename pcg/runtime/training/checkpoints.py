"""Checkpoints of a finetuning job, in files without code.

    <directory>/latest                      name of the newest checkpoint
    <directory>/step-00000040/
        adapter_config.json                 the adapter in peft's format
        adapter_model.safetensors
        encoder.safetensors                 the encoder that computes the adapter's weights, if any
        allocation.safetensors              the scores of AdaLoRA's ranks, if any
        optimizer.safetensors               the optimizer's state, "<parameter>/<key>"
        trainer_state.json                  the job's state, and the trajectory of the run
        SHA256SUMS                          the checksums of all of these
        best/                               the adapter of the best evaluation, if restore_best, its
                                            encoder, and their SHA256SUMS

A checkpoint is written under a temporary name and renamed; then `latest` is replaced; then older
checkpoints are removed, so that `latest` always names a complete checkpoint. A run over a trainer
stores its state as notes of the trainer's state, in the entry `position` of trainer_state.json. A
damaged checkpoint is skipped with a warning: a job continues from the last good checkpoint before
it. A lock, which ends with its process, keeps other jobs out of the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import math
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pcg.errors import AdapterError, FinetuneError, UnsupportedError
from pcg.files import (
    SUMS,
    check_sums,
    check_writable,
    damage_of,
    expanded,
    is_directory,
    is_file,
    read_json,
    seal,
    shown_path,
    sync_names,
    verified,
    write_text,
)
from pcg.peft.adapter import Adapter, check_finite
from pcg.peft.adapter_files import CONFIG, WEIGHTS, read_adapter, write_adapter_files, write_tensors
from pcg.peft.method import Shape
from pcg.peft.separate_experts import with_swapped_experts
from pcg.tensor_file import read_header
from pcg.units import shown

LATEST = "latest"
STATE = "trainer_state.json"
BESIDE = "allocation.safetensors"
ENCODER = "encoder.safetensors"
OPTIMIZER = "optimizer.safetensors"
BEST = "best"
TRAINER = "state"
"""The folder of the trainer's state in a checkpoint of reinforcement learning."""
FORMAT = 2
"""The format of trainer_state.json; checkpoints of format 1 have no SHA256SUMS."""

_LOG = logging.getLogger(__name__)
Count = Annotated[int, msgspec.Meta(ge=0)]
Contents = TypeVar("Contents")
SavedRun = TypeVar("SavedRun", bound="Resumable")
_NAME = re.compile(r"step-\d{8,}(\.\d+)?")
_UNFINISHED = ".saving-"


@dataclass
class TrainerState:
    """The state of a job after a step, except tensors; see `FinetuneResult`.

    Attributes:
        stopped: True if the job ended early, without improvement.
    """

    step: Count = 0
    position: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    eval_losses: list[tuple[Count, float]] = field(default_factory=list)
    tokens: Count = 0
    targets: Count = 0
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    best_step: Count | None = None
    best_loss: float | None = None
    stale: Count = 0
    stopped: bool = False

    @property
    def evaluated(self) -> bool:
        """True if this step has been evaluated."""
        return bool(self.eval_losses) and self.eval_losses[-1][0] == self.step


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
        trajectory: all values that the weights depend on; equal in the run that resumes.
        best: the adapter of the best evaluation, with `restore_best`; else None.
        beside: tensors trained outside the program, such as AdaLoRA's scores; else empty.
    """

    state: TrainerState
    trajectory: Mapping[str, Any]
    adapter: Adapter
    best: Adapter | None
    optimizer: Mapping[str, Tensor]
    beside: Mapping[str, Tensor] = field(default_factory=dict)

    def of_base(self, module_shapes: Mapping[str, Shape]) -> Checkpoint:
        """Return the contents of a file with adapters in the dims of their base."""
        adapter, best = (
            each and with_swapped_experts(each, module_shapes) for each in (self.adapter, self.best)
        )
        assert adapter is not None
        return dataclasses.replace(self, adapter=adapter, best=best)


class Resumable(Protocol):
    """The contents of a checkpoint for resuming a run."""

    @property
    def state(self) -> TrainerState: ...

    @property
    def trajectory(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class TrainerRun:
    """The notes of a run in its trainer's state, which `Trainer.load_state` loads."""

    state: TrainerState
    trajectory: Mapping[str, Any]
    history: list[dict[str, float]]
    evaluations: list[tuple[int, dict[str, float]]]

    @classmethod
    def read(cls, path: Path) -> TrainerRun:
        """Read the notes of a state; empty for other notes. FinetuneError: the state is damaged."""
        check_checkpoint(path)
        with damage_of(str(path), FinetuneError, "; use an older one, or start anew"):
            notes = read_json(path / STATE, FinetuneError)["state"]["position"]
            if not isinstance(notes.get("trajectory"), dict):
                return cls(TrainerState(), {}, [], [])
            history = [dict(numbers) for numbers in notes["history"]]
            evaluations = [(int(at), dict(numbers)) for at, numbers in notes.get("evaluations", ())]
            if len(history) != notes["step"]:
                raise ValueError(f"{len(history)} numbers of {notes['step']} steps")
            tokens = history[-1].get("num_tokens", 0) if history else 0  # GRPO of older versions
            state = TrainerState(
                step=int(notes["step"]),
                position=dict(notes.get("position", {})),
                losses=[numbers["loss"] for numbers in history],
                eval_losses=[(at, numbers["loss"]) for at, numbers in evaluations],
                tokens=int(notes.get("tokens", tokens)),
                seconds=float(notes.get("seconds", 0.0)),
            )
            return cls(state, notes["trajectory"], history, evaluations)

    @property
    def notes(self) -> dict[str, Any]:
        """The notes, as JSON values."""
        state = self.state
        return {
            "trajectory": self.trajectory,
            "position": state.position,
            "step": state.step,
            "history": self.history,
            "evaluations": self.evaluations,
            "tokens": state.tokens,
            "seconds": state.seconds,
        }


class CheckpointStore:
    """The checkpoints of a job in a directory; the last `keep_last` are kept."""

    def __init__(self, directory: str | os.PathLike[str], keep_last: int = 2) -> None:
        self.directory = expanded(directory)
        self._keep_last = keep_last
        self._kept: list[Path] = []
        self._damaged: list[Path] = []
        self.unlock: Callable[[], object] = lambda: None

    def check_writable(self) -> None:
        """Raise a FinetuneError if checkpoints cannot be saved; leaves no files."""
        check_writable(self.directory, "checkpoints", FinetuneError)

    def lock(self) -> None:
        """Lock the directory against other jobs, of any process, until `unlock`.

        Raises:
            FinetuneError: another job has locked the directory.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.directory, os.O_RDONLY)
        except OSError as error:
            raise FinetuneError(f"{self.directory} cannot be used: {error.strerror}") from error
        self.unlock = weakref.finalize(self, os.close, handle)
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.unlock()
                raise FinetuneError(
                    f"another job saves its checkpoints in {self.directory} now; wait for its end, "
                    "or give another checkpoint_dir"
                ) from None

    def latest(self) -> Path | None:
        """Return the first of `candidates`, the newest checkpoint, or None."""
        return next(iter(self.candidates()), None)

    def good_beside(self, path: Path) -> Path | None:
        """Return the newest other checkpoint with undamaged files, or None."""
        for other in self._all()[::-1]:
            with contextlib.suppress(FinetuneError):
                if other != path:
                    check_checkpoint(other)
                    return other
        return None

    def candidates(self) -> list[Path]:
        """Return the checkpoints to continue from: `latest`, then older checkpoints.

        Without a valid `latest`, return all checkpoints, the newest first.
        """
        saved = self._all()[::-1]
        try:
            name = (self.directory / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            name = ""
        named = [path for path in saved if path.name == name]
        if saved and not named:
            _LOG.warning(
                "%s names no checkpoint that is there; %s is the newest of %d",
                *(shown_path(self.directory / LATEST), saved[0].name, len(saved)),
            )
        return [*named, *(path for path in saved if path.name < name or not named)]

    def resumable(
        self,
        resume: str | bool,
        read: Callable[[Path], SavedRun],
        trajectory: Mapping[str, Any],
        total_steps: int,
    ) -> tuple[Path, SavedRun] | None:
        """Return the checkpoint to resume from, and its contents; None to start at step 0.

        Args:
            resume: "auto", True or False; see `FinetuneOptions`.
            read: reads a checkpoint; raises a FinetuneError for a damaged checkpoint.
        Raises:
            FinetuneError: `resume` is True and no checkpoint exists, all checkpoints are damaged,
                or the newest undamaged checkpoint belongs to another run.
        """
        candidates = [] if resume is False else self.candidates()
        if not candidates:
            if resume is True:
                raise FinetuneError(
                    f"resume=True, but there is no checkpoint in {self.directory}; give the "
                    "directory of the run to resume, or leave resume out to start a new run"
                )
            return None
        path, saved = last_good(candidates, read)
        if not saved.trajectory:
            raise FinetuneError(
                f"{path} is not a checkpoint of this kind of run; give another checkpoint_dir"
            )
        different = _differences(saved.trajectory, trajectory)
        if len(different) == 1 and different[0].startswith("total_steps "):
            raise FinetuneError(
                f"{path} is of a run whose {different[0]}, and its schedule depends on the number "
                "of steps; only constant schedules can be extended. Start from the adapter with "
                "start_from, or start at step 0 with resume=False"
            )
        if different:
            raise FinetuneError(
                f"{path} is a checkpoint of another run: {'; '.join(different)}. Use its values, "
                "another checkpoint_dir, or resume=False to start at step 0"
            )
        if saved.state.step > total_steps:
            raise FinetuneError(
                f"{path} is beyond the {total_steps} steps of this run; ask for more, or give "
                "another checkpoint_dir"
            )
        self._kept = [kept for kept in self._all() if kept.name <= path.name]
        self._damaged = [damaged for damaged in candidates if damaged.name > path.name]
        return path, saved

    def load(self, path: Path, name: str) -> Checkpoint:
        """Read a checkpoint. FinetuneError: a file is missing or damaged."""
        with verified(partial(check_checkpoint, path)):
            return self._load(path, name)

    def _load(self, path: Path, name: str) -> Checkpoint:
        try:
            saved = _read_state(path / STATE)
            adapter = _read_adapter(path, name)
            best = _read_adapter(path / BEST, name) if is_directory(path / BEST) else None
            optimizer = _read_tensors(path / OPTIMIZER)
            beside = _read_tensors(path / BESIDE) if adapter.recipe.trains_beside else {}
        except (AdapterError, UnsupportedError, SafetensorError, OSError) as error:
            raise FinetuneError(f"the checkpoint {path} is damaged: {error}") from error
        return Checkpoint(saved[0], saved[1], adapter, best, optimizer, beside)

    def save(self, step: int, write: Callable[[Path], object]) -> Path:
        """Write a checkpoint, point `latest` to it, and remove checkpoints beyond `keep_last`.

        Raises:
            FinetuneError: the checkpoint cannot be written, for example because the disk is full;
                `latest` still names the previous checkpoint.
        """
        beside = self.directory / f"{_UNFINISHED}{secrets.token_hex(4)}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            write(beside)
            path = self._free_path(step)
            beside.rename(path)
            sync_names(self.directory)
            self._point_to(path)
        except (OSError, SafetensorError, AdapterError, FinetuneError) as error:
            cause = error.__cause__ if isinstance(error, AdapterError | FinetuneError) else error
            if isinstance(error, FinetuneError) and cause is None:  # e.g. the trainer was closed
                raise
            reason = getattr(cause, "strerror", None) or str(cause or error)
            last = self.latest()
            left = "there is none before it" if last is None else f"{last.name} is still good"
            raise FinetuneError(
                f"the checkpoint of step {step} cannot be saved in {self.directory}: {reason}; "
                f"{left}; make room and run the same call again"
            ) from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        self._kept = [*self._kept, path][-self._keep_last :]
        for old in self._all():
            if old not in (*self._kept, *self._damaged):
                shutil.rmtree(old, ignore_errors=True)
        return path

    def _all(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.iterdir() if _NAME.fullmatch(path.name))

    def _sweep(self) -> None:
        """Remove the unfinished files of a killed run."""
        for path in self.directory.glob(f"*{_UNFINISHED}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _free_path(self, step: int) -> Path:
        """Return an unused path for a step's checkpoint; another run may have saved the step."""
        path, count = self.directory / f"step-{step:08d}", 0
        while path.exists():
            count += 1
            path = self.directory / f"step-{step:08d}.{count}"
        return path

    def _point_to(self, path: Path) -> None:
        """Point `latest` to a checkpoint. OSError: the file cannot be written."""
        beside = self.directory / f"{_UNFINISHED}{secrets.token_hex(4)}"
        try:
            write_text(beside, f"{path.name}\n")
            beside.replace(self.directory / LATEST)
        finally:
            beside.unlink(missing_ok=True)
        sync_names(self.directory)


def last_good(
    candidates: Iterable[Path], read: Callable[[Path], Contents]
) -> tuple[Path, Contents]:
    """Return the first readable checkpoint and its contents; warn about skipped checkpoints.

    Raises:
        FinetuneError: no checkpoint can be read; has the error of the newest.
    """
    damage: FinetuneError | None = None
    for path in candidates:
        try:
            contents = read(path)
        except FinetuneError as error:
            damage = damage or error
            continue
        if damage is not None:
            _LOG.warning("%s. Resuming from the last good one, %s", damage, shown_path(path))
        return path, contents
    raise FinetuneError(f"{damage}; there is no good checkpoint before it") from damage


def check_checkpoint(path: Path) -> None:
    """Compare the files of a checkpoint with their checksums.

    Raises:
        FinetuneError: a file is missing or damaged, or the folder has no checkpoint.
    """
    fix = "; bring it back from a copy, resume from another checkpoint, or start at step 0"
    if is_directory(path / TRAINER):
        is_whole = is_file(path / SUMS)  # older versions of pcg wrote none
        check_sums(path, (STATE, CONFIG, WEIGHTS), FinetuneError, fix, is_whole=is_whole)
        check_checkpoint(path / TRAINER)
        return
    if not is_file(path / SUMS) and read_json(path / STATE, FinetuneError, fix).get("format") == 1:
        return
    names = (STATE, CONFIG, WEIGHTS, OPTIMIZER)
    check_sums(path, names, FinetuneError, fix, is_whole=True)
    if is_directory(path / BEST):
        check_sums(path / BEST, (CONFIG, WEIGHTS), FinetuneError, fix, is_whole=True)


def write_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write all files of a checkpoint, and wait until they are on the disk."""
    _write_adapter(checkpoint.adapter, path)
    if checkpoint.best is not None:
        _write_adapter(checkpoint.best, path / BEST)
        seal(path / BEST)
    write_tensors(path / OPTIMIZER, checkpoint.optimizer)
    if checkpoint.adapter.recipe.trains_beside:
        write_tensors(path / BESIDE, checkpoint.beside)
    state = {
        "format": FORMAT,
        "trajectory": dict(checkpoint.trajectory),
        "state": dataclasses.asdict(checkpoint.state),
    }
    text = json.dumps(state, indent=1, allow_nan=False) + "\n"
    (path / STATE).write_text(text, encoding="utf-8")
    seal(path)


def _write_adapter(adapter: Adapter, path: Path) -> None:
    write_adapter_files(adapter, path)
    if adapter.encoder:
        write_tensors(path / ENCODER, adapter.encoder)


def _read_adapter(path: Path, name: str) -> Adapter:
    adapter = read_adapter(path, name)
    check_finite(adapter, path)
    if adapter.recipe.encoder is None:
        return adapter
    return dataclasses.replace(adapter, encoder=_read_tensors(path / ENCODER))


def _read_tensors(file: Path) -> dict[str, Tensor]:
    read_header(file, FinetuneError)
    tensors: dict[str, Tensor] = load_file(file)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise FinetuneError(
                f"{file}: {name} holds NaN or infinity, which the job would train on; write the "
                f"name of another checkpoint into {LATEST}, or start anew with resume=False"
            )
    return tensors


def _read_state(path: Path) -> tuple[TrainerState, dict[str, Any]]:
    fix = f"; write the name of another checkpoint into {LATEST}, or start anew with resume=False"
    saved = read_json(path, FinetuneError, fix)
    if saved.get("format") not in (1, FORMAT):
        raise FinetuneError(
            f"{path} is of format {shown(saved.get('format'))}, this pcg reads {FORMAT}; resume "
            "with the version that wrote it, or start anew with resume=False"
        )
    with damage_of(str(path), FinetuneError, fix):
        state = msgspec.convert(saved["state"], TrainerState)
        numbers = [*state.losses, *(loss for _, loss in state.eval_losses), state.seconds]
        if not all(map(math.isfinite, [*numbers, state.best_loss or 0.0])):
            raise ValueError("a number is not finite")
        if len(state.losses) != state.step:
            raise ValueError(f"{len(state.losses)} losses of {state.step} steps")
        return state, dict(saved["trajectory"])


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Describe the differences between a saved trajectory and this run's trajectory."""
    words = []
    for name in dict.fromkeys([*saved, *current]):
        before, now = saved.get(name), current.get(name)
        if before != now:
            what = name.replace("_checksum", " (checksum)")
            words.append(f"{what} was {shown(before)}, is {shown(now)}")
    return words
