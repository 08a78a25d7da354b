"""Chat templates: the text of transformers, and the spans of it that are learned."""

import re
from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from pcg.errors import ConfigError, DataError, GenerationError
from pcg.runtime.text.chat import ChatTemplate
from pcg.runtime.text.chat_spans import assistant_spans
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import chat_templates as families
from tests.support import toy_tokenizers as toys

CHAT = [
    {"role": "user", "content": "Hello, how are you? <b>&amp;"},
    {"role": "assistant", "content": "I am fine. 中文 😀"},
    {"role": "user", "content": "what is it?"},
]

# What templates in the wild lean on: block trimming, loop controls, namespaces, tojson, the clock.
FEATURES = """
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
{{ bos_token }}{{ message | tojson(indent=2) }}
    {% if ns.count == 2 %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') }} {{ dict(a=1) | tojson }} {{ tools is none }} {{ documents is none }}
"""


@pytest.mark.parametrize(
    "template", [toys.CHATML, toys.CHATML_MARKED, toys.REWRITING, toys.LLAMA2, FEATURES]
)
@pytest.mark.parametrize("prompt", [True, False])
def test_text_and_ids_are_those_of_transformers(tmp_path, template, prompt):
    save = toys.save_llama2 if template == toys.LLAMA2 else toys.save_chatml
    directory = save(tmp_path, template)
    ours = Tokenizer.load(directory)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    rendered = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False)
    assert ours.render_chat(CHAT, add_generation_prompt=prompt) == rendered
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
    assert ours.encode_chat(CHAT, add_generation_prompt=prompt) == ids
    if template == FEATURES:
        assert str(datetime.now().year) in rendered


def test_the_reason_of_a_refusal_is_told(tmp_path):
    tokenizer = Tokenizer.load(toys.save_llama2(tmp_path))
    with pytest.raises(GenerationError, match="refuses the messages: roles must alternate"):
        tokenizer.encode_chat([{"role": "assistant", "content": "no"}])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].content + 1 }}", "fails with TypeError"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "cannot hold '__class__'"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "cannot hold '_x'"),
    ],
)
def test_a_failing_or_forbidden_template_is_a_checked_error(source, words):
    with pytest.raises(GenerationError, match=words):
        ChatTemplate({"default": source}).render(CHAT)


def test_a_template_that_does_not_compile_names_the_line():
    with pytest.raises(ConfigError, match="chat template 'default', line 2"):
        ChatTemplate({"default": "fine\n{% endif %}"})


@pytest.mark.parametrize("source", ["{{ 10**100000 }}", "{{ " + "(" * 9999 + ")" * 9999 + " }}"])
def test_a_template_whose_constants_fail_is_a_checked_error(source):
    with pytest.raises(ConfigError, match=r"'default' fails with (ValueError|RecursionError)"):
        ChatTemplate({"default": source})


def test_marked_spans():
    template = ChatTemplate({"default": toys.CHATML_MARKED})
    text, spans = template.marked_spans(CHAT)
    assert text == template.render(CHAT)
    assert [text[slice(*span)] for span in spans] == ["I am fine. 中文 😀<|im_end|>"]
    assert ChatTemplate({"default": toys.CHATML}).marked_spans(CHAT) is None
    # Trimming what was captured would tell another text; then there are no marks to trust.
    trimmed = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
    assert ChatTemplate({"default": trimmed}).marked_spans(CHAT) is None


# --------------------------------------------------------------------------- spans that are learned

ENDS = ("<|im_start|>", "<|im_end|>", "</s>")
THOUGHT = [
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


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


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


def test_several_marks_in_one_message():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a{% endgeneration %}"
        "-{% generation %}{{ m.content }}{% endgeneration %}{% else %}|{{ m.content }}|{% endif %}"
        "{% endfor %}"
    )
    assert learned(template, SHORT[:3], (1,)) == ["a", "first"]


@pytest.mark.parametrize("refuses_empty_chats", [False, True])
def test_an_assistant_that_speaks_first(refuses_empty_chats):
    messages = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "x"}]
    picky = "{% if not messages %}{{ raise_exception('empty') }}{% endif %}"
    template = picky * refuses_empty_chats + toys.CHATML
    assert learned(template, messages, (0,)) == ["hi<|im_end|>"]


def test_a_template_without_a_generation_prompt():
    assert learned(toys.LLAMA2, SHORT[:2], (1,)) == [" first </s>"]
    assert learned(toys.LLAMA2, THOUGHT, (1, 3)) == [
        " <think>why</think>first answer </s>",
        " <think>how</think>second answer </s>",
    ]


def test_a_template_that_rewrites_earlier_turns():
    last = "<think>\nhow\n</think>\n\nsecond answer<|im_end|>"
    plain = [THOUGHT[0], {"role": "assistant", "content": "first answer"}, *THOUGHT[2:]]
    assert learned(toys.REWRITING, plain, (1, 3)) == ["first answer<|im_end|>", last]
    assert learned(toys.REWRITING, THOUGHT, (3,)) == [last]
    with pytest.raises(DataError, match=r"drops the reasoning of message 1, 'why', .*a row of its"):
        learned(toys.REWRITING, THOUGHT, (1, 3))


def test_a_generation_prompt_that_begins_the_answer():
    template = toys.REWRITING.replace(
        "assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"
    )
    assert learned(template, THOUGHT, (3,)) == ["how\n</think>\n\nsecond answer<|im_end|>"]


def spoken(reasoning, content, key):
    """Return an assistant's message, with its reasoning by key, or in the content for None."""
    if key is None:
        return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}
    return {"role": "assistant", "content": content, key: reasoning}


@pytest.mark.parametrize("name", families.REASONING)
def test_all_reasoning_of_a_known_family_is_learned(name):
    template, keys = families.REASONING[name]
    for key in keys:
        chat = [THOUGHT[0], spoken("why", "first", key), THOUGHT[2], spoken("how", "second", key)]
        first, second = learned(template, chat, (1, 3), stops=("<|im_end|>", "<|user|>"))
        assert re.fullmatch(r"\s*(<think>)?\s*why\s*</think>\s*first(<.*>)", first)
        assert re.fullmatch(r"\s*(<think>)?\s*how\s*</think>\s*second(<.*>)", second)
        # A turn is learned as it is written where it is the last.
        assert learned(template, chat[:2], (1,), stops=("<|im_end|>", "<|user|>")) == [first]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_a_template_does_not_know_is_refused(key):
    chat = [THOUGHT[0], spoken("why", "first", key)]
    with pytest.raises(DataError, match=f"drops '{key}' of message 1, 'why', .*<think>"):
        learned(toys.CHATML, chat, (1,))
    assert learned(toys.CHATML, [*chat, THOUGHT[2], SHORT[1]], (3,)) == ["first<|im_end|>"]


def test_the_next_roles_token_ends_a_turn():
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
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
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
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


JOINED = (
    "{% for m in messages %}{% if m['content'] is none %}{% for c in m['tool_calls'] %}"
    "<|im_start|>assistant {{ c['function']['name'] + c['function']['arguments'] + '<|im_end|>' }}"
    "{% endfor %}{% else %}<|im_start|>{{ m['role'] + m['content'] }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<think>\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m['content'] %}{{ part['text'] }}"
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{{ m.role }}: {% if 'thinking' in m %}<{{ m.thinking }}>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_messages_have_the_form_that_a_template_reads():
    """Contents as parts, as Idefics 3; the key of reasoning, as gpt-oss."""
    assert learned(PARTS, SHORT[:2], (1,)) == [" first<|im_end|>"]
    for key in ("reasoning_content", "reasoning", "thinking"):
        chat = [SHORT[0], spoken("why", "first", key)]
        assert learned(HARMONY, chat, (1,)) == ["<why>first<|im_end|>"]


def test_calls_of_a_model_whose_prompt_opens_reasoning():
    """Their arguments are joined as text, and their content is none, as DeepSeek's."""
    messages = [SHORT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert learned(JOINED, messages, (1,)) == [' add{"a": 1}<|im_end|>']


def test_calls_that_a_template_does_not_know_are_refused():
    messages = [SHORT[0], {"role": "assistant", "content": "now", "tool_calls": [CALL]}]
    with pytest.raises(DataError, match="drops a call of message 1, 'add'"):
        learned(toys.CHATML, messages, (1,))


def test_a_header_that_always_follows_is_not_learned():
    """The last turn ends at its end-of-turn token, as those before it."""
    assert learned(toys.ALWAYS_PROMPTED, THOUGHT, (1, 3)) == [
        "<think>why</think>first answer<|im_end|>",
        "<think>how</think>second answer<|im_end|>",
    ]
    assert learned(toys.ALWAYS_PROMPTED, SHORT[:2], (1,)) == ["first<|im_end|>"]
    two = [*SHORT[:2], {"role": "assistant", "content": " and again "}]
    assert learned(toys.ALWAYS_PROMPTED, two, (1, 2)) == ["first<|im_end|>", "and again<|im_end|>"]
    with pytest.raises(DataError, match="ends every text with the assistant's header"):
        learned(toys.ALWAYS_PROMPTED, SHORT, (3,))


def test_a_message_that_cannot_be_found_is_an_error():
    """The text begins otherwise with each message, and only contents are told apart."""
    template = "{{ messages | length }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    messages = [SHORT[0], {**SHORT[1], "tool_calls": [CALL]}, *SHORT[2:]]
    with pytest.raises(DataError, match=r'message 1 cannot be found .* "weight": 0'):
        learned(template, messages, (1,))
