"""The output of a response: items, and the events that tell of them as they come."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.serve.openai.chat.logprobs import LogprobWriter
from pcg.serve.openai.chat.message_reader import MessageReader
from pcg.serve.openai.chat.tool_calls.pieces import ArgumentsPiece, CallPiece, Piece, TextPiece
from pcg.serve.openai.chat.tool_use import ToolUse

Event = dict[str, Any]


class OutputItems:
    """Makes the items of one output.

    Args:
        logprobs: None for an output without logprobs.
    Attributes:
        items: the items that have begun; the last one may grow.
    """

    def __init__(self, use: ToolUse, logprobs: LogprobWriter | None) -> None:
        self.items: list[dict[str, Any]] = []
        self._use = use
        self._reader = MessageReader(use)
        self._logprobs = logprobs
        self._pending: list[dict[str, Any]] = []
        self._events: list[Event] = []
        self._is_open = False

    def push(
        self, text: str, found: Iterable[TokenLogprobs], status: str | None = None
    ) -> list[Event]:
        """Add text and the logprobs of its tokens; returns the events of it.

        Args:
            status: that of the last item, with the last text; None before.
        """
        self._events = []
        if self._logprobs is not None:
            self._pending += self._logprobs.tokens(found)
        for piece in self._reader.push(text, is_last=status is not None):
            self._add(piece)
        if status is not None:
            if not self.items:
                self._begin_message()
            self._close(status)
        return self._events

    def _add(self, piece: Piece) -> None:
        match piece:
            case TextPiece():
                if not (self._is_open and self.items[-1]["type"] == "message"):
                    self._close("completed")
                    self._begin_message()
                self._add_text(piece.text)
            case CallPiece():
                self._close("completed")
                self._begin_call(piece.name)
            case ArgumentsPiece():
                self.items[-1]["arguments"] += piece.text
                self._tell("response.function_call_arguments.delta", delta=piece.text)

    def _begin_message(self) -> None:
        item: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(16)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._begin(item)
        item["content"] = [_part("", [])]
        self._tell("response.content_part.added", content_index=0, part=_part("", []))

    def _begin_call(self, name: str) -> None:
        assert self._use.format is not None  # it has a parser
        self._begin(
            {
                "id": f"fc_{secrets.token_hex(16)}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": self._use.format.new_call_id(),
                "name": name,
                "arguments": "",
            }
        )

    def _begin(self, item: dict[str, Any]) -> None:
        self.items.append(item)
        self._is_open = True
        self._events.append(
            {
                "type": "response.output_item.added",
                "output_index": len(self.items) - 1,
                "item": dict(item),
            }
        )

    def _add_text(self, text: str) -> None:
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += self._pending
        self._tell(
            "response.output_text.delta", content_index=0, delta=text, logprobs=self._pending
        )
        self._pending = []

    def _close(self, status: str) -> None:
        """End the last item."""
        if not self._is_open:
            return
        item = self.items[-1]
        item["status"] = status
        self._is_open = False
        if item["type"] == "message":
            part = item["content"][0]
            part["logprobs"] += self._pending
            self._pending = []
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            self._tell("response.output_text.done", content_index=0, **said)
            self._tell("response.content_part.done", content_index=0, part=part)
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            self._tell("response.function_call_arguments.done", **said)
        done = {"output_index": len(self.items) - 1, "item": item}
        self._events.append({"type": "response.output_item.done", **done})

    def _tell(self, kind: str, **said: Any) -> None:
        """Add an event of the last item."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        self._events.append({"type": kind, **place, **said})


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
