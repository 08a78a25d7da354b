"""ZeroMQ, which is imported where it is used first."""

from __future__ import annotations

from typing import Any

from pcg.errors import SplitError


def zmq() -> Any:
    """Return the module. SplitError: it is not installed."""
    try:
        import zmq as module
        import zmq.auth
        import zmq.utils.monitor
    except ImportError:
        raise SplitError(
            "split execution between processes needs pyzmq; install pcg[split]"
        ) from None
    return module
