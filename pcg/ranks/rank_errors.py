"""Errors of started ranks: each writes its own to a file, and the launcher raises it again.

An error keeps its type, its text, and the traceback that it had on its rank, as its cause.
"""

from __future__ import annotations

import builtins
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pcg import errors
from pcg.errors import FinetuneInterrupted, ParallelError, RankLostError


class RankTraceback(Exception):  # no error, but where one was raised
    """The traceback of an error on its rank, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class RankError:
    """An error as its rank has written it.

    Attributes:
        rank: the number of the rank.
        time_s: when it was raised, by the machine's clock.
        module, name: those of its type.
        text: what it says.
        traceback: where it was raised, as Python prints it.
        numbers: an OSError's number, or the step of an interrupted job.
        paths: an OSError's file, or the checkpoint of an interrupted job.
    """

    rank: int
    time_s: float
    module: str
    name: str
    text: str
    traceback: str
    numbers: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankError:
        """The record of an error."""
        text = str(error)
        numbers: tuple[int, ...] = ()
        paths: tuple[str, ...] = ()
        if isinstance(error, OSError) and error.errno is not None:
            text, numbers = error.strerror or "", (error.errno,)
            paths = () if error.filename is None else (str(error.filename),)
        elif isinstance(error, FinetuneInterrupted):
            numbers = (error.step,)
            paths = () if error.checkpoint is None else (str(error.checkpoint),)
        kind = type(error)
        lines = "".join(traceback.format_exception(error))
        return cls(
            rank, time.time(), kind.__module__, kind.__qualname__, text, lines, numbers, paths
        )

    def write(self, folder: Path) -> None:
        """Write the record to a folder that the launcher reads."""
        (folder / f"{self.rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @property
    def is_lost(self) -> bool:
        """True if it says alone that another rank is gone."""
        return self.name == RankLostError.__name__

    @property
    def is_interrupted(self) -> bool:
        """True if Ctrl-C ended a job, whose checkpoint it names."""
        return self.name == FinetuneInterrupted.__name__

    def made(self, degree: int) -> BaseException:
        """The error, of its own type, and caused by its traceback.

        One whose type is not known in this process, or cannot be made of a text, is a
        ParallelError that names the type.
        """
        error = self._made(f" (on rank {self.rank} of {degree})")
        error.__cause__ = RankTraceback(self.traceback)
        return error

    def _made(self, place: str) -> BaseException:
        module = {"builtins": builtins, errors.__name__: errors}.get(
            self.module, sys.modules.get(self.module)
        )
        kind = getattr(module, self.name, None)
        if kind is FinetuneInterrupted:
            checkpoint = Path(self.paths[0]) if self.paths else None
            return FinetuneInterrupted(self.text, self.numbers[0], checkpoint)
        if isinstance(kind, type) and issubclass(kind, Exception):
            given = (*self.numbers, f"{self.text}{place}", *self.paths)
            try:
                return kind(*given)
            except TypeError:  # it wants more than a text
                pass
        return ParallelError(f"{self.name}: {self.text}{place}")


def read_errors(folder: Path) -> Sequence[RankError]:
    """Read what ranks have written: first the cause, then those that heard of it alone."""
    found = []
    for file in folder.glob("*.json"):
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        lists = {name: tuple(fields[name]) for name in ("numbers", "paths")}
        found.append(RankError(**{**fields, **lists}))
    return sorted(found, key=lambda one: (one.is_lost, one.time_s))
