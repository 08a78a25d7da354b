"""Messages on the wire, and the form that a model's chat template reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from pcg.errors import DataError
from pcg.runtime.text.chat import check_messages
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel

MOST_MESSAGES = 4096
MOST_PARTS = 8_192
"""The most parts and tool calls of all messages: to check so many takes a tenth of a second."""


class ContentPart(WireModel):
    """A part of a message's content; text alone is supported, and others are refused by name."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None


def text_or_list(value: Any) -> str:
    """Return the branch of a union of a text and a list, for `Discriminator`.

    The names of branches are left out of errors, as those with a hyphen are.
    """
    return "a-list" if isinstance(value, list) else "a-text"


Content = Annotated[
    Annotated[str, Tag("a-text")] | Annotated[list[ContentPart], Tag("a-list")],
    Discriminator(text_or_list),
]


class CalledFunction(WireModel):
    """The function of a tool call; OpenAI's client sends what it parsed back, without effect."""

    name: str
    arguments: str | dict[str, Any]
    parsed_arguments: Any = None


class ToolCall(WireModel):
    """A tool call of an assistant's message."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(WireModel):
    """A message of any role.

    What an assistant's message of a reply has beside its text may come back: a refusal is its text,
    what OpenAI's client parsed of it has no effect, and annotations, audio and function_call are
    refused unless they are empty.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    parsed: Any = None


def check_parts(messages: Any) -> Any:
    """Return messages or items as they came, before they are validated.

    ValueError: they have too many parts together.
    """
    if isinstance(messages, list):
        fields = ("content", "output", "tool_calls")
        found = [one.get(name) for one in messages if isinstance(one, dict) for name in fields]
        count = sum(len(parts) for parts in found if isinstance(parts, list))
        if count > MOST_PARTS:
            raise ValueError(f"{count} parts and tool calls; use at most {MOST_PARTS} together")
    return messages


Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MOST_MESSAGES), BeforeValidator(check_parts)
]


def template_messages(
    messages: Sequence[Message], *, knows_developer: bool, reads_parts: bool
) -> list[dict[str, Any]]:
    """Return messages as a chat template reads them.

    Args:
        knows_developer: False for a template without the role, where a developer's messages are a
            system's.
        reads_parts: False for a template that writes texts alone, where parts are joined by line
            breaks.
    Raises:
        ApiError: a message has no text, or has what is no text.
    """
    plain = [_plain(message, index) for index, message in enumerate(messages)]
    try:
        checked = check_messages(plain, "'messages'", "the request", keep_parts=reads_parts)
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from error
    if not knows_developer:
        for message in checked:
            if message["role"] == "developer":
                message["role"] = "system"
    return checked


def _plain(message: Message, index: int) -> dict[str, Any]:
    for name in ("annotations", "audio", "function_call"):
        if getattr(message, name):
            raise ApiError(
                400,
                f"messages[{index}].{name} is not supported; leave it out"
                + ("; use tool_calls" if name == "function_call" else ""),
                param=f"messages.{index}.{name}",
            )
    if message.tool_calls and message.role != "assistant":
        raise ApiError(
            400,
            f"messages[{index}] has tool_calls, and the role {message.role!r}; only an assistant's "
            "may",
            param=f"messages.{index}.tool_calls",
        )
    found: dict[str, Any] = {"role": message.role, "content": _content(message, index)}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if message.tool_calls:
        found["tool_calls"] = [
            call.model_dump(exclude_none=True, exclude={"function": {"parsed_arguments"}})
            for call in message.tool_calls
        ]
    if message.role == "assistant" and found["content"] is None:
        found["content"] = ""
    return found


def _content(message: Message, index: int) -> str | list[dict[str, Any]] | None:
    if not isinstance(message.content, list):
        return message.refusal if message.content is None else message.content
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(message.content):
        text = part.text
        if part.type in ("text", "input_text", "output_text") and text is not None:
            parts.append({"type": "text", "text": text})
        elif part.type == "refusal" and part.refusal is not None:
            parts.append({"type": "text", "text": part.refusal})
        else:
            raise ApiError(
                400,
                f"messages[{index}].content[{place}] is of type {part.type[:64]!r}; this model "
                "reads text parts alone, each with its 'text'",
                param=f"messages.{index}.content.{place}",
                code="unsupported_content",
            )
    return parts
