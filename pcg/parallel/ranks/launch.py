"""Start the ranks of a tensor-parallel group on this machine, by torch's elastic launcher.

Each rank is a process with torchrun's environment, so that what runs there is what runs under
torchrun. When one ends badly, the launcher ends the others within a second.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pcg.errors import ParallelError, PcgError, RankLostError

LOOPBACK = "127.0.0.1"


def launch(
    degree: int,
    act: Callable[..., object],
    arguments: Mapping[str, Any],
    stops: Collection[signal.Signals] = (),
) -> None:
    """Call a function of a module on so many ranks, and wait for all; the first alone prints.

    Args:
        arguments: the function's, by name; they are pickled.
        stops: signals that ranks are told, and end by in order.
    Raises:
        ParallelError: a rank failed, and why; the others were ended.
        KeyboardInterrupt: Ctrl-C.
    """
    # Else the threads of each rank are as many as there are cores, and wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // degree)))
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Ranks have 30 seconds to end by themselves once the launcher asks them to, as torch has it.
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
    )
    try:
        elastic_launch(config, _as_rank)(act, dict(arguments))
    except ChildFailedError as error:
        raise ParallelError(_reason(error.failures, degree)) from error
    except SignalException as error:
        if error.sigval in stops:
            return
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise ParallelError(f"all ranks were ended by {error.sigval.name}") from error


def _as_rank(act: Callable[..., object], arguments: Mapping[str, Any]) -> None:
    """Run in a started process; the launcher prints an error."""
    mute_others()
    try:
        act(**arguments)
    except (PcgError, OSError) as error:
        get_error_handler().record_exception(error)
        sys.exit(1)


def mute_others() -> None:
    """Silence all output on every rank but the first, that of libraries in C, too."""
    if not int(os.environ["RANK"]):
        return
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _reason(failures: Mapping[int, ProcessFailure], degree: int) -> str:
    """The reason that the ranks ended: a killed rank, else the first error but lost ranks."""
    order = sorted(failures.items(), key=lambda entry: entry[1].timestamp)
    lost = f"{RankLostError.__name__}: "
    for rank, failure in order:
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            return f"rank {rank} of {degree} was ended by {name}, and the others with it" + (
                ": out of memory, if nobody did" if name == "SIGKILL" else ""
            )
    messages = [(rank, _message(failure)) for rank, failure in order]
    rank, message = next((e for e in messages if not e[1].startswith(lost)), messages[0])
    kind, _, text = message.partition(": ")
    return f"{text if kind.endswith('Error') else message} (on rank {rank} of {degree})"


def _message(failure: ProcessFailure) -> str:
    """The message of a rank that failed, such as `WeightsError: …`."""
    message: Any = failure.message
    return str(message["message"] if isinstance(message, dict) else message)
