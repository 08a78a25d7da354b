"""Streamed text of an output: decodes tokens incrementally, and cuts the text at stop strings.

`tokenizers`' DecodeStream (0.23) is not used, because it raises on broken byte-fallback runs,
repeats text after a prompt that ends within a character, and cannot return an unfinished character
at the end. The text of a token depends on its neighbours: a character may span several tokens, and
many decoders drop the first word's space. Tokens are therefore decoded in a window that starts at a
token with final text, and the window's new text is returned, except a tail of U+FFFD, to which an
unfinished character decodes.

    window        ids[start:]; the first `returned` characters were returned earlier
    return        text[returned:] without trailing U+FFFD
    move          after all text of the window was returned, it may start at the last such place

Tokens that the decoder skips (special tokens) never end a window, as the word after them would lose
its space. The parts and the final `finish()` add up to `decode(all ids)`. A window without new text
grows to at most 16 tokens, which bounds the decoding time of a token: then skipped tokens are
dropped from the window, and bytes that are not UTF-8 are returned up to the first of the last k
tokens that decode independently:

    decode(ids) = decode(ids[:-k]) + decode(ids[-k:])

Stop strings may span several parts of the text, and returned text is final, so the longest suffix
that could still grow into a stop string is held back. The first complete match wins and, among
matches complete at the same character, the longest. This rule does not look ahead, so it stops
generation at the earliest possible token, and does not depend on the division into parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pcg.errors import GenerationError

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"
# Tokens of the prompt in the first window. A character has up to 4 tokens, so the window may need 3
# more to begin between characters, and the prompt may end within one.
_CONTEXT = 6
_REST_OF_CHARACTER = 3
_MOST = 16
"""Tokens without new text in a window."""


class StreamDecoder:
    """Decodes a sequence token by token.

    Args:
        prompt_ids: the tokens before the stream, as context: the first word keeps its space, and a
            character that starts in the prompt is completed. Their text is not returned.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        # The window, the number of its returned characters, and of its tokens up to the
        # last place where all text was returned.
        self._ids, self._returned, self._boundary = _context(decode, prompt_ids)

    def push(self, token: int) -> str:
        """Add a token; return the text that has become final, or ""."""
        self._ids.append(token)
        text = self._decode(self._ids)
        stable = len(text.rstrip(_REPLACEMENT))
        if stable <= self._returned:
            return self._shortened(text) if len(self._ids) - self._boundary > _MOST else ""
        new, self._returned = text[self._returned : stable], stable
        if stable == len(text):
            # The tokens of the last returned text stay as context; those before are dropped.
            del self._ids[: self._boundary]
            self._boundary = len(self._ids)
            self._returned = len(self._decode(self._ids))
        return new

    def _shortened(self, text: str) -> str:
        """Shorten a long window without new text; return the text that becomes final."""
        if len(text) <= self._returned:
            del self._ids[self._boundary]  # not the latest: a space has no text yet
            return ""
        for k in range(1, _REST_OF_CHARACTER + 2):
            head, tail = self._decode(self._ids[:-k]), self._decode(self._ids[-k:])
            if head + tail == text:
                new = head[self._returned :]
                self._ids, self._boundary, self._returned = self._ids[-k:], 0, 0
                return new
        return ""

    def finish(self) -> str:
        """End the stream; return the remaining text, with an unfinished character as U+FFFD."""
        text = self._decode(self._ids) if self._ids else ""
        rest, self._returned = text[self._returned :], max(self._returned, len(text))
        return rest


def _context(decode: Decode, prompt_ids: Sequence[int]) -> tuple[list[int], int, int]:
    """Return the window after a prompt: tokens, returned characters, and boundary.

    The window starts between characters; it may end within a character.
    """
    for begun in range(_REST_OF_CHARACTER + 1):
        whole = len(prompt_ids) - begun
        for start in range(whole - _CONTEXT, whole - _CONTEXT - _REST_OF_CHARACTER - 1, -1):
            start = max(start, 0)
            text = decode(list(prompt_ids[start:whole])) if start < whole else ""
            if _REPLACEMENT not in (text[:1], text[-1:]):
                ids = list(prompt_ids[start:])
                return ids, len(text), 0 if begun else len(ids)
    ids = list(prompt_ids[-_CONTEXT:])  # no text at all
    return ids, len(decode(ids)), len(ids)


class StopChecker:
    """Finds the first stop string of a stream, and cuts the text before or after it.

    Args:
        included: leave the stop string in the text.
    Raises:
        GenerationError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str], included: bool = False) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise GenerationError(f"stop={stop!r}; use a sequence of strings that are not empty")
        self._stop = tuple(dict.fromkeys(stop))
        self._included = included
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_end: bool = True) -> str:
        """Add a part of the stream; return the text that has become final.

        After a match, return the text before the stop string, and "" for further parts.

        Args:
            may_end: False if a stop string that is complete within this part must not end the
                stream.
        """
        if self.matched is not None:
            return ""
        held, text = len(self._held), self._held + text
        # (end, start): first complete, then longest. Held-back text was searched earlier.
        matches = [
            (start + len(stop), start, stop)
            for stop in (self._stop if may_end else ())
            if (start := text.find(stop, max(0, held - len(stop) + 1))) >= 0
        ]
        if matches:
            end, start, self.matched = min(matches)
            self._held = ""
            return text[: end if self._included else start]
        safe = self._safe_length(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """End the stream; return the text held back."""
        held, self._held = self._held, ""
        return held

    def _safe_length(self, text: str) -> int:
        safe = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), safe)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, safe)
            if start >= 0:
                safe = start
        return safe


class OutputText:
    """The text of an output, token by token.

    Args:
        decoder: the decoder; None without a tokenizer, for an output without text.
        stop: strings that end the output, and stay in the text with `keeps_stop`.
        echoed: text before the output, for `echo`.
    Attributes:
        parts: the returned text.
        matched: the stop string that ended the output; None before.
    """

    __slots__ = ("_stop", "decoder", "echoed", "matched", "parts")

    def __init__(
        self,
        decoder: StreamDecoder | None = None,
        stop: Sequence[str] = (),
        *,
        keeps_stop: bool = False,
        echoed: str = "",
    ) -> None:
        self.decoder = decoder
        self.echoed = echoed
        self.parts: list[str] = []
        self.matched: str | None = None
        self._stop = StopChecker(stop, keeps_stop) if stop else None

    def push(self, token: int, may_end: bool) -> str:
        """Add a token and return the text that has become final; see `StopChecker.push`."""
        text = "" if self.decoder is None else self.decoder.push(token)
        if self._stop is not None:
            text = self._stop.push(text, may_end)
            self.matched = self._stop.matched
        echo = self.take_echo() if self.echoed else ""
        if text:
            self.parts.append(text)
        return echo + text

    def finish(self, may_end: bool) -> str:
        """End the output without a stop string and return the rest of its text."""
        text = "" if self.decoder is None else self.decoder.finish()
        if self._stop is not None:
            text = self._stop.push(text, may_end) + self._stop.finish()
            self.matched = self._stop.matched
        echo = self.take_echo()
        if text:
            self.parts.append(text)
        return echo + text

    def take_echo(self) -> str:
        """Return the echoed text, once."""
        text, self.echoed = self.echoed, ""
        if text:
            self.parts.append(text)
        return text
