"""Chat templates: messages to text by the model's jinja2 template.

A template is a program from a stranger, so it runs in jinja2's immutable sandbox, with the options,
filters and globals of transformers, whose templates it is written for. jinja2's sandbox alone lets
templates store private attributes in a namespace, and says nothing of the text's parts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox, utils
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Macro

from pcg.errors import ConfigError, GenerationError

Message = Mapping[str, Any]
Span = tuple[int, int]
"""The first character and the end of a part of a text."""
# Private-use characters: the ends of a generation block.
_OPEN, _CLOSE = "\U000f0100", "\U000f0101"
_MARKS = "pcg_marks"
_CUTS = (
    # Turns before the last question: Qwen3 and 3.5, GLM-4.5, LFM2.5, Gemma 4; Nemotron 3.
    (re.compile(r"loop\.index0 > \w+\.last_(?:query|user)_(?:index|idx)\b"), "true"),
    (re.compile(r"loop\.index0 < \w+\.last_(?:query|user)_(?:index|idx)\b"), "false"),
    # Qwen3: turns without reasoning between the calls of tools.
    (re.compile(r"loop\.last or \(not loop\.last and reasoning_content\)"), "true"),
)
"""Conditions of known families that drop the reasoning of some turns, and what keeps it."""
_REASONING = re.compile(r"\.split\((['\"])</think>\1\)\[0\]")
_ANSWER = re.compile(r"\.split\((['\"])</think>\1\)\[-1\]")
"""Expressions that take the reasoning, or the answer, out of a content."""


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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sources,)

    @cached_property
    def training(self) -> "ChatTemplate":
        """The template without what drops the reasoning of earlier turns, to learn all of them.

        Known are conditions of Qwen3, Qwen3.5, GLM-4.5, Nemotron 3, LFM2.5 and Gemma 4, and
        templates that keep the answer alone, as those of DeepSeek-R1's distilled models and QwQ.
        """
        sources = dict(self.sources)
        for name, source in sources.items():
            for cut, kept in _CUTS:
                source = cut.sub(kept, source)
            sources[name] = source if _REASONING.search(source) else _ANSWER.sub("", source)
        return self if sources == self.sources else ChatTemplate(sources)

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
                **{"documents": None, **variables},
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


def _environment() -> jinja2.Environment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
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


class _Namespace(utils.Namespace):
    """`namespace(…)` without private attributes."""

    def __init__(*args: Any, **items: Any) -> None:  # so that `namespace(self=…)` works
        self, *rest = args
        attributes = dict(*rest, **items)
        for name in attributes:
            _refuse_private(name)
        utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _Generation(ext.Extension):
    """`{% generation %}`: its body, between marks if the context asks for them."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_wrap", [nodes.Name(_MARKS, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _wrap(self, marks: Any, caller: Macro) -> str:
        said = str(caller())
        return f"{_OPEN}{said}{_CLOSE}" if marks else said
