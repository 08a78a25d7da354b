"""Reader of public traces of LLM services: CSV files, told apart by their header.

    Azure 2023, 2024   TIMESTAMP,ContextTokens,GeneratedTokens
                       TIMESTAMP is a date and time: 2023-11-16 18:17:03.9799600
    BurstGPT           Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,…
                       Timestamp is in seconds

Rows without an output are failed requests (BurstGPT's description) and are left out, as are rows
without a prompt. Neither trace has adapters; `assign_adapters` adds them.

Source: AzurePublicDataset's AzureLLMInferenceDataset2023.md and 2024.md; BurstGPT's README.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from pcg.errors import BenchmarkError
from pcg.files import damage_of, is_file, shown_path
from pcg.simulate.workloads.workload import TimedRequest, Workload


@dataclass(frozen=True)
class _Form:
    """The columns of a trace, and the reader of its times, in whole microseconds."""

    time: str
    prompt: str
    output: str
    microseconds: Callable[[str], int]


def _of_moment(text: str) -> int:
    moment = datetime.fromisoformat(text).replace(tzinfo=None)
    return (moment - datetime(2000, 1, 1)) // timedelta(microseconds=1)


def _of_seconds(text: str) -> int:
    return round(float(text) * 1e6)


_FORMS = (
    _Form("TIMESTAMP", "ContextTokens", "GeneratedTokens", _of_moment),
    _Form("Timestamp", "Request tokens", "Response tokens", _of_seconds),
)


def read_public_trace(path: str | Path) -> Workload:
    """Read a trace; its times start at 0 with the earliest request.

    Raises:
        BenchmarkError: the file is missing, its header is of neither trace, a row has no number
            where one belongs, or no request is left.
    """
    path = Path(path)
    if not is_file(path):
        raise BenchmarkError(f"no trace file {shown_path(path)}")
    with damage_of(str(path), BenchmarkError, "; download it again"):
        rows = sorted(_rows(path), key=lambda row: row[0])
    if not rows:
        raise BenchmarkError(f"{path} holds no requests that have a prompt and an output")
    first = rows[0][0]
    return Workload(
        tuple(
            TimedRequest((time - first) / 1e6, None, prompt, output)
            for time, prompt, output in rows
        )
    )


def _rows(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield time in microseconds, prompt and output tokens of each request."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or ()
        form = next((one for one in _FORMS if {one.time, one.prompt, one.output} <= {*names}), None)
        if form is None:
            known = "; ".join(f"{one.time}, {one.prompt}, {one.output}" for one in _FORMS)
            raise BenchmarkError(
                f"{path} has columns {', '.join(names) or 'none'}; a trace has one of: {known}"
            )
        for row in reader:
            where = f"{path} line {reader.line_num}"
            try:
                time = form.microseconds(row[form.time])
                prompt, output = int(row[form.prompt]), int(row[form.output])
            except (OverflowError, TypeError, ValueError) as error:  # a short row is a TypeError
                raise BenchmarkError(f"{where}: {error}") from error
            if prompt and output:
                yield time, prompt, output
