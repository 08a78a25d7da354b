"""Prompts of chats, as transformers makes them, over many templates; schemas without notes."""

from __future__ import annotations

import dataclasses
import json

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.http.errors import ApiError
from pcg.serve.openai.chat import Chat
from pcg.serve.openai.messages import Message, Template
from pcg.serve.openai.sampling import bare
from pcg.serve.openai.tools import AskedTools, ChatSupport, Tool
from tests.support import chat_templates, toy_tokenizers

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = PLAIN.replace("m['content']", "m['content'] | trim")
STRIPPED = PLAIN.replace("m['content']", "m.content.strip()")
SPACED = PLAIN.replace("<|im_end|>", " <|im_end|>")
PARTS = PLAIN.replace(
    "{{ m['content'] }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}",
)
TEMPLATES = {
    "plain": PLAIN,
    "trimmed": TRIMMED,
    "stripped": STRIPPED,
    "spaced": SPACED,
    "parts": PARTS,
    "hermes": chat_templates.HERMES,
    "llama3": chat_templates.LLAMA3,
    "mistral": chat_templates.MISTRAL,
    "xml": chat_templates.XML,
}
USER = {"role": "user", "content": "a dog"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts by the server and by transformers."""

    support: ChatSupport
    theirs: PreTrainedTokenizerFast
    max_model_len: int | None = None

    def ours(self, messages, tools=None, **template):
        parsed = [Message.model_validate(message) for message in messages]
        chat = Chat(parsed, tools or AskedTools(), template=Template(**template))
        ids, _ = chat.prompt(self.support, self.max_model_len)
        tokenizer = self.support.tokenizer
        return tokenizer.decode(ids, skip_special_tokens=False)

    def expected(self, messages, **template):
        options = {"add_generation_prompt": True, **template, "tokenize": False}
        text = self.theirs.apply_chat_template(list(messages), **options)
        assert isinstance(text, str)
        return text


@pytest.fixture(params=TEMPLATES)
def prompts(request, tmp_path):
    return prompts_of(TEMPLATES[request.param], tmp_path)


def prompts_of(template, directory):
    toy_tokenizers.byte_level().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    return Prompts(ChatSupport(Tokenizer.load(directory)), theirs)


@pytest.mark.parametrize("content", ["a dog", "a dog ", " a dog \n\n", "a  dog\t", "Ünï "])
def test_a_message_is_continued(prompts, content):
    begun = [USER, {"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompts.ours(begun, **options) == prompts.expected(begun, **options)


def test_parts_are_lines_unless_the_template_reads_parts(prompts):
    texts = ["first", "second"]
    parts = [{"type": "text", "text": text} for text in texts]
    given = parts if prompts.support.reads_parts else "\n".join(texts)
    for role in ("system", "user", "assistant"):
        sent = [USER, {"role": role, "content": parts}]
        assert prompts.ours(sent) == prompts.expected([USER, {"role": role, "content": given}])
    begun = [USER, {"role": "assistant", "content": parts}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    as_read = [USER, {"role": "assistant", "content": given}]
    assert prompts.ours(begun, **options) == prompts.expected(as_read, **options)


def test_one_template_of_these_reads_parts(tmp_path):
    found = {
        name: prompts_of(text, tmp_path).support.reads_parts for name, text in TEMPLATES.items()
    }
    assert [name for name, reads in found.items() if reads] == ["parts"]


@pytest.mark.parametrize("content", [None, "", "It is"])
def test_a_tools_result_is_read_whatever_the_content_is(prompts, content):
    called = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "23 degrees"}
    text = prompts.ours([USER, called, result])
    assert "23 degrees" in text
    assert "weather" in text
    assert "Rome" in text or "function=" in text
    assert "None" not in text
    if prompts.support.writes_calls:
        function = {**CALL["function"], "arguments": {"city": "Rome"}}
        plain = {**called, "content": content or "", "tool_calls": [{**CALL, "function": function}]}
        assert text == prompts.expected([USER, plain, result])


@pytest.mark.parametrize("choice", ["required", "none"])
@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "You help."}]])
def test_a_model_that_has_to_call_a_tool_is_shown_it(prompts, choice, before):
    asked = AskedTools([Tool.model_validate(TOOL)], choice, True)
    text = prompts.ours([*before, USER], asked)
    if choice == "required" or prompts.support.reads_tools:
        assert "weather" in text
        assert "city" in text
    if not prompts.support.reads_tools:
        if choice == "none":
            assert text == prompts.expected([*before, USER])
        else:
            assert '<tool_call>\n{"name": ' in text
            assert text.index("weather") < text.index("a dog")


def test_results_of_several_calls_are_one_message_of_a_user(tmp_path):
    calls = [CALL, {**CALL, "id": "b"}]
    called = {"role": "assistant", "content": "Hm.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "x"} for one in calls]
    text = prompts_of(PLAIN, tmp_path).ours([USER, called, *results, USER])
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    response = "<tool_response>\nx\n</tool_response>"
    assert text == prompts_of(PLAIN, tmp_path).expected(
        [
            USER,
            {"role": "assistant", "content": f"Hm.\n{call}\n{call}"},
            {"role": "user", "content": f"{response}\n{response}"},
            USER,
        ]
    )


NOTED = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Book",
    "description": "A book.",
    "type": "object",
    "properties": {
        "title": {"type": "string", "title": "Title", "default": "none"},
        "description": {"$ref": "#/$defs/description"},
        "kind": {"enum": [{"title": "a"}, "b"], "examples": ["b"]},
        "notes": {"type": "array", "items": {"anyOf": [{"const": {"default": 1}, "title": "x"}]}},
    },
    "required": ["title", "kind"],
    "$defs": {"description": {"type": "integer", "$comment": "of pages"}},
}


def test_notes_are_left_out():
    assert bare(NOTED, "tools") == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "description": {"$ref": "#/$defs/description"},
            "kind": {"enum": [{"title": "a"}, "b"]},
            "notes": {"type": "array", "items": {"anyOf": [{"const": {"default": 1}}]}},
        },
        "required": ["title", "kind"],
        "$defs": {"description": {"type": "integer"}},
    }


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ({"title": "a", "kind": {"title": "a"}, "notes": [{"default": 1}]}, True),
        ({"title": "a", "kind": {}}, False),
        ({"title": 3, "kind": "b"}, False),
        ({"title": "a", "kind": "b", "description": 7}, True),
        ({"title": "a", "kind": "b", "description": "c"}, False),
        ({"kind": "b"}, False),
    ],
)
def test_it_allows_the_same(value, is_valid):
    for schema in (NOTED, bare(NOTED, "tools")):
        assert jsonschema.Draft202012Validator(schema).is_valid(value) == is_valid


def test_what_is_no_schema_stays():
    for schema in (True, 3, "a", None, [], {"properties": 5}, {"enum": 3}):
        assert bare(schema, "tools") == schema


def test_nesting_has_an_end():
    deep = {}
    for _ in range(20_000):
        deep = {"items": deep}
    with pytest.raises(ApiError, match="nested too deeply"):
        bare(deep, "tools")
