"""The page of a run in its folder."""

from __future__ import annotations

from pathlib import Path

from pcg.records.run import read_run
from pcg.records.run_files import REPORT, write_whole

MOST_BYTES = 2**24
"""Bytes of metrics.jsonl, some 70,000 steps, from which no page is written where others wait."""


def write_report(folder: Path) -> Path:
    """Write the page of the run in a folder; returns the file.

    Raises:
        RecordError: there is no record, it is damaged, or the page cannot be written.
    """
    from pcg.records.page import run_page  # its templates take a while to import

    path = folder / REPORT
    write_whole(path, run_page(read_run(folder)))
    return path
