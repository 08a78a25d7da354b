"""The base executor of a server: split clients multiply by the weights that it serves by.

It has a port of its own, and a thread, which has the engine run what clients ask for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pcg.kernels.devices import device_thread
from pcg.keys import Keys
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.serve.engine.options import ServeOptions
from pcg.split.base.base_executor import tokenizer_files
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.base.shared_base import SharedBase
from pcg.split.zeromq import ZeroMqEndpoint

_LOG = logging.getLogger("pcg.split")


@dataclass(frozen=True)
class SplitAccess:
    """Facts that a server's base needs beside its options.

    Attributes:
        keys: the server's keys.
        directory: where the tokenizer's files are, which clients are sent; None for nowhere.
    """

    keys: Keys
    directory: Path | None


class ServedBase:
    """A base executor that runs on a thread of its own.

    Attributes:
        where: its address.
        keys: the keys that clients come with.
        ended: is done once it has ended.
    """

    def __init__(self, loop: BaseLoop, keys: Keys) -> None:
        self.where = loop.endpoint.where
        self.keys = keys
        self.ended: Future[None] = Future()
        self._loop = loop
        self._thread = device_thread(None, self._run, "pcg base")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception:
            _LOG.exception("the base executor at %s ended", self.where)
        self.ended.set_result(None)

    def drain(self) -> Future[None]:
        """Take no new clients, and end once those that are here have left."""
        self._loop.drain()
        return self.ended

    def close(self) -> None:
        """End it now."""
        self._loop.stop()
        self._thread.join()


@contextmanager
def split_endpoint(options: ServeOptions) -> Iterator[ZeroMqEndpoint]:
    """Listen for split clients, within a `with`. SplitError: the address cannot be listened at."""
    asked = _base_options(options)
    most = asked.max_request_mib * 2**20
    endpoint = ZeroMqEndpoint(asked.host, asked.port, most, asked.curve)
    try:
        yield endpoint
    finally:
        endpoint.close()


@contextmanager
def served_base(
    executor: Executor,
    engine: AsyncEngine,
    options: ServeOptions,
    access: SplitAccess,
    endpoint: ZeroMqEndpoint,
) -> Iterator[ServedBase]:
    """Serve split clients by an engine's weights, within a `with`."""
    base = SharedBase(executor, engine)
    files = tokenizer_files(access.directory)
    loop = BaseLoop(base, endpoint, _base_options(options), files, access.keys)
    found = ServedBase(loop, access.keys)
    try:
        yield found
    finally:
        found.close()


def _base_options(options: ServeOptions) -> BaseOptions:
    assert options.split_port is not None
    return BaseOptions(
        host=options.host,
        port=options.split_port,
        curve_key=options.split_curve_key,
        curve_clients=options.split_curve_clients,
        plaintext=options.split_plaintext,
        drain_s=options.shutdown_timeout_s,
    )
