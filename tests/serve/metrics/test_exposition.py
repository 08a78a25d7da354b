"""The text of metrics: character by character what prometheus_client writes of the same samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from pcg.runtime.metrics.totals import REQUEST_BOUNDS_S, Histogram
from pcg.serve.metrics.exposition import Exposition

COMMON = {"model_name": 'a "model"\\ of\nours', "engine": "0"}


class Families:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def theirs(*families: Metric) -> str:
    registry = CollectorRegistry()
    registry.register(Families(list(families)))
    return generate_latest(registry).decode()


@given(
    value=st.one_of(
        st.integers(0, 10**12), st.floats(0, 1e300), st.sampled_from([math.inf, math.nan])
    ),
    label=st.text(max_size=8),
)
def test_gauges_and_counters(value: float, label: str) -> None:
    if not label.isprintable() and any("\ud800" <= c <= "\udfff" for c in label):
        return
    to = Exposition(COMMON)
    to.gauges("g", "words\\ and\nmore", [({"adapter": label}, value), ({"adapter": "x"}, 1)])
    to.counter("c", "words", value)
    to.gauges("alone", "words", [({"a": label}, value)], with_common=False)
    gauge = GaugeMetricFamily("g", "words\\ and\nmore", labels=["adapter", *COMMON])
    gauge.add_metric([label, *COMMON.values()], value)
    gauge.add_metric(["x", *COMMON.values()], 1)
    counter = CounterMetricFamily("c", "words", labels=list(COMMON))
    counter.add_metric(list(COMMON.values()), value)
    alone = GaugeMetricFamily("alone", "words", labels=["a"])
    alone.add_metric([label], value)
    assert to.page().decode() == theirs(gauge, counter, alone)


def family(name: str, *samples: tuple[str, Histogram], most: float = math.inf) -> Metric:
    found = HistogramMetricFamily(name, "words", labels=["adapter", *COMMON])
    for label, one in samples:
        upto, buckets = 0, []
        for bound, count in zip([*one.bounds, math.inf], one.counts, strict=True):
            upto += count
            if bound <= most or bound == math.inf:
                buckets.append((floatToGoString(bound), upto))
        found.add_metric([label, *COMMON.values()], buckets, one.sum)
    return found


@pytest.mark.parametrize("most", [math.inf, 60.0])
def test_histograms(most: float) -> None:
    one, two = Histogram(REQUEST_BOUNDS_S), Histogram(REQUEST_BOUNDS_S)
    to = Exposition(COMMON)
    for turn in range(3):
        for value in (0.0, 0.3, 0.31, 7.0, 60.0):
            one.observe(value + turn)
        to.histograms("h", "words", [({"adapter": "a"}, one), ({"adapter": "b"}, two)], most)
        assert to.page().decode() == theirs(family("h", ("a", one), ("b", two), most=most))


def test_what_is_not_written_any_more_is_forgotten() -> None:
    to = Exposition({})
    for turn in range(100):
        to.gauges("g", "words", [({"adapter": f"adapter {turn}"}, turn)])
        assert to.page().decode() == (
            f'# HELP g words\n# TYPE g gauge\ng{{adapter="adapter {turn}"}} {turn}.0\n'
        )
    assert len(to._kept) == 1
