"""Loads: adding adapters to a running engine, and removing them, in the background.

A first thread reads an adapter, a second thread compiles its program and packs its weights, and the
engine's thread installs it. Calls for the same name run in order: a load or removal starts when the
earlier calls for the name have ended. Calls for other names do not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from pcg.peft.adapter import Adapter
from pcg.runtime.model.state import ModelState, ServingProgram

Result = TypeVar("Result")
Spread: TypeAlias = Callable[[str, object, int, Adapter], Callable[[], Adapter]]


class Threads(Protocol):
    """The threads that load adapters; both raise an EngineError once they are closed."""

    def load(self, act: Callable[[], None]) -> None:
        """Run a function that reads an adapter."""

    def compile(self, act: Callable[[], None]) -> None:
        """Run a function that compiles, after earlier calls."""


class Loads:
    """Adds and removes adapters; for any thread."""

    def __init__(
        self,
        state: ModelState,
        threads: Threads,
        call: Callable[[Callable[[], Any]], Future[Any]],
        check_open: Callable[[], None],
        check_unreserved: Callable[[str], None],
        remove: Callable[[str], None],
        spread: Spread | None = None,
    ) -> None:
        """Create an empty queue.

        Args:
            call: runs a function between two steps.
            check_open: raises an error once the engine accepts no loads.
            check_unreserved: raises an error if a prepared job trains the name.
            remove: removes an adapter, between two steps.
            spread: for several ranks, reads an adapter's files and returns a function that compiles
                its program and serves it on all ranks, between two steps.
        """
        self._state = state
        self._threads = threads
        self._call = call
        self._check_open = check_open
        self._check_unreserved = check_unreserved
        self._remove = remove
        self._spread = spread
        self._lock = Lock()
        self._last: dict[str, Future[Any]] = {}

    def add(
        self, name: str, path_or_config: object, seed: int, check_free: Callable[[], None]
    ) -> Future[Adapter]:
        """Load an adapter; `check_free` raises an error if the name is in use."""
        state, threads, end = self._state, self._threads, begun()

        def check() -> None:
            self._check_open()
            self._check_unreserved(name)
            check_free()

        def load() -> None:
            check()
            read = state.make_adapter(name, path_or_config, seed=seed)
            adapter = read.map(torch.clone)  # load mapped files here instead of in a step
            if self._spread is None:
                threads.compile(passing(end, partial(add, adapter)))
                return
            put = self._spread(name, path_or_config, seed, adapter)
            self._call(partial(put_everywhere, put)).add_done_callback(partial(pass_result, end))

        def put_everywhere(put: Callable[[], Adapter]) -> Adapter:
            check()
            return put()

        def add(adapter: Adapter) -> None:
            self._check_open()
            program = state.program_for(adapter)
            for test in state.self_tests(adapter, program):
                self._call(test).result()
            program.tables.pack(adapter)
            self._call(partial(put_in, adapter, program)).add_done_callback(
                partial(pass_result, end)
            )

        def put_in(adapter: Adapter, program: ServingProgram) -> Adapter:
            check()
            served = state.put_adapter(adapter, program)
            program.tables.carry(adapter, served)
            return served

        self._in_turn(name, end, lambda: threads.load(passing(end, load)))
        return end

    def remove(self, name: str) -> Future[None]:
        """Remove an adapter between two steps."""
        end: Future[None] = begun()

        def remove() -> None:
            self._check_unreserved(name)
            self._remove(name)

        def begin() -> None:
            self._call(remove).add_done_callback(partial(pass_result, end))

        self._in_turn(name, end, begin)
        return end

    def _in_turn(self, name: str, end: Future[Any], begin: Callable[[], None]) -> None:
        begin = passing(end, begin)
        with self._lock:
            before = self._last.get(name)
            self._last[name] = end
        end.add_done_callback(lambda _: self._leave(name, end))
        if before is None:
            begin()
        else:
            before.add_done_callback(lambda _: begin())

    def _leave(self, name: str, end: Future[Any]) -> None:
        with self._lock:
            if self._last.get(name) is end:
                del self._last[name]


def begun() -> Future[Any]:
    """Return a future that a waiter cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def passing(end: Future[Any], act: Callable[[], None]) -> Callable[[], None]:
    """Return a function that passes its error to a future."""

    def run() -> None:
        try:
            act()
        except BaseException as error:  # the caller's
            end.set_exception(error)

    return run


def pass_result(end: Future[Result], ended: Future[Result]) -> None:
    """Copy the result or the error of a future to another future."""
    error = ended.exception()
    if error is None:
        end.set_result(ended.result())
    else:
        end.set_exception(error)
