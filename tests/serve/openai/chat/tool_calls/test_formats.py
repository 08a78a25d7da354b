"""The formats of tool calls: found in templates, and guides whose outputs their parsers read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
from tokenizers import AddedToken

from pcg.runtime.sampling.grammars import Grammars
from pcg.runtime.sampling.guides import Guide
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.options import ServeOptions
from pcg.serve.openai.tool_formats import (
    FORMATS,
    ArgumentsPiece,
    CallPiece,
    Mistral,
    Notation,
    ToolFormat,
    format_of,
    reads_tools,
)
from pcg.serve.openai.tools import CallGuide, GuidedTool
from tests.support import chat_templates, toy_tokenizers

TEMPLATES: dict[str, tuple[str, ToolFormat | None]] = {
    "hermes": (chat_templates.HERMES, FORMATS["hermes"]),
    "llama3": (chat_templates.LLAMA3, FORMATS["llama3_json"]),
    "mistral": (chat_templates.MISTRAL, Mistral()),
    "mistral by name": (chat_templates.MISTRAL_BY_NAME, Mistral(by_name=True)),
    "another": (chat_templates.XML, None),
    "none": (toy_tokenizers.CHATML, None),
    "one that refuses": ("{{ raise_exception('no tools') }}", None),
}
TOOLS = [
    GuidedTool(
        "f",
        {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/n"}},
            "required": ["x"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer"}},
        },
    ),
    GuidedTool("f2", {"type": "object", "properties": {}, "additionalProperties": False}),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(toy_tokenizers.save_chatml(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose markers are tokens, special ones and others."""
    backend = toy_tokenizers.byte_level()
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    backend.add_tokens(["<tool_call>", "</tool_call>", "[ARGS]", "<think>", "</think>"])
    directory = tmp_path_factory.mktemp("marked")
    return Tokenizer.load(toy_tokenizers.save(directory, backend, {"eos_token": "<|im_end|>"}))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_shows_the_format(plain: Tokenizer, name: str) -> None:
    template, expected = TEMPLATES[name]
    tokenizer = plain.with_template(template)
    assert format_of(tokenizer) == expected
    assert reads_tools(tokenizer) == (name not in ("none", "one that refuses"))


def test_the_operator_may_name_the_format(plain: Tokenizer) -> None:
    assert format_of(plain, "hermes") == FORMATS["hermes"]
    by_name = plain.with_template(chat_templates.MISTRAL_BY_NAME)
    assert format_of(by_name, "mistral") == Mistral(by_name=True)
    assert format_of(by_name, "llama3_json") == FORMATS["llama3_json"]
    assert format_of(replace(plain, chat_template=None)) is None
    assert format_of(None) is None
    (choices, _) = get_args(get_type_hints(ServeOptions)["tool_call_parser"])
    assert set(get_args(choices)) == set(FORMATS)


WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "f2", "arguments": {}}\n</tool_call>',
        "\n",
    ),
    "llama3_json": (
        '{"name": "f", "parameters": {"x": 1}}',
        '{"name": "f2", "parameters": {}}',
        "; ",
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
        '[TOOL_CALLS][{"name": "f2", "arguments": {}}]',
        None,
    ),
    "by name": ('[TOOL_CALLS]f[ARGS]{"x": 1}', "[TOOL_CALLS]f2[ARGS]{}", ""),
}


def follows(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """True if an output of this text is whole under the grammar."""
    assert tokenizer.eos_id is not None
    made = Grammars(tokenizer, 520, frozenset({tokenizer.eos_id})).begin(
        Guide("guided_grammar", grammar)
    )
    made.wait()
    assert made.error is None, made.error
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(made.matcher.try_consume_tokens(ids) == len(ids) and made.matcher.is_accepting())


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("as_tokens", [False, True])
def test_guides_allow_the_calls_of_the_format_alone(
    plain: Tokenizer, marked: Tokenizer, name: str, as_tokens: bool
) -> None:
    tokenizer = marked if as_tokens else plain
    found = FORMATS.get(name, Mistral(by_name=True))
    one, other, between = WRITTEN[name]
    both = (
        one[:-1] + ', {"name": "f2", "arguments": {}}]'
        if between is None
        else one + between + other
    )
    wrong = one.replace('"x"', '"y"').replace("1", "true")
    for is_forced, several in itertools.product((False, True), repeat=2):
        guide = CallGuide(TOOLS, is_forced, several)
        grammar = guide.grammar(found, Notation.of(tokenizer))
        assert follows(tokenizer, grammar, one)
        assert follows(tokenizer, grammar, other)
        assert follows(tokenizer, grammar, both) == several
        assert follows(tokenizer, grammar, "hello") == (not is_forced)
        assert not follows(tokenizer, grammar, wrong)
        thought = "<think>Hm, {hm}</think>"
        assert follows(tokenizer, grammar, f"{thought} hello") == (not is_forced)
        if as_tokens and found.opening:
            assert follows(tokenizer, grammar, f"{thought}\n{one}") == (not is_forced)
            assert not follows(tokenizer, grammar, f"{thought}<|im_start|>")
            assert not follows(tokenizer, grammar, f"{thought}\n{wrong}")
        if found.opening:
            assert follows(tokenizer, grammar, f"hello {one}") == (not is_forced)
        content = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
        if found.opening and not is_forced:
            grammar = replace(guide, content=content).grammar(found, Notation.of(tokenizer))
            assert follows(tokenizer, grammar, '{"a": 1}')
            assert follows(tokenizer, grammar, one)
            assert not follows(tokenizer, grammar, "hello")
    parser = found.parser(["f", "f2"])
    pieces = [*parser.push(both), *parser.finish()]
    joined = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsPiece))
    assert [piece.name for piece in pieces if isinstance(piece, CallPiece)] == ["f", "f2"]
    assert joined == '{"x": 1}{}'


def test_ids_are_what_templates_demand() -> None:
    made: dict[str, Any] = {name: one.new_call_id() for name, one in FORMATS.items()}
    assert made["hermes"].startswith("call_")
    assert made["mistral"].isalnum()
    assert len(made["mistral"]) == 9
    assert made["mistral"] != Mistral().new_call_id()
