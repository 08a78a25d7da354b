"""The message in an output: blocks of text and of tool use, whole or as events.

event: message_start            data: {"type", "message": {…, "content": [], "usage"}}
event: content_block_start      data: {"type", "index", "content_block"}
event: content_block_delta      data: {"type", "index", "delta": {"type": "text_delta", "text"}}
                                or {"type": "input_json_delta", "partial_json"}
event: content_block_stop       data: {"type", "index"}
event: message_delta            data: {"type", "delta": {"stop_reason", …}, "usage"}
event: message_stop
event: error                    data: {"type": "error", "error"}, the last one
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pcg.runtime.requests.request import Chunk, Completion
from pcg.serve.http.errors import MESSAGES, as_api_error
from pcg.serve.http.wire import json_bytes
from pcg.serve.openai.chat.message_reader import MessageReader
from pcg.serve.openai.chat.tool_format import ArgumentsPiece, CallPiece, Piece, TextPiece
from pcg.serve.openai.chat.tool_use import ToolUse
from pcg.serve.openai.event_stream import Events, check_ended


def begun_message(message_id: str, model: str, prompt: int) -> dict[str, Any]:
    """Return a message before its first token.

    Args:
        prompt: the tokens of the prompt.
    """
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(prompt, 0, 0),
    }


class MessageBlocks:
    """The blocks of one message, as its text comes.

    Attributes:
        blocks: those that have begun; the input of a tool's use is JSON text until it ends.
    """

    def __init__(self, use: ToolUse) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._reader = MessageReader(use)
        self._is_open = False

    def push(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Add text; returns the events of it."""
        events: list[dict[str, Any]] = []
        for piece in self._reader.push(text, is_last=is_last):
            self._add(piece, events)
        if is_last:
            self._close(events)
        return events

    def ended(self, done: Completion) -> dict[str, Any]:
        """Return why the message ends, in Anthropic's words."""
        sequence = done.stop_reason if isinstance(done.stop_reason, str) else None
        if done.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        reason = "tool_use" if self._reader.has_called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def whole(self, done: Completion) -> list[dict[str, Any]]:
        """Return the blocks of a whole output; the input of a call that was cut off is empty."""
        self.push(done.text, is_last=True)
        return [
            {**one, "input": _input(one["input"])} if one["type"] == "tool_use" else one
            for one in self.blocks
        ]

    def _add(self, piece: Piece, events: list[dict[str, Any]]) -> None:
        match piece:
            case TextPiece():
                if not (self._is_open and self.blocks[-1]["type"] == "text"):
                    self._begin({"type": "text", "text": ""}, events)
                self.blocks[-1]["text"] += piece.text
                self._tell("content_block_delta", events, type="text_delta", text=piece.text)
            case CallPiece():
                call_id = f"toolu_{secrets.token_hex(12)}"
                block = {"type": "tool_use", "id": call_id, "name": piece.name, "input": {}}
                self._begin(block, events)
                self.blocks[-1]["input"] = ""
            case ArgumentsPiece():
                self.blocks[-1]["input"] += piece.text
                said = {"type": "input_json_delta", "partial_json": piece.text}
                self._tell("content_block_delta", events, **said)

    def _begin(self, block: dict[str, Any], events: list[dict[str, Any]]) -> None:
        self._close(events)
        self._is_open = True
        self.blocks.append(block)
        place = len(self.blocks) - 1
        started = {"type": "content_block_start", "index": place, "content_block": dict(block)}
        events.append(started)

    def _close(self, events: list[dict[str, Any]]) -> None:
        if self._is_open:
            events.append({"type": "content_block_stop", "index": len(self.blocks) - 1})
        self._is_open = False

    def _tell(self, kind: str, events: list[dict[str, Any]], **delta: Any) -> None:
        events.append({"type": kind, "index": len(self.blocks) - 1, "delta": delta})


class MessageEvents(Events):
    """Makes events of chunks.

    Args:
        message: the message as it begins.
        prompt: the tokens of the prompt.
    """

    def __init__(self, message: Mapping[str, Any], blocks: MessageBlocks, prompt: int) -> None:
        self._message = message
        self._blocks = blocks
        self._prompt = prompt
        self._output = 0

    def begin(self) -> bytes:
        return _event({"type": "message_start", "message": self._message})

    def step(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        return b"".join([self._events(chunk) for chunk in chunks])

    def end(self) -> bytes:
        return _event({"type": "message_stop"})

    def failed(self, error: Exception) -> bytes:
        return _event(as_api_error(error).content_for(MESSAGES))

    def _events(self, chunk: Chunk) -> bytes:
        done = chunk.completion
        if chunk.token_id is not None:
            self._output += 1
        if done is not None:
            check_ended(done)
        events = self._blocks.push(chunk.text, is_last=done is not None)
        if done is not None:
            usage = _usage(self._prompt, done.cached_tokens, self._output)
            delta = self._blocks.ended(done)
            events.append({"type": "message_delta", "delta": delta, "usage": usage})
        return b"".join(map(_event, events))


def whole_message(
    message: Mapping[str, Any], blocks: MessageBlocks, done: Completion
) -> dict[str, Any]:
    """Return a message with the whole output."""
    content = blocks.whole(done)
    usage = _usage(done.prompt_tokens, done.cached_tokens, len(done.token_ids))
    return {**message, "content": content, **blocks.ended(done), "usage": usage}


def _input(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(prompt: int, cached: int, output: int) -> dict[str, int]:
    """Return the usage of a message; the tokens of its prompt that the KV cache had are apart."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _event(content: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (content["type"].encode(), json_bytes(content))
