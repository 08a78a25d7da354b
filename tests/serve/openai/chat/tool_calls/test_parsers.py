"""Parsers of tool calls: what they find does not depend on how the text comes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.serve.openai.tool_formats import FORMATS, ArgumentsPiece, CallPiece, Piece, TextPiece

NAMES = ("search", "add")
SEARCH = ("search", '{"query": "a \\"b\\" {c}", "n": [1, {"m": 2}]}')
ADD = ("add", '{"a": -1.5}')


def merged(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    content = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallPiece):
            calls.append((piece.name, ""))
        elif isinstance(piece, ArgumentsPiece):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls


def parsed(name: str, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = FORMATS[name].parser(NAMES)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return merged([*pieces, *parser.finish()])


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str) -> str:
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
def test_calls_and_content_in_an_output(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parsed(name, [text]) == (content, calls)
    assert parsed(name, list(text)) == (content, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=6))
def test_any_split_finds_the_same(
    case: tuple[str, str, str, list[tuple[str, str]]], cuts: list[int]
) -> None:
    name, text, content, calls = case
    places = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parsed(name, parts) == (content, calls)


@pytest.mark.parametrize("before", ["", "a", "[TOOL_CALLS]", "<|python_tag|>", "<tool_call>"])
@pytest.mark.parametrize("name", FORMATS)
def test_white_space_is_held_back_within_a_bound(name: str, before: str) -> None:
    """Else each token's reading would be longer than the last one's."""
    parser = FORMATS[name].parser(("add",))
    said = "".join(_texts(parser.push(before)))
    for _ in range(5):
        said += "".join(_texts(parser.push(" " * 1000)))
    if name != "hermes" or before != "<tool_call>":  # there it is not kept, but counted
        assert len(said) > len(before) + 5000 - 3000
    assert said + "".join(_texts(parser.finish())) == before + " " * 5000


def _texts(pieces: Sequence[Piece]) -> list[str]:
    return [piece.text for piece in pieces if isinstance(piece, TextPiece)]


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.integers(0, 3000), max_size=6))
def test_much_white_space_is_the_same_in_any_split(name: str, cuts: list[int]) -> None:
    text = f"a{' ' * 1500}[TOOL_CALLS]{' ' * 1500}<tool_call>{llama(*ADD)}"
    places = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parsed(name, parts) == parsed(name, [text])


@pytest.mark.parametrize("name", FORMATS)
@given(st.text(alphabet='<>[]{}"\\:, \nadeglmnoprstuTOL_CAS|/1', max_size=80))
def test_any_text_ends_as_content_or_calls(name: str, text: str) -> None:
    content, calls = parsed(name, list(text))
    if not calls:
        assert content == text


def test_arguments_are_handed_on_as_they_come() -> None:
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
def test_arguments_of_any_json_come_back(arguments: dict[str, object]) -> None:
    text = json.dumps(arguments)
    for name, write in (("hermes", hermes), ("llama3_json", llama)):
        _, calls = parsed(name, [write("add", text)])
        assert calls == [("add", text)]
