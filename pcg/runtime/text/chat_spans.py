"""Which characters of a rendered chat the assistant wrote: what finetuning learns from.

A template does not say where a message begins in its output, so it is asked several times.

    marks     a template with {% generation %} blocks says it itself.
    prefixes  the text of messages[:i] with the generation prompt ends where message i begins; the
              text of messages[:i + 1] where it ends. True where both begin the whole text.
    contrast  some templates rewrite earlier turns (they drop the reasoning, say), so that no prefix
              matches. Then the whole chat is rendered again with another content in message i:
              the two texts differ in that content alone.

A span takes in the special token that ends the turn, so that the model learns to stop, and not the
line break that many templates put after it, which the model never writes.
"""

from collections.abc import Callable, Collection, Sequence

from pcg.errors import DataError, GenerationError
from pcg.runtime.text.chat import Message, Span

# Text of messages; the flag is add_generation_prompt.
Render = Callable[[Sequence[Message], bool], str]

# No message holds this private-use character.
_OTHER = "\U000f0102"


def assistant_spans(
    messages: Sequence[Message],
    learn: Collection[int],
    render: Render,
    marked: tuple[str, list[Span]] | None,
    ends: Sequence[str],
) -> tuple[str, list[Span]]:
    """Render a chat and find the assistant's messages in it.

    Args:
        messages: the chat.
        learn: indexes of the assistant messages to find.
        render: the template.
        marked: what the template's own marks say, if it has them.
        ends: texts of special tokens that may end a turn.
    Returns:
        The text, and one [start, end) in characters for each span to learn, in order.
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
    """Length of the text of the first messages, None unless the whole text begins with it."""
    try:
        prefix = render(messages, add_generation_prompt)
    except GenerationError:  # a template may refuse a chat without a user, or with no message
        return None
    return len(prefix) if text.startswith(prefix) else None


def _contrast(text: str, messages: Sequence[Message], index: int, render: Render) -> Span:
    """Where the content of a message lies, found by changing it."""
    message = messages[index]
    other = ""
    if message.get("content") and not message.get("tool_calls"):
        changed = [*messages[:index], {**message, "content": _OTHER}, *messages[index + 1 :]]
        other = render(changed, False)
    if _OTHER not in other:
        raise DataError(
            f"the chat template rewrites earlier turns, and message {index} cannot be found in its "
            "text; mark the assistant's text in the template with {% generation %} … "
            '{% endgeneration %}, or give the message "weight": 0'
        )
    start = _common_length(text, other)
    tail = _common_length(text[start:][::-1], other[start:][::-1])
    return start, len(text) - tail


def _common_length(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _without_line_break(text: str, start: int, end: int, ends: Sequence[str]) -> int:
    said = text[start:end].rstrip()
    return start + len(said) if said.endswith(tuple(ends)) else end


def _with_end_of_turn(text: str, end: int, ends: Sequence[str]) -> int:
    rest = text[end:].lstrip()
    first = next((mark for mark in ends if rest.startswith(mark)), "")
    return len(text) - len(rest) + len(first) if first else end
