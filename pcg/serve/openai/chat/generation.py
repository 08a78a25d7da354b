"""Chats on their way to the engine: what an endpoint asks for becomes one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pcg.runtime.requests.request import RequestFields
from pcg.serve.errors import ApiError
from pcg.serve.openai.call import Call
from pcg.serve.openai.chat.messages import Message, template_messages
from pcg.serve.openai.chat.template import ChatRequest, prompt_of
from pcg.serve.openai.chat.tool_use import AskedTools, ToolUse, shown_to
from pcg.serve.service import Service, Submitted

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
        most = call.service.generation.defaults.max_new_tokens or room
        fields["max_new_tokens"] = max(1, min(room - length, most))
    (submitted,) = await call.submit([prompt], fields, reply_id)
    return call, submitted, use


def prepared(service: Service, chat: Chat) -> tuple[list[int], ToolUse]:
    """Return a chat's tokens and tools; takes milliseconds, so it is for a thread."""
    support = service.chat
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
