"""The prompt of a chat: messages by the chat template, and then tokens.

It runs beside the event loop. A template that a client sends is a program of a stranger's, which
jinja2's sandbox keeps from everything but time and memory; only an operator may allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcg.errors import ConfigError
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.errors import ApiError
from pcg.serve.openai.text_bound import check_length

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
