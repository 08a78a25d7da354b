"""A data folder whose adapters were trained on other weights is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pcg.errors import ServeError
from pcg.serve.jobs.records import check_base
from pcg.serve.store.store import Store, open_store
from pcg.serve.store.tables import now
from pcg.serve.tinker.records import (
    CHECKPOINTS,
    CLOSED,
    MODELS,
    SAMPLER,
    SAMPLERS,
    CheckpointRecord,
    ModelRecord,
    SamplerRecord,
    insert_sampler,
)
from tests.support import tinker_client

FIRST: Any = SimpleNamespace(base_digest="sha256:a", name="first")
OTHER: Any = SimpleNamespace(base_digest="sha256:b", name="other")


def keep(store: Store, act: Callable[[Any], object]) -> None:
    store.database.write(act).result()


def test_what_tinkers_clients_trained_is_of_one_base(tmp_path: Path) -> None:
    model = ModelRecord("s:train:0", "a", "s", 0, "first", "{}", None, 0, 0)
    path = "tinker://s:train:0/sampler_weights/x"
    saved = CheckpointRecord(
        path, "a", model.id, SAMPLER, "x", "tinker/x", "first", "{}", None, 1, 0, None
    )
    sampler = SamplerRecord("smp-1", "a", "s", 0, "first", None, "tinker/y", 0, 1)
    with open_store(tmp_path) as store:
        check_base(store, OTHER)
        check_base(store, FIRST)  # nothing was trained on the other one
        keep(store, lambda one: MODELS.insert(one, model))
        keep(store, lambda one: CHECKPOINTS.insert(one, saved))
        keep(store, lambda one: insert_sampler(one, sampler))
        for count, removed in (
            (3, lambda one: MODELS.change(one, {"status": CLOSED}, id=model.id)),
            (2, lambda one: one.execute("UPDATE tinker_checkpoints SET expires_s = ?", (now(),))),
            (1, lambda one: SAMPLERS.delete(one, id=sampler.id)),
        ):
            for _ in range(2):  # what is refused is not noted
                with pytest.raises(ServeError, match=f"has {count} models, .* of 'first'"):
                    check_base(store, OTHER)
            check_base(store, FIRST)
            keep(store, removed)
        check_base(store, OTHER)


def test_a_server_notes_what_it_serves(tmp_path: Path) -> None:
    with tinker_client.server(tmp_path) as served, tinker_client.raw(served.url) as raw:
        session = raw.post("create_session", json={"tags": []}).json()["session_id"]
        lora = {"rank": 2, "seed": 1}
        body = {"session_id": session, "model_seq_id": 0, "base_model": tinker_client.MODEL}
        assert raw.post("create_model", json={**body, "lora_config": lora}).status_code == 200
    with open_store(tmp_path) as store, pytest.raises(ServeError, match="has 1 models"):
        check_base(store, OTHER)
