"""Chat templates: messages to text by the model's jinja2 template; and checks of messages.

A template is an untrusted program, so it runs in jinja2's immutable sandbox, with the options,
filters and globals of transformers, for which templates are written. This file extends the sandbox:
namespaces refuse private attributes, and generation blocks are marked.

Messages have OpenAI's format. Every error names the place, for lines of data files and for
requests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Self

import jinja2
from jinja2 import ext, nodes, sandbox, utils
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Macro

from pcg.errors import ConfigError, DataError, GenerationError
from pcg.files import expanded, is_file, json_value, read_text, shown_path
from pcg.units import shown

Message = Mapping[str, Any]
Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""
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
"""Conditions of known templates that drop the reasoning of some turns, with replacements."""
_REASONING = re.compile(r"\.split\((['\"])</think>\1\)\[0\]")
_ANSWER = re.compile(r"\.split\((['\"])</think>\1\)\[-1\]")
"""Expressions that extract the reasoning or the answer from a content."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold the reasoning before its content."""
_READS = re.compile(rf"""(?:\.|\[['"]|get\(['"])({"|".join(REASONING)})\b""")
_JOINS_ARGUMENTS = re.compile(r"\+\s*\w+\[(['\"])function\1\]\[(['\"])arguments\2\]\s*\+")
"""Concatenations of DeepSeek's templates, which need text where others dump objects."""
_NO_CONTENT = re.compile(r"\[(['\"])content\1\] is none")
_PROBE = "\U000f0103"


class ChatTemplate:
    """The compiled chat templates of a model.

    Args:
        sources: template texts by name: "default", and optionally "tool_use" for chats with tools.

    Raises:
        ConfigError: "default" is missing, or a template is not valid jinja.
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
            except Exception as error:  # jinja2 evaluates constant expressions, which may fail
                kind = type(error).__name__
                raise ConfigError(f"chat template {name!r} fails with {kind}: {error}") from error
        self._forms: dict[str, _Form] = {}  # of templates that were rendered

    @classmethod
    def read(cls, template: str | os.PathLike[str]) -> Self:
        """Return the template of a file, or of a text, which has braces.

        Raises:
            ConfigError: the file is missing, or the template is not valid jinja.
        """
        if isinstance(template, str) and "{" in template:
            return cls({"default": template})
        path = expanded(template)
        if not is_file(path):
            raise ConfigError(
                f"no chat template file {shown_path(path)}; give a path, or the template's text"
            )
        return cls({"default": read_text(path, ConfigError)})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sources,)

    @cached_property
    def training(self) -> ChatTemplate:
        """The template without conditions that drop the reasoning of earlier turns.

        Supported are conditions of Qwen3, Qwen3.5, GLM-4.5, Nemotron 3, LFM2.5 and Gemma 4, and
        templates that keep only the answer, such as those of DeepSeek-R1's distilled models and
        QwQ.
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
        """Render messages as text, in the form that the template reads.

        Raises:
            GenerationError: the template refuses the messages, or fails on them.
        """
        name = self._name(tools)
        template = self._templates[name]
        if name not in self._forms:
            self._forms[name] = _Form.of(self.sources[name], template)
        try:
            return template.render(
                messages=[self._forms[name].shown(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **{"documents": None, **variables},
            )
        except jinja2.TemplateError as error:
            raise GenerationError(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # templates may raise any error
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

        Return None if the template has no such blocks, or marks change the text.
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
        # A template that trims captured text may trim marked text differently.
        return (plain, spans) if text == plain else None

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"


@dataclass(frozen=True)
class _Form:
    """The form of messages that a template reads.

    Attributes:
        reasoning: the keys of a message that it reads reasoning from.
        joins_arguments: the arguments of calls have to be text.
        no_content: the content of a message with calls has to be None if it is empty.
        only_parts: contents have to be lists of parts.
    """

    reasoning: tuple[str, ...]
    joins_arguments: bool
    no_content: bool
    only_parts: bool

    @classmethod
    def of(cls, source: str, template: jinja2.Template) -> _Form:
        """Return the form that a template reads, by its source and by two renderings."""
        shows = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            messages = [{"role": "user", "content": content}]
            tokens = dict.fromkeys(("bos_token", "eos_token"), "")
            shows.append(False)
            with suppress(Exception):  # templates may raise any error
                shows[-1] = _PROBE in template.render(messages=messages, **tokens)
        return cls(
            reasoning=tuple(dict.fromkeys(_READS.findall(source))),
            joins_arguments=_JOINS_ARGUMENTS.search(source) is not None,
            no_content=_NO_CONTENT.search(source) is not None,
            only_parts=shows == [False, True],
        )

    def shown(self, message: Message) -> Message:
        """Return a message in this form."""
        if not isinstance(message, Mapping):
            return message
        changed = dict(message)
        for key in REASONING:
            if key in changed and self.reasoning and key not in self.reasoning:
                changed.setdefault(self.reasoning[0], changed.pop(key))
        content, calls = changed.get("content"), changed.get("tool_calls")
        if calls and self.no_content and content == "":
            changed["content"] = None
        if calls and self.joins_arguments:
            changed["tool_calls"] = [_with_text(call) for call in calls]
        if self.only_parts and isinstance(content, str):
            changed["content"] = [{"type": "text", "text": content}]
        return changed


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON."""
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = _tojson(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _environment() -> jinja2.Environment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    # Instead of the classes, whose attributes would give templates access to more.
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
    """`{% generation %}`: its body, between marks if the context has them."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_wrap", [nodes.Name(_MARKS, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _wrap(self, marks: Any, caller: Macro) -> str:
        said = str(caller())
        return f"{_OPEN}{said}{_CLOSE}" if marks else said


_RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "chat_template"))


def check_variables(value: Any, where: str) -> dict[str, Any]:
    """Return the variables of a chat template that are not null. DataError: no such object."""
    if not isinstance(value, Mapping) or _RESERVED.intersection(value):
        raise DataError(
            f"{where} is {shown(value)}; expected an object without {', '.join(sorted(_RESERVED))}"
        )
    return {name: item for name, item in value.items() if item is not None}


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_messages(
    value: Any, name: str, where: str, *, keep_parts: bool = False
) -> list[dict[str, Any]]:
    """Check a list of messages; contents become text, and the arguments of tool calls objects.

    Args:
        name: the value's name in errors, such as "'messages'".
        where: the value's place in errors, such as "train.jsonl line 7".
        keep_parts: True to keep lists of text parts as contents; False to join parts by line
            breaks, as vLLM does.
    Returns:
        New messages, without null keys and empty tool calls. The content of an assistant's message
        with only tool calls is "".
    Raises:
        DataError: the value is not a list of messages, or a message has no text.
    """
    checked = []
    for index, message in enumerate(require_list(value, name, where)):
        label = f"{name}[{index}]"
        place = f"{where}: {label}"
        if not isinstance(message, Mapping):
            raise DataError(f"{place} is {kind_of(message)}; expected an object")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(f"{place} has role {role!r}; use one of {', '.join(ROLES)}")
        clean = {key: item for key, item in message.items() if item is not None}
        if clean.get("tool_calls") == []:  # tables give each message all keys
            del clean["tool_calls"]
        if "tool_calls" in clean:
            clean["tool_calls"] = _tool_calls(clean["tool_calls"], f"{label} 'tool_calls'", where)
        if "content" not in clean and "tool_calls" in clean and role == "assistant":
            clean["content"] = ""
        clean["content"] = _content(clean.get("content"), f"{label} 'content'", where, keep_parts)
        checked.append(clean)
    return checked


def _content(value: Any, name: str, where: str, keep_parts: bool) -> str | list[dict[str, str]]:
    if not isinstance(value, list):
        return require_string(value, name, where)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        if kind != "text":
            raise DataError(f"{where}: {name}[{index}] is of type {kind!r}; only text is supported")
        texts.append(require_string(part.get("text"), f"{name}[{index}] 'text'", where))
    if keep_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _tool_calls(value: Any, name: str, where: str) -> list[Any]:
    """Return tool calls with arguments as objects; OpenAI writes them as JSON in a string."""
    calls = []
    for index, call in enumerate(require_list(value, name, where)):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: {name}[{index}] has no 'function' with a 'name'")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            of_call = f"{where}: the JSON of the 'arguments' of {name}[{index}]"
            arguments = json_value(arguments, of_call, DataError)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def require_list(value: Any, name: str, where: str) -> list[Any]:
    """Return a list; refuse other values, and an empty list."""
    if not isinstance(value, list):
        raise DataError(f"{where}: {name} is {kind_of(value)}; expected a list")
    if not value:
        raise DataError(f"{where}: {name} is empty")
    return value


def require_string(value: Any, name: str, where: str) -> str:
    """Return a string; refuse other values."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {kind_of(value)}; expected a string")
    return value


def kind_of(value: Any) -> str:
    """Describe the kind of a JSON value, for errors."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null or missing"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    name = type(value).__name__
    return kinds.get(type(value), f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}")
