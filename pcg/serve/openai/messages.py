"""Messages of a chat: on the wire, for a chat template, and as tokens of a prompt.

A client's template is untrusted code. jinja2's sandbox limits everything except its time and
memory, so only an operator may allow such templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from pcg.errors import ConfigError, DataError
from pcg.runtime.text.chat import check_messages
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import check_length
from pcg.serve.http.wire import WireModel

MOST_MESSAGES = 4096
MOST_PARTS = 8_192
"""The most parts and tool calls of all messages; checking them takes a tenth of a second."""
_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "documents",
    "messages",
    "pcg_marks",
    "self",
    "tokenize",
    "tools",
}
"""Names that chat_template_kwargs may not have: they have their own fields, or none."""
_END = "\U000f0103 "
"""A private-use character and a space, appended to the content of a message to continue."""


class ContentPart(WireModel):
    """A part of a message's content; only text is supported, other types are refused by name."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def plain(self) -> str | None:
        """The text of the part; None for a part of another type."""
        if self.type == "refusal":
            return self.refusal
        return self.text if self.type in ("text", "input_text", "output_text") else None

    def unsupported(self, place: str, param: str) -> ApiError:
        return ApiError(
            400,
            f"{place} is of type {self.type[:64]!r}; this model reads only text parts, each with "
            "its 'text'",
            param=param,
            code="unsupported_content",
        )


def text_or_list(value: Any) -> str:
    """Return the tag of a text or a list, for `Discriminator`.

    The hyphen marks tags, which errors omit.
    """
    return "a-list" if isinstance(value, list) else "a-text"


Content = Annotated[
    Annotated[str, Tag("a-text")] | Annotated[list[ContentPart], Tag("a-list")],
    Discriminator(text_or_list),
]


class CalledFunction(WireModel):
    """The function of a tool call; `parsed_arguments` of OpenAI's client has no effect."""

    name: str
    arguments: str | dict[str, Any]
    parsed_arguments: Any = None


class ToolCall(WireModel):
    """A tool call in an assistant's message."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(WireModel):
    """A message of any role.

    Clients send an assistant's reply back: a refusal counts as text, `parsed` has no effect, and
    annotations, audio and function_call must be empty.
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
    """Return messages or items unchanged, before their validation.

    ValueError: they have too many parts together.
    """
    if isinstance(messages, list):
        names = ("content", "output", "tool_calls")
        lists = [each.get(name) for each in messages if isinstance(each, dict) for name in names]
        count = sum(len(parts) for parts in lists if isinstance(parts, list))
        if count > MOST_PARTS:
            raise ValueError(f"{count} parts and tool calls; use at most {MOST_PARTS} together")
    return messages


Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MOST_MESSAGES), BeforeValidator(check_parts)
]


def template_messages(
    messages: Sequence[Message], *, knows_developer: bool, reads_parts: bool
) -> list[dict[str, Any]]:
    """Convert messages for a chat template.

    Args:
        knows_developer: False for a template without the role; developer messages become system
            messages.
        reads_parts: False for a template that accepts only texts; parts are joined by line breaks.
    Raises:
        ApiError: a message has no text, or has parts other than text.
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
            instead = "; use tool_calls" if name == "function_call" else ""
            text = f"messages[{index}].{name} is not supported; leave it out{instead}"
            raise ApiError(400, text, param=f"messages.{index}.{name}")
    if message.tool_calls and message.role != "assistant":
        raise ApiError(
            400,
            f"messages[{index}] has tool_calls and the role {message.role!r}; only the role "
            "'assistant' may have them",
            param=f"messages.{index}.tool_calls",
        )
    content: str | list[dict[str, Any]] | None = None
    if isinstance(message.content, list):
        content = []
        for place, part in enumerate(message.content):
            if part.plain is None:
                where = f"messages[{index}].content[{place}]"
                raise part.unsupported(where, f"messages.{index}.content.{place}")
            content.append({"type": "text", "text": part.plain})
    else:
        content = message.refusal if message.content is None else message.content
    if message.role == "assistant" and content is None:
        content = ""
    plain: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [
            call.model_dump(exclude_none=True, exclude={"function": {"parsed_arguments"}})
            for call in message.tool_calls
        ]
    return plain


@dataclass(frozen=True)
class Template:
    """The options of a chat template.

    Attributes:
        variables: further variables of the template.
        chat_template: a template that replaces the model's.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None


def check_continued(continues: bool | None, add_generation_prompt: bool | None) -> None:
    """Raise an ApiError if a message is to be continued and a new message started."""
    if continues and add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )


def prompt_of(
    tokenizer: Tokenizer | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template: Template,
    *,
    max_model_len: int | None = None,
) -> list[int]:
    """Return the tokens of a chat.

    Args:
        messages: the result of `template_messages`.
        tools: JSON schemas of functions, or None.
        max_model_len: the most tokens of a prompt and its output; None without a limit.
    Raises:
        ApiError: the model has no template, or an option is invalid.
        GenerationError: the template refuses the messages, or fails.
    """
    for name in template.variables:
        if name in _RESERVED:
            raise ApiError(
                400,
                f"chat_template_kwargs has {name!r}, which is not a variable for clients",
                param="chat_template_kwargs",
            )
    tokenizer = _with_template(tokenizer, template.chat_template)
    variables = {**template.variables, "documents": template.documents, "tools": tools}
    if template.continue_final_message:
        text = _open_ended(tokenizer, messages, variables)
    else:
        begins = template.add_generation_prompt
        text = tokenizer.render_chat(messages, add_generation_prompt=begins, **variables)
    if not text:
        raise ApiError(400, "The chat template renders the messages to an empty prompt.")
    check_length(text, max_model_len)
    return tokenizer.encode(text, add_special_tokens=template.add_special_tokens)


def _with_template(tokenizer: Tokenizer | None, chat_template: str | None) -> Tokenizer:
    if tokenizer is None:
        raise ApiError(
            400,
            "The model has no tokenizer, so messages cannot become tokens; use /v1/completions "
            "with token ids.",
            code="no_tokenizer",
        )
    if chat_template is not None:
        try:
            return tokenizer.with_template(chat_template)
        except ConfigError as error:
            raise ApiError(400, str(error), param="chat_template") from error
    if tokenizer.chat_template is None:
        raise ApiError(
            400,
            "The model has no chat template, so messages cannot become a prompt; use "
            "/v1/completions, or have the operator give --chat-template.",
            code="no_chat_template",
        )
    return tokenizer


def _open_ended(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render messages up to the end of the last message's content.

    If the template trims contents, the text is trimmed, too, as in transformers: the space after
    the mark shows whether the template trims.
    """
    *before, last = messages
    content = last.get("content") or ""
    if isinstance(content, list):
        *parts, part = content
        marked: Any = [*parts, {**part, "text": f"{part['text']}{_END}"}]
    else:
        marked = f"{content}{_END}"
    text = tokenizer.render_chat(
        [*before, {**last, "content": marked}], add_generation_prompt=False, **variables
    )
    written, mark, behind = text.rpartition(_END.strip())
    if not mark:
        raise ApiError(
            400,
            "continue_final_message needs a chat template that writes the last message's content",
            param="continue_final_message",
        )
    written = written.replace(_END, "").replace(_END.strip(), "")
    return written if behind.startswith(" ") else written.rstrip()
