"""Start the ranks of a group on this machine, by torch's elastic launcher, and raise their errors.

Each rank is a process with torchrun's environment, so that it runs as it does under
torchrun. When a rank ends badly, the launcher ends the others within a second. Each rank writes its
error to a file; the launcher raises it again with its type, its text, and the traceback that it had
on its rank as its cause.
"""

from __future__ import annotations

import builtins
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
        time_s: the time of the error, by the machine's clock.
        module, name: those of its type.
        text: its message.
        traceback: its traceback, as Python prints it.
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
        (folder / f"{self.rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @property
    def is_lost(self) -> bool:
        """True if it reports only that another rank is gone."""
        return self.name == RankLostError.__name__

    @property
    def is_interrupted(self) -> bool:
        """True if Ctrl-C ended a job; the error names the checkpoint."""
        return self.name == FinetuneInterrupted.__name__

    def made(self, degree: int) -> BaseException:
        """Return the error, of its type, and caused by its traceback.

        An error of a type that is unknown in this process, or needs more than a text, becomes
        a ParallelError that names the type.
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
            arguments = (*self.numbers, f"{self.text}{place}", *self.paths)
            try:
                return kind(*arguments)
            except TypeError:  # it wants more than a text
                pass
        return ParallelError(f"{self.name}: {self.text}{place}")


def read_errors(folder: Path) -> Sequence[RankError]:
    """Read the errors of ranks: first the cause, then those that only report a loss."""
    errors = []
    for file in folder.glob("*.json"):
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        lists = {name: tuple(fields[name]) for name in ("numbers", "paths")}
        errors.append(RankError(**{**fields, **lists}))
    return sorted(errors, key=lambda error: (error.is_lost, error.time_s))


LOOPBACK = "127.0.0.1"
ENDING_S = 300
"""The longest time that ranks have to end by themselves: a job's last step, and its checkpoint."""
SERVER_ENDING_S = 30
"""The same of ranks that serve until a signal."""


def launch(
    degree: int,
    act: Callable[..., object],
    arguments: Mapping[str, Any],
    stops: Collection[signal.Signals] = (),
) -> None:
    """Call a function of a module on `degree` ranks, and wait for all; only the first prints.

    Args:
        arguments: the function's, by name; they are pickled.
        stops: signals passed to the ranks, which end them in order.
    Raises:
        Exception: the error of the first rank that failed, with its traceback there as the cause;
            the others were ended.
        ParallelError: a rank was killed, or all were.
        FinetuneInterrupted: Ctrl-C in a job, which ended between two steps.
        KeyboardInterrupt: Ctrl-C in anything else.
    """
    # Else the threads of each rank are as many as there are cores, and wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // degree)))
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=degree,
        run_id="pcg",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SERVER_ENDING_S if stops else ENDING_S,
    )
    with tempfile.TemporaryDirectory(prefix="pcg-ranks-") as folder:
        try:
            elastic_launch(config, _as_rank)(act, dict(arguments), folder)
        except ChildFailedError as error:
            _raise_first(read_errors(Path(folder)), error.failures, degree)
        except SignalException as error:
            if error.sigval in stops:
                return
            _raise_stopped(read_errors(Path(folder)), error, degree)


def _as_rank(act: Callable[..., object], arguments: Mapping[str, Any], folder: str) -> None:
    mute_others()
    try:
        act(**arguments)
    except Exception as error:
        # Ctrl-C comes from the terminal and from the launcher.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        RankError.of(int(os.environ["RANK"]), error).write(Path(folder))
        sys.exit(1)


def mute_others() -> None:
    """Silence all output on every rank but the first, that of libraries in C, too."""
    if not int(os.environ["RANK"]):
        return
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _raise_first(
    errors: Sequence[RankError], failures: Mapping[int, ProcessFailure], degree: int
) -> NoReturn:
    """Raise the reason that the ranks ended: a killed rank, else the first error."""
    for rank, failure in sorted(failures.items(), key=lambda entry: entry[1].timestamp):
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise ParallelError(
                f"rank {rank} of {degree} was ended by {name}, and the others with it"
                + (": out of memory, if nobody did" if name == "SIGKILL" else "")
            )
    if errors:
        raise errors[0].made(degree)
    rank, failure = next(iter(failures.items()))
    raise ParallelError(
        f"rank {rank} of {degree} ended with exit code {failure.exitcode}, and said no reason"
    )


def _raise_stopped(errors: Sequence[RankError], stop: SignalException, degree: int) -> NoReturn:
    if stop.sigval == signal.SIGINT:
        for error in errors:
            if error.is_interrupted:  # says where the job can go on
                raise error.made(degree)
        raise KeyboardInterrupt from stop
    raise ParallelError(f"all ranks were ended by {stop.sigval.name}") from stop
