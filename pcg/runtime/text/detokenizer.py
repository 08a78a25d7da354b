"""Streamed detokenizing: text from tokens as they come, without unfinished characters.

Ours, because `tokenizers`' DecodeStream (0.23) raises on broken byte-fallback runs, repeats text
after a prompt that ends within a character, and cannot return an unfinished character at the end.

The text of a token depends on its neighbours: a character may span several tokens, and many
decoders drop the first word's space. So tokens are decoded in a window that begins at a token whose
text is final, and the new text of the window is returned, except a tail of U+FFFD, to which an
unfinished character decodes.

    window        ids[start:]; its first `given` characters are returned already
    return        text[given:] without its trailing U+FFFD
    move          once all of the window's text is returned, it may begin at the last such place

Tokens that the decoder skips (special ones) never end a window: the word after them would lose its
space. The parts and the final `finish()` add up to `decode(all ids)`.

A window without new text grows to 16 tokens, so that no output makes a token's decoding longer and
longer: then what the decoder skips is dropped from it, and of bytes that are no UTF-8 all is
returned before the first of the last tokens whose text is its own:

    decode(ids) = decode(ids[:-k]) + decode(ids[-k:])
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
# Tokens of the prompt in the first window. A character has up to 4 tokens, so the window may need 3
# more to begin between characters, and the prompt may end within one.
_CONTEXT = 6
_REST_OF_CHARACTER = 3
_MOST = 16
"""Tokens without new text in a window."""


class StreamDecoder:
    """Decodes one sequence token by token.

    Args:
        prompt_ids: the tokens before the stream, whose text is not returned; with them the first
            word keeps its space, and a character begun in the prompt is completed.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        # The window, the number of its characters that are returned, and of its tokens up to the
        # last place where all text was returned.
        self._ids, self._given, self._boundary = _context(decode, prompt_ids)

    def push(self, token: int) -> str:
        """Add a token; returns the text that has become final, or ""."""
        self._ids.append(token)
        text = self._decode(self._ids)
        stable = len(text.rstrip(_REPLACEMENT))
        if stable <= self._given:
            return self._shortened(text) if len(self._ids) - self._boundary > _MOST else ""
        new, self._given = text[self._given : stable], stable
        if stable == len(text):
            self._move_window()
        return new

    def _shortened(self, text: str) -> str:
        """Make a long window without new text shorter; returns what becomes final by that."""
        if len(text) <= self._given:
            del self._ids[self._boundary]  # not the latest: a space has no text yet
            return ""
        for k in range(1, _REST_OF_CHARACTER + 2):
            head, tail = self._decode(self._ids[:-k]), self._decode(self._ids[-k:])
            if head + tail == text:
                new = head[self._given :]
                self._ids, self._boundary, self._given = self._ids[-k:], 0, 0
                return new
        return ""

    def finish(self) -> str:
        """End the stream; returns the rest of the text, with an unfinished character as U+FFFD."""
        text = self._decode(self._ids) if self._ids else ""
        rest, self._given = text[self._given :], max(self._given, len(text))
        return rest

    def _move_window(self) -> None:
        """Keep the tokens of the last returned text as context, and drop those before."""
        del self._ids[: self._boundary]
        self._boundary = len(self._ids)
        self._given = len(self._decode(self._ids))


def _context(decode: Decode, prompt_ids: Sequence[int]) -> tuple[list[int], int, int]:
    """Return the window after a prompt: tokens, characters returned, and boundary.

    It begins between characters, and ends there but for a character begun at its end.
    """
    for begun in range(_REST_OF_CHARACTER + 1):
        whole = len(prompt_ids) - begun
        for start in range(whole - _CONTEXT, whole - _CONTEXT - _REST_OF_CHARACTER - 1, -1):
            start = max(start, 0)
            text = decode(prompt_ids[start:whole]) if start < whole else ""
            if _REPLACEMENT not in (text[:1], text[-1:]):
                ids = list(prompt_ids[start:])
                return ids, len(text), 0 if begun else len(ids)
    ids = list(prompt_ids[-_CONTEXT:])  # no text at all
    return ids, len(decode(ids)), len(ids)
