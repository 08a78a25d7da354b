"""Chat templates: messages to text, through the jinja2 template that comes with a model.

A template is a program from a stranger, so it runs in jinja's immutable sandbox, with the options,
filters and globals that templates are written for (those of transformers):

    trim_blocks, lstrip_blocks, loop controls, tojson without HTML escapes,
    raise_exception(message), strftime_now(format), {% generation %} … {% endgeneration %}

`{% generation %}` marks what the assistant says; `marked_spans` reports where it lies in the text.
"""

import json
from collections.abc import Mapping, Sequence
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

from pcg.errors import ConfigError, GenerationError

Message = Mapping[str, Any]
Span = tuple[int, int]

# Private-use characters that stand for the two ends of a generation block while spans are sought.
_OPEN, _CLOSE = "\U000f0100", "\U000f0101"
_MARKS = "pcg_marks"


class ChatTemplate:
    """The compiled chat template of a model, or its several named ones.

    Attributes:
        sources: template texts by name; "default" is used unless there are tools and a "tool_use".
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        """Compile the templates.

        Raises:
            ConfigError: there is no "default", or a template is not valid jinja.
        """
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
        """Messages as text.

        Raises:
            GenerationError: the template refuses the messages, or fails on them.
        """
        template = self._templates[self._name(tools)]
        try:
            return template.render(
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
        """Messages as text, and the [start, end) characters of its generation blocks.

        Returns:
            None if the template has no generation blocks, or they cannot be told from the text.
        """
        if "generation" not in self.sources[self._name(tools)]:
            return None
        plain = self.render(messages, tools=tools, **variables)
        marked = self.render(messages, tools=tools, **{**variables, _MARKS: True})
        if _OPEN in plain or _CLOSE in plain or _OPEN not in marked:
            return None
        spans: list[Span] = []
        text = ""
        for piece in marked.split(_OPEN):
            said, close, rest = piece.partition(_CLOSE)
            if close:
                spans.append((len(text), len(text) + len(said)))
            text += said + rest
        # A template that trims what it captured trims other text with the marks than without.
        return (plain, spans) if text == plain else None

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # In place of the classes themselves, whose attributes reach further than a template should.
    environment.globals["dict"] = _dict
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*args: Any, **items: Any) -> dict[Any, Any]:
    return dict(*args, **items)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(…)`, without the attributes that Python keeps to itself."""

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
    """`{% generation %}`: its body, between marks when the context asks for marks."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_wrap", [jinja2.nodes.Name(_MARKS, "load")])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _wrap(self, marks: Any, caller: jinja2.runtime.Macro) -> str:
        said = str(caller())
        return f"{_OPEN}{said}{_CLOSE}" if marks else said
