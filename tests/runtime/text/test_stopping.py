from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import GenerationError
from pcg.runtime.text.output_text import StopChecker

LETTERS = st.text(alphabet="ab", max_size=30)
STOP = st.text(alphabet="ab", min_size=1, max_size=5)


def run(stop, pieces):
    """(text given out, stop string) of a stream; nothing is given out after the match."""
    checker = StopChecker(stop)
    text = ""
    for piece in pieces:
        text += checker.push(piece)
    return text + checker.finish(), checker.matched


def cut(text, points):
    edges = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(
    text=LETTERS,
    stop=STOP,
    points=st.lists(st.integers(0, 30)),
)
def test_one_stop_string_is_where_find_finds_it(text, stop, points):
    at = text.find(stop)
    expected = (text, None) if at < 0 else (text[:at], stop)
    assert run([stop], cut(text, points)) == expected


@given(
    text=LETTERS,
    stops=st.lists(STOP, max_size=4),
    points=st.lists(st.integers(0, 30)),
)
def test_of_several_the_first_complete_one_stops(text, stops, points):
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    expected = (text, None)
    if found:
        _, start, stop = min(found)
        expected = (text[:start], stop)
    assert run(stops, cut(text, points)) == expected


@given(text=LETTERS, stop=STOP)
def test_no_more_is_held_back_than_could_begin_a_stop(text, stop):
    checker = StopChecker([stop])
    given_out = ""
    for index, letter in enumerate(text):
        given_out += checker.push(letter)
        if checker.matched:
            break
        held = text[len(given_out) : index + 1]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_text_after_the_match_is_dropped():
    checker = StopChecker(("\n\n", "###"))
    assert checker.push("a\n") == "a"
    assert checker.push("b#") == "\nb"
    assert checker.push("## c") == ""
    assert checker.matched == "###"
    assert (checker.push("d"), checker.finish()) == ("", "")


@given(
    text=LETTERS,
    stops=st.lists(STOP, max_size=4),
    points=st.lists(st.integers(0, 30)),
    early=st.integers(0, 30),
)
def test_stops_that_are_complete_too_early_do_not_count(text, stops, points, early):
    """And with the stop string left in, the text ends with it."""
    checker = StopChecker(stops, included=True)
    pieces = [text[:early], *cut(text[early:], points)]
    found = checker.push(pieces[0], may_end=False)
    for piece in pieces[1:]:
        found += checker.push(piece)
    found += checker.finish()
    ends = [end for end in range(early + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text[: ends[0]] if stops and ends else text
    assert found == expected
    assert (checker.matched is not None) == bool(stops and ends)


def test_a_long_stop_string_costs_little():
    """A part costs as much as it is long, however much is held."""
    checker = StopChecker(["a" * 1000 + "b"] * 100)
    looked = sum(len(checker.push("a")) for _ in range(3000))
    assert looked == 2000
    assert checker.push("b") == ""
    assert checker.matched == "a" * 1000 + "b"


@pytest.mark.parametrize("stop", [("",), "abc", (1,)])
def test_a_stop_that_is_none(stop):
    with pytest.raises(GenerationError, match="use a sequence of strings that are not empty"):
        StopChecker(stop)
