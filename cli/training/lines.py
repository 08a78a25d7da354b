"""Lines that say how training goes, off a terminal or by steps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def step_lines(log_every: object) -> Iterator[None]:
    """Print the lines of the log of steps within the block, on standard error.

    Args:
        log_every: steps between lines; None for a line every few seconds where there is no bar.
    """
    log, lines = logging.getLogger("pcg.finetuning"), _Lines()
    if log_every is None:  # an error is the command's to tell
        lines.addFilter(lambda record: record.levelno == logging.INFO)
    before = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(before)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)
