"""Tokenizers: the ids and texts of transformers, streamed texts, and stop strings."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pcg.errors import ConfigError, GenerationError, ModelNotFoundError
from pcg.runtime.text.output_text import StopChecker, StreamDecoder
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


def test_stored_truncation_and_padding_are_off(tmp_path):
    backend = toys.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    toys.save(tmp_path, backend, {})
    assert (
        Tokenizer.load(tmp_path).encode("Hello, how are you today?")
        == toys.byte_level().encode("Hello, how are you today?").ids
    )


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


# ---------------------------------------------------------------------------------------- decoding

BYTE_LEVEL = Tokenizer(toys.byte_level(), {})
BYTE_FALLBACK = Tokenizer(toys.byte_fallback(), {})
TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from("abe o,\n\t"),
        st.sampled_from("äé中文😀👩🏽‍🚀\u0301\ufffd"),
        st.characters(codec="utf-8"),
    ),
    max_size=40,
)


def stream(tokenizer, ids, prompt=()):
    decoder = tokenizer.stream(prompt)
    return [*(decoder.push(index) for index in ids), decoder.finish()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
@given(text=TEXT)
def test_pieces_add_up_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        # Not one piece, the last included, shows a character before all its bytes are there.
        assert "\ufffd" not in "".join(pieces)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60))
def test_any_bytes_add_up_to_the_decoded_whole(ids):
    assert "".join(stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@given(ids=st.lists(st.integers(0, BYTE_FALLBACK.vocab_size - 1), max_size=60))
def test_broken_byte_fallback_runs_keep_what_is_out(ids):
    """A broken run decodes, as a whole, to U+FFFD alone, so text that is out may differ from it."""
    pieces = stream(BYTE_FALLBACK, ids)
    whole = BYTE_FALLBACK.decode(ids)
    if "\ufffd" not in whole:
        assert "".join(pieces) == whole
    assert len("".join(pieces)) >= len(whole) - whole.count("\ufffd")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
@given(prompt=TEXT, text=TEXT)
def test_a_stream_after_a_prompt_continues_its_text(tokenizer, prompt, text):
    ids = tokenizer.encode(prompt + text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    if "\ufffd" in whole:
        return
    for cut in {len(ids) // 3, len(ids) // 2, len(ids)} - {0}:
        # What the prompt says up to its last whole character.
        prompts = (tokenizer.decode(ids[: cut - begun]) for begun in range(4))
        before = next(text for text in prompts if not text.endswith("\ufffd"))
        assert before + "".join(stream(tokenizer, ids[cut:], ids[:cut])) == whole


@pytest.mark.parametrize("kind", ["bytes", "halves", "special"])
def test_no_output_makes_decoding_longer_and_longer(kind):
    """Bytes that are no UTF-8, halves of characters, and tokens without a text."""
    tokenizer = BYTE_FALLBACK if kind == "special" else BYTE_LEVEL
    first, second = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("😀", "é"))
    special = BYTE_FALLBACK.backend.token_to_id("</s>")
    ids = {"bytes": [second] * 300, "halves": [first, second] * 150, "special": [special] * 300}
    lengths = []

    def decode(some):
        lengths.append(len(some))
        return tokenizer.decode(some)

    decoder = StreamDecoder(decode)
    rest = tokenizer.encode(" and the fox", add_special_tokens=False)
    pieces = [decoder.push(token) for token in [*ids[kind], *rest]]
    assert "".join([*pieces, decoder.finish()]) == tokenizer.decode([*ids[kind], *rest])
    assert max(lengths) < 32


def test_a_word_after_a_special_token_keeps_its_space():
    hello = BYTE_FALLBACK.encode("Hello", add_special_tokens=False)
    end = BYTE_FALLBACK.backend.token_to_id("</s>")
    the = BYTE_FALLBACK.encode("the fox", add_special_tokens=False)
    assert "".join(stream(BYTE_FALLBACK, [*hello, end, *the])) == "Hello the fox"
    # After a prompt the first word, too, keeps it.
    assert "".join(stream(BYTE_FALLBACK, the, hello)) == " the fox"
    assert "".join(stream(BYTE_FALLBACK, the)) == "the fox"


# ----------------------------------------------------------------------------------------- stopping

LETTERS = st.text(alphabet="ab", max_size=30)
STOP = st.text(alphabet="ab", min_size=1, max_size=5)


def run(stop, pieces):
    """(text given out, stop string) of a stream; nothing is given out after the match."""
    checker = StopChecker(stop)
    text = ""
    for piece in pieces:
        text += checker.push(piece)
    return text + checker.finish(), checker.matched


def cut(text, points):
    edges = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(text=LETTERS, stop=STOP, points=st.lists(st.integers(0, 30)))
def test_one_stop_string_is_where_find_finds_it(text, stop, points):
    at = text.find(stop)
    expected = (text, None) if at < 0 else (text[:at], stop)
    assert run([stop], cut(text, points)) == expected


@given(text=LETTERS, stops=st.lists(STOP, max_size=4), points=st.lists(st.integers(0, 30)))
def test_of_several_the_first_complete_one_stops(text, stops, points):
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    expected = (text, None)
    if found:
        _, start, stop = min(found)
        expected = (text[:start], stop)
    assert run(stops, cut(text, points)) == expected


@given(
    text=LETTERS,
    stops=st.lists(STOP, max_size=4),
    points=st.lists(st.integers(0, 30)),
    early=st.integers(0, 30),
)
def test_stops_that_are_complete_too_early_do_not_count(text, stops, points, early):
    """And with the stop string left in, the text ends with it."""
    checker = StopChecker(stops, included=True)
    pieces = [text[:early], *cut(text[early:], points)]
    found = checker.push(pieces[0], may_end=False)
    for piece in pieces[1:]:
        found += checker.push(piece)
    found += checker.finish()
    ends = [end for end in range(early + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text[: ends[0]] if stops and ends else text
    assert found == expected
    assert (checker.matched is not None) == bool(stops and ends)


@given(text=LETTERS, stop=STOP)
def test_no_more_is_held_back_than_could_begin_a_stop(text, stop):
    checker, given_out = StopChecker([stop]), ""
    for index, letter in enumerate(text):
        given_out += checker.push(letter)
        if checker.matched:
            break
        held = text[len(given_out) : index + 1]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_a_long_stop_string_costs_little():
    """A part costs as much as it is long, however much is held."""
    checker = StopChecker(["a" * 1000 + "b"] * 100)
    looked = sum(len(checker.push("a")) for _ in range(3000))
    assert looked == 2000
    assert checker.push("b") == ""
    assert checker.matched == "a" * 1000 + "b"


@pytest.mark.parametrize("stop", [("",), "abc", (1,)])
def test_a_stop_that_is_none(stop):
    with pytest.raises(GenerationError, match="use a sequence of strings that are not empty"):
        StopChecker(stop)
