"""Chat templates: messages to text by the model's jinja2 template, and what the assistant said.

A template is a program from a stranger, so it runs in jinja2's immutable sandbox, with the options,
filters and globals of transformers, whose templates it is written for. jinja2's sandbox alone lets
templates store private attributes in a namespace, and says nothing of the text's parts.

Finetuning learns the assistant's messages, which are found in the text in one of three ways:

    marks     a template with {% generation %} … {% endgeneration %} marks them itself;
    prefixes  the text of messages[:i] with the generation prompt ends where message i begins, and
              the text of messages[:i + 1] where it ends, if both begin the whole text;
    contrast  a template that rewrites earlier turns, say without their reasoning, has no such
              prefixes: the text with another content in message i differs in that content alone.

A span includes the special token that ends the turn, so that the model learns to stop, but not the
line break that many templates add, which the model never writes.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from pcg.errors import ConfigError, DataError, GenerationError

Message = Mapping[str, Any]
Span = tuple[int, int]
"""The first character and the end of a part of a text."""
Render = Callable[[Sequence[Message], bool], str]
"""Renders messages; the flag is add_generation_prompt."""

# Private-use characters: the ends of a generation block, and a content that no message has.
_OPEN, _CLOSE, _OTHER = "\U000f0100", "\U000f0101", "\U000f0102"
_MARKS = "pcg_marks"


class ChatTemplate:
    """The compiled chat templates of a model.

    Args:
        sources: template texts by name; "default" is used unless there are tools and a "tool_use".

    Raises:
        ConfigError: there is no "default", or a template is not valid jinja.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        if "default" not in sources:
            raise ConfigError(
                f"the chat templates are named {', '.join(sorted(sources)) or 'nothing'}; "
                'one of them must be "default"'
            )
        environment = _environment()
        self.sources = dict(sources)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"chat template {name!r}, line {error.lineno}: {error.message}"
                ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render messages as text.

        Raises:
            GenerationError: the template refuses the messages, or fails on them.
        """
        try:
            return self._templates[self._name(tools)].render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise GenerationError(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # a template can fail as any program can
            kind = type(error).__name__
            raise GenerationError(f"the chat template fails with {kind}: {error}") from error

    def marked_spans(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[str, list[Span]] | None:
        """Return the rendered messages and the spans of their generation blocks.

        None if the template has no such blocks, or their marks change the text.
        """
        if "generation" not in self.sources[self._name(tools)]:
            return None
        plain = self.render(messages, tools=tools, **variables)
        marked = self.render(messages, tools=tools, **{**variables, _MARKS: True})
        if _OPEN in plain or _CLOSE in plain or _OPEN not in marked:
            return None
        spans: list[Span] = []
        text = ""
        for part in marked.split(_OPEN):
            said, close, rest = part.partition(_CLOSE)
            if close:
                spans.append((len(text), len(text) + len(said)))
            text += said + rest
        # A template that trims what it captured trims other text with the marks than without.
        return (plain, spans) if text == plain else None

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"


# ----------------------------------------------------------------------------- the sandbox


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    # Instead of the classes, whose attributes reach further than a template should.
    environment.globals["dict"] = lambda *args, **items: dict(*args, **items)
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON as transformers does: without jinja2's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(…)` without private attributes."""

    def __init__(*args: Any, **items: Any) -> None:  # so that `namespace(self=…)` works
        self, *rest = args
        attributes = dict(*rest, **items)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: its body, between marks if the context asks for them."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_wrap", [jinja2.nodes.Name(_MARKS, "load")])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _wrap(self, marks: Any, caller: jinja2.runtime.Macro) -> str:
        said = str(caller())
        return f"{_OPEN}{said}{_CLOSE}" if marks else said


# ----------------------------------------------------------------------------- the assistant's text


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


def _contrast(text: str, messages: Sequence[Message], index: int, render: Render) -> Span:
    """Find the content of a message by changing it."""
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
