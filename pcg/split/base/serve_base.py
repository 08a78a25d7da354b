"""A base executor as a process: from its options to its end."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping

from pcg.keys import open_keys
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.transports.zeromq import ZeroMqEndpoint
from pcg.units import size_text


def serve_base(
    options: BaseOptions,
    load: Callable[[], BaseExecutor],
    say: Callable[[str], None],
    files: Mapping[str, str],
) -> None:
    """Serve a base until SIGTERM or Ctrl-C; a second one ends it at once.

    Args:
        load: loads the base.
        say: is told lines for the one who has started it.
        files: the tokenizer's files, by name.
    Raises:
        SplitError: the address cannot be listened at.
        ServeError: a key is too short, or the file of keys is damaged.
    """
    keys, made = open_keys(options.api_key, options.api_keys)
    # The address is taken first, so that one which cannot be is an answer at once.
    most, curve = options.max_request_mib * 2**20, options.curve
    endpoint = ZeroMqEndpoint(options.host, options.port, most, curve)
    try:
        base = load()
        loop = BaseLoop(base, endpoint, options, files, keys)
        logging.getLogger("pcg.split").addHandler(_Lines(say))
        logging.getLogger("pcg.split").setLevel(logging.INFO)
        kept = {one: signal.signal(one, _ended_by(loop, say)) for one in _SIGNALS}
        say(
            f"{base.name} in {str(base.dtype).removeprefix('torch.')} on {base.device}, "
            f"{size_text(base.size_bytes)} of weights; policy {options.policy}"
        )
        if made is not None:
            say(f"key: {made}")
        if curve is not None:
            say(f"CURVE key: {curve.public.decode()}")
        say(f"listening at {endpoint.where}")
        try:
            loop.run()
        finally:
            for one, handler in kept.items():
                signal.signal(one, handler)
        counts = loop.counts
        say(f"ended: {counts.requests} requests in {counts.batches} batches")
    finally:
        endpoint.close()


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _ended_by(loop: BaseLoop, say: Callable[[str], None]) -> Callable[[int, object], None]:
    def end(number: int, _: object) -> None:
        if loop.is_draining:
            loop.stop()
            return
        say(f"{signal.Signals(number).name}: no new clients; {loop.clients} are here")
        loop.drain()

    return end


class _Lines(logging.Handler):
    """Says each record as a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))
