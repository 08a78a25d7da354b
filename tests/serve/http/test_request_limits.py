"""The bounds of requests and bodies, by keys and by tenants."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pcg.keys import Keys
from pcg.serve.http import service as long_body
from pcg.serve.http.limits import MOST_CONTAINERS, _counts, _without_texts
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


MANY: dict[str, tuple[str, Any]] = {
    "lists and objects": ("x", [[]] * (MOST_CONTAINERS + 1)),
    "objects": ("x", [{}] * (MOST_CONTAINERS + 1)),
    "token ids": ("prompt", [1] * 10**6),
    "names": ("logit_bias", {str(token): 1 for token in range(122_000)}),
    "fields": ("x", {f"field{index}": None for index in range(100_000)}),
    "texts": ("stop", ["a"] * (2**17 + 1)),
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("beside", ["", '"' * 101, "\\", '\\"[{,:'])
def test_bodies_of_too_many_elements_are_refused_before_objects_are_made(
    monkeypatch: pytest.MonkeyPatch, kind: str, beside: str
) -> None:
    """Whatever stands in texts beside them."""

    def read(*_: Any) -> Any:
        raise AssertionError("the body was read")

    monkeypatch.setattr(long_body, "validated", read)
    name, value = MANY[kind]
    with serving.service_of() as service:
        reply = serving.post(service, "/v1/completions", {"a": beside, name: value, "z": beside})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "body_too_large"
    assert "more than" in reply.json()["error"]["message"]


@pytest.mark.parametrize("text", ["[", "{", ",", ":", '\\"', '"[{,:', "\\"])
def test_texts_may_have_any_characters(text: str) -> None:
    with serving.service_of() as service:
        reply = serving.post(service, "/tokenize", {"prompt": text * (900_000 // len(text))})
    assert reply.status_code == 200


LEAVES = st.none() | st.booleans() | st.integers(-99, 99) | st.text('a"\\[]{},:\n\x00é', max_size=9)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('ab"\\,:{'), inner),
    max_leaves=40,
)


@given(VALUES, st.booleans(), st.integers(1, 40))
@example(["\\", '"', "\\" * 9 + '",'], True, 1)
def test_elements_are_counted_exactly(value: Any, is_ascii: bool, size: int) -> None:
    """As Python's reader finds them; entries are counted with the brackets around them."""
    text = np.frombuffer(json.dumps(value, ensure_ascii=is_ascii).encode(), np.uint8)
    parts = [text[place : place + size] for place in range(0, len(text), size)]
    counts = sum((_counts(*part) for part in _without_texts(parts)), Counter[str]())
    found = Counter[str]()

    def walk(one: Any) -> None:
        if isinstance(one, str):
            found["quotation marks"] += 2
        elif isinstance(one, dict | list):
            found["lists and objects"] += 1
            found["values"] += 1 + max(len(one) - 1, 0)
            if isinstance(one, dict):
                found["names"] += len(one)
                found["quotation marks"] += 2 * len(one)
            for part in one.values() if isinstance(one, dict) else one:
                walk(part)

    walk(value)
    assert counts == found
