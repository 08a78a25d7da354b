"""Which requests a base runs together, and when."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from pcg.split.base.queues import Queues, Waiting, make_policy
from pcg.split.messages import Piece

FIRST, SECOND, THIRD = (Piece("linear", (name,)) for name in "abc")


def waiting(client, piece=FIRST, *, tokens=4, at=0.0, serves=False):
    return Waiting(client.encode(), 1, piece, (torch.zeros(tokens, 2),), serves, at)


def choose(policy, *there, now, active="abc"):
    queues = Queues()
    for one in there:
        queues.add(one)
    return policy.choose(queues, [name.encode() for name in active], now)


def clients(choice):
    return b"".join(one.client for one in choice.batch).decode()


def opportunistic(wait_ms=100, most=100):
    return make_policy("opportunistic", most, wait_ms)


def test_none_runs_the_oldest_alone():
    policy = make_policy("none", 100, 0)
    assert clients(choose(policy, waiting("a", SECOND, at=2), waiting("b", at=1), now=3)) == "b"


def test_nothing_waits_when_nobody_else_can_come():
    assert clients(choose(opportunistic(), waiting("a"), now=0, active="a")) == "a"
    other = waiting("b", SECOND)
    assert len(choose(opportunistic(), waiting("a"), other, now=0, active="ab").batch) == 1


WAY = "pqrstu"
"""The pieces of a program, in their order."""
TOOK_S = 0.01
"""The time of each batch, whatever its tokens."""


def ran(queues, *batch, now):
    """Have requests run as one, and be answered at a time."""
    for one in batch:
        queues.add(one)
    queues.take(batch)
    queues.ran(batch, TOOK_S, now)


def known(think_s, serves=False):
    """Queues that know both clients' way: `b` takes so long from a reply on, and `a` a moment.

    Either has been answered at its last piece, at 0 s.
    """
    queues = Queues()
    pieces = 8 * WAY + "pqrs"
    for client, pause_s in (("b", think_s), ("a", 1e-4)):
        now_s = -len(pieces) * (pause_s + TOOK_S)
        for name in pieces:
            one = waiting(client, piece(name), at=now_s + pause_s, serves=serves)
            now_s += pause_s + TOOK_S
            ran(queues, one, now=now_s)
    return queues


def piece(name):
    return Piece("linear", (name,))


def wait_for_b(queues, now=0.001, wait_ms=100, **given):
    """The choice where `a` has asked for the next piece."""
    queues.add(waiting("a", piece("t"), at=0.001, **given))
    return opportunistic(wait_ms).choose(queues, [b"a", b"b"], now)


def test_a_request_waits_for_a_client_that_is_expected_and_no_longer():
    queues = known(think_s=0.004)
    choice = wait_for_b(queues)
    assert not choice.batch
    queues.add(waiting("b", piece("t"), at=0.004))
    assert clients(opportunistic().choose(queues, [b"a", b"b"], 0.004)) == "ab"
    assert not wait_for_b(known(think_s=0.004), now=0.09).batch
    assert clients(wait_for_b(known(think_s=0.004), now=0.11)) == "a"
    late = known(think_s=0.004)
    late._replied_s[b"b"] = -0.11  # which has stopped, as it seems
    assert clients(wait_for_b(late)) == "a"


def test_nothing_waits_longer_than_that_saves():
    """A batch fewer saves half of its 10 ms; training waits twice as long, and a user no more."""
    assert not wait_for_b(known(0.009)).batch
    assert clients(wait_for_b(known(0.011))) == "a"
    assert not wait_for_b(known(0.004, serves=True), serves=True).batch
    assert clients(wait_for_b(known(0.006, serves=True), serves=True)) == "a"


def came_from(queues, client, pieces):
    """Have a client ask for pieces, one after the other, each of which runs."""
    for at, name in enumerate(pieces, -len(pieces)):
        now_s = 1.001 * TOOK_S * at
        ran(queues, waiting(client, piece(name), at=now_s, serves=True), now=now_s + TOOK_S)


def test_a_request_waits_only_for_clients_that_are_near_its_piece():
    queues, policy = Queues(), opportunistic()
    came_from(queues, "b", 2 * WAY + "p")
    queues.add(waiting("a", piece("t")))
    assert clients(policy.choose(queues, [b"a", b"b"], 0.0)) == "a"  # q, r and s are before it
    came_from(queues, "b", "q")
    assert not policy.choose(queues, [b"a", b"b"], 0.0).batch
    queues.drop(b"b")
    assert clients(policy.choose(queues, [b"a"], 0.0)) == "a"


def test_what_others_may_join_runs_behind_what_nobody_can():
    queues, policy = Queues(), opportunistic()
    came_from(queues, "c", 2 * WAY)
    queues.add(waiting("a", Piece("linear", ("q",))))  # c may come
    active = [b"a", b"b", b"c"]
    for _ in range(7):
        queues.add(waiting("b", THIRD))
        choice = policy.choose(queues, active, 9.0)
        assert clients(choice) == "b"
        queues.take(choice.batch)
    queues.add(waiting("b", THIRD))
    assert clients(policy.choose(queues, active, 9.0)) == "a"  # it has waited for long enough


def test_training_waits_for_inference_a_bounded_time():
    queues, policy = Queues(), opportunistic()
    queues.add(waiting("a"))
    for _ in range(2):  # as many as there are clients
        queues.add(waiting("b", SECOND, serves=True))
        choice = policy.choose(queues, [b"a", b"b"], 9.0)
        assert clients(choice) == "b"
        queues.take(choice.batch)
    queues.add(waiting("b", SECOND, serves=True))
    assert clients(policy.choose(queues, [b"a", b"b"], 9.0)) == "a"


def test_inference_is_before_training():
    there = [waiting("a", at=0), waiting("b", SECOND, at=0.05, serves=True)]
    assert clients(choose(opportunistic(), *there, now=1)) == "b"


def test_a_batch_has_a_bound_and_one_that_is_full_does_not_wait():
    policy = opportunistic(most=8)
    there = [waiting("a"), waiting("b"), waiting("c", serves=True)]
    assert clients(choose(policy, *there, now=0, active="abcd")) == "ca"
    assert clients(choose(policy, waiting("a", tokens=50), now=0)) == "a"


def test_requests_of_different_dtypes_are_not_one():
    half = Waiting(b"b", 1, FIRST, (torch.zeros(4, 2, dtype=torch.bfloat16),), False, 0)
    assert len(choose(opportunistic(), waiting("a"), half, now=1).batch) == 1


def test_lockstep_begins_when_all_are_there_and_runs_each_before_anyone_s_next():
    policy = make_policy("lockstep", 100, 0)
    first, other, last = waiting("a"), waiting("b", SECOND), waiting("c")
    assert not choose(policy, first, other, now=9).batch
    assert clients(choose(policy, first, other, last, now=9)) == "ac"
    assert clients(choose(policy, waiting("a", SECOND), other, now=9)) == "b"
    assert not choose(policy, waiting("a", SECOND), now=9).batch


def test_what_a_client_had_waiting_is_dropped_with_it():
    queues = Queues()
    for one in (waiting("a"), waiting("a", SECOND), waiting("b")):
        queues.add(one)
    assert queues.drop(b"a") == 2
    assert queues.clients == {b"b"}


@dataclass
class Client:
    """A client of a simulated base.

    Attributes:
        think_s: draws the time from a reply to its next request, s.
    """

    name: str
    think_s: Callable[[], float]
    tokens: int = 16
    serves: bool = False


def simulated(policy, clients, seconds=4.0):
    """Requests a batch, and a second of each client, in the second half of a time.

    All run one program of 60 pieces; a batch takes 2 ms, and 60 us for each token.
    """
    queues, now_s, counts = Queues(), 0.0, dict.fromkeys((one.name for one in clients), 0)
    batches, program = 0, [piece(str(at)) for at in range(60)]
    events = [(at * 1e-3, one.name, 0) for at, one in enumerate(clients)]
    of = {one.name: one for one in clients}
    while now_s < seconds:
        while events and events[0][0] <= now_s:
            at_s, name, place = heapq.heappop(events)
            one = of[name]
            tensors = (torch.zeros(one.tokens, 1),)
            wanted = program[place % len(program)]
            queues.add(Waiting(name.encode(), place, wanted, tensors, one.serves, at_s))
        wait_s = 1.0
        if len(queues):
            choice = policy.choose(queues, [name.encode() for name in of], now_s)
            wait_s = max(choice.wait_s, 1e-6)
            if choice.batch:
                queues.take(choice.batch)
                took_s = 2e-3 + 6e-5 * sum(one.tokens for one in choice.batch)
                now_s += took_s
                queues.ran(choice.batch, took_s, now_s)
                batches += now_s > seconds / 2
                for each in choice.batch:
                    name = each.client.decode()
                    counts[name] += now_s > seconds / 2
                    heapq.heappush(events, (now_s + of[name].think_s(), name, each.seq + 1))
                continue
        now_s = min(now_s + wait_s, events[0][0]) if events else now_s + wait_s
    return sum(counts.values()) / batches, {n: 2 * c / seconds for n, c in counts.items()}


def around(seconds, spread, seed, late=0.0):
    """A time around another; the machine does something else for 20 ms more, now and then."""
    draw = random.Random(seed)

    def think_s():
        more_s = draw.expovariate(50) if draw.random() < late else 0.0
        return seconds * draw.lognormvariate(0, spread) + more_s

    return think_s


@pytest.mark.parametrize("late", [0.0, 0.1])
@pytest.mark.parametrize(("count", "tokens", "serves"), [(4, 16, False), (6, 1, True)])
def test_clients_of_one_pace_run_together(count, tokens, serves, late):
    """Also those that start a few pieces apart, or that come late now and then."""
    every = [Client(n, around(1e-3, 0.3, ord(n), late), tokens, serves) for n in "abcdef"[:count]]
    together, rates = simulated(opportunistic(most=8192), every)
    _, alone = simulated(make_policy("none", 8192, 0), every)
    assert together > (0.9 if not late else 0.7) * count
    assert min(rates.values()) > (1.5 if not late else 0.8) * max(alone.values())


def test_a_fast_client_does_not_wait_for_a_slow_one():
    every = [Client("f", around(1e-3, 0.3, 1)), Client("s", around(2e-2, 0.3, 2))]
    _, rates = simulated(opportunistic(most=8192), every)
    _, alone = simulated(make_policy("none", 8192, 0), every)
    assert rates["f"] > 0.95 * alone["f"]
    assert rates["s"] > 0.9 * alone["s"]
