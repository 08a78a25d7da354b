"""The spans of the assistant's messages in a chat's text, for finetuning, by three methods.

    marks     a template with {% generation %} … {% endgeneration %} marks the spans itself;
    prefixes  message i spans from the end of the text of messages[:i] with the generation prompt to
              the end of the text of messages[:i + 1], if both are prefixes of the whole text;
    contrast  for templates without such prefixes, which rewrite earlier turns, for example without
              reasoning, or end every text with the assistant's header, as early templates of
              Llama 3: texts with different contents in message i differ only in the content.

A span includes the token that ends the turn, so that the model learns to stop, but not the line
break that many templates add, which the model never generates. GLM-4 ends a turn with the token of
the next role: this token belongs to the turn, and is appended to the last turn.

A template that drops the text to learn, or its context, is refused.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from os.path import commonprefix

from pcg.errors import DataError, GenerationError
from pcg.runtime.text.chat import REASONING, Message, Span
from pcg.units import shown

Render = Callable[[Sequence[Message], bool], str]
"""Renders messages; the flag is add_generation_prompt."""
_MARK = re.compile("</?think>")
_OTHER = "\U000f0102"
"""A private-use character, as a content unequal to every message."""


def assistant_spans(
    messages: Sequence[Message],
    learn: Collection[int],
    render: Render,
    marked: tuple[str, list[Span]] | None,
    ends: Sequence[str],
    stops: Sequence[str] = (),
) -> tuple[str, list[Span]]:
    """Render a chat, and find the assistant's messages in its text.

    Args:
        learn: indexes of the assistant messages to find.
        marked: the result of `ChatTemplate.marked_spans`.
        ends: texts of special tokens that may end a turn.
        stops: texts of tokens that end the model's output; a turn must end with such a token. The
            first text is appended to a last turn without an end.
    Returns:
        The text, and the spans to learn, in order.
    Raises:
        DataError: a message, or a part of it, cannot be found in the text.
        GenerationError: the template refuses the messages.
    """
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    text, marked_parts = marked if marked is not None else (render(messages, False), [])
    if len(marked_parts) == len(assistants):
        spans = {i: span for i, span in zip(assistants, marked_parts, strict=True) if i in learn}
    elif marked is not None and marked_parts and len(learn) == len(assistants):
        said = "".join(text[slice(*span)] for span in marked_parts)
        for index in assistants:
            _check_said(said, messages, index)
        return text, marked_parts
    else:
        spans = {i: _span(text, messages, i, render, ends, stops) for i in sorted(learn)}
    for index, (start, end) in spans.items():
        _check_said(text[start:end], messages, index)
        text, end = _ended(text, (start, end), messages, index, render, ends, stops)
        spans[index] = start, end
    return text, list(spans.values())


def check_context(text: str, messages: Sequence[Message], render: Render) -> None:
    """Refuse a chat if its text lacks a message of the system or a user.

    Raises:
        DataError: names the message.
    """
    joined = _joined(text)
    for index, message in enumerate(messages):
        content = message.get("content")
        if message["role"] == "assistant" or not content or _joined(content) in joined:
            continue
        other = [*messages[:index], {**message, "content": _OTHER}, *messages[index + 1 :]]
        is_dropped = False
        with suppress(GenerationError):
            is_dropped = render(other, False) == render(messages, False)
        if is_dropped:
            raise DataError(
                f"the chat template drops message {index}, of role {message['role']!r}; put its "
                "content into a message that the template shows, or give another chat template"
            )


def _check_said(said: str, messages: Sequence[Message], index: int) -> None:
    """Refuse a message if the text to learn lacks a part of it."""
    joined = _joined(said)
    for part, name, fix in _parts(messages[index]):
        if _joined(part) not in joined:
            alone = "" if index == len(messages) - 1 else ", end a row of its own with it"
            raise DataError(
                f"the chat template drops {name} of message {index}, {shown(part.strip())}, which "
                f'would not be learned; {fix}{alone}, give the message "weight": 0, or give a '
                "chat template that shows it"
            )


def _parts(message: Message) -> Iterator[tuple[str, str, str]]:
    """Yield the learned texts of a message, each with its name and a fix."""
    *thoughts, answer = _MARK.split(message.get("content") or "")
    yield from ((thought, "the reasoning", "leave it out") for thought in thoughts)
    yield answer, "the content", "leave the message out"
    for key in REASONING:
        if isinstance(message.get(key), str):
            yield message[key], repr(key), "write it into the content as <think>…</think>"
    for call in message.get("tool_calls") or ():
        fix = "write the call into the content"
        yield call["function"]["name"], "a call", fix
        arguments = call["function"].get("arguments")
        for key in arguments if isinstance(arguments, dict) else ():
            yield json.dumps(key, ensure_ascii=False)[1:-1], "an argument of a call", fix


def _joined(text: str) -> str:
    return "".join(text.split())


def _ended(
    text: str,
    span: Span,
    messages: Sequence[Message],
    index: int,
    render: Render,
    ends: Sequence[str],
    stops: Sequence[str],
) -> tuple[str, int]:
    """Return the text and the end of a turn, extended by the token that ends the turn."""
    start, end = span
    said = text[start:end].rstrip()
    if said.endswith(tuple(stops)):
        return text, end
    behind = _with_end_of_turn(text, end, stops)
    if behind > end or index < len(messages) - 1 or text[end:].strip():
        return text, behind
    for role in ("tool", "user") if messages[index].get("tool_calls") else ("user",):
        try:
            longer = render([*messages, {"role": role, "content": _OTHER}], False)
        except GenerationError:  # a template may refuse the next message
            continue
        behind = _with_end_of_turn(longer, end, stops)
        if longer.startswith(text[:end]) and behind > end:
            return text[:end] + longer[end:behind], behind
    if said.endswith(tuple(ends)) or not stops:
        return text, end
    return text[:end] + stops[0], end + len(stops[0])


def _span(
    text: str,
    messages: Sequence[Message],
    index: int,
    render: Render,
    ends: Sequence[str],
    stops: Sequence[str],
) -> Span:
    before = _prefix(text, messages[:index], True, render)
    after = _prefix(text, messages[: index + 1], False, render)
    if (
        after is not None
        and not text[:after].rstrip().endswith(tuple(stops))
        and _is_always_prompted(messages[: index + 1], render)
    ):
        after = None  # the text so far has a header that no message has
    if before is None and after is not None and messages[index].get("tool_calls"):
        before = _shared_prefix(text, messages[:index], render)
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
    """Return the length of the first messages' text; None if it is no prefix of the whole text."""
    try:
        prefix = render(messages, add_generation_prompt)
    except GenerationError:  # a template may refuse a chat without a user, or without messages
        return None
    return len(prefix) if text.startswith(prefix) else None


def _shared_prefix(text: str, messages: Sequence[Message], render: Render) -> int | None:
    """Return the length of the part of the generation prompt that a message begins with.

    The prompt of a reasoning model may open reasoning that the message does not have.
    """
    with suppress(GenerationError):
        history, prompted = render(messages, False), render(messages, True)
        shared = re.sub("<[^<>]*$", "", commonprefix((text, prompted)))  # noqa: RUF071
        if shared.startswith(history) and len(shared) > len(history):
            return len(shared)
    return None


def _is_always_prompted(messages: Sequence[Message], render: Render) -> bool:
    """Return True if the generation prompt always ends the text, without a request for it.

    The text is then no prefix of a longer chat's text, and requesting the prompt has no effect.
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
    """Find the reasoning and the content of a message by changing them."""
    message = messages[index]
    other = ""
    if message.get("content") and not message.get("tool_calls"):
        spoken = {key: _OTHER for key in ("content", *REASONING) if key in message}
        other = render([*messages[:index], {**message, **spoken}, *messages[index + 1 :]], False)
    if _OTHER not in other:
        _check_said(text, messages, index)
        raise DataError(
            "the chat template rewrites earlier turns, or ends every text with the assistant's "
            f"header, and message {index} cannot be found in its text; mark the assistant's text "
            "in the template with {% generation %} … {% endgeneration %}, or give the message "
            '"weight": 0'
        )
    start = _common_length(text, other)
    tail = _common_length(text[start:][::-1], other[start:][::-1])
    return start, len(text) - tail


def _common_length(first: str, other: str) -> int:
    return len(commonprefix((first, other)))  # noqa: RUF071 (of texts, by characters)


def _without_line_break(text: str, start: int, end: int, ends: Sequence[str]) -> int:
    said = text[start:end].rstrip()
    return start + len(said) if said.endswith(tuple(ends)) else end


def _with_end_of_turn(text: str, end: int, ends: Sequence[str]) -> int:
    rest = text[end:].lstrip()
    first = next((mark for mark in ends if rest.startswith(mark)), "")
    return len(text) - len(rest) + len(first) if first else end
