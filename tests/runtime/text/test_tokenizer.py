import json

import pytest
from transformers import PreTrainedTokenizerFast

from pcg.errors import ConfigError, GenerationError, ModelNotFoundError
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import toy_tokenizers as toys

TEXTS = ["Hello, how are you?", "naïve 中文 😀 text", "  two  spaces \n", "", "<|im_end|> </s> x"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "chatml": toys.save_chatml(root / "chatml"),
        "llama2": toys.save_llama2(root / "llama2"),
    }


@pytest.mark.parametrize("family", ["chatml", "llama2"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_text_are_those_of_transformers(directories, family, text, special):
    ours = Tokenizer.load(directories[family])
    theirs = PreTrainedTokenizerFast.from_pretrained(directories[family])
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    assert ours.encode_with_offsets(text, add_special_tokens=special).ids == ids


@pytest.mark.parametrize("family", ["chatml", "llama2"])
def test_special_ids_are_those_of_transformers(directories, family):
    ours = Tokenizer.load(directories[family])
    theirs = PreTrainedTokenizerFast.from_pretrained(directories[family])
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map


def test_output_ends_at_every_token_that_the_generation_config_names(tmp_path):
    backend = toys.byte_level()
    toys.save(
        tmp_path,
        backend,
        {"eos_token": {"content": "<|im_end|>"}},
        generation={"eos_token_id": [0, 2], "pad_token_id": 7},
        model={"eos_token_id": 9, "bos_token_id": 1, "pad_token_id": 8},
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_id == 2
    assert tokenizer.eos_ids == (0, 2)
    assert tokenizer.pad_id == 7
    assert tokenizer.bos_id == 1


def test_ids_come_from_the_config_without_a_generation_config(tmp_path):
    toys.save(tmp_path, toys.byte_level(), {}, model={"eos_token_id": 5, "pad_token_id": -1})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.pad_id is None
    assert (tokenizer.eos_id, tokenizer.eos_ids, tokenizer.bos_id) == (5, (5,), None)


def test_stored_truncation_and_padding_are_off(tmp_path):
    backend = toys.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    toys.save(tmp_path, backend, {})
    assert (
        Tokenizer.load(tmp_path).encode("Hello, how are you today?")
        == toys.byte_level().encode("Hello, how are you today?").ids
    )


def test_a_named_token_that_is_plain_in_the_file_becomes_special(tmp_path):
    backend = toys.byte_level()
    toys.save(tmp_path, backend, {"eos_token": "Hello"})
    tokenizer = Tokenizer.load(tmp_path)
    index = backend.token_to_id("Hello")
    if index is None:
        pytest.skip("the toy vocabulary has no such token")
    assert tokenizer.decode([index]) == ""


@pytest.mark.parametrize(
    ("break_it", "error", "words"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), ModelNotFoundError, "no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), ConfigError, "is not a tokenizer"),
        (
            lambda d: (d / "tokenizer_config.json").write_text("{"),
            ConfigError,
            "is damaged at line 1, column 2",
        ),
        (lambda d: (d / "config.json").write_text("[]"), ConfigError, "holds a list"),
        (
            lambda d: (d / "config.json").write_text('{"pad_token_id": "x"}'),
            ConfigError,
            "config.json has pad_token_id='x'; expected an id",
        ),
        (
            lambda d: (d / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}'),
            ConfigError,
            "eos_token=.*lone surrogate",
        ),
        (
            lambda d: (d / "chat_template.jinja").write_text("{% if %}"),
            ConfigError,
            "chat template 'default', line 1",
        ),
    ],
)
def test_broken_files(tmp_path, break_it, error, words):
    toys.save(tmp_path, toys.byte_level(), {})
    break_it(tmp_path)
    with pytest.raises(error, match=words.replace("[", r"\[")):
        Tokenizer.load(tmp_path)


def test_many_tokens_are_decoded_as_few(tmp_path):
    toys.save(tmp_path, toys.byte_level(), {})
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a schöner Tag 😀 ")
    assert tokenizer.decode(ids * 2_000) == tokenizer.decode(ids) * 2_000


def test_the_template_file_goes_before_the_config(tmp_path):
    toys.save(tmp_path, toys.byte_level(), {"chat_template": "config"}, template_file="file{{ x }}")
    assert Tokenizer.load(tmp_path).render_chat([], x=1) == "file1"
    assert Tokenizer.load(tmp_path, chat_template="{{ 2 }}").render_chat([]) == "2"
    (tmp_path / "other.jinja").write_text("other")
    other = Tokenizer.load(tmp_path, chat_template=tmp_path / "other.jinja")
    assert other.render_chat([]) == "other"
    with pytest.raises(ConfigError, match="no chat template file"):
        Tokenizer.load(tmp_path, chat_template="missing.jinja")


def test_named_templates(tmp_path):
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    toys.save(tmp_path, toys.byte_level(), {"chat_template": templates})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render_chat([]) == "plain"
    assert tokenizer.render_chat([], tools=[{}]) == "tools 1"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates[1:]}))
    with pytest.raises(ConfigError, match='must be "default"'):
        Tokenizer.load(tmp_path)


def test_no_template_names_the_fix(tmp_path):
    tokenizer = Tokenizer.load(toys.save_llama2(tmp_path, template=None))
    with pytest.raises(GenerationError, match=r"put a chat_template\.jinja beside tokenizer\.json"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.with_template("x").render_chat([]) == "x"
