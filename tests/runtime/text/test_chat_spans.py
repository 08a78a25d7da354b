import re

import pytest

from pcg.errors import DataError
from pcg.runtime.text.chat import ChatTemplate
from pcg.runtime.text.chat_spans import assistant_spans
from tests.support import chat_templates as families
from tests.support import toy_tokenizers as toys

ENDS = ("<|im_start|>", "<|im_end|>", "</s>")
CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>why</think>first answer"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "<think>how</think>second answer"},
]
SHORT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": ""},
]


def learned(template, messages, learn, marks=True, ends=ENDS, stops=()):
    template = ChatTemplate({"default": template}).training
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    text, spans = assistant_spans(
        messages,
        learn,
        lambda part, prompt: template.render(part, add_generation_prompt=prompt, **names),
        template.marked_spans(messages, **names) if marks else None,
        ends,
        stops,
    )
    rendered = template.render(messages, **names)
    assert text.removeprefix(rendered) in ("", *stops)
    return [text[slice(*span)] for span in spans]


@pytest.mark.parametrize("template", [toys.CHATML, toys.CHATML_MARKED])
def test_the_content_and_the_end_of_turn(template):
    assert learned(template, SHORT, (1, 3)) == ["first<|im_end|>", "<|im_end|>"]
    assert learned(template, SHORT, (1,)) == ["first<|im_end|>"]
    assert learned(template, SHORT, (3,), marks=False) == ["<|im_end|>"]
    assert learned(template, SHORT, ()) == []


def test_a_template_without_a_generation_prompt():
    assert learned(toys.LLAMA2, SHORT[:2], (1,)) == [" first </s>"]
    assert learned(toys.LLAMA2, CHAT, (1, 3)) == [
        " <think>why</think>first answer </s>",
        " <think>how</think>second answer </s>",
    ]


def test_a_template_that_rewrites_earlier_turns():
    last = "<think>\nhow\n</think>\n\nsecond answer<|im_end|>"
    plain = [CHAT[0], {"role": "assistant", "content": "first answer"}, *CHAT[2:]]
    assert learned(toys.REWRITING, plain, (1, 3)) == ["first answer<|im_end|>", last]
    assert learned(toys.REWRITING, CHAT, (3,)) == [last]
    with pytest.raises(DataError, match=r"drops the reasoning of message 1, 'why', .*a row of its"):
        learned(toys.REWRITING, CHAT, (1, 3))


def test_a_generation_prompt_that_begins_the_answer():
    template = toys.REWRITING.replace(
        "assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"
    )
    assert learned(template, CHAT, (3,)) == ["how\n</think>\n\nsecond answer<|im_end|>"]


def spoken(reasoning, content, key):
    """Return an assistant's message, with its reasoning by key, or in the content for None."""
    if key is None:
        return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}
    return {"role": "assistant", "content": content, key: reasoning}


@pytest.mark.parametrize("name", families.REASONING)
def test_all_reasoning_of_a_known_family_is_learned(name):
    template, keys = families.REASONING[name]
    for key in keys:
        chat = [CHAT[0], spoken("why", "first", key), CHAT[2], spoken("how", "second", key)]
        first, second = learned(template, chat, (1, 3), stops=("<|im_end|>", "<|user|>"))
        assert re.fullmatch(r"\s*(<think>)?\s*why\s*</think>\s*first(<.*>)", first)
        assert re.fullmatch(r"\s*(<think>)?\s*how\s*</think>\s*second(<.*>)", second)
        # A turn is learned as it is written where it is the last.
        assert learned(template, chat[:2], (1,), stops=("<|im_end|>", "<|user|>")) == [first]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_a_template_does_not_know_is_refused(key):
    chat = [CHAT[0], spoken("why", "first", key)]
    with pytest.raises(DataError, match=f"drops '{key}' of message 1, 'why', .*<think>"):
        learned(toys.CHATML, chat, (1,))
    assert learned(toys.CHATML, [*chat, CHAT[2], SHORT[1]], (3,)) == ["first<|im_end|>"]


def test_the_next_roles_token_ends_a_turn():
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [*SHORT[:3], calls, {"role": "tool", "content": "1"}, SHORT[1]]
    ends = [*stops, "<|assistant|>", "<|system|>"]
    template = families.GLM4
    assert learned(template, messages, (1, 3, 5), ends=ends, stops=stops) == [
        "\nfirst<|user|>",
        '\nadd({"a": 1})<|observation|>',
        "\nfirst<|user|>",
    ]
    assert learned(template, messages[:4], (3,), ends=ends, stops=stops) == [
        '\nadd({"a": 1})<|observation|>'
    ]
    # A turn that is not learned is not continued.
    assert learned(template, messages[:4], (1,), ends=ends, stops=stops) == ["\nfirst<|user|>"]


def test_tools_that_move_to_the_last_question_do_not_hide_calls():
    """A longer chat begins otherwise, but the turn has its end: no header follows it."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [SHORT[0], calls, {"role": "tool", "content": "1"}, SHORT[1]]
    template = ChatTemplate({"default": families.MISTRAL_V3}).training
    text, spans = assistant_spans(
        messages,
        (1, 3),
        lambda part, prompt: template.render(part, tools=tools, eos_token="</s>", bos_token="<s>"),
        None,
        ENDS,
        ("</s>",),
    )
    assert [text[slice(*span)] for span in spans] == [
        '[TOOL_CALLS]{"name": "add", "arguments": {"a": 1}}</s>',
        "first</s>",
    ]


def test_a_template_without_an_end_of_turn_ends_with_the_eos():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert learned(template, CHAT[2:], (1,), stops=("</s>",)) == [CHAT[3]["content"] + "\n</s>"]
    assert learned(template, [*CHAT[:2], CHAT[0]], (1,), stops=("</s>",)) == [
        CHAT[1]["content"] + "\n"
    ]


def test_marks_without_the_end_of_turn_are_extended_by_it():
    template = toys.CHATML_MARKED.replace(
        "message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert template != toys.CHATML_MARKED
    assert learned(template, SHORT, (1, 3)) == ["first", ""]
    assert learned(template, SHORT, (1, 3), stops=("<|im_end|>",)) == [
        "first<|im_end|>",
        "<|im_end|>",
    ]


def test_calls_that_a_template_does_not_know_are_refused():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [SHORT[0], {"role": "assistant", "content": "now", "tool_calls": [call]}]
    with pytest.raises(DataError, match="drops a call of message 1, 'add'"):
        learned(toys.CHATML, messages, (1,))


def test_a_header_that_always_follows_is_not_learned():
    """The last turn ends at its end-of-turn token, as those before it."""
    assert learned(toys.ALWAYS_PROMPTED, CHAT, (1, 3)) == [
        "<think>why</think>first answer<|im_end|>",
        "<think>how</think>second answer<|im_end|>",
    ]
    assert learned(toys.ALWAYS_PROMPTED, SHORT[:2], (1,)) == ["first<|im_end|>"]
    two = [*SHORT[:2], {"role": "assistant", "content": " and again "}]
    assert learned(toys.ALWAYS_PROMPTED, two, (1, 2)) == ["first<|im_end|>", "and again<|im_end|>"]
    with pytest.raises(DataError, match="ends every text with the assistant's header"):
        learned(toys.ALWAYS_PROMPTED, SHORT, (3,))


def test_the_header_of_llama_3_is_not_learned():
    template = (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
        " + message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
        "{{ content }}{% endfor %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    )
    ends = ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>", "<|eot_id|>")
    assert learned(template, CHAT, (1, 3), ends=ends) == [
        "<think>why</think>first answer<|eot_id|>",
        "<think>how</think>second answer<|eot_id|>",
    ]


def test_an_assistant_that_speaks_first():
    messages = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "x"}]
    assert learned(toys.CHATML, messages, (0,)) == ["hi<|im_end|>"]
    # This one cannot render an empty chat.
    picky = "{% if not messages %}{{ raise_exception('empty') }}{% endif %}" + toys.CHATML
    assert learned(picky, messages, (0,)) == ["hi<|im_end|>"]


def test_a_plain_text_end_of_turn_is_learned():
    template = (
        "{% for m in messages %}### {{ m.role }}:\\n{{ m.content | trim }}\\n<end>\\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\\n{% endif %}"
    ).replace("\\n", "\n")
    assert learned(template, SHORT[:3], (1,)) == ["first\n<end>\n"]


def test_tool_calls():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "1"},
    ]
    first, second = learned(template, messages, (1, 3))
    assert first.startswith('[{"type"')
    assert first.endswith("}]<|im_end|>")
    assert second == "1<|im_end|>"


def test_a_message_that_cannot_be_found_is_an_error():
    template = "{{ messages | length }}{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(DataError, match=r'message 1 cannot be found .* "weight": 0'):
        learned(template, CHAT, (1,))


def test_several_marks_in_one_message():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a{% endgeneration %}"
        "-{% generation %}{{ m.content }}{% endgeneration %}{% else %}|{{ m.content }}|{% endif %}"
        "{% endfor %}"
    )
    assert learned(template, SHORT[:3], (1,)) == ["a", "first"]
