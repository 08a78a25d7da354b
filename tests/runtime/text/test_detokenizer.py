import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.runtime.text.output_text import StreamDecoder
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import toy_tokenizers as toys

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
    # A broken run decodes, as a whole, to U+FFFD alone, so text that is out may differ from it;
    # it must still be a stream that loses nothing else.
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


def test_a_character_waits_for_its_last_byte():
    ids = BYTE_FALLBACK.encode("a😀b", add_special_tokens=False)
    assert "😀" in stream(BYTE_FALLBACK, ids)
    assert all("\ufffd" not in piece for piece in stream(BYTE_FALLBACK, ids))


def test_an_unfinished_character_ends_as_a_replacement():
    ids = [BYTE_FALLBACK.backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()[:3]]
    assert stream(BYTE_FALLBACK, ids) == ["", "", "", "\ufffd\ufffd\ufffd"]


def test_a_word_after_a_special_token_keeps_its_space():
    hello = BYTE_FALLBACK.encode("Hello", add_special_tokens=False)
    end = BYTE_FALLBACK.backend.token_to_id("</s>")
    the = BYTE_FALLBACK.encode("the fox", add_special_tokens=False)
    assert "".join(stream(BYTE_FALLBACK, [*hello, end, *the])) == "Hello the fox"
    # After a prompt the first word, too, keeps it.
    assert "".join(stream(BYTE_FALLBACK, the, hello)) == " the fox"
    assert "".join(stream(BYTE_FALLBACK, the)) == "the fox"


def test_the_window_stays_short():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return BYTE_LEVEL.decode(ids)

    decoder = BYTE_LEVEL.stream()
    decoder._decode = decode
    for index in BYTE_LEVEL.encode("Hello, how are you 😀 today? " * 50):
        decoder.push(index)
    assert max(decoded) < 16
