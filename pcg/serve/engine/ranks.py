"""The ranks of a server's engine: processes beside the engine's own, which is the first rank.

They load the same model, make the same engine, and follow the first one's; where that process ends,
the system ends them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import get_context

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pcg.errors import PcgError
from pcg.parallel.ranks.launch import LOOPBACK, mute_others
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.ranks.following_engine import FollowingEngine
from pcg.runtime.executor import Executor
from pcg.serve.options import ServeOptions


class Ranks:
    """The other ranks of an engine, which this process has started, as the first one.

    Attributes:
        threads: the number of threads for tensors that each rank has.
    """

    def __init__(
        self,
        degree: int,
        begin: Callable[[], None],
        load: Callable[[], Executor],
        options: ServeOptions,
        tenants: int,
        threads: int,
    ) -> None:
        """Start them.

        Args:
            degree: the number of ranks, with this process.
            begin: called first in each of them.
            load: loads the model; it is pickled, as what multiprocessing starts is.
            options, tenants: those of the engine.
            threads: the number of threads of all ranks together.
        """
        self.threads = max(1, threads // degree)
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        context = get_context("spawn")
        for rank in range(1, degree):
            environment = _environment(rank, degree, self._store.port)
            arguments = (begin, environment, load, options, tenants, self.threads)
            name = f"pcg rank {rank}"
            context.Process(target=_follow, args=arguments, name=name, daemon=True).start()
        os.environ.update(_environment(0, degree, self._store.port))


def _environment(rank: int, degree: int, port: int) -> dict[str, str]:
    """Return torchrun's environment of a rank, with a store that is there already."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(degree),
        "LOCAL_WORLD_SIZE": str(degree),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _follow(
    begin: Callable[[], None],
    environment: Mapping[str, str],
    load: Callable[[], Executor],
    options: ServeOptions,
    tenants: int,
    threads: int,
) -> None:
    """Follow the first rank to its end; its process says what went wrong."""
    begin()
    os.environ.update(environment)
    mute_others()
    torch.set_num_threads(threads)
    code = 0
    try:
        engine = Engine(load().state, options.engine(tenants)).start()
        assert isinstance(engine, FollowingEngine)
        engine.follow()
    except Exception as error:
        if not isinstance(error, PcgError):
            traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads that still hash are not waited for
