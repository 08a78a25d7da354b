"""Sinks: what else the numbers of a run go to beside its record, by other people's libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pcg.errors import RecordError
from pcg.records.run_files import RunFacts
from pcg.records.sink import Sink
from pcg.units import shown

SINKS = ("tensorboard", "wandb")
"""Names of sinks, which are those of their libraries and of the extras that install these."""


def check_sinks(names: Sequence[str]) -> None:
    """Raise a RecordError if one of the names is no sink's, or its library is not installed."""
    for name in names:
        if name not in SINKS:
            raise RecordError(f"report_to={shown(name)}; use some of {', '.join(SINKS)}")
        if importlib.util.find_spec(name) is None:
            raise RecordError(
                f"report_to={name!r} needs the library {name}, which is not installed; "
                f"pip install 'pcg[{name}]'"
            )


def open_sinks(
    names: Sequence[str], folder: Path, facts: RunFacts, config: Mapping[str, Any], done: int
) -> list[Sink]:
    """Open the sinks of a run.

    Args:
        folder: the folder of its record.
        facts: its name, and when it began, by which one that goes on is known.
        done: the steps that it has done.
    Raises:
        RecordError: one is not known, not installed, or cannot be opened.
    """
    check_sinks(names)
    found: list[Sink] = []
    for kind in dict.fromkeys(names):
        try:
            if kind == "tensorboard":
                from pcg.records.tensorboard_sink import TensorBoardSink

                found.append(TensorBoardSink(folder, config, done))
            else:
                from pcg.records.wandb_sink import WandbSink

                found.append(WandbSink(folder, facts, config))
        except Exception as error:  # the library's own, of a network or a login
            for sink in found:
                sink.end(is_completed=False)
            raise RecordError(f"{kind} cannot be written: {error}") from error
    return found
