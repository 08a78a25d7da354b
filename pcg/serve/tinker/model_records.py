"""Rows of models that are trained: what each is, and how far its state is kept."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from pcg.runtime.engine.commands import LoraOrder
from pcg.serve.store.tables import Table

OPEN, CLOSED = "open", "closed"
COPIES = "copy-"
"""The beginning of sessions that are none: each has a model that is a copy of a checkpoint."""


@dataclass(frozen=True)
class ModelRecord:
    """A model that a session trains.

    Attributes:
        id: `SESSION:train:SEQ`, which is its stream's name, too.
        seq: its number in the session.
        lora: JSON of its `LoraOrder`.
        asked_s: when something was last asked of it.
        status: open, or closed once nothing more can be asked of it.
        state: the folder of the last state that is kept, relative to the store's.
        state_seq: the last request that is in that state; -1 for the one that made it.
        done_seq: the request up to which all are settled.
    """

    id: str
    tenant: str
    session: str
    seq: int
    base_model: str
    lora: str
    user_metadata: str | None
    created_s: int
    asked_s: int
    status: str = OPEN
    state: str | None = None
    state_seq: int = -1
    done_seq: int = -1

    @property
    def order(self) -> LoraOrder:
        """The LoRA that its trainer is made of."""
        return lora_of(self.lora)


def lora_of(text: str) -> LoraOrder:
    """Return the LoRA that a row has as JSON."""
    return LoraOrder(**json.loads(text))


MODELS = Table("tinker_models", ModelRecord)


def states(connection: sqlite3.Connection) -> set[str]:
    """Return the folders of states that rows name."""
    return {str(state) for (state,) in MODELS.read(connection, "state", "state IS NOT NULL")}
