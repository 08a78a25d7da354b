"""The observers of requests that a server's options select.

The access log has a JSON line per request, without texts and keys.

    {"time": "2026-05-01T09:30:00.125Z", "request_id": "req-…", "method": "POST",
     "route": "/v1/completions", "status": 200, "is_whole": true, "key": "ci", "tenant": "research",
     "model": "sql", "adapter_version": 3, "adapter_digest": "sha256:…", "prompt_tokens": 12,
     "cached_tokens": 0, "output_tokens": 64, "finish_reasons": ["stop"],
     "queued_s": 0.001, "first_token_s": 0.031, "duration_s": 0.902}

A thread writes the lines, so a full pipe or a slow disk delays no request. Lines beyond 10,000
waiting lines, and lines that cannot be written, are dropped; a line reports their number. Texts
from clients are escaped to printable ASCII and truncated, so they cannot start a line or control a
terminal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from queue import Full, Queue
from threading import Thread
from typing import Any

from pcg.errors import ServeError
from pcg.files import expanded
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.errors import LOG
from pcg.serve.http.middleware import Observer, Record

# --------------------------------------------------------------------------------------- access log


_MOST_WAITING = 10_000
_LONGEST = 256
"""Maximum characters of a text in a line."""


class AccessLog:
    """Writes a line for every request.

    Args:
        target: `stderr`, or a file, which is reopened after it was moved.
    Raises:
        ServeError: the file cannot be written.
    """

    def __init__(self, target: str) -> None:
        self._handler = _handler(target)
        self._handler.handleError = self._note_error  # type: ignore[method-assign]
        self._error: str | None = None
        self._lines: Queue[str | None] = Queue(_MOST_WAITING)
        self._dropped = 0
        self._thread = Thread(target=self._write, name="pcg access log", daemon=True)
        self._thread.start()

    def observe(self, record: Record) -> None:
        try:
            self._lines.put_nowait(line_of(record))
        except Full:
            self._dropped += 1

    def close(self) -> None:
        """Write the remaining lines, for a few seconds at most."""
        try:
            self._lines.put(None, timeout=1)
        except Full:
            return
        self._thread.join(5)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if not self._emit(line):
                self._dropped += 1
            elif self._lines.empty():
                self._report_dropped()
        self._report_dropped()
        with contextlib.suppress(OSError):
            self._handler.close()

    def _report_dropped(self) -> None:
        if self._dropped:
            count, self._dropped = self._dropped, 0
            if not self._emit(json.dumps({"time": _time(None), "dropped_lines": count})):
                self._dropped += count

    def _emit(self, line: str) -> bool:
        """Write a line. Return False on an error, which the server's log reports once."""
        before, self._error = self._error, None
        try:
            self._handler.handle(logging.makeLogRecord({"msg": line}))
        except OSError as error:  # the file cannot be reopened
            self._error = str(error)
        if self._error is not None and self._error != before:
            LOG.error("the access log cannot be written: %s", self._error)
        return self._error is None

    def _note_error(self, record: logging.LogRecord) -> None:
        self._error = str(sys.exc_info()[1])
        handler = self._handler
        if isinstance(handler, WatchedFileHandler) and handler.stream is not None:
            with contextlib.suppress(OSError):  # discards the buffered part of the line
                handler.stream.close()
            handler.stream = None


def line_of(record: Record) -> str:
    """Return the line of a request."""
    caller = record.caller
    path = record.route or record.scope["path"]  # without the query, which may hold anything
    line: dict[str, Any] = {
        "time": _time(record.came_s),
        "request_id": record.request_id,
        "method": record.scope["method"],
        "route": path,
        "status": record.status,
        "is_whole": record.is_whole,
        "key": None if caller is None else caller.key,
        "tenant": None if caller is None else caller.tenant,
    }
    if record.model is not None:
        version, (prompt_tokens, output_tokens) = record.version, record.tokens
        line |= {
            "model": record.model,
            "adapter_version": None if version is None else version.number,
            "adapter_digest": None if version is None else version.known_digest,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": sum(c.cached_tokens for c in record.completions if not c.index),
            "output_tokens": output_tokens,
            "finish_reasons": [c.finish_reason for c in record.completions][:_LONGEST],
            "queued_s": _rounded(record.queued_s),
            "first_token_s": _rounded(record.first_token_s),
        }
    line["duration_s"] = _rounded(record.ended_s - record.began_s)
    cut = {k: v[:_LONGEST] if isinstance(v, str) else v for k, v in line.items()}
    return json.dumps(cut, ensure_ascii=True).replace("\x7f", "\\u007f")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _time(unix_s: float | None) -> str:
    moment = datetime.now(UTC) if unix_s is None else datetime.fromtimestamp(unix_s, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _handler(target: str) -> logging.Handler:
    if target == "stderr":
        return logging.StreamHandler(sys.stderr)
    try:
        path = expanded(target)
        # Without O_NONBLOCK, opening a pipe without a reader would block.
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))
        return WatchedFileHandler(path, encoding="ascii")
    except OSError as error:
        raise ServeError(f"the access log {target!r} cannot be written: {error}") from error


# ---------------------------------------------------------------------------------------- observers


class Observers:
    """The access log and the exporter of traces, if the options enable them.

    Raises:
        ServeError: the log's file cannot be written, or a package for traces is not installed.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.each: list[Observer] = []
        if options.access_log != "none":
            self.each.append(AccessLog(options.access_log))
        if options.otlp_traces_endpoint is not None:
            try:
                from pcg.serve.tracing import Traces
            except ImportError as error:
                raise ServeError(
                    f"--otlp-traces-endpoint needs {error.name}; pip install 'pcg[otel]'"
                ) from error
            self.each.append(Traces(options.otlp_traces_endpoint))

    def close(self) -> None:
        for observer in self.each:
            observer.close()
