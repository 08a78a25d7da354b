"""A process that puts contents into a store and says which ones it was told are kept.

    python -m tests.support.store_writer FOLDER MIB     with a bound of MiB a file; 0 for none

It is killed, or ends by the error that it prints.
"""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

from pcg.errors import StoreError
from pcg.serve.store.contents import Incoming
from pcg.serve.store.store import Store, open_store

_PARTS = 40


def put(store: Store, name: str, incoming: Incoming) -> Future[str]:
    """Keep a content under a name."""

    def act(connection: sqlite3.Connection) -> str:
        digest = store.contents.put(incoming)
        row = (name, "a", "f", "fine-tune", incoming.size_bytes, 0, digest)
        columns = "id, tenant, filename, purpose, size_bytes, created_s, digest"
        connection.execute(f"INSERT INTO files ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return digest

    return store.database.write(act)


def written(store: Store, part: bytes, parts: int = 1) -> Incoming:
    """A content that is on the disk."""
    incoming = store.contents.begin()
    for _ in range(parts):
        incoming.write(part)
    incoming.finish()
    return incoming


def writer(folder: Path, most_mib: int = 0) -> subprocess.Popen[str]:
    """The process, which says what it was told is kept."""
    command = [sys.executable, "-m", "tests.support.store_writer", str(folder), str(most_mib)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main(folder: str, most_mib: int) -> None:
    if most_mib:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_mib * 2**20, most_mib * 2**20))
    with open_store(Path(folder)) as store:
        number = 0
        while True:
            names = [f"{os.getpid()}-{number + place}" for place in range(3)]
            waiting = [
                (name, put(store, name, written(store, os.urandom(400), _PARTS))) for name in names
            ]
            for name, future in waiting:
                print(name, future.result(), flush=True)
            number += 3


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except StoreError as error:
        print("refused", type(error).__name__, flush=True)
