"""What is in a data folder belongs together: absence refuses a start, and removes nothing."""

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from pcg.errors import ServeError
from pcg.files import SUMS
from pcg.serve.store.contents import QUARANTINE
from pcg.serve.store.store import DATABASE, IDENTITY, open_store
from tests.support.command_line import assert_one_error, output_of, run
from tests.support.store_writer import put, writer, written

ROOT = Path(__file__).parents[3]


def fill(folder, *names):
    """Keep a content under each name; returns the digests."""
    with open_store(folder) as store:
        return [put(store, name, written(store, name.encode())).result() for name in names]


def contents(folder):
    """The contents of a folder, wherever they are."""
    return {path.name for path in folder.rglob("*") if len(path.name) == 64}


def empty(path):
    path.write_bytes(b"")


def without_tables(path):
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 1")
    connection.close()


@pytest.mark.parametrize("how", [Path.unlink, empty, without_tables])
@pytest.mark.parametrize("has_sums", [True, False])
@pytest.mark.parametrize("has_identity", [True, False])
def test_contents_without_a_database(tmp_path, how, has_sums, has_identity):
    digests = set(fill(tmp_path, "a", "b"))
    how(tmp_path / DATABASE)
    if not has_sums:
        (tmp_path / SUMS).unlink()
    if not has_identity:
        (tmp_path / IDENTITY).unlink()
    for _ in range(2):
        with pytest.raises(ServeError, match=r"pcg.sqlite.*from a copy, or run `pcg data check "):
            open_store(tmp_path).__enter__()
        assert contents(tmp_path) == digests
    said = output_of("data", "check", tmp_path, "--repair")
    assert "a new database was created" in said
    assert contents(tmp_path) == digests  # in quarantine
    with open_store(tmp_path):
        assert not list(tmp_path.glob("files/*/*"))
    assert contents(tmp_path / QUARANTINE) == digests


def test_a_database_without_its_contents(tmp_path):
    digests = fill(tmp_path, "a", "b")
    shutil.move(tmp_path / "files", tmp_path.with_name("elsewhere"))
    with pytest.raises(ServeError, match=r"names paths in files/, and all of them are missing; re"):
        open_store(tmp_path).__enter__()
    shutil.move(tmp_path.with_name("elsewhere"), tmp_path / "files")
    fill(tmp_path, "c")
    assert digests[0] in contents(tmp_path)


def test_a_part_of_the_contents_is_missing(tmp_path, caplog):
    digests = fill(tmp_path, "a", "b")
    (tmp_path / "files" / digests[0][:2] / digests[0]).unlink()
    fill(tmp_path, "c")
    assert "1 paths that pcg.sqlite names are missing; `pcg data check" in caplog.text


def test_another_folders_database_or_identity(tmp_path):
    digests = set(fill(tmp_path / "one", "a")) | set(fill(tmp_path / "other", "b"))
    for name in (DATABASE, SUMS):
        shutil.copy(tmp_path / "other" / name, tmp_path / "one" / name)
    with pytest.raises(ServeError, match=r"identity.json has the id \w{32}, and pcg.sqlite is of "):
        open_store(tmp_path / "one").__enter__()
    shutil.copy(tmp_path / "other" / IDENTITY, tmp_path / "one" / IDENTITY)
    with pytest.raises(ServeError, match="all of them are missing"):
        open_store(tmp_path / "one").__enter__()
    assert contents(tmp_path) == digests
    (tmp_path / "other" / IDENTITY).unlink()
    with pytest.raises(ServeError, match=r"identity.json cannot be read: No such file"):
        open_store(tmp_path / "other").__enter__()


def test_what_no_row_names_moves_to_quarantine_and_comes_back(tmp_path):
    """A database from a copy that is older than the contents."""
    digests = fill(tmp_path, "a")
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    digests += fill(tmp_path, "b", "c")
    newer = tmp_path.with_name("newer")
    shutil.copytree(tmp_path, newer)
    for name in (DATABASE, SUMS):
        shutil.copy(tmp_path.with_name("copy") / name, tmp_path / name)
    fill(tmp_path)
    assert contents(tmp_path / "files") == set(digests[:1])
    assert contents(tmp_path / QUARANTINE) == set(digests[1:])
    for name in (DATABASE, SUMS):
        shutil.copy(newer / name, tmp_path / name)
    assert run("data", "check", tmp_path).exit_code == 1
    said = output_of("data", "check", tmp_path, "--repair")
    assert said.count("put back from quarantine/") == 2
    assert contents(tmp_path / "files") == set(digests)
    assert "is whole" in output_of("data", "check", tmp_path)


def test_a_crash_before_a_deletion_ended_deletes_and_keeps_nothing_else(tmp_path):
    digests = fill(tmp_path, "a", "b")
    with open_store(tmp_path) as store:
        delete = "DELETE FROM files WHERE id = 'a'"
        store.database.write(lambda one: one.execute(delete)).result()
    fill(tmp_path)
    assert contents(tmp_path) == set(digests[1:])
    with open_store(tmp_path) as store:
        rows = store.database.read(lambda one: one.execute("SELECT * FROM removed").fetchall())
        assert not rows.result()  # what they told of is gone


def test_the_log_of_a_killed_server_is_gone(tmp_path):
    with writer(tmp_path) as process:
        process.stdout.readline()
        process.kill()
    log = tmp_path / f"{DATABASE}-wal"
    log.rename(tmp_path / "elsewhere")
    with pytest.raises(ServeError, match=r"pcg.sqlite-wal is missing, and its server was killed"):
        open_store(tmp_path).__enter__()
    (tmp_path / "elsewhere").rename(log)
    run("data", "check", tmp_path)
    fill(tmp_path)  # the check has closed the database in order


def test_a_server_killed_at_any_line_of_its_start_starts_again(tmp_path):
    """Over a folder that a killed server used before."""
    digests = fill(tmp_path, "a")
    with writer(tmp_path) as process:
        process.stdout.readline()
        process.kill()
    command = [sys.executable, "-m", "tests.support.killed_starts", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
    fill(tmp_path)
    assert set(digests) <= contents(tmp_path / "files")


def test_a_flipped_bit_of_the_database(tmp_path):
    """In a text, which SQLite does not notice."""
    fill(tmp_path, "a-name-of-a-file")
    path = tmp_path / DATABASE
    path.write_bytes(path.read_bytes().replace(b"a-name-of-a-file", b"b-name-of-a-file"))
    with pytest.raises(ServeError, match=r"pcg.sqlite is damaged: the SHA-256 of its \d+ bytes is"):
        open_store(tmp_path).__enter__()


def test_folders_that_are_none(tmp_path):
    assert_one_error(run("data", "check", tmp_path / "none"), "is not a folder; give a server")
    assert_one_error(run("data", "check", tmp_path), "has no pcg.sqlite; give the folder of")
    assert not list(tmp_path.iterdir())
    with open_store(tmp_path / "used"):
        assert_one_error(run("data", "check", tmp_path / "used"), "another server, process")


def killed(folder):
    """Have a server keep contents, and kill it before its log is in the database."""
    with writer(folder) as process:
        process.stdout.readline()
        process.kill()


def older(path):
    """Put a database back from a copy, which was made before it had tables."""
    copy = path.with_name("copy")
    copy.touch()
    without_tables(copy)
    copy.replace(path)


def garbage(path):
    path.write_bytes(b"\x01" * 2**16)


@pytest.mark.parametrize("how", [Path.unlink, empty, older, garbage])
@pytest.mark.parametrize("has_index", [True, False])
def test_the_log_of_a_killed_server_outlasts_its_database(tmp_path, how, has_index):
    """Neither a start nor the check or its repair writes a log to a database that is not its own.

    SQLite removes the log of an empty database, and writes that of another one to it.
    """
    killed(tmp_path)
    database, log = tmp_path / DATABASE, tmp_path / f"{DATABASE}-wal"
    if not has_index:
        (tmp_path / f"{DATABASE}-shm").unlink()
    how(database)
    before = sorted(path.read_bytes() for path in (database, log) if path.exists())
    with pytest.raises(ServeError, match=r"pcg data check"):
        open_store(tmp_path).__enter__()
    assert run("data", "check", tmp_path).exit_code == 1
    output_of("data", "check", tmp_path, "--repair")
    found = (tmp_path / QUARANTINE).glob(f"*/{DATABASE}*")
    assert before == sorted(p.read_bytes() for p in found if not p.name.endswith("-shm"))
    with open_store(tmp_path):
        assert not list(tmp_path.glob("files/*/*"))


def test_the_log_of_a_later_use_beside_a_copy_from_before(tmp_path):
    """The database is whole with it, too: pages of the copy, and pages of the log."""
    digests = fill(tmp_path, "a", "b")
    copy = (tmp_path / DATABASE).read_bytes()
    killed(tmp_path)
    database, log = tmp_path / DATABASE, tmp_path / f"{DATABASE}-wal"
    newer, of_log = database.read_bytes(), log.read_bytes()
    database.write_bytes(copy)
    with pytest.raises(ServeError, match=r"pcg.sqlite-wal is the log of another pcg.sqlite"):
        open_store(tmp_path).__enter__()
    assert log.read_bytes() == of_log
    database.write_bytes(newer)
    with open_store(tmp_path):
        assert contents(tmp_path) > set(digests)
    killed(tmp_path)
    database.write_bytes(copy)
    assert "pcg.sqlite-wal" in output_of("data", "check", tmp_path, "--repair")
    with open_store(tmp_path) as store:
        names = store.database.read(lambda one: one.execute("SELECT id FROM files").fetchall())
        assert [name for (name,) in names.result()] == ["a", "b"]


def into_folder(path):
    path.unlink()
    path.mkdir()


def into_file(path):
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("a file")


def into_link(path):
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("name", "become"),
    [
        (DATABASE, into_folder),
        (IDENTITY, into_folder),
        (SUMS, into_folder),
        ("files", into_file),
        ("incoming", into_file),
        ("jobs", into_file),
        ("files/*/*", into_folder),
        ("files/*/*", into_link),
    ],
)
def test_files_and_folders_in_the_place_of_the_other(tmp_path, name, become):
    """The check tells of each, and its repair has the next start work."""
    fill(tmp_path, "a", "b")
    become(next(iter(tmp_path.glob(name)), tmp_path / name))
    said = run("data", "check", tmp_path)
    assert said.exit_code == 1
    assert "Errno" not in said.output
    output_of("data", "check", tmp_path, "--repair")
    assert "is whole" in output_of("data", "check", tmp_path)
    with open_store(tmp_path):
        pass
