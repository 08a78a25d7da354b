"""A store keeps what it acknowledged: over kills, a full disk, two servers and newer schemas."""

import hashlib
import itertools
import os
import random
import sqlite3
from functools import partial

import pytest

from pcg.errors import ServeError, StoreFullError
from pcg.files import SUMS
from pcg.serve.store.database import MIGRATIONS, RESERVE, connect, migrate
from pcg.serve.store.store import DATABASE, open_store
from tests.support.small_disk import fill_up, small_disk
from tests.support.store_writer import put, writer, written


def kept(folder):
    """The digests of all contents by name; each is what it should be, and nothing else is there."""
    with open_store(folder) as store:

        def rows(connection):
            (state,) = connection.execute("PRAGMA integrity_check").fetchone()
            assert state == "ok"
            found = connection.execute("SELECT id, digest FROM files").fetchall()
            assert len(found) == len({row["id"] for row in found})
            return {row["id"]: row["digest"] for row in found}

        names = store.database.read(rows).result()
        for digest in names.values():
            content = store.contents.path(digest).read_bytes()
            assert hashlib.sha256(content).hexdigest() == digest
        there = {path.name for path in (folder / "files").glob("*/*")}
        assert there == set(names.values())
        assert not list((folder / "incoming").iterdir())
        return names


def test_what_was_acknowledged_survives_kills(tmp_path):
    instants, acknowledged = random.Random(0), dict[str, str]()
    for _ in range(8):
        with writer(tmp_path) as process:
            for _ in range(instants.randrange(1, 40)):
                name, digest = process.stdout.readline().split()
                acknowledged[name] = digest
            process.kill()
            for line in process.stdout:  # what it said before it was killed
                if line.endswith("\n"):
                    name, digest = line.split()
                    acknowledged[name] = digest
        found = kept(tmp_path)
        assert {name: found.get(name) for name in acknowledged} == acknowledged


def test_a_full_disk_is_an_error_and_what_was_there_stays(tmp_path):
    with open_store(tmp_path) as store:
        before = put(store, "before", written(store, b"x" * 100)).result()
    process = writer(tmp_path, most_mib=1)  # the log of the database outgrows that
    said, _ = process.communicate(timeout=60)
    assert said.splitlines()[-1] == "refused StoreFullError"
    acknowledged = dict(line.split() for line in said.splitlines()[:-1])
    assert len(acknowledged) > 5
    found = kept(tmp_path)
    assert found["before"] == before
    assert {name: found.get(name) for name in acknowledged} == acknowledged
    with open_store(tmp_path) as store:  # there is room again
        put(store, "after", written(store, b"y")).result()


def test_a_content_that_finds_no_room(tmp_path):
    with open_store(tmp_path) as store:
        incoming = store.contents.begin()
        incoming._file.close()
        incoming._file = open("/dev/full", "wb")  # noqa: SIM115  the content's, which drops it
        with pytest.raises(StoreFullError, match="no room on the disk"):
            incoming.write(b"x" * 2**20)
        incoming.drop()
        assert not list((tmp_path / "incoming").iterdir())


def test_a_write_that_fails_undoes_its_own_alone(tmp_path):
    with open_store(tmp_path) as store:
        put(store, "one", written(store, b"1")).result()
        futures = [put(store, name, written(store, name.encode())) for name in ("two", "one")]
        futures.append(put(store, "three", written(store, b"3")))
        assert futures[0].result()
        assert "UNIQUE" in str(futures[1].exception())
        assert futures[2].result()
    assert set(kept(tmp_path)) == {"one", "two", "three"}


def test_equal_contents_are_kept_once_and_as_long_as_one_is_named(tmp_path):
    def remove(connection, name):
        connection.execute("DELETE FROM files WHERE id = ?", (name,))

    with open_store(tmp_path) as store:
        same = [put(store, name, written(store, b"same")).result() for name in ("a", "b")]
        path, unnamed = store.contents.path(same[0]), store.contents.remove_unnamed
        assert same[0] == same[1]
        for name, is_there in (("a", True), ("b", False)):
            store.database.write(partial(remove, name=name)).result()
            store.database.write(partial(unnamed, digest=same[0])).result()
            assert path.exists() is is_there


def test_a_second_server_is_refused_by_name(tmp_path):
    with writer(tmp_path) as process:
        process.stdout.readline()
        try:
            with pytest.raises(ServeError, match=f"another server, process {process.pid}, "):
                open_store(tmp_path).__enter__()
        finally:
            process.kill()
    kept(tmp_path)  # the folder is free once its server is gone, however that came


def test_folders_that_cannot_be(tmp_path):
    newer = tmp_path / "newer"
    with open_store(newer):
        pass
    connection = sqlite3.connect(newer / DATABASE)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    (newer / SUMS).unlink()
    with pytest.raises(ServeError, match=f"has schema {len(MIGRATIONS) + 1}, and this pcg knows"):
        open_store(newer).__enter__()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / DATABASE).write_bytes(b"no database" * 100)
    with pytest.raises(ServeError, match="cannot be used: file is not a database"):
        open_store(damaged).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(ServeError, match="cannot be used"):
        open_store(tmp_path / "file" / "below").__enter__()


def test_an_older_schema_becomes_the_newest(tmp_path):
    """Its folder has no identity yet, and no checksums."""
    digest = hashlib.sha256(b"old").hexdigest()
    connection = connect(tmp_path / DATABASE)
    for statement in MIGRATIONS[0]:
        connection.execute(statement)
    row = ("old", "a", "f", "fine-tune", 3, 0, digest)
    columns = "id, tenant, filename, purpose, size_bytes, created_s, digest"
    connection.execute(f"INSERT INTO files ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    (tmp_path / "files" / digest[:2]).mkdir(parents=True)
    (tmp_path / "files" / digest[:2] / digest).write_bytes(b"old")
    assert kept(tmp_path) == {"old": digest}
    connection = sqlite3.connect(tmp_path / DATABASE)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    connection.close()


def layout(connection):
    """The columns of each table, and the names of indexes and triggers."""
    named = connection.execute(
        "SELECT type, name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"
    )
    kinds = sorted(map(tuple, named.fetchall()))
    return kinds, {
        name: {tuple(row)[1:] for row in connection.execute(f"PRAGMA table_info({name})")}
        for kind, name in kinds
        if kind == "table"
    }


def rows_of(connection, columns):
    return {
        table: [*map(tuple, connection.execute(f"SELECT {', '.join(names)} FROM {table}"))]
        for table, names in columns.items()
    }


@pytest.mark.parametrize("first", range(1, len(MIGRATIONS)))
def test_rows_of_each_schema_reach_the_newest(first, tmp_path):
    """A row in each table, with a value in each column, is as it was."""
    connection = connect(tmp_path / DATABASE)
    for statement in itertools.chain.from_iterable(MIGRATIONS[:first]):
        connection.execute(statement)
    connection.execute("PRAGMA foreign_keys = OFF")
    columns = {}
    for name in layout(connection)[1]:
        known = connection.execute(f"PRAGMA table_info({name})").fetchall()
        columns[name] = [column[1] for column in known]
        of_type = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": lambda n: bytes([n])}
        values = [of_type[column[2]](column[0] + 1) for column in known]
        places = ", ".join("?" * len(values))
        connection.execute(f"INSERT OR IGNORE INTO {name} VALUES ({places})", values)
    before = rows_of(connection, columns)
    assert sum(map(len, before.values())) > 0
    connection.execute(f"PRAGMA user_version = {first}")
    migrate(connection, tmp_path)
    assert rows_of(connection, columns) == before
    fresh = connect(tmp_path / "fresh")
    migrate(fresh, tmp_path)
    assert layout(connection) == layout(fresh)
    for each in (connection, fresh):
        each.close()


def test_commits_wait_for_the_disk(tmp_path):
    with open_store(tmp_path) as store:
        connection = store.database._writing
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def remove(store, name):
    """Delete a content as a client does."""

    def act(connection):
        (digest,) = connection.execute("DELETE FROM files WHERE id = ? RETURNING digest", (name,))
        return str(digest[0])

    digest = store.database.write(act, may_use_reserve=True).result()
    unnamed = partial(store.contents.remove_unnamed, digest=digest)
    store.database.write(unnamed, may_use_reserve=True).result()


def test_a_full_disk_can_be_emptied(tmp_path):
    with small_disk(tmp_path / "disk", 8 * 1024) as disk:
        folder = disk / "data"
        with open_store(folder) as store:
            assert store.reserve.is_whole
            for number in range(8):
                put(store, f"{number}", written(store, os.urandom(2**16), 4)).result()
            others = fill_up(disk)
            incoming = store.contents.begin()
            with pytest.raises(StoreFullError):
                incoming.write(b"x" * 2**20)
            incoming.drop()
            for number in range(2):
                remove(store, f"{number}")
                fill_up(disk)  # by others, at once
            with pytest.raises(StoreFullError):
                store.contents.begin()
        for number in range(2, 6):  # a start has what is left of the reserve
            with open_store(folder) as store:
                assert not store.reserve.is_whole
                with pytest.raises(StoreFullError, match="no room on the disk"):
                    store.contents.begin()
                with pytest.raises(StoreFullError):
                    store.database.write(lambda one: one.execute("SELECT 1")).result()
                content = hashlib.sha256(b"".join(store.contents.pieces(digest_at(store)))).digest()
                assert content.hex() == digest_at(store)
                remove(store, f"{number}")
                fill_up(disk)
        others.unlink()
        with open_store(folder) as store:
            assert store.reserve.is_whole
            put(store, "after", written(store, b"y")).result()
        assert set(kept(folder)) == {"6", "7", "after"}


def digest_at(store):
    """The digest of a content that is kept."""
    row = store.database.read(lambda one: one.execute("SELECT digest FROM files").fetchone())
    return str(row.result()[0])


def test_a_disk_that_is_full_and_without_a_reserve(tmp_path):
    with small_disk(tmp_path / "disk", 8 * 1024) as disk:
        folder = disk / "data"
        with open_store(folder) as store:
            put(store, "a", written(store, b"a")).result()
        (folder / RESERVE).unlink()
        fill_up(disk)
        with pytest.raises(ServeError, match="its disk has no room for a start: free 1 MiB, then"):
            open_store(folder).__enter__()
