"""JSON as it is sent: what JSON is not, and what some readers take for an end of a line."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from pcg.serve.http.wire import json_bytes
from pcg.serve.openai.replies import event


def strict(text: bytes) -> Any:
    """JSON, without the words that Python reads beside it."""

    def refuse(word: str) -> Any:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("beside", ["x", "half \ud800", 10**30])
def test_numbers_that_json_does_not_have_are_null(beside: object) -> None:
    """Whichever writer takes it: the fast one has no large integers and no half characters."""
    content = {"a": [float("nan"), {"b": (float("inf"), 1.5)}], "c": beside}
    assert strict(json_bytes(content)) == {"a": [None, {"b": [None, 1.5]}], "c": beside}


def test_a_client_that_splits_text_finds_the_lines_that_were_sent() -> None:
    text = "".join(map(chr, range(0x100))) + "\u2028\u2029\u2027\u202a é"
    content = event({"text": text}) + event({"text": "next"})
    first, _, second, _ = httpx2.Response(200, content=content).iter_lines()
    assert strict(first.removeprefix("data: ").encode()) == {"text": text}
    assert second == 'data: {"text":"next"}'
