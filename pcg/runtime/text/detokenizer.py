"""Text from tokens as they come, without half characters and without second thoughts.

What a token means as text depends on its neighbours: a character may span several tokens, and many
decoders drop the first word's space. So tokens are decoded in a window that begins at a token whose
text is final, and what is new in the window's text is given out, but for a tail of U+FFFD, which is
what an unfinished character decodes to.

    window        ids[start:]; its first `given` characters are out already
    give out      text[given:] without its trailing U+FFFD
    move          once all of the window's text is out, it may begin at the previous such place

Tokens that the decoder skips (special ones) never end a window: the word after them would lose its
space. The pieces and the final `finish()` add up to `decode(all ids)`.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
# Tokens of the prompt that are context. A character has up to 4 tokens: the context may begin
# within one and then needs 3 more, and the prompt may end within one.
_CONTEXT = 6
_REST_OF_CHARACTER = 3


class StreamDecoder:
    """Decodes one sequence token by token."""

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        """Start a stream.

        Args:
            decode: text of a list of tokens, as a whole.
            prompt_ids: what comes before the stream; with it, the first word keeps its space, and
                a character begun in the prompt is completed. Its text is not given out.
        """
        self._decode = decode
        # The window, its characters that are out, and its tokens up to the last place where all
        # text was out.
        self._ids, self._given, self._boundary = _context(decode, prompt_ids)

    def push(self, token: int) -> str:
        """Add a token.

        Returns:
            The text that has become certain; "" if there is none.
        """
        self._ids.append(token)
        text = self._decode(self._ids)
        stable = len(text.rstrip(_REPLACEMENT))
        if stable <= self._given:
            return ""
        piece, self._given = text[self._given : stable], stable
        if stable == len(text):
            self._move_window()
        return piece

    def finish(self) -> str:
        """End the stream: the text still held back, an unfinished character as U+FFFD."""
        text = self._decode(self._ids) if self._ids else ""
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece

    def _move_window(self) -> None:
        """All text is out: keep the tokens of the last piece as context, drop what is before."""
        del self._ids[: self._boundary]
        self._boundary = len(self._ids)
        self._given = len(self._decode(self._ids))


def _context(decode: Decode, prompt_ids: Sequence[int]) -> tuple[list[int], int, int]:
    """The window that a prompt leaves: tokens, characters given out, boundary.

    It begins and, but for the begun character at its end, ends between characters.
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
