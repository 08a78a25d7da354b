"""The rooms that are left where there are too many to record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pcg.kernels.triton.step_rooms import MOST_ROOMS, StepRoom, StepRooms, rooms_within

ROOMS = StepRooms(64, 512, 64, 512, 4, has_adapters=True)


@pytest.mark.parametrize("widest", [16, 64])
@pytest.mark.parametrize("most", [40, 1])
def test_rooms_that_are_left_hold_all(widest: int, most: int) -> None:
    rooms = replace(ROOMS, widest=widest).all
    found = rooms_within(rooms, most)
    assert len(found) < len(rooms)
    assert list(found) == [room for room in rooms if room in set(found)]  # the largest first
    assert all(any(one.holds(room) for one in found) for room in rooms)
    if most == 1:  # those that nothing else holds
        assert not any(a.holds(b) for a in found for b in found if a is not b)


def test_all_are_left_where_there_is_room() -> None:
    assert len(ROOMS.all) <= MOST_ROOMS
    assert rooms_within(ROOMS.all) == ROOMS.all


def test_the_room_goes_that_loses_least() -> None:
    """Few tokens take as long as weights, so one of them goes before one of many does."""
    sizes = (512, 448, 24, 16)
    rooms = [StepRoom(tokens, tokens, tokens, 0, 0, 0, 0) for tokens in sizes]
    assert [room.tokens for room in rooms_within(rooms, 3)] == [512, 448, 24]
    assert [room.tokens for room in rooms_within(rooms, 2)] == [512, 24]
