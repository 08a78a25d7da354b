"""From messages to the tokens of a prompt.

The prompt of a chat: messages by the chat template, and then tokens.

It runs beside the event loop. A template that a client sends is a program of a stranger's, which
jinja2's sandbox keeps from everything but time and memory; only an operator may allow it.

Chats on their way to the engine: what an endpoint asks for becomes one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pcg.errors import ConfigError
from pcg.runtime.requests.request import RequestFields
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import Service, Submitted, check_length
from pcg.serve.openai.call import Call
from pcg.serve.openai.chat.messages import Message, template_messages
from pcg.serve.openai.chat.tool_use import AskedTools, ChatSupport, ToolUse, shown_to
from pcg.serve.openai.generation_config import GenerationConfig

# ----------------------------------------------------------------------------------------- template


_RESERVED = frozenset(
    {
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
)
"""Variables of a template that have fields of their own, or none."""
_END = "\U000f0103 "
"""A private-use character and a space, behind the content of a message that is continued."""


@dataclass(frozen=True)
class ChatRequest:
    """The chat that a template makes a prompt of.

    Attributes:
        messages: as `template_messages` returns them.
        tools: JSON schemas of functions; None for none.
        variables: further variables of the template.
        chat_template: a template instead of the model's.
        max_model_len: the most tokens of a prompt and its output; None if there is no bound.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    max_model_len: int | None = None


def prompt_of(tokenizer: Tokenizer | None, chat: ChatRequest) -> list[int]:
    """Return the tokens of a chat.

    Raises:
        ApiError: the model has no template, or it refuses the messages.
        GenerationError: the template refuses the messages, or fails on them.
    """
    for name in chat.variables:
        if name in _RESERVED:
            raise ApiError(
                400,
                f"chat_template_kwargs has {name!r}, which is not a variable for clients",
                param="chat_template_kwargs",
            )
    tokenizer = _with_template(tokenizer, chat.chat_template)
    variables = {**chat.variables, "documents": chat.documents, "tools": chat.tools}
    if not chat.continue_final_message:
        text = tokenizer.render_chat(
            chat.messages, add_generation_prompt=chat.add_generation_prompt, **variables
        )
    else:
        text = _open_ended(tokenizer, chat, variables)
    if not text:
        raise ApiError(400, "The chat template makes an empty prompt of the messages.")
    check_length(text, chat.max_model_len)
    return tokenizer.encode(text, add_special_tokens=chat.add_special_tokens)


def _with_template(tokenizer: Tokenizer | None, chat_template: str | None) -> Tokenizer:
    if tokenizer is None:
        raise ApiError(
            400,
            "The model came without a tokenizer, so messages cannot become tokens; use "
            "/v1/completions with token ids.",
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


def _open_ended(tokenizer: Tokenizer, chat: ChatRequest, variables: Mapping[str, Any]) -> str:
    """Render messages up to the end of the last one's content.

    Where the template trims contents, the text ends without white space, as in transformers: the
    space behind the mark is there only if the template left it.
    """
    *before, last = chat.messages
    content = last.get("content") or ""
    if isinstance(content, list):
        *parts, part = content
        marked: Any = [*parts, {**part, "text": f"{part['text']}{_END}"}]
    else:
        marked = f"{content}{_END}"
    text = tokenizer.render_chat(
        [*before, {**last, "content": marked}], add_generation_prompt=False, **variables
    )
    said, found, behind = text.rpartition(_END.strip())
    if not found:
        raise ApiError(
            400,
            "continue_final_message needs a chat template that writes the last message's content",
            param="continue_final_message",
        )
    said = said.replace(_END, "").replace(_END.strip(), "")
    return said if behind.startswith(" ") else said.rstrip()


# --------------------------------------------------------------------------------------- generation


_GUIDES = (
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


@dataclass(frozen=True)
class Chat:
    """A chat to continue.

    Attributes:
        fields: the fields of the request; without `max_new_tokens`, as many as fit are generated.
        template: further arguments of `ChatRequest`.
    """

    messages: Sequence[Message]
    tools: AskedTools
    fields: RequestFields
    template: Mapping[str, Any] = field(default_factory=dict)


async def submit_chat(call: Call, chat: Chat, reply_id: str) -> tuple[Call, Submitted, ToolUse]:
    """Submit a chat; returns its call with all names, the request, and how its output is read.

    Raises:
        ApiError: the chat cannot be, or has no place.
        GenerationError: the template refuses the messages, or a field cannot be.
        EngineError: the engine takes no requests.
    """
    with call.names.naming():
        prompt, use = await call.service.beside(call.caller, prepared, call.service, chat)
    fields: RequestFields = {**chat.fields}
    for name in use.fields:
        if name in _GUIDES and (given := next((g for g in _GUIDES if g in fields), None)):
            raise ApiError(
                400,
                f"{call.names.names[given]} and these tools cannot be given together; use "
                f"{chat.tools.content_field}, or tool_choice='none'",
                param=call.names.names[given],
            )
    fields = {**fields, **use.fields}
    if "guided_grammar" in use.fields:
        of_content = "" if chat.tools.content is None else f" and of {chat.tools.content_field}"
        names = call.names.with_tools(f"The schemas of the tools{of_content}")
        call = replace(call, names=names)
    if use.names == () or "guided_grammar" not in use.fields:
        content = chat.tools.content
        if content is not None:
            fields["guided_json"] = content
    if "max_new_tokens" not in fields:
        room = await call.service.room(call.model)
        kept = fields.get("truncate_prompt_tokens")
        length = min(len(prompt), kept if isinstance(kept, int) and kept > 0 else room)
        most = call.service.part(GenerationConfig).defaults.max_new_tokens or room
        fields["max_new_tokens"] = max(1, min(room - length, most))
    (submitted,) = await call.submit([prompt], fields, reply_id)
    return call, submitted, use


def prepared(service: Service, chat: Chat) -> tuple[list[int], ToolUse]:
    """Return a chat's tokens and tools; takes milliseconds, so it is for a thread."""
    support = service.part(ChatSupport)
    if chat.template.get("chat_template") is not None and not support.trusts_templates:
        raise ApiError(
            400,
            "chat_template is not taken from requests: a template is a program. The operator may "
            "allow it by --trust-request-chat-template.",
            param="chat_template",
        )
    messages = template_messages(
        chat.messages, knows_developer=support.knows_developer, reads_parts=support.reads_parts
    )
    use = chat.tools.use(support.tools)
    shown = use.shown
    if chat.template.get("chat_template") is None:
        messages, shown = shown_to(support.tools, messages, use)
    bound = service.max_model_len
    request = ChatRequest(messages, shown, max_model_len=bound, **chat.template)
    return prompt_of(support.tokenizer, request), use
