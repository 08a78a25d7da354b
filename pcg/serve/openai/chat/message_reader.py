"""The message in an output: content and tool calls, as text comes."""

from __future__ import annotations

from typing import Any

from pcg.serve.openai.chat.tool_format import ArgumentsPiece, CallPiece, Piece, TextPiece
from pcg.serve.openai.chat.tool_use import ToolUse


class MessageReader:
    """Reads one output.

    Attributes:
        has_called: True once a tool call has begun.
    """

    def __init__(self, use: ToolUse) -> None:
        self.has_called = False
        self._parser = use.parser()

    def push(self, text: str, *, is_last: bool) -> list[Piece]:
        """Add a part of the text; returns the pieces of the message that are certain now."""
        if self._parser is None:
            return [TextPiece(text)] if text else []
        pieces = self._parser.push(text)
        if is_last:
            pieces += self._parser.finish()
        self.has_called = self.has_called or any(isinstance(one, CallPiece) for one in pieces)
        return pieces


class ChatMessage:
    """An assistant's message of a chat completion, or the parts of one in a stream."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = MessageReader(use)
        self._calls = 0

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Add a part of the text; returns what it adds to the message, as a stream says it."""
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in self._reader.push(text, is_last=is_last):
            match piece:
                case TextPiece():
                    content.append(piece.text)
                case CallPiece():
                    calls.append(self._call(piece.name))
                case ArgumentsPiece():
                    self._add_arguments(calls, piece.text)
        delta: dict[str, Any] = {"content": "".join(content)} if content else {}
        if calls:
            delta["tool_calls"] = calls
        return delta

    def whole(self, text: str) -> dict[str, Any]:
        """Return the message that a whole output is."""
        delta = self.delta(text, is_last=True)
        calls = delta.get("tool_calls", [])
        content = delta.get("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
        return message

    def finish_reason(self, reason: str) -> str:
        """Return why the message ends, in OpenAI's words: a tool that was named is a `stop`."""
        if self._reader.has_called and reason == "stop" and not self._use.is_named:
            return "tool_calls"
        return reason

    def _call(self, name: str) -> dict[str, Any]:
        assert self._use.format is not None  # it has a parser
        call_id = self._use.format.new_call_id()
        self._calls += 1
        function = {"name": name, "arguments": ""}
        return {"index": self._calls - 1, "id": call_id, "type": "function", "function": function}

    def _add_arguments(self, calls: list[dict[str, Any]], text: str) -> None:
        if not calls or calls[-1]["index"] != self._calls - 1:
            calls.append({"index": self._calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text
