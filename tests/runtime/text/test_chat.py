from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from pcg.errors import ConfigError, GenerationError
from pcg.runtime.text.chat import ChatTemplate
from pcg.runtime.text.tokenizer import Tokenizer
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


def test_marked_spans():
    template = ChatTemplate({"default": toys.CHATML_MARKED})
    text, spans = template.marked_spans(CHAT)
    assert text == template.render(CHAT)
    assert [text[slice(*span)] for span in spans] == ["I am fine. 中文 😀<|im_end|>"]
    assert ChatTemplate({"default": toys.CHATML}).marked_spans(CHAT) is None
    # Trimming what was captured would tell another text; then there are no marks to trust.
    trimmed = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
    assert ChatTemplate({"default": trimmed}).marked_spans(CHAT) is None
