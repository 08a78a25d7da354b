"""Bodies: the numbers that JSON schema calls integers, and the forms of prompts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pcg.serve.http.wire import WireModel
from pcg.serve.openai.wire import Prompts


class Body(WireModel):
    count: int | None = None
    share: float | None = None
    ids: list[int] | None = None
    prompt: Prompts | None = None


def test_numbers_without_a_fraction_are_integers() -> None:
    body = Body(count=3.0, share=1.0, ids=[1.0, 2], prompt=[[1.0, 2.0], [3]])
    assert (body.count, body.share, body.ids, body.prompt) == (3, 1.0, [1, 2], [[1, 2], [3]])
    assert type(body.count) is int
    assert type(body.share) is float
    assert {type(one) for one in body.ids or ()} == {int}


@pytest.mark.parametrize(
    "body",
    [{"count": 3.5}, {"count": "3"}, {"count": True}, {"ids": [1.5]}, {"count": float("inf")}],
)
def test_other_numbers_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Body(**body)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_a_prompt_has_four_forms(given: Any, prompts: Any) -> None:
    assert Body(prompt=given).prompt == prompts
