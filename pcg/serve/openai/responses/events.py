"""The events of a streamed response.

    event: response.created             data: {"type", "sequence_number", "response"}
    event: response.in_progress
    event: response.output_item.added   …of each item, with its parts and deltas between
    event: response.output_item.done
    event: response.completed           or response.incomplete; response.failed after an error

Every event has its name twice, as OpenAI's have, and the next sequence number. There is no [DONE].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pcg.runtime.requests.request import Chunk, Completion
from pcg.serve.errors import as_api_error
from pcg.serve.json_bytes import json_bytes
from pcg.serve.openai.event_stream import Events, check_ended
from pcg.serve.openai.responses.output import OutputItems
from pcg.serve.openai.responses.reply import status_of


class ResponseEvents(Events):
    """Makes events of chunks.

    Args:
        response: the response object as it begins.
        end: makes the whole response of a completion, and keeps it.
    """

    repeats_output = True

    def __init__(
        self,
        response: dict[str, Any],
        output: OutputItems,
        end: Callable[[Completion], dict[str, Any]],
    ) -> None:
        self._response = response
        self._output = output
        self._end = end
        self._number = 0

    def begin(self) -> bytes:
        begun = {"response": self._response}
        created = self._event({"type": "response.created", **begun})
        return created + self._event({"type": "response.in_progress", **begun})

    def step(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        return b"".join([self._events(chunk) for chunk in chunks])

    def end(self) -> bytes:
        return b""

    def failed(self, error: Exception) -> bytes:
        said = as_api_error(error)
        # OpenAI's words, which are fewer than a status has.
        code = "invalid_prompt" if said.status_code < 500 else "server_error"
        failed = {
            **self._response,
            "status": "failed",
            "output": self._output.items,
            "error": {"code": code, "message": said.detail},
        }
        return self._event({"type": "response.failed", "response": failed})

    def _events(self, chunk: Chunk) -> bytes:
        done = chunk.completion
        if done is not None:
            check_ended(done)
        found = [] if chunk.logprobs is None else [chunk.logprobs]
        status = None if done is None else status_of(done)
        events = self._output.push(chunk.text, found, status)
        if done is not None:
            response = self._end(done)
            events.append({"type": f"response.{response['status']}", "response": response})
        return b"".join([self._event(one) for one in events])

    def _event(self, content: dict[str, Any]) -> bytes:
        numbered = {**content, "sequence_number": self._number}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (content["type"].encode(), json_bytes(numbered))
