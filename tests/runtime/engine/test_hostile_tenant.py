"""Everything that a tenant may send at once, beside a neighbour whose tokens and steps go on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pcg.errors import QueueFullError
from pcg.runtime.admission.backlog import QueueLimits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from tests.support.small_engine import NEW, make_executor

NEIGHBOUR: dict[str, Any] = {"tenant": "neighbour", "max_new_tokens": NEW, "ignore_eos": True}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def executor() -> Executor:
    return make_executor()


def hold(running: AsyncEngine) -> threading.Event:
    """Keep the engine's thread between two steps until the event is set."""
    release, held = threading.Event(), threading.Event()
    running.call(lambda: (held.set(), release.wait(30)))
    assert held.wait(30)
    return release


def test_calls_let_the_steps_go_on(executor: Executor) -> None:
    """A second of calls that come at once does not stand between two tokens of a neighbour."""
    done = []
    with executor.engine(kv_cache_bytes=2**20).start() as running:
        release = hold(running)
        stream = running.submit(PROMPT, **NEIGHBOUR)
        for _ in range(500):
            running.call(lambda: (time.sleep(2e-3), done.append(True)))
        release.set()
        stream.wait(30)
        assert len(done) < 400
    assert len(done) == 500


def test_a_flood_is_refused_where_it_is_made(executor: Executor) -> None:
    """It costs the engine's thread nothing, and the neighbour's requests are taken."""
    queue = QueueLimits(tenant_requests=8)
    with executor.engine(kv_cache_bytes=2**20, queue=queue).start() as running:
        expected = running.submit(PROMPT, **NEIGHBOUR).wait(30).token_ids
        release = hold(running)
        flood = [running.submit([1], tenant="hostile", max_new_tokens=1) for _ in range(2000)]
        stream = running.submit(PROMPT, **NEIGHBOUR)
        assert sum(one.is_over for one in flood) == 2000 - 8
        assert running._calls.qsize() < 20
        release.set()
        assert stream.wait(30).token_ids == expected
        with pytest.raises(QueueFullError, match="8 requests wait or came since the last step"):
            flood[-1].wait(1)
        assert all(one.wait(30).token_ids for one in flood[:8])
        assert running.numbers().totals.turned_away == 2000 - 8
        assert not len(running._arrivals)
