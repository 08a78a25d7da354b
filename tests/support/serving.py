"""A small model behind the server: in this process by ASGI, or on a port of its own.

with on_a_port() as server: …                      over loopback, by uvicorn on a thread
async with by_asgi() as client: …                  without a network, by httpx
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import httpx2
from starlette.applications import Starlette

from pcg.keys import Key, Keys, Scope, digest_of, open_keys
from pcg.runtime.executor import Executor
from pcg.serve.app import create_app, open_service
from pcg.serve.engine.client import local_client
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.service import Service
from pcg.serve.server import Server, serve
from tests.support import compiled
from tests.support.text_model import save_text_model

KEY = "key-for-tests"
HEADERS = {"authorization": f"Bearer {KEY}"}
LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
MODEL = "tiny"
"""The name of the base on the wire."""
OPTIONS: Mapping[str, Any] = {
    "port": 0,
    "api_key": (KEY,),
    "served_model_name": (MODEL,),
    "kv_cache_gib": 1 / 64,
    "access_log": "none",
}


@cache
def model_directory() -> Path:
    """The small model, written once a process."""
    return save_text_model(Path(tempfile.mkdtemp()) / MODEL)


def make_executor(
    backend: str = "torch", adapters: int = 1, directory: Path | None = None
) -> Executor:
    """An executor of it or another one, with adapters `lora-0`, `lora-1`, … that do something."""
    executor = compiled.executor(directory or model_directory(), backend=backend)
    for index in range(adapters):
        adapter = executor.add_adapter(f"lora-{index}", LORA, seed=index)
        for weights in adapter.weights.values():
            weights.b.normal_(std=0.1)
        executor.refresh_adapter(f"lora-{index}")
    return executor


def key(name: str, *scopes: str, tenant: str | None = None) -> Key:
    """A key whose text is `key-of-NAME`."""
    allowed = frozenset(map(Scope, scopes or ("infer", "train", "admin")))
    return Key(name, digest_of(f"key-of-{name}"), allowed, tenant or name)


def headers_of(name: str) -> dict[str, str]:
    """The headers of who has the key of that name."""
    return {"authorization": f"Bearer key-of-{name}"}


def keys_file(folder: Path, **keys: Mapping[str, Any]) -> Path:
    """A file of keys `key-of-NAME`, whose entries have these fields."""
    entries = [
        {"name": name, "sha256": digest_of(f"key-of-{name}").hex(), **fields}
        for name, fields in keys.items()
    ]
    (folder / "keys.json").write_text(json.dumps(entries))
    return folder / "keys.json"


@contextlib.contextmanager
def service_of(
    executor: Executor | None = None, keys: Keys | None = None, **options: Any
) -> Iterator[Service]:
    """A service over an executor, with an engine that runs; options as of `ServeOptions`."""
    executor = make_executor() if executor is None else executor
    asked = ServeOptions(**{**OPTIONS, **options})
    keys = open_keys(asked.api_key, asked.api_keys)[0] if keys is None else keys
    with local_client(lambda: executor, asked, keys.tenants) as client:
        service = open_service(client, keys, asked)
        try:
            yield service
        finally:
            service.close()


@lru_cache(maxsize=4)
def _app_of(service: Service) -> Starlette:
    """The application of a service, made once for its requests."""
    return create_app(service)


@contextlib.asynccontextmanager
async def client_of(
    service: Service, headers: Mapping[str, str] = HEADERS
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a service, without a network."""
    transport = httpx2.ASGITransport(_app_of(service))
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://test", headers=dict(headers), timeout=60
    ) as client:
        yield client


def ask(
    service: Service,
    method: str,
    path: str,
    headers: Mapping[str, str] = HEADERS,
    **options: Any,
) -> httpx2.Response:
    """The reply to a request, without a network; options as of httpx."""

    async def send() -> httpx2.Response:
        async with client_of(service, headers) as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def post(
    service: Service, path: str, body: Any, headers: Mapping[str, str] = HEADERS
) -> httpx2.Response:
    """The reply to a body, without a network; Python's JSON writes any text and number."""
    sent = {**headers, "content-type": "application/json"}
    return ask(service, "POST", path, sent, content=json.dumps(body))


def white_space(service: Service) -> dict[str, int]:
    """Biases of a model that goes on with white space wherever it may."""
    tokenizer = service.client.tokenizer
    assert tokenizer is not None
    texts = ((index, tokenizer.decode([index])) for index in range(tokenizer.vocab_size))
    return {str(index): 100 for index, text in texts if text.isspace()}


@dataclass(frozen=True)
class Served:
    """A server on a port.

    Attributes:
        url: its address, without a slash.
        service: what it serves.
    """

    url: str
    service: Service
    server: Server

    def client(self, headers: Mapping[str, str] = HEADERS) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers=dict(headers), timeout=60)


@contextlib.contextmanager
def on_a_port(load: Callable[[], Executor] = make_executor, **options: Any) -> Iterator[Served]:
    """A server on a free port of loopback, by `pcg.serve.server.serve` on a thread."""
    found: list[Server] = []
    said: list[str] = []
    is_ready = threading.Event()

    def ready(server: Server) -> None:
        found.append(server)
        is_ready.set()

    asked = ServeOptions(**{**OPTIONS, **options})
    failed: list[BaseException] = []

    def run() -> None:
        try:
            serve(asked, partial(local_client, load), said.append, ready)
        except BaseException as error:
            failed.append(error)
            is_ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_ready.wait(60)
    if failed:
        raise failed[0]
    line = next(line for line in said[0].splitlines() if line.startswith("listening at "))
    server = found[0]
    try:
        yield Served(line.removeprefix("listening at "), server.service, server)
    finally:
        server.drain()
        thread.join(60)
        assert not thread.is_alive()
