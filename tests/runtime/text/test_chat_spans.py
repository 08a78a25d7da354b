import pytest

from pcg.errors import DataError
from pcg.runtime.text.chat import ChatTemplate
from pcg.runtime.text.chat_spans import assistant_spans
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


def learned(template, messages, learn, marks=True, ends=ENDS):
    template = ChatTemplate({"default": template})
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    text, spans = assistant_spans(
        messages,
        learn,
        lambda part, prompt: template.render(part, add_generation_prompt=prompt, **names),
        template.marked_spans(messages, **names) if marks else None,
        ends,
    )
    assert text == template.render(messages, **names)
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
    assert learned(toys.REWRITING, CHAT, (1, 3)) == [
        "first answer<|im_end|>",
        "<think>\nhow\n</think>\n\nsecond answer<|im_end|>",
    ]


def test_a_generation_prompt_that_begins_the_answer():
    template = toys.REWRITING.replace(
        "assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"
    )
    assert learned(template, CHAT, (1, 3)) == [
        "first answer<|im_end|>",
        "how\n</think>\n\nsecond answer<|im_end|>",
    ]


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
