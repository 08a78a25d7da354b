"""The bounds of requests and bodies, by keys and by tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2

from pcg.serve.security.keys import Keys
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
