"""The real tinker client, and a server for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import peft
import tinker

from pcg.runtime.executor import Executor
from pcg.serve.tinker.records import find_checkpoint
from pcg.serve.tinker.tinker import Tinker
from tests.support import compiled, serving, trainer_data
from tests.support.waiting import until

KEY = "tml-key-for-tests"
HEADERS = {"x-api-key": KEY}
MODEL = serving.MODEL
os.environ["TINKER_TELEMETRY"] = "0"


@contextlib.contextmanager
def server(
    data_dir: Path, load: Callable[[], Executor] = serving.make_executor, **options: Any
) -> Iterator[serving.Served]:
    """A server that keeps what it does in a folder."""
    own = {"api_key": (KEY,), "data_dir": data_dir, "kv_cache_gib": 0.1, **options}
    with serving.on_a_port(load, **own) as served:
        yield served


@contextlib.contextmanager
def client(url: str) -> Iterator[tinker.ServiceClient]:
    """A client of a server, whose session ends with it."""
    made = tinker.ServiceClient(base_url=f"{url}/tinker", api_key=KEY)
    try:
        yield made
    finally:
        made.holder.run_coroutine_threadsafe(made.holder.aclose()).result(60)


def raw(url: str) -> httpx2.Client:
    """A client of the bare protocol."""
    return httpx2.Client(base_url=f"{url}/tinker/api/v1/", headers=HEADERS, timeout=60)


def load() -> Executor:
    """A small model in fp32, which peft's oracle has, too."""
    return compiled.executor(trainer_data.base_model())


def folder_of(served: serving.Served, path: str) -> Path:
    """The folder of a checkpoint, in peft's format."""
    tinker_state = served.service.part(Tinker)
    found = tinker_state.store.database.read(
        lambda one: find_checkpoint(one, path, "default", 0)
    ).result()
    assert found is not None
    return tinker_state.models.folders.path(found.folder)


def peft_of(served: serving.Served, path: str) -> Any:
    """peft's model of a checkpoint, over the same base."""
    with raw(served.url) as client:
        assert client.post("weights_info", json={"tinker_path": path}).status_code == 200
    folder = folder_of(served, path)
    return peft.PeftModel.from_pretrained(trainer_data.base_model(), str(folder), is_trainable=True)


def result(client: httpx2.Client, promise: dict[str, Any]) -> Any:
    """The result of a promise, or why there is none."""
    ask = {"request_id": promise["request_id"]}
    until(lambda: client.post("retrieve_future", json=ask).json().get("type") != "try_again")
    return client.post("retrieve_future", json=ask).json()


def new_session(client: httpx2.Client) -> str:
    """Open a session; returns its id."""
    return str(client.post("create_session", json={"tags": []}).json()["session_id"])


def new_model(client: httpx2.Client, session: str, seq: int = 0, rank: int = 2) -> httpx2.Response:
    """The reply to asking for a model: a promise that names it."""
    place = {"session_id": session, "model_seq_id": seq, "base_model": MODEL}
    lora = {"rank": rank, "seed": 1}
    return client.post("create_model", json={**place, "lora_config": lora})


def model_of(client: httpx2.Client, session: str | None = None, rank: int = 2) -> str:
    """Make a model, and wait until it is there; returns its id."""
    promise = new_model(client, session or new_session(client), rank=rank).json()
    assert result(client, promise)["model_id"] == promise["model_id"]
    return str(promise["model_id"])


def sample(tokens: list[int], most: int = 2, **fields: Any) -> dict[str, Any]:
    """The body of a request for samples, of the base unless the fields say otherwise."""
    place = (
        {} if "sampling_session_id" in fields or "model_path" in fields else {"base_model": MODEL}
    )
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    return {**place, "prompt": prompt, "sampling_params": {"max_tokens": most}, **fields}
