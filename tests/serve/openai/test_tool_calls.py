"""Tool calls: formats found in templates, guides whose outputs their parsers read, any split."""

import itertools
import json
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    TextPiece,
    format_of,
    reads_tools,
)
from pcg.serve.openai.tools import CallGuide, GuidedTool
from tests.support import chat_templates, toy_tokenizers

NAMES = ("search", "add")
SEARCH = ("search", '{"query": "a \\"b\\" {c}", "n": [1, {"m": 2}]}')
ADD = ("add", '{"a": -1.5}')


def merged(pieces):
    content = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    calls = []
    for piece in pieces:
        if isinstance(piece, CallPiece):
            calls.append((piece.name, ""))
        elif isinstance(piece, ArgumentsPiece):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls


def parsed(name, parts):
    parser = FORMATS[name].parser(NAMES)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return merged([*pieces, *parser.finish()])


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name, arguments):
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name, arguments):
    return f'{{"name": "{name}", "arguments": {arguments}}}'


CASES = [
    ("hermes", "Hello.", "Hello.", []),
    ("hermes", hermes(*SEARCH), "", [SEARCH]),
    ("hermes", f"Let me see.\n{hermes(*SEARCH)}\n{hermes(*ADD)}\n", "Let me see.", [SEARCH, ADD]),
    ("hermes", "a <tool_ b < c\n", "a <tool_ b < c\n", []),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
    ("hermes", '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    # cut off within the arguments
    ("hermes", hermes(*SEARCH)[:60], "", [(SEARCH[0], SEARCH[1][:16])]),
    # in the other order, with further members, as a text, without arguments, with a brace too many
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"id": 7, "x": null, "name": "add", "arguments": {}}</tool_call>!',
        "!",
        [("add", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}}</tool_call>', "", [("add", "{}")]),
    ("llama3_json", "Hello {you}.", "Hello {you}.", []),
    ("llama3_json", llama(*SEARCH), "", [SEARCH]),
    ("llama3_json", f" <|python_tag|>{llama(*SEARCH)}; {llama(*ADD)}", "", [SEARCH, ADD]),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", "<|python", "<|python", []),
    ("llama3_json", llama(*ADD) + " and so on", " and so on", [ADD]),
    ("mistral", "Hello.", "Hello.", []),
    ("mistral", f"[TOOL_CALLS] [{mistral(*SEARCH)}, {mistral(*ADD)}]", "", [SEARCH, ADD]),
    ("mistral", f"Well, [TOOL_CALLS][{mistral(*ADD)}]\n", "Well,", [ADD]),
    ("mistral", f"[TOOL_CALLS]{mistral(*ADD)}", "", [ADD]),
    ("mistral", f"[TOOL_CALLS]search[ARGS]{SEARCH[1]}[TOOL_CALLS]add{ADD[1]}", "", [SEARCH, ADD]),
    ("mistral", f"[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{ADD[1]}", "", [ADD]),
    ("mistral", "[TOOL_CALLS][oh", "[TOOL_CALLS][oh", []),
    ("mistral", "[TOOL_CALLS] what is it {", "[TOOL_CALLS] what is it {", []),
    ("mistral", "[TOOL_CALLS]sear", "[TOOL_CALLS]sear", []),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_and_content_in_an_output(name, text, content, calls):
    assert parsed(name, [text]) == (content, calls)
    assert parsed(name, list(text)) == (content, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=6))
def test_any_split_finds_the_same(case, cuts):
    name, text, content, calls = case
    places = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parsed(name, parts) == (content, calls)


@pytest.mark.parametrize("before", ["", "a", "[TOOL_CALLS]", "<|python_tag|>", "<tool_call>"])
@pytest.mark.parametrize("name", FORMATS)
def test_white_space_is_held_back_within_a_bound(name, before):
    """Else each token's reading would be longer than the last one's."""
    parser = FORMATS[name].parser(("add",))
    said = "".join(_texts(parser.push(before)))
    for _ in range(5):
        said += "".join(_texts(parser.push(" " * 1000)))
    if name != "hermes" or before != "<tool_call>":  # there it is not kept, but counted
        assert len(said) > len(before) + 5000 - 3000
    assert said + "".join(_texts(parser.finish())) == before + " " * 5000


def _texts(pieces):
    return [piece.text for piece in pieces if isinstance(piece, TextPiece)]


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.integers(0, 3000), max_size=6))
def test_much_white_space_is_the_same_in_any_split(name, cuts):
    text = f"a{' ' * 1500}[TOOL_CALLS]{' ' * 1500}<tool_call>{llama(*ADD)}"
    places = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parsed(name, parts) == parsed(name, [text])


@pytest.mark.parametrize("name", FORMATS)
@given(st.text(alphabet='<>[]{}"\\:, \nadeglmnoprstuTOL_CAS|/1', max_size=80))
def test_any_text_ends_as_content_or_calls(name, text):
    content, calls = parsed(name, list(text))
    if not calls:
        assert content == text


def test_arguments_are_handed_on_as_they_come():
    parser = FORMATS["hermes"].parser(NAMES)
    assert parser.push('<tool_call>{"name": "add"') == []
    assert parser.push(', "arguments": {"a') == [CallPiece("add"), ArgumentsPiece('{"a')]
    assert parser.push('": 1') == [ArgumentsPiece('": 1')]
    assert parser.push("}}</tool_call>") == [ArgumentsPiece("}")]
    assert parser.finish() == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
    ).map(lambda value: {"value": value})
)
def test_arguments_of_any_json_come_back(arguments):
    text = json.dumps(arguments)
    for name, write in (("hermes", hermes), ("llama3_json", llama)):
        _, calls = parsed(name, [write("add", text)])
        assert calls == [("add", text)]


TEMPLATES = {
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
def plain(tmp_path_factory):
    return Tokenizer.load(toy_tokenizers.save_chatml(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A tokenizer whose markers are tokens, special ones and others."""
    backend = toy_tokenizers.byte_level()
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    backend.add_tokens(["<tool_call>", "</tool_call>", "[ARGS]", "<think>", "</think>"])
    directory = tmp_path_factory.mktemp("marked")
    return Tokenizer.load(toy_tokenizers.save(directory, backend, {"eos_token": "<|im_end|>"}))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_shows_the_format(plain, name):
    template, expected = TEMPLATES[name]
    tokenizer = plain.with_template(template)
    assert format_of(tokenizer) == expected
    assert reads_tools(tokenizer) == (name not in ("none", "one that refuses"))


def test_the_operator_may_name_the_format(plain):
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


def follows(tokenizer, grammar, text):
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
def test_guides_allow_the_calls_of_the_format_alone(plain, marked, name, as_tokens):
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


def test_ids_are_what_templates_demand():
    made = {name: one.new_call_id() for name, one in FORMATS.items()}
    assert made["hermes"].startswith("call_")
    assert made["mistral"].isalnum()
    assert len(made["mistral"]) == 9
    assert made["mistral"] != Mistral().new_call_id()
