"""The text that Prometheus reads: format 0.0.4, character by character that of prometheus_client.

That library builds an object and a dict for each line, 4 µs, and a page is read 20 times a second
beside the engine, under the interpreter's one lock. Here everything of a line but its number is
made once and kept, 0.2 µs. It is kept while it is written: what one page lacks, the next forgets.

    # HELP vllm:num_requests_running Requests that run.
    # TYPE vllm:num_requests_running gauge
    vllm:num_requests_running{engine="0",model_name="llama"} 3.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.utils import floatToGoString

from pcg.runtime.metrics.totals import Histogram

Labels: TypeAlias = Mapping[str, str]
_NONE: Labels = {}
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n"})
_SMALL = 1_000_000
"""From here on Prometheus writes floats with an exponent."""


class Exposition:
    """Writes pages of metrics, one after the other; not for several threads at once.

    Args:
        common: labels that all series have unless they are written without.
    """

    def __init__(self, common: Labels) -> None:
        self._common = common
        self._parts: list[str] = []
        self._heads: dict[str, str] = {}
        self._kept: dict[object, str] = {}
        self._written: dict[object, str] = {}
        self._kept_histograms: dict[object, _Written] = {}
        self._written_histograms: dict[object, _Written] = {}

    def page(self) -> bytes:
        """Return what was written since the last page, and begin the next one."""
        text = "".join(self._parts).encode(errors="replace")
        self._parts = []
        self._kept, self._written = self._written, {}
        self._kept_histograms, self._written_histograms = self._written_histograms, {}
        return text

    def gauge(self, name: str, words: str, value: float, labels: Labels = _NONE) -> None:
        self.gauges(name, words, [(labels, value)])

    def gauges(
        self,
        name: str,
        words: str,
        samples: Iterable[tuple[Labels, float]],
        *,
        with_common: bool = True,
    ) -> None:
        """Write a family of gauges.

        Args:
            with_common: False for series that have their own labels alone.
        """
        self._family(name, name, "gauge", words, samples, with_common)

    def counter(self, name: str, words: str, value: float) -> None:
        self.counters(name, words, [(_NONE, value)])

    def counters(self, name: str, words: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """Write a family of counters, whose series end in `_total`."""
        self._family(name, f"{name}_total", "counter", words, samples, True)

    def histogram(self, name: str, words: str, found: Histogram, most: float | None = None) -> None:
        """Write a histogram; bounds above `most` are left out, as no sample is."""
        self.histograms(name, words, [(_NONE, found)], most)

    def histograms(
        self,
        name: str,
        words: str,
        samples: Iterable[tuple[Labels, Histogram]],
        most: float | None = None,
    ) -> None:
        """Write a family of histograms, all with the same bounds."""
        is_first = True
        for labels, found in samples:
            if is_first:
                self._head(name, "histogram", words)
                is_first = False
            key = (name, *labels.items())
            kept = self._kept_histograms.get(key)
            if kept is None:
                shown = [bound for bound in found.bounds if most is None or bound <= most]
                kept = _Written(self._histogram_lines(name, labels, shown))
            self._written_histograms[key] = kept
            self._parts.append(kept.text_of(found))

    def _family(
        self,
        name: str,
        series: str,
        kind: str,
        words: str,
        samples: Iterable[tuple[Labels, float]],
        with_common: bool,
    ) -> None:
        self._head(series, kind, words)
        for labels, value in samples:
            key = (name, *labels.items())
            line = self._kept.get(key)
            if line is None:
                whole = {**self._common, **labels} if with_common else labels
                line = f"{series}{_labelled(whole)} "
            self._written[key] = line
            self._parts += (line, _number(value), "\n")

    def _head(self, name: str, kind: str, words: str) -> None:
        head = self._heads.get(name)
        if head is None:
            head = f"# HELP {name} {words.translate(_HELP_ESCAPED)}\n# TYPE {name} {kind}\n"
            self._heads[name] = head
        self._parts.append(head)

    def _histogram_lines(self, name: str, labels: Labels, bounds: Sequence[float]) -> list[str]:
        """Return what stands before each number of a histogram, line ends included."""
        whole = {**self._common, **labels}
        shown = [*map(floatToGoString, bounds), "+Inf"]
        lines = [f"\n{name}_bucket{_labelled({**whole, 'le': bound})} " for bound in shown]
        rest = _labelled(whole)
        lines += [f"\n{name}_count{rest} ", f"\n{name}_sum{rest} "]
        return [lines[0][1:], *lines[1:]]


class _Written:
    """A histogram that was written: what stands before its numbers, and its latest text."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._counts: list[int] = []
        self._sum = 0.0
        self._text = ""

    def text_of(self, found: Histogram) -> str:
        counts = found.counts.copy()  # at once, while the engine's thread counts on
        if counts != self._counts or found.sum != self._sum:  # those of most adapters rest
            self._counts, self._sum = counts, found.sum
            *upto, whole = accumulate(counts)
            lines = self._lines
            values = [*upto[: len(lines) - 3], whole, whole]
            parts = [f"{a}{_number(b)}" for a, b in zip(lines, values, strict=False)]
            self._text = f"{''.join(parts)}{lines[-1]}{_number(self._sum)}\n"
        return self._text


def _labelled(labels: Labels) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{value.translate(_ESCAPED)}"' for name, value in sorted(labels.items()))
    return f"{{{','.join(pairs)}}}"


def _number(value: float) -> str:
    if type(value) is int and value < _SMALL:
        return f"{value}.0"
    return str(floatToGoString(value))
