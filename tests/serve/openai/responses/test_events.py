"""Streams of responses that fail after they began."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from openai.types.responses import ResponseFailedEvent
from starlette.types import Message

from pcg.errors import GenerationError
from pcg.runtime.requests.request import Chunk, Completion
from pcg.serve.openai.replies import Chunks, EventStream, Sending
from pcg.serve.openai.responses import ResponseBody, Responses, begun_response
from pcg.serve.openai.sampling import SamplingDefaults
from pcg.serve.openai.tools import ToolUse

GIVEN_UP = Completion("a dog", (1, 2), "timed_out", None, 3)


def events(*chunks: Chunk | Exception) -> list[dict[str, Any]]:
    """The events of chunks, of which an exception is raised."""
    response = begun_response("resp_1", "tiny", ResponseBody(input="a"), SamplingDefaults())
    made = Responses([], response, ToolUse(), lambda whole: whole)
    sent = made.begin()
    try:
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            sent += made.step(0, [chunk])
        sent += made.end()
    except Exception as error:
        sent += made.failed(error)
    text = sent.decode()
    found = [json.loads(event.split("\ndata: ")[1]) for event in text.split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (Chunk(0, "", None, completion=GIVEN_UP), "server_error"),
        (GenerationError("the logits are not finite"), "invalid_prompt"),
        (RuntimeError("a secret"), "server_error"),
    ],
)
def test_what_fails_is_the_last_event(last: Chunk | Exception, code: str) -> None:
    found = events(Chunk(0, "a dog", 1), last)
    assert found[-2]["delta"] == "a dog"
    assert found[-1]["type"] == "response.failed"
    failed = found[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", code)
    assert failed["output"][0]["content"][0]["text"] == "a dog"
    assert "secret" not in json.dumps(found)
    ResponseFailedEvent.model_validate(found[-1])


def test_the_whole_output_is_written_beside_the_event_loop() -> None:
    """Its last event repeats all of it; those of tokens are written at once."""
    done = Completion("a dog", (1, 2), "stop", None, 3)
    response = begun_response("resp_1", "tiny", ResponseBody(input="a"), SamplingDefaults())
    made = Responses([], response, ToolUse(), lambda whole: whole)
    steps: list[bytes] = []
    sent: list[Message] = []

    given = iter([(0, [Chunk(0, "a ", 1)]), (0, [Chunk(0, "dog", 2, completion=done)]), None])

    class Given:
        async def next(self) -> Any:
            return next(given)

        def cancel(self) -> None:
            pass

    async def beside(act: Callable[[], bytes]) -> bytes:
        steps.append(act())
        return steps[-1]

    async def send(message: Message) -> None:
        sent.append(message)

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    reply = EventStream(cast(Chunks, Given()), made, Sending(beside, lambda error: error, 60.0), {})
    asyncio.run(reply({"type": "http"}, never, send))
    body = b"".join(message.get("body", b"") for message in sent)
    (last,) = steps
    assert b'"response.completed"' in last
    assert b'"delta":"a "' not in last
    assert b'"delta":"a "' in body
    assert body.endswith(last)
