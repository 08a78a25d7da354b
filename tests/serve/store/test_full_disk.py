"""A disk that is full is a clear error, what was there stays, and serving goes on."""

import functools

import openai
import pytest

from pcg.errors import StoreFullError
from pcg.serve.files.files import Files
from pcg.serve.jobs import runner
from pcg.serve.tinker import futures
from tests.support import serving, tinker_client
from tests.support.job_client import begin, client_of, ended, steps
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    with tinker_client.server(folder, functools.partial(serving.make_executor, adapters=0)) as one:
        yield one


@pytest.fixture
def client(server):
    with client_of(server.url, tinker_client.KEY) as client:
        yield client


def bound(server, pages):
    """Let the database have no more pages than it has, or so many, and wait until it may."""

    def act(connection):
        (there,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages or there}")

    database = server.service.part(Files).store.database

    def is_bound():
        try:
            return database.write(act).result() is None
        except StoreFullError:  # writes are refused for half a second after the reserve is used
            return False

    until(is_bound)


def full(calls, act):
    """The function, which finds no room so many times first."""
    left = [calls]

    @functools.wraps(act)
    def acts(*args, **fields):
        if left[0]:
            left[0] -= 1
            raise StoreFullError("there is no room on the disk: on purpose")
        return act(*args, **fields)

    return acts


def test_files_find_no_room(server, client):
    contents = server.service.part(Files).store.folder / "files"
    kept = {}

    def keep(count=1):
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


def test_steps_of_a_job_are_told_in_order(client, monkeypatch):
    monkeypatch.setattr(runner, "_AGAIN_S", 0.01)
    monkeypatch.setattr(runner, "add_step", full(3, runner.add_step))
    job = ended(client, begin(client, epochs=1).id)
    assert job.status == "succeeded"
    assert steps(client, job.id) == [1, 2, 3]


def test_samples_that_find_no_room_come_once_there_is_some(server, monkeypatch):
    """With its result, and not behind it, the request is forgotten."""
    monkeypatch.setattr(futures, "AGAIN_S", 0.01)
    monkeypatch.setattr(futures, "settle", full(3, futures.settle))
    found = []

    def wake(_, id):
        row = "SELECT state, request FROM tinker_futures WHERE id = ?"
        read = server.service.part(Files).store.database.read
        found.append(tuple(read(lambda one: one.execute(row, (id,)).fetchone()).result()))

    monkeypatch.setattr(futures.Futures, "_wake", wake)
    with tinker_client.raw(server.url) as raw:
        assert raw.post("asample", json=tinker_client.sample([5, 8])).status_code == 200
        until(lambda: bool(found))
    assert found == [("done", None)]
