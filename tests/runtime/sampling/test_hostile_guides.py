"""Guides that are made to take long: they have their turns, and end before others wait for them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import pcg.compiler as compiler
from pcg.errors import GenerationError, QueueFullError
from pcg.runtime.executor import Executor
from pcg.runtime.sampling import grammars
from pcg.runtime.sampling.grammars import CompileQueue, Grammars
from tests.support import tiny_llama

AMBIGUOUS = 'start: a\na: "x" | a a | a a a\n'


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return compiler.compile(tiny_llama.save(tmp_path_factory.mktemp("model"), seed=3))


def test_tenants_have_turns() -> None:
    """Behind two that take long, one of each tenant runs, whoever asked first."""
    queue, release, order = CompileQueue(), threading.Event(), []
    queue.submit("a", lambda: release.wait(60))
    queue.submit("c", lambda: release.wait(60))
    ends = [queue.submit("a", lambda i=i: order.append(f"a{i}")) for i in range(8)]
    ends.append(queue.submit("b", lambda: order.append("b")))
    release.set()
    for end in ends:
        end.result(60)
    assert order.index("b") <= 2


def test_guides_that_take_long_hold_up_their_own_tenant_alone() -> None:
    queue, release = CompileQueue(), threading.Event()
    slow = [queue.submit("a", lambda: release.wait(60)) for _ in range(3)]
    assert [queue.submit("b", lambda i=i: i).result(60) for i in range(4)] == [0, 1, 2, 3]
    assert queue.submit("", lambda: 5).result(60) == 5
    assert not any(one.done() for one in slow)
    release.set()
    assert all(one.result(60) for one in slow)


def test_a_tenant_has_so_many_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_QUEUED", 3)
    queue, release, begun = CompileQueue(), threading.Event(), threading.Semaphore(0)
    queue.submit("a", lambda: (begun.release(), release.wait(60)))
    assert begun.acquire(timeout=60)
    ends = [queue.submit("a", lambda: None) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 guides of tenant 'a' wait to be compiled"):
        queue.submit("a", lambda: None)
    ends.append(queue.submit("b", lambda: None))
    release.set()
    for end in ends:
        end.result(60)


def test_a_guide_is_not_compiled_for_a_request_that_has_gone(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a cancel, a time that is out, or a client that left."""
    compiled: list[str] = []
    release, begun = threading.Event(), threading.Semaphore(0)

    def compile_slowly(grammars: Grammars, guide: Any) -> Any:
        compiled.append(guide.text)
        begun.release()
        release.wait(60)
        raise GenerationError("slow")

    monkeypatch.setattr(Grammars, "_compiled_matcher", compile_slowly)
    fields: dict[str, Any] = {"max_new_tokens": 4}
    with executor.engine(kv_cache_bytes=2**22).start() as running:
        slow = [running.submit("a", guided_regex=text, **fields) for text in ("one", "two")]
        assert all(begun.acquire(timeout=60) for _ in slow)
        gone = running.submit("a", guided_regex="gone", **fields)
        stays = running.submit("a", guided_regex="stays", **fields)
        gone.cancel()
        assert gone.wait(60).finish_reason == "cancelled"
        del gone
        gc.collect()
        release.set()
        with pytest.raises(GenerationError):
            stays.wait(60)
    assert sorted(compiled) == ["one", "stays", "two"]


def test_an_ambiguous_grammar_fails_before_its_tokens_take_long(executor: Executor) -> None:
    """Its tokens would take 80 ms each of everyone's steps; its neighbour is left alone."""
    fields: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}
    expected = executor.generate("the fox", **fields).token_ids
    with executor.engine(kv_cache_bytes=2**22).start() as running:
        hostile = running.submit("x", guided_grammar=AMBIGUOUS, max_new_tokens=200, min_tokens=200)
        neighbour = running.submit("the fox", **fields)
        assert neighbour.wait(60).token_ids == expected
        with pytest.raises(GenerationError, match="more than 2 ms each of everyone's step"):
            hostile.wait(60)
