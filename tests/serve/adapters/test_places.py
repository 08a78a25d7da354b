"""Who waits for a place for an adapter, and in which order the places are handed out."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import AdapterNotFoundError, EngineError
from pcg.runtime.engine.commands import AddAdapter
from pcg.serve.adapters.loader import Loader, Origin
from pcg.serve.http.errors import ApiError

FOUND = Origin("somewhere", 0, is_found=True)
BY_NAME = Origin("somewhere", 0)


class Client:
    """An engine whose loads end when a test says so."""

    def __init__(self) -> None:
        self.adapters: dict[str, Any] = {}
        self.loads: dict[str, Future[Any]] = {}
        self.order: list[str] = []

    def call(self, command: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(command, AddAdapter):
            self.order.append(command.name)
            self.loads[command.name] = future
        elif self.adapters.pop(command.name, None) is None:
            future.set_exception(AdapterNotFoundError(command.name))
        else:
            future.set_result(None)
        return future

    def end(self, name: str, error: Exception | None = None) -> None:
        if error is None:
            self.adapters[name] = name
            self.loads.pop(name).set_result(name)
        else:
            self.loads.pop(name).set_exception(error)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def load(loader: Loader, name: str, tenant: str = "", origin: Origin = FOUND) -> asyncio.Task[Any]:
    return asyncio.create_task(loader.load(name, Path("x"), origin, tenant=tenant))


def test_tenants_have_places_in_turn() -> None:
    """One that asks for a hundred adapters keeps another, who asks later, waiting for one."""

    async def run() -> list[str]:
        client = Client()
        loader = Loader(client, 2)  # type: ignore[arg-type]
        tasks = [load(loader, f"flood {i}", "flood") for i in range(100)]
        await settled()
        tasks += [load(loader, f"other {i}", "other") for i in range(3)]
        await settled()
        while client.loads:
            assert len(client.adapters) + len(client.loads) <= 2
            client.end(next(iter(client.loads)))
            await settled()
        for task in tasks:
            assert task.result() in client.order
        return client.order

    order = asyncio.run(run())
    assert [place for place, name in enumerate(order) if name.startswith("other")] == [3, 5, 7]
    assert [n for n in order if n.startswith("flood")] == [f"flood {i}" for i in range(100)]


def test_one_that_leaves_while_places_are_handed_out() -> None:
    async def run() -> None:
        client = Client()
        loader = Loader(client, 1)  # type: ignore[arg-type]
        first, left, second = (load(loader, name) for name in ("first", "left", "second"))
        await settled()
        client.end("first", EngineError("no"))
        while not first.done():
            await asyncio.sleep(0)
        left.cancel()  # its place is handed out before it notices
        await settled()
        client.end("second")
        assert await second == "second"
        assert first.exception() is not None

    asyncio.run(run())


def test_nobody_waits_for_what_stays() -> None:
    async def run() -> None:
        client = Client()
        loader = Loader(client, 1)  # type: ignore[arg-type]
        kept, late = load(loader, "kept", origin=BY_NAME), load(loader, "late")
        await settled()
        assert not late.done()  # what comes may fail
        client.end("kept")
        await settled()
        with pytest.raises(ApiError, match="--max-cpu-loras is 1"):
            await late
        again = load(loader, "again")
        with pytest.raises(ApiError, match="--max-cpu-loras is 1"):
            await again
        await loader.unload("kept")
        after = load(loader, "after")
        await settled()
        client.end("after")
        assert await after == "after"
        await kept

    asyncio.run(run())


def test_places_of_those_who_left_and_failed_go_to_others() -> None:
    async def run() -> None:
        client = Client()
        loader = Loader(client, 1)  # type: ignore[arg-type]
        first, left, second = (load(loader, name) for name in ("first", "left", "second"))
        await settled()
        left.cancel()
        client.end("first", EngineError("no"))
        await settled()
        assert list(client.loads) == ["second"]
        third = load(loader, "third")
        await settled()
        second.cancel()  # its load goes on in the engine, and its place is free
        await settled()
        client.end("third")
        assert await third == "third"
        with pytest.raises(EngineError):
            await first

    asyncio.run(run())
