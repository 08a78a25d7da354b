"""The bases that a store's models were trained on: with another one they would answer nonsense."""

from __future__ import annotations

import sqlite3

from pcg.errors import ServeError
from pcg.files import shown_path
from pcg.serve.engine.facts import ModelFacts
from pcg.serve.jobs.records import UNFINISHED
from pcg.serve.store.store import Store


def check_base(store: Store, facts: ModelFacts) -> None:
    """Note the base that is served, for the jobs to come.

    Raises:
        ServeError: the store has models, or jobs that are not over, of another base.
    """
    places = ", ".join("?" for _ in UNFINISHED)

    def act(connection: sqlite3.Connection) -> list[tuple[str, int]]:
        connection.execute(
            "INSERT OR REPLACE INTO bases (digest, name) VALUES (?, ?)",
            (facts.base_digest, facts.name),
        )
        rows = connection.execute(
            "SELECT bases.name, COUNT(*) FROM (SELECT base FROM models UNION ALL "
            f"SELECT base FROM jobs WHERE status IN ({places})) AS used "
            "JOIN bases ON bases.digest = used.base WHERE used.base != ? GROUP BY bases.digest",
            (*UNFINISHED, facts.base_digest),
        )
        return [(str(name), int(count)) for name, count in rows]

    found = store.database.write(act).result()
    if found:
        name, count = found[0]
        raise ServeError(
            f"--data-dir {shown_path(store.folder)} has {count} models and unfinished jobs that "
            f"were trained on other weights, of {name!r}, and this server serves {facts.name!r}: "
            "serve those weights, or give another --data-dir"
        )
