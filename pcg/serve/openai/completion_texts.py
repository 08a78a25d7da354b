"""Places of tokens in a completion's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pcg.runtime.requests.request import Completion, Request
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.openai.logprobs import TokenNames, completion_logprobs


class ChoiceText:
    """The text of a continuation, with its prompt's before it if that is echoed.

    Args:
        tokenizer: None for a model without one, whose tokens are all at place 0.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self._tokenizer = tokenizer
        self._request = request

    def logprobs(self, done: Completion, names: TokenNames) -> dict[str, Any]:
        """Return the logprobs of a whole continuation, as JSON; under `echo` the prompt's, too."""
        tokens = list(zip(done.token_ids, done.logprobs or (), strict=True))
        offsets = [min(place, len(done.text)) for place in self._of_output(done.token_ids)]
        before, places = self.echoed(done.prompt_logprobs)
        return completion_logprobs([*before, *tokens], [*places, *offsets], names)

    def echoed(
        self, found: Sequence[TokenLogprobs | None] | None
    ) -> tuple[list[tuple[int, TokenLogprobs | None]], list[int]]:
        """Return the prompt's tokens with their logprobs, and their places; none without echo."""
        request = self._request
        if not request.params.echo or found is None:
            return [], []
        tokens = list(zip(request.prompt_ids, found, strict=True))
        return tokens, list(self._places(request.prompt_ids, (), 0))

    @property
    def start(self) -> int:
        """The place where the output begins."""
        request = self._request
        if not request.params.echo or self._tokenizer is None:
            return 0
        text = request.text
        return len(self._tokenizer.decode(request.prompt_ids) if text is None else text)

    def _of_output(self, tokens: Sequence[int]) -> Iterator[int]:
        return self._places(tokens, self._request.prompt_ids, self.start)

    def _places(self, tokens: Sequence[int], before: Sequence[int], place: int) -> Iterator[int]:
        decoder = None
        if self._tokenizer is not None:
            skips = self._request.params.skip_special_tokens
            decoder = self._tokenizer.stream(before, skips)
        for token in tokens:
            yield place
            place += 0 if decoder is None else len(decoder.push(token))
