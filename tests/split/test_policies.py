"""Which requests a base runs together, and when."""

from __future__ import annotations

import torch

from pcg.split.base.policies import Choice, Policy, make_policy
from pcg.split.base.queues import Queues, Waiting
from pcg.split.pieces import Piece

FIRST, SECOND, THIRD = (Piece("linear", (name,)) for name in "abc")


def waiting(
    client: str, piece: Piece = FIRST, *, tokens: int = 4, at: float = 0.0, serves: bool = False
) -> Waiting:
    return Waiting(client.encode(), 1, piece, (torch.zeros(tokens, 2),), serves, at)


def choose(policy: Policy, *there: Waiting, now: float, active: str = "abc") -> Choice:
    queues = Queues()
    for one in there:
        queues.add(one)
    return policy.choose(queues, [name.encode() for name in active], now)


def clients(choice: Choice) -> str:
    return b"".join(one.client for one in choice.batch).decode()


def opportunistic(wait_ms: float = 100, scale: int = 4, most: int = 100) -> Policy:
    return make_policy("opportunistic", most, wait_ms, scale)


def test_none_runs_the_oldest_alone() -> None:
    policy = make_policy("none", 100, 0, 1)
    assert clients(choose(policy, waiting("a", SECOND, at=2), waiting("b", at=1), now=3)) == "b"


def test_opportunistic_waits_for_others_and_then_runs_them_together() -> None:
    there = [waiting("a", at=0), waiting("b", at=0.05)]
    early = choose(opportunistic(), *there, now=0.06)
    assert not early.batch
    assert abs(early.wait_s - 0.04) < 1e-9
    assert clients(choose(opportunistic(), *there, now=0.1)) == "ab"


def test_nothing_waits_when_nobody_else_can_come() -> None:
    assert clients(choose(opportunistic(), waiting("a"), now=0, active="a")) == "a"
    other = waiting("b", SECOND)
    assert len(choose(opportunistic(), waiting("a"), other, now=0, active="ab").batch) == 1


def came_from(queues: Queues, client: str, pieces: str) -> None:
    """Have a client ask for pieces, one after the other, each of which runs."""
    for name in pieces:
        one = waiting(client, Piece("linear", (name,)), serves=True)
        queues.add(one)
        queues.take([one])


WAY = "pqrstupqrstu"
"""Six pieces, twice: from then on it is known."""


def test_a_request_waits_only_for_clients_that_are_near_its_piece() -> None:
    queues, policy = Queues(), opportunistic()
    came_from(queues, "b", WAY + "p")
    queues.add(waiting("a", Piece("linear", ("t",))))
    assert clients(policy.choose(queues, [b"a", b"b"], 0.0)) == "a"  # q, r and s are before it
    came_from(queues, "b", "q")
    assert not policy.choose(queues, [b"a", b"b"], 0.0).batch
    assert policy.choose(queues, [b"a", b"b"], 0.1).batch  # it was waited for long enough
    queues.drop(b"b")
    assert clients(policy.choose(queues, [b"a"], 0.0)) == "a"


def test_what_others_may_join_runs_behind_what_nobody_can() -> None:
    queues, policy = Queues(), opportunistic()
    came_from(queues, "c", WAY)
    queues.add(waiting("a", Piece("linear", ("q",))))  # c may come
    active = [b"a", b"b", b"c"]
    for _ in range(7):
        queues.add(waiting("b", THIRD))
        choice = policy.choose(queues, active, 9.0)
        assert clients(choice) == "b"
        queues.take(choice.batch)
    queues.add(waiting("b", THIRD))
    assert clients(policy.choose(queues, active, 9.0)) == "a"  # it has waited for long enough


def test_training_waits_for_inference_a_bounded_time() -> None:
    queues, policy = Queues(), opportunistic()
    queues.add(waiting("a"))
    for _ in range(2):  # as many as there are clients
        queues.add(waiting("b", SECOND, serves=True))
        choice = policy.choose(queues, [b"a", b"b"], 9.0)
        assert clients(choice) == "b"
        queues.take(choice.batch)
    queues.add(waiting("b", SECOND, serves=True))
    assert clients(policy.choose(queues, [b"a", b"b"], 9.0)) == "a"


def test_a_small_request_waits_less_and_one_that_serves_half_as_long() -> None:
    assert not choose(opportunistic(), waiting("a", tokens=2), now=0.049).batch
    assert choose(opportunistic(), waiting("a", tokens=2), now=0.05).batch
    assert choose(opportunistic(), waiting("a", tokens=2, serves=True), now=0.025).batch
    assert not choose(opportunistic(), waiting("a", tokens=40), now=0.099).batch


def test_inference_is_before_training() -> None:
    there = [waiting("a", at=0), waiting("b", SECOND, at=0.05, serves=True)]
    assert clients(choose(opportunistic(), *there, now=1)) == "b"


def test_a_batch_has_a_bound_and_one_that_is_full_does_not_wait() -> None:
    policy = opportunistic(most=8)
    there = [waiting("a"), waiting("b"), waiting("c", serves=True)]
    assert clients(choose(policy, *there, now=0, active="abcd")) == "ca"
    assert clients(choose(policy, waiting("a", tokens=50), now=0)) == "a"


def test_requests_of_different_dtypes_are_not_one() -> None:
    half = Waiting(b"b", 1, FIRST, (torch.zeros(4, 2, dtype=torch.bfloat16),), False, 0)
    assert len(choose(opportunistic(), waiting("a"), half, now=1).batch) == 1


def test_lockstep_begins_when_all_are_there_and_runs_each_before_anyone_s_next() -> None:
    policy = make_policy("lockstep", 100, 0, 1)
    first, other, last = waiting("a"), waiting("b", SECOND), waiting("c")
    assert not choose(policy, first, other, now=9).batch
    assert clients(choose(policy, first, other, last, now=9)) == "ac"
    assert clients(choose(policy, waiting("a", SECOND), other, now=9)) == "b"
    assert not choose(policy, waiting("a", SECOND), now=9).batch


def test_what_a_client_had_waiting_is_dropped_with_it() -> None:
    queues = Queues()
    for one in (waiting("a"), waiting("a", SECOND), waiting("b")):
        queues.add(one)
    assert queues.drop(b"a") == 2
    assert queues.clients == {b"b"}
