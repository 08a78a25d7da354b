"""The bases that a store's adapters were trained on: with another they would answer nonsense."""

from __future__ import annotations

import sqlite3

from pcg.errors import ServeError
from pcg.files import shown_path
from pcg.serve.engine.facts import ModelFacts
from pcg.serve.jobs.records import UNFINISHED
from pcg.serve.store.store import Store
from pcg.serve.store.tables import now

_WHOLE = "sha256:"
"""How digests of all weights begin; an older pcg's were of samples, and tell nothing here."""


def check_base(store: Store, facts: ModelFacts) -> None:
    """Note the base that is served, for what will be trained.

    Raises:
        ServeError: the store has models, jobs that are not over, or models and checkpoints of
            Tinker's protocol, of another base.
    """

    def act(connection: sqlite3.Connection) -> tuple[str, int] | None:
        found = _of_jobs(connection, facts.base_digest) or _of_tinker(connection, facts.base_digest)
        if found is None:
            connection.execute(
                "INSERT OR REPLACE INTO bases (digest, name) VALUES (?, ?)",
                (facts.base_digest, facts.name),
            )
        return found

    found = store.database.write(act, may_use_reserve=True).result()
    if found is not None:
        name, count = found
        raise ServeError(
            f"--data-dir {shown_path(store.folder)} has {count} models, checkpoints and unfinished "
            f"jobs that were trained on other weights, of {name!r}, and this server serves "
            f"{facts.name!r}: serve those weights, or give another --data-dir"
        )


def _of_jobs(connection: sqlite3.Connection, digest: str) -> tuple[str, int] | None:
    """Return another base of models and unfinished jobs, and their number; None without."""
    places = ", ".join("?" for _ in UNFINISHED)
    found: tuple[str, int] | None = connection.execute(
        "SELECT bases.name, COUNT(*) FROM (SELECT base FROM models UNION ALL "
        f"SELECT base FROM jobs WHERE status IN ({places})) AS used "
        "JOIN bases ON bases.digest = used.base WHERE used.base != ? AND used.base LIKE ? "
        "GROUP BY bases.digest",
        (*UNFINISHED, digest, f"{_WHOLE}%"),
    ).fetchone()
    return found


def _of_tinker(connection: sqlite3.Connection, digest: str) -> tuple[str, int] | None:
    """Return another base of what Tinker's clients trained, and its number; None without.

    All of it is of one base, which is the last that was served: with another it is refused.
    """
    last = connection.execute(
        "SELECT digest, name FROM bases ORDER BY rowid DESC LIMIT 1"
    ).fetchone()
    if last is None or last[0] == digest or not last[0].startswith(_WHOLE):
        return None
    (count,) = connection.execute(
        "SELECT (SELECT COUNT(*) FROM tinker_models WHERE status = 'open') + "
        "(SELECT COUNT(*) FROM tinker_checkpoints WHERE expires_s IS NULL OR expires_s > ?) + "
        "(SELECT COUNT(*) FROM tinker_samplers WHERE path IS NULL AND folder IS NOT NULL)",
        (now(),),
    ).fetchone()
    return (str(last[1]), int(count)) if count else None
