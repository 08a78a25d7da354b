"""The tables of a store, and how those of an older one become these.

A store has the number of its schema in SQLite's `user_version`; each migration leads from one
number to the next. One that was released never changes: what is new is a further migration.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from pcg.errors import ServeError

_CONTENT = "'files/' || substr(OLD.digest, 1, 2) || '/' || OLD.digest"


def _notes(event: str, path: str, when: str = "1") -> str:
    """Return a trigger that notes a path as removed with the row that named it."""
    name = "_".join(("removed", *event.lower().split()))
    return (
        f"CREATE TRIGGER {name} AFTER {event} WHEN {when} BEGIN INSERT OR REPLACE INTO removed "
        f"(path, removed_s) VALUES ({path}, CAST(strftime('%s', 'now') AS INTEGER)); END"
    )


MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE files (
            place INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            tenant TEXT NOT NULL,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            size_bytes INTEGER NOT NULL,
            created_s INTEGER NOT NULL,
            expires_s INTEGER,
            digest TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX files_of_tenant ON files (tenant, place)",
        "CREATE INDEX files_of_digest ON files (digest)",
    ),
    (
        """CREATE TABLE uploads (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            mime_type TEXT NOT NULL,
            size_bytes INTEGER NOT NULL,
            created_s INTEGER NOT NULL,
            expires_s INTEGER NOT NULL,
            file_expires_after_s INTEGER,
            status TEXT NOT NULL,
            file TEXT
        ) STRICT""",
        "CREATE INDEX uploads_of_tenant ON uploads (tenant, status)",
        """CREATE TABLE upload_parts (
            id TEXT PRIMARY KEY,
            upload TEXT NOT NULL REFERENCES uploads (id) ON DELETE CASCADE,
            created_s INTEGER NOT NULL,
            size_bytes INTEGER NOT NULL,
            digest TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX parts_of_upload ON upload_parts (upload)",
        "CREATE INDEX parts_of_digest ON upload_parts (digest)",
        "CREATE INDEX files_by_id ON files (tenant, id)",
    ),
    (
        """CREATE TABLE jobs (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            model TEXT NOT NULL,
            name TEXT NOT NULL,
            status TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            finished_s INTEGER,
            training_file TEXT NOT NULL,
            validation_file TEXT,
            seed INTEGER NOT NULL,
            metadata TEXT,
            config TEXT NOT NULL,
            trained_tokens INTEGER,
            result_file TEXT,
            error TEXT
        ) STRICT""",
        "CREATE INDEX jobs_of_tenant ON jobs (tenant, id)",
        "CREATE INDEX jobs_of_status ON jobs (status)",
        """CREATE TABLE job_events (
            id TEXT PRIMARY KEY,
            job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            created_s INTEGER NOT NULL,
            level TEXT NOT NULL,
            type TEXT NOT NULL,
            message TEXT NOT NULL,
            data TEXT,
            step INTEGER,
            UNIQUE (job, type, step)
        ) STRICT""",
        "CREATE INDEX events_of_job ON job_events (job, id)",
        """CREATE TABLE job_checkpoints (
            id TEXT PRIMARY KEY,
            job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            created_s INTEGER NOT NULL,
            step INTEGER NOT NULL,
            model TEXT NOT NULL,
            metrics TEXT NOT NULL,
            UNIQUE (job, step)
        ) STRICT""",
        """CREATE TABLE models (
            name TEXT NOT NULL,
            tenant TEXT NOT NULL,
            folder TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            PRIMARY KEY (tenant, name)
        ) STRICT""",
    ),
    (
        """CREATE TABLE tinker_sessions (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            status TEXT NOT NULL,
            tags TEXT NOT NULL,
            user_metadata TEXT,
            display_name TEXT,
            sdk_version TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX tinker_sessions_of_tenant ON tinker_sessions (tenant, id)",
        """CREATE TABLE tinker_futures (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            session TEXT NOT NULL,
            stream TEXT NOT NULL,
            seq INTEGER NOT NULL,
            kind TEXT NOT NULL,
            answer TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            request BLOB,
            state TEXT NOT NULL,
            media_type TEXT,
            result BLOB,
            category TEXT,
            finished_s INTEGER,
            UNIQUE (stream, seq)
        ) STRICT""",
        "CREATE INDEX tinker_futures_of_state ON tinker_futures (state, finished_s)",
        """CREATE TABLE tinker_models (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            session TEXT NOT NULL,
            seq INTEGER NOT NULL,
            base_model TEXT NOT NULL,
            lora TEXT NOT NULL,
            user_metadata TEXT,
            created_s INTEGER NOT NULL,
            asked_s INTEGER NOT NULL,
            status TEXT NOT NULL,
            state TEXT,
            state_seq INTEGER NOT NULL,
            done_seq INTEGER NOT NULL,
            UNIQUE (session, seq)
        ) STRICT""",
        "CREATE INDEX tinker_models_of_tenant ON tinker_models (tenant, id)",
        """CREATE TABLE tinker_checkpoints (
            path TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            model TEXT NOT NULL,
            kind TEXT NOT NULL,
            name TEXT NOT NULL,
            folder TEXT NOT NULL,
            base_model TEXT NOT NULL,
            lora TEXT NOT NULL,
            user_metadata TEXT,
            size_bytes INTEGER NOT NULL,
            created_s INTEGER NOT NULL,
            expires_s INTEGER,
            is_public INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX tinker_checkpoints_of_tenant ON tinker_checkpoints (tenant, path)",
        "CREATE INDEX tinker_checkpoints_of_model ON tinker_checkpoints (model, path)",
    ),
    (
        """CREATE TABLE tinker_samplers (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            session TEXT NOT NULL,
            seq INTEGER NOT NULL,
            base_model TEXT NOT NULL,
            path TEXT,
            folder TEXT,
            created_s INTEGER NOT NULL,
            UNIQUE (session, seq)
        ) STRICT""",
    ),
    (
        """CREATE TABLE job_data (
            job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            tenant TEXT NOT NULL,
            digest TEXT NOT NULL,
            size_bytes INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX job_data_of_job ON job_data (job)",
        "CREATE INDEX job_data_of_tenant ON job_data (tenant)",
        """CREATE TABLE job_folders (
            job TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            size_bytes INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX job_folders_of_tenant ON job_folders (tenant)",
        "CREATE TABLE bases (digest TEXT PRIMARY KEY, name TEXT NOT NULL) STRICT",
        "ALTER TABLE jobs ADD COLUMN base TEXT",
        "ALTER TABLE models ADD COLUMN base TEXT",
        "CREATE INDEX jobs_of_end ON jobs (finished_s)",
        """CREATE TABLE checkpoint_permissions (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            model TEXT NOT NULL,
            project TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            UNIQUE (tenant, model, project),
            FOREIGN KEY (tenant, model) REFERENCES models (tenant, name) ON DELETE CASCADE
        ) STRICT""",
    ),
    (
        "ALTER TABLE jobs ADD COLUMN config_bytes INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX jobs_of_config ON jobs (tenant, config_bytes)",
    ),
    (
        """CREATE TABLE tinker_losses (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            session TEXT NOT NULL,
            seq INTEGER NOT NULL,
            graph TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            UNIQUE (session, seq)
        ) STRICT""",
        "CREATE INDEX tinker_losses_of_tenant ON tinker_losses (tenant)",
    ),
    (
        "ALTER TABLE tinker_samplers ADD COLUMN size_bytes INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX tinker_samplers_of_tenant ON tinker_samplers (tenant)",
    ),
    (
        "ALTER TABLE tinker_sessions ADD COLUMN ended_s INTEGER",
        "CREATE INDEX tinker_futures_of_session ON tinker_futures (session)",
    ),
    (
        "CREATE TABLE identity (id TEXT NOT NULL, is_written INTEGER NOT NULL) STRICT",
        "CREATE TABLE removed (path TEXT PRIMARY KEY, removed_s INTEGER NOT NULL) STRICT",
        _notes("DELETE ON files", _CONTENT),
        _notes("DELETE ON upload_parts", _CONTENT),
        _notes("DELETE ON jobs", "'jobs/' || OLD.id"),
        _notes("DELETE ON models", "OLD.folder"),
        _notes("DELETE ON tinker_checkpoints", "OLD.folder"),
        _notes(
            "DELETE ON tinker_samplers",
            "OLD.folder",
            "OLD.path IS NULL AND OLD.folder IS NOT NULL",
        ),
        _notes("DELETE ON tinker_models", "OLD.state", "OLD.state IS NOT NULL"),
        _notes(
            "UPDATE OF state ON tinker_models",
            "OLD.state",
            "OLD.state IS NOT NULL AND OLD.state IS NOT NEW.state",
        ),
    ),
)
"""Statements that lead from schema 0, which is empty, to 1, from there to 2, and so on."""


def migrate(connection: sqlite3.Connection, folder: Path) -> None:
    """Bring a database to the newest schema, all of it or nothing.

    Raises:
        ServeError: a newer pcg wrote it.
    """
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    newest = len(MIGRATIONS)
    if found > newest:
        raise ServeError(
            f"{folder} has schema {found}, and this pcg knows schemas up to {newest}: serve it "
            "with the pcg that wrote it or a later one, or give another --data-dir"
        )
    if found == newest:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statements in MIGRATIONS[found:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {newest}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
