"""The observers of requests that a server's options ask for."""

from __future__ import annotations

from pcg.errors import ServeError
from pcg.serve.access_log import AccessLog
from pcg.serve.options import ServeOptions
from pcg.serve.record import Observer


def open_observers(options: ServeOptions) -> tuple[Observer, ...]:
    """Open the access log and the exporter of traces.

    Raises:
        ServeError: the log's file cannot be written, or what traces need is not installed.
    """
    found: list[Observer] = []
    if options.access_log != "none":
        found.append(AccessLog(options.access_log))
    if options.otlp_traces_endpoint is not None:
        try:
            from pcg.serve.tracing import Traces
        except ImportError as error:
            raise ServeError(
                f"--otlp-traces-endpoint needs {error.name}; pip install 'pcg[otel]'"
            ) from error
        found.append(Traces(options.otlp_traces_endpoint))
    return tuple(found)
