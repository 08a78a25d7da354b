"""The sizes of recorded windows: one at a time, and what is asked for again and again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pcg.runtime.training.recorded.window_sizes import SIZES, WindowSizes


def test_a_window_has_the_largest_size_that_it_may() -> None:
    sizes = WindowSizes()
    assert sizes.fitting(700, 4096) == 512
    assert sizes.fitting(900, 3584) == 512
    assert sizes.fitting(300, 3072) == 300  # less than the size, as there is no room for more
    assert sizes.fitting(700, 200) == 200
    assert [sizes.holds(tokens) for tokens in (512, 200, 64, 63, 513)] == [True] * 3 + [False] * 2


def test_no_short_rest_is_left() -> None:
    sizes = WindowSizes()
    assert sizes.fitting(700, 4096) == 512
    assert sizes.fitting(700, 575) == 288
    assert sizes.fitting(700, 287) == 287
    assert sizes.fitting(700, 576) == 512  # and 64, an eighth


def test_a_pass_of_one_window_is_filled_up() -> None:
    sizes = WindowSizes()
    assert sizes.fitting(4096, 100) == 100
    assert sizes.size == 128
    assert sizes.holds(100)


def test_another_size_is_taken_between_passes_once_it_is_asked_for_often() -> None:
    sizes = WindowSizes()
    sizes.fitting(700, 4096)
    for _ in range(7):
        assert sizes.fitting(300, 4096) == 300
    sizes.begin_pass()
    assert sizes.size == 512
    sizes.fitting(600, 4096)  # as it is: the others are not in turn any more
    for _ in range(8):
        sizes.fitting(300, 4096)
    assert sizes.size == 512
    sizes.begin_pass()
    assert sizes.size == 256


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 9000)), min_size=1))
def test_windows_make_headway_and_are_never_longer_than_they_may(
    asked: list[tuple[int, int]],
) -> None:
    sizes = WindowSizes()
    for tokens, remaining in asked:
        found = sizes.fitting(tokens, remaining)
        assert 0 < found <= min(tokens, remaining, SIZES[-1])
        sizes.begin_pass()
        assert sizes.size in SIZES
