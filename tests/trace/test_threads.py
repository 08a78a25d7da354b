"""Threads that trace at once do not see each other's hooks."""

from __future__ import annotations

import threading

from pcg.trace import TracedModel
from pcg.trace import trace as trace_model
from tests.support.families import BY_NAME


def test_models_are_traced_on_threads_at_once() -> None:
    barrier = threading.Barrier(2)
    found: list[TracedModel] = []

    def run() -> None:
        barrier.wait(60)
        found.append(trace_model(BY_NAME["llama3"].config(1)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 2
    assert str(found[0].graph) == str(found[1].graph)
