"""Random operations on a simulated engine: nothing is lost, duplicated or stuck."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.engine_life import POLICIES, EngineLife

NAMES = st.sampled_from("pqrstu")
STEPS = 5000


@pytest.mark.parametrize("pages", [7, 13, 24, 60])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_random_operations(policy: str, pages: int) -> None:
    for seed in range(2):
        life = EngineLife(policy, pages, promises=bool(seed), seed=pages + seed)
        for _ in range(800):
            life.random_operation()
        life.finish(STEPS)
        assert life.finished > 50
        assert life.cached > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_soak(policy: str) -> None:
    """100,000 operations; finetuning, promises and a pool that is always short of pages."""
    life = EngineLife(policy, seed=5)
    for _ in range(100_000):
        life.random_operation()
    life.finish(STEPS)
    assert life.finished > 5_000


class Machine(RuleBasedStateMachine):
    """Operations in any order, which hypothesis shrinks when one breaks something."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        pages=st.integers(4, 30),
        promises=st.booleans(),
        prefix_caching=st.booleans(),
    )
    def start(self, policy: str, pages: int, promises: bool, prefix_caching: bool) -> None:
        self.life = EngineLife(policy, pages, promises, prefix_caching=prefix_caching)

    @rule(
        prompt=st.integers(1, 90),
        tokens=st.integers(1, 20),
        adapter=st.none() | NAMES,
        tenant=st.sampled_from("abc"),
        timeout_s=st.none() | st.floats(0.001, 2.0),
        own=st.integers(0, 90),
    )
    def submit(
        self,
        prompt: int,
        tokens: int,
        adapter: str | None,
        tenant: str,
        timeout_s: float | None,
        own: int,
    ) -> None:
        known = adapter if adapter in self.life.adapters else None
        self.life.submit(prompt, tokens, known, tenant, timeout_s, own)

    @rule(place=st.integers(0, 100))
    def cancel(self, place: int) -> None:
        self.life.cancel(place)

    @rule(name=NAMES, pages=st.integers(1, 6), virtual=st.sampled_from([0, 5, 40]))
    def add_adapter(self, name: str, pages: int, virtual: int) -> None:
        self.life.add_adapter(name, pages, virtual)

    @rule(name=NAMES)
    def remove_adapter(self, name: str) -> None:
        self.life.remove_adapter(name)

    @rule(lengths=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=3), max_size=3))
    def start_job(self, lengths: list[list[int]]) -> None:
        self.life.start_job(lengths)

    @rule(place=st.integers(0, 10), how=st.sampled_from(["pause", "resume", "cancel"]))
    def change_job(self, place: int, how: str) -> None:
        self.life.change_job(place, how)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.life.step()

    @rule()
    def fail(self) -> None:
        self.life.fail()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.finish(STEPS)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def longest_waits(policy: str) -> dict[str, int]:
    """Steps of the request that took longest, where one tenant asks for more than can be served.

    A batch has room for 16 of the 41 requests that come in 20 steps; one of these is the other's.
    """
    life = EngineLife(policy, pages=60, promises=False)
    longest = {"greedy": 0, "modest": 0}
    came: dict[str, tuple[str, int]] = {}
    for step in range(1500):
        for tenant in ["greedy"] * 40 + ["modest"] if step % 20 == 0 else []:
            life.submit(30, 10, None, tenant, None)
            came[list(life.wanted)[-1]] = tenant, step
        before = set(life.wanted)
        life.step()
        for name in before - set(life.wanted):
            tenant, since = came.pop(name)
            longest[tenant] = max(longest[tenant], step - since)
    for tenant, since in came.values():
        longest[tenant] = max(longest[tenant], 1500 - since)
    return longest


def test_fair_share_starves_nobody() -> None:
    fair, first = longest_waits("fair share"), longest_waits("fcfs")
    assert fair["modest"] <= 40
    assert fair["greedy"] > 500
    assert first["modest"] > 500
