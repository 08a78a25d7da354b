"""The bounds of requests and bodies, by keys and by tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from pcg.keys import Keys
from pcg.serve.security.json_containers import MOST_CONTAINERS
from pcg.serve.service import Service
from tests.support import serving


def test_bodies_are_counted_by_tenant_whatever_keys_they_come_with() -> None:
    """Eight bodies of the largest size may be under way; a second key brings no more."""
    keys = Keys([serving.key("a", tenant="red"), serving.key("b", tenant="red"), serving.key("c")])
    whole = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b" " * (2**20 - 1)
        await whole.wait()
        yield b" "

    with serving.service_of(keys=keys, max_body_mib=1.0) as service:

        async def ask() -> tuple[list[int], int]:
            async with serving.client_of(service) as client:

                def post(name: str) -> asyncio.Future[httpx2.Response]:
                    headers = {**serving.headers_of(name), "content-type": "application/json"}
                    return asyncio.ensure_future(
                        client.post("/v1/completions", content=slowly(), headers=headers)
                    )

                asked = [post(name) for name in "ab" for _ in range(5)]
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                other = post("c")
                await asyncio.sleep(0)
                whole.set()
                await asyncio.gather(*asked)
                return [one.result().status_code for one in asked], (await other).status_code

        statuses, other = asyncio.run(ask())
    # The body itself is no JSON, which is told to who was read to the end.
    assert statuses.count(429) == 2
    assert statuses.count(400) == 8
    assert other == 400


def test_lists_and_objects_in_a_body_have_a_bound() -> None:
    """Those that are parsed, and not brackets within texts."""
    many = MOST_CONTAINERS + 1

    async def ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> httpx2.Response:
        return await client.post("/tokenize", json=body)

    async def ask_all(service: Service) -> list[httpx2.Response]:
        async with serving.client_of(service) as client:
            bodies: list[dict[str, Any]] = [
                {"prompt": "a", "x": [[]] * many},
                {"prompt": "a", "x": [{}] * many, "y": '"' * 101},
                {"prompt": "a", "x": "\\", "y": [[]] * many, "z": "\\"},
                {"prompt": "[" * many},
                {"prompt": '\\"[{' * many},
            ]
            return [await ask(client, body) for body in bodies]

    with serving.service_of() as service:
        *refused, first, second = asyncio.run(ask_all(service))
    assert [one.status_code for one in refused] == [400] * 3
    assert {one.json()["error"]["code"] for one in refused} == {"body_too_large"}
    assert [first.status_code, second.status_code] == [200, 200]
