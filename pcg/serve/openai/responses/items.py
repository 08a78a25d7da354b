"""Items of an input, and the messages that they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from pcg.serve.errors import ApiError
from pcg.serve.json_bytes import json_bytes
from pcg.serve.openai.chat.messages import (
    CalledFunction,
    Content,
    ContentPart,
    Message,
    ToolCall,
    check_parts,
    text_or_list,
)
from pcg.serve.openai.wire import WireModel

MOST_ITEMS = 4096
_OBJECT_BYTES, _VALUE_BYTES = 1024, 64
"""The memory of an item or a part beside its texts, and of any other value in it."""
_TEXTS = ("input_text", "output_text", "text")
_OF_REPLIES = {"annotations", "parsed_arguments"}
"""Fields that items of replies have, and that say nothing to a model."""


class InputItem(WireModel):
    """A message, a function call or the output of one; other items are refused by name."""

    model_config = ConfigDict(extra="allow")

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


Items = Annotated[
    list[InputItem], Field(min_length=1, max_length=MOST_ITEMS), BeforeValidator(check_parts)
]
Input = Annotated[
    Annotated[str, Tag("a-text")] | Annotated[Items, Tag("a-list")], Discriminator(text_or_list)
]


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """Return the messages that items are; calls are in the message of the assistant before them.

    Raises:
        ApiError: an item is of another type, or lacks what its type has.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        _check_known(item, place)
        match item.type:
            case "message":
                messages.append(_message(item, place))
            case "function_call":
                _add_call(messages, item, place)
            case "function_call_output":
                content = _text(item.output, f"{place}.output")
                call_id = _given(item.call_id, f"{place}.call_id")
                messages.append(
                    Message(role="tool", content=content, tool_call_id=call_id, name=item.name)
                )
            case _:
                raise ApiError(
                    400,
                    f"{place} is of type {item.type[:64]!r}; this server takes message, "
                    "function_call and function_call_output",
                    param=f"input.{index}",
                    code="unsupported_item",
                )
    return messages


def _check_known(item: InputItem, place: str) -> None:
    if item.type not in ("message", "function_call", "function_call_output"):
        return
    for name, value in (item.model_extra or {}).items():
        if value is not None and name not in _OF_REPLIES:
            raise ApiError(400, f"Unrecognized request argument supplied: {place}.{name[:64]}")


def _message(item: InputItem, place: str) -> Message:
    role = _given(item.role, f"{place}.role")
    content = _text(item.content, f"{place}.content")
    return Message(role=role, content=content)  # type: ignore[arg-type]


def _add_call(messages: list[Message], item: InputItem, place: str) -> None:
    name = _given(item.name, f"{place}.name")
    arguments = _given(item.arguments, f"{place}.arguments")
    call_id = _given(item.call_id, f"{place}.call_id")
    call = ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        calls = [*(last.tool_calls or []), call]
        messages.append(last.model_copy(update={"tool_calls": calls}))
    else:
        messages.append(Message(role="assistant", tool_calls=[call]))


def _given(value: str | None, place: str) -> str:
    if value is None:
        raise ApiError(400, f"Missing required parameter: '{place}'.", param=place)
    return value


def _text(content: str | list[ContentPart] | None, place: str) -> str | list[ContentPart]:
    """Return a content as chats have it."""
    if isinstance(content, str):
        return content
    if content is None:
        raise ApiError(400, f"Missing required parameter: '{place}'.", param=place)
    parts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal") or text is None:
            raise ApiError(
                400,
                f"{place}[{index}] is of type {part.type[:64]!r}; this model reads text parts "
                "alone, each with its 'text'",
                param=f"{place}[{index}]",
                code="unsupported_content",
            )
        parts.append(ContentPart(type="text", text=text))
    return parts


def memory_of(items: Sequence[InputItem]) -> int:
    """Return about how many bytes items take, which for empty parts is far more than their JSON."""
    values: list[Any] = [as_json(item) for item in items]
    found = len(json_bytes(values))
    while values:
        match values.pop():
            case dict() as one:
                found += _OBJECT_BYTES
                values += one.values()
            case list() as one:
                values += one
        found += _VALUE_BYTES
    return found


def as_json(item: InputItem) -> dict[str, Any]:
    """Return an item as it was given."""
    return item.model_dump(exclude_none=True)
