"""The assistant's messages in a chat's text, which finetuning learns, found in one of three ways.

    marks     a template with {% generation %} … {% endgeneration %} marks them itself;
    prefixes  the text of messages[:i] with the generation prompt ends where message i begins, and
              the text of messages[:i + 1] where it ends, if both begin the whole text;
    contrast  a template that rewrites earlier turns, say without their reasoning, or that ends
              every text with the assistant's header, as Llama 3's first ones, has no such prefixes:
              the text with another content in message i differs in that content alone.

A span includes the special token that ends the turn, so that the model learns to stop, but not the
line break that many templates add, which the model never writes.
"""

from collections.abc import Callable, Collection, Sequence
from os.path import commonprefix

from pcg.errors import DataError, GenerationError
from pcg.runtime.text.chat import Message, Span

Render = Callable[[Sequence[Message], bool], str]
"""Renders messages; the flag is add_generation_prompt."""
_OTHER = "\U000f0102"
"""A private-use character, as a content that no message has."""


def assistant_spans(
    messages: Sequence[Message],
    learn: Collection[int],
    render: Render,
    marked: tuple[str, list[Span]] | None,
    ends: Sequence[str],
) -> tuple[str, list[Span]]:
    """Render a chat, and find the assistant's messages in its text.

    Args:
        learn: indexes of the assistant messages to find.
        marked: the result of `ChatTemplate.marked_spans`.
        ends: texts of special tokens that may end a turn.
    Returns:
        The text, and the spans to learn, in order.
    Raises:
        DataError: a message cannot be found in the text.
        GenerationError: the template refuses the messages.
    """
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if marked is not None:
        text, spans = marked
        if len(spans) == len(assistants):
            return text, [span for i, span in zip(assistants, spans, strict=True) if i in learn]
        if len(learn) == len(assistants):
            return text, spans
    text = render(messages, False)
    return text, [_span(text, messages, i, render, ends) for i in sorted(learn)]


def _span(
    text: str, messages: Sequence[Message], index: int, render: Render, ends: Sequence[str]
) -> Span:
    before = _prefix(text, messages[:index], True, render)
    after = _prefix(text, messages[: index + 1], False, render)
    if after is not None and _is_always_prompted(messages[: index + 1], render):
        after = None  # the text so far has a header that no message has
    if before is not None and after is not None:
        return before, _without_line_break(text, before, after, ends)
    start, end = _contrast(text, messages, index, render)
    if before is not None and before <= start:
        start = before
    if after is not None and after >= end:
        return start, _without_line_break(text, start, after, ends)
    return start, _with_end_of_turn(text, end, ends)


def _prefix(
    text: str, messages: Sequence[Message], add_generation_prompt: bool, render: Render
) -> int | None:
    """Return the length of the first messages' text; None unless the whole text begins with it."""
    try:
        prefix = render(messages, add_generation_prompt)
    except GenerationError:  # a template may refuse a chat without a user, or without messages
        return None
    return len(prefix) if text.startswith(prefix) else None


def _is_always_prompted(messages: Sequence[Message], render: Render) -> bool:
    """Return True if the generation prompt ends the text although it was not asked for.

    It is then no beginning of a longer chat's text, and asking for it changes nothing.
    """
    text = render(messages, False)
    if render(messages, True) != text:
        return False
    try:
        longer = render([*messages, {"role": "user", "content": _OTHER}], False)
    except GenerationError:  # a template may refuse what comes next
        return False
    return not longer.startswith(text)


def _contrast(text: str, messages: Sequence[Message], index: int, render: Render) -> Span:
    """Find the content of a message by changing it."""
    message = messages[index]
    other = ""
    if message.get("content") and not message.get("tool_calls"):
        changed = [*messages[:index], {**message, "content": _OTHER}, *messages[index + 1 :]]
        other = render(changed, False)
    if _OTHER not in other:
        raise DataError(
            "the chat template rewrites earlier turns, or ends every text with the assistant's "
            f"header, and message {index} cannot be found in its text; mark the assistant's text "
            "in the template with {% generation %} … {% endgeneration %}, or give the message "
            '"weight": 0'
        )
    start = _common_length(text, other)
    tail = _common_length(text[start:][::-1], other[start:][::-1])
    return start, len(text) - tail


def _common_length(one: str, other: str) -> int:
    return len(commonprefix((one, other)))  # noqa: RUF071 (of texts, by characters)


def _without_line_break(text: str, start: int, end: int, ends: Sequence[str]) -> int:
    said = text[start:end].rstrip()
    return start + len(said) if said.endswith(tuple(ends)) else end


def _with_end_of_turn(text: str, end: int, ends: Sequence[str]) -> int:
    rest = text[end:].lstrip()
    first = next((mark for mark in ends if rest.startswith(mark)), "")
    return len(text) - len(rest) + len(first) if first else end
