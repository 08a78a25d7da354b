"""Runs beside each other: the options that differ, and how far each of them came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pcg.records.run import EVALUATION, Run, flat

LOSSES = ("loss", f"{EVALUATION}loss")
_MINOR = ("epoch", "tokens", "learning_rate", "gradient_norm", "memory_bytes", "tokens_per_second")
"""Numbers whose last value says nothing about how good a run is."""
_ABSENT = object()


@dataclass(frozen=True)
class Comparison:
    """Some runs, in the order in which they were named.

    Attributes:
        names: a name for each, which no other has.
    """

    runs: Sequence[Run]
    names: Sequence[str]

    @property
    def differing(self) -> dict[str, list[Any]]:
        """The options that differ, each with the value of each run; None where one has it not."""
        configs = [flat(run.config) for run in self.runs]
        found = {}
        for name in dict.fromkeys(name for config in configs for name in config):
            values = [config.get(name, _ABSENT) for config in configs]
            if any(value != values[0] for value in values):
                found[name] = [None if value is _ABSENT else value for value in values]
        return found

    @property
    def results(self) -> dict[str, list[Any]]:
        """The outcome by what it is called, each with the value of each run."""
        rows: dict[str, list[Any]] = {
            "status": [str(run.status) for run in self.runs],
            "steps": [run.last_step for run in self.runs],
        }
        for name in LOSSES:
            if any(name in run.series for run in self.runs):
                rows[f"{name}, last"] = [run.last(name) for run in self.runs]
                least = [run.least(name) for run in self.runs]
                rows[f"{name}, best"] = [None if one is None else one[1] for one in least]
        others = dict.fromkeys(name for run in self.runs for name in run.series)
        for name in others:
            if name not in (*LOSSES, *_MINOR):
                rows[f"{name}, last"] = [run.last(name) for run in self.runs]
        rows["tokens/s"] = [run.last("tokens_per_second") for run in self.runs]
        rows["seconds"] = [run.seconds for run in self.runs]
        return rows

    @property
    def json(self) -> dict[str, Any]:
        """The comparison as one object."""
        runs = []
        for place, (run, name) in enumerate(zip(self.runs, self.names, strict=True)):
            results = {what: values[place] for what, values in self.results.items()}
            options = {what: values[place] for what, values in self.differing.items()}
            runs.append(
                {"run": name, "folder": str(run.folder), "results": results, "options": options}
            )
        return {"runs": runs}


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs, each named by what its folder's path has apart from the others'."""
    paths = [run.folder.absolute().parts for run in runs]
    start = end = 0
    if len(set(paths)) > 1:
        least = min(map(len, paths))
        while start < least and len({path[start] for path in paths}) == 1:
            start += 1
        while end < least - start - 1 and len({path[-1 - end] for path in paths}) == 1:
            end += 1
    names = ["/".join(path[start : len(path) - end]) or path[-1] for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" for place, name in enumerate(names, 1)]
    return Comparison(runs, names)
