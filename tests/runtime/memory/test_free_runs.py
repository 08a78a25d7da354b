"""Runs of free pages, held against a set of pages."""

from hypothesis import given
from hypothesis import strategies as st

from pcg.runtime.memory.free_runs import FreeRuns

SIZE = 24


def runs_of(pages: set[int]) -> list[tuple[int, int]]:
    """Start and length of each run, in order."""
    starts = [page for page in sorted(pages) if page - 1 not in pages]
    ends = [page + 1 for page in sorted(pages) if page + 1 not in pages]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


KINDS = st.sampled_from(["add", "take", "take last"])


@given(st.lists(st.tuples(KINDS, st.integers(0, SIZE - 1), st.integers(1, 8))))
def test_runs_are_those_of_a_set(operations: list[tuple[str, int, int]]) -> None:
    free, pages = FreeRuns(), set[int]()
    for kind, place, count in operations:
        if kind == "take last" and pages:
            start, length = runs_of(pages)[-1]
            first, taken = free.take_last(count)
            assert taken == min(count, length)
            assert first + taken == start + length
            pages -= set(range(first, first + taken))
        elif kind == "take" and pages:
            start, length = runs_of(pages)[place % len(runs_of(pages))]
            taken = free.take(start, count)
            assert taken == min(count, length)
            pages -= set(range(start, start + taken))
        else:
            added = set(range(place, min(place + count, SIZE))) - pages
            for start, length in runs_of(added):
                free.add(start, length)
            pages |= added
        assert list(free) == runs_of(pages)
        assert free.pages == len(pages)
        lengths = [length for _, length in free]
        assert free.longest == max(lengths, default=0)
        assert [p for p in range(SIZE) if free.begins(p)] == [start for start, _ in free]
        for wanted in range(1, free.longest + 1):
            best = min((length, start) for start, length in free if length >= wanted)
            assert free.fitting(wanted) == best[1]
