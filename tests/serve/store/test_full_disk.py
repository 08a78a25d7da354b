"""A disk that is full is a clear error, what was there stays, and serving goes on."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pcg.errors import StoreFullError
from pcg.serve.files.files import Files
from pcg.serve.jobs import runner
from pcg.serve.tinker import futures
from tests.support import serving, tinker_client
from tests.support.job_client import begin, client_of, ended, steps, text, upload
from tests.support.small_disk import fill_up, small_disk
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Served]:
    folder = tmp_path_factory.mktemp("data")
    with tinker_client.server(folder, functools.partial(serving.make_executor, adapters=0)) as one:
        yield one


@pytest.fixture
def client(server: serving.Served) -> Iterator[openai.OpenAI]:
    with client_of(server.url, tinker_client.KEY) as client:
        yield client


def bound(server: serving.Served, pages: int | None) -> None:
    """Let the database have no more pages than it has, or so many."""

    def act(connection: sqlite3.Connection) -> None:
        (there,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages or there}")

    server.service.part(Files).store.database.write(act).result()


def full(calls: int, act: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which finds no room so many times first."""
    left = [calls]

    @functools.wraps(act)
    def acts(*args: Any, **fields: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise StoreFullError("there is no room on the disk: on purpose")
        return act(*args, **fields)

    return acts


def test_files_find_no_room(server: serving.Served, client: openai.OpenAI) -> None:
    contents = server.service.part(Files).store.folder / "files"
    kept = {}

    def keep(count: int = 1) -> None:
        for _ in range(count):
            content = f"content {len(kept)}".encode()
            name = f"{len(kept)}".zfill(255)
            made = client.files.create(file=(name, content), purpose="user_data")
            kept[made.id] = content

    keep()
    bound(server, None)
    with pytest.raises(openai.APIStatusError, match="no room to keep this") as refused:
        keep(100)
    assert refused.value.status_code == 507
    assert refused.value.code == "storage_full"
    # Neither a row nor a content of what was refused is there, and all else is.
    assert {one.id for one in client.files.list()} == set(kept)
    assert len(list(contents.glob("*/*"))) == len(kept)
    assert all(client.files.content(id).content == content for id, content in kept.items())
    assert client.completions.create(model=serving.MODEL, prompt="a", max_tokens=1).choices
    bound(server, 2**30)
    keep()


def test_steps_of_a_job_are_told_in_order(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_AGAIN_S", 0.01)
    monkeypatch.setattr(runner, "add_step", full(3, runner.add_step))
    job = ended(client, begin(client, epochs=1).id)
    assert job.status == "succeeded"
    assert steps(client, job.id) == [1, 2, 3]


def test_samples_that_find_no_room_come_once_there_is_some(
    server: serving.Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its result, and not behind it, the request is forgotten."""
    monkeypatch.setattr(futures, "AGAIN_S", 0.01)
    monkeypatch.setattr(futures, "settle", full(3, futures.settle))
    found: list[Any] = []

    def wake(_: futures.Futures, id: str) -> None:
        row = "SELECT state, request FROM tinker_futures WHERE id = ?"
        read = server.service.part(Files).store.database.read
        found.append(tuple(read(lambda one: one.execute(row, (id,)).fetchone()).result()))

    monkeypatch.setattr(futures.Futures, "_wake", wake)
    body = {
        "base_model": tinker_client.MODEL,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 8]}]},
        "sampling_params": {"max_tokens": 2},
    }
    with tinker_client.raw(server.url) as raw:
        assert raw.post("asample", json=body).status_code == 200
        until(lambda: bool(found))
    assert found == [("done", None)]


def test_a_full_disk_is_emptied_by_its_clients(tmp_path: Path) -> None:
    """Also behind a start, while all else goes on; new things are kept once there is room."""
    load = functools.partial(serving.make_executor, adapters=0)
    with small_disk(tmp_path / "disk", 16 * 1024) as disk:
        folder, others = disk / "data", disk / "others"
        for start in range(2):
            with (
                tinker_client.server(folder, load) as server,
                client_of(server.url, tinker_client.KEY) as client,
            ):
                if not start:
                    for name in "abcd":
                        content = name.encode() * 2**17
                        client.files.create(file=(name, content), purpose="user_data")
                    model = ended(client, begin(client, epochs=1).id).fine_tuned_model
                    said = text(client, model)
                    fill_up(disk)
                assert server.service.part(Files).store.reserve.is_whole is not bool(start)
                files = {one.filename: one.id for one in client.files.list()}
                for act in (functools.partial(begin, client), functools.partial(upload, client)):
                    with pytest.raises(openai.APIStatusError, match="only reads and deletes") as no:
                        act()
                    assert no.value.status_code == 507
                name = "ab"[start]
                client.files.delete(files[name])
                fill_up(disk)
                assert name not in {one.filename for one in client.files.list()}
                assert client.files.content(files["c"]).content == b"c" * 2**17
                assert text(client, model) == said
                if start:
                    client.models.delete(model)
                    others.unlink()
                    until(lambda: server.service.part(Files).store.reserve.restore())
                    assert client.files.content(upload(client)).content
