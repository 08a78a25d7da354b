"""Numbers of an engine as plain data, and back: counters, histograms and sums by adapter.

A value is turned back by what a new engine has in its place, so totals may get further ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pcg.runtime.metrics.events import EventLog
from pcg.runtime.metrics.status import EngineNumbers, JobState
from pcg.runtime.metrics.totals import AdapterSums, AdapterTotals, Histogram, Totals


def plain(value: Any) -> Any:
    """Return numbers as dicts, lists, texts and numbers, while another thread counts on."""
    if isinstance(value, Histogram):
        return [value.counts.copy(), value.sum]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.copy().items()}
    if isinstance(value, AdapterTotals):
        return {**_public(value), "own": plain(value.own)}
    if isinstance(value, Totals):
        return _public(value)
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def plain_state(numbers: EngineNumbers) -> dict[str, Any]:
    """Return what `plain` makes of numbers, without the totals."""
    found = {**vars(numbers), "jobs": dict(numbers.jobs)}
    del found["totals"]
    return found


def _public(value: object) -> dict[str, Any]:
    return {name: plain(one) for name, one in vars(value).items() if not name.startswith("_")}


def numbers_of(data: Mapping[str, Any]) -> EngineNumbers:
    """Return the numbers that `plain` made data of."""
    return with_totals(data, totals_of(data["totals"]))


def totals_of(data: Mapping[str, Any]) -> Totals:
    """Return the totals that `plain` made data of."""
    totals = Totals(EventLog(0))
    for name, value in data.items():
        setattr(totals, name, _restored(getattr(totals, name), value))
    return totals


def with_totals(data: Mapping[str, Any], totals: Totals) -> EngineNumbers:
    """Return the numbers that `plain` made data of, with these totals."""
    jobs = {JobState(state): count for state, count in data["jobs"].items()}
    return EngineNumbers(**{**data, "jobs": jobs, "totals": totals})


def _restored(new: Any, value: Any) -> Any:
    """Return a value in the class of what a new engine has in its place."""
    if isinstance(new, Histogram):
        new.counts, new.sum = value
        return new
    if isinstance(new, Counter):
        return Counter(value)
    if isinstance(new, AdapterTotals):
        own = {name: _restored(AdapterSums(), sums) for name, sums in value.pop("own").items()}
        new.take(own)
    if isinstance(new, AdapterTotals) or is_dataclass(new):
        for name, one in value.items():
            setattr(new, name, _restored(getattr(new, name), one))
        return new
    return value
