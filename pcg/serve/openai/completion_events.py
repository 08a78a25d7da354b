"""The events of a streamed completion.

    data: {"id", "object", "created", "model", "choices": [{"index", "text", "logprobs",
           "finish_reason", "stop_reason"}], "usage": null}
    data: {…, "choices": [], "usage": {…}}                    with stream_options.include_usage
    data: [DONE]

All events of one step of the engine are sent together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from pcg.runtime.requests.request import Chunk
from pcg.serve.openai.completion_texts import ChoiceText
from pcg.serve.openai.event_stream import check_ended, event
from pcg.serve.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from pcg.serve.openai.usage import counted
from pcg.serve.openai.wire import StreamOptions
from pcg.serve.security.caller import Caller
from pcg.serve.service import Service, Submitted


@dataclass(frozen=True)
class Wanted:
    """The parts of events that a request asks for.

    Attributes:
        token_ids: ids of tokens.
        prompt_logprobs: logprobs of the prompt's tokens, as vLLM has them.
        usage: the usage in the last event; `running_usage` in every event, too.
    """

    token_ids: bool
    prompt_logprobs: bool
    usage: bool
    running_usage: bool

    @classmethod
    def of(cls, token_ids: bool, prompt_logprobs: bool, options: StreamOptions | None) -> Wanted:
        options = options or StreamOptions()
        usage = bool(options.include_usage)
        return cls(
            token_ids, prompt_logprobs, usage, usage and bool(options.continuous_usage_stats)
        )


class CompletionEvents:
    """Makes events of chunks.

    Args:
        head: the fields that all events have.
        submitted: the requests, one for each prompt.
    """

    def __init__(
        self,
        service: Service,
        caller: Caller,
        head: dict[str, Any],
        submitted: Sequence[Submitted],
        names: TokenNames,
        wanted: Wanted,
    ) -> None:
        self._service = service
        self._caller = caller
        self._texts = service.token_texts
        self._choices = [ChoiceText(service.executor.tokenizer, o.request) for o in submitted]
        self._head = {**head, "choices": [], **({"usage": None} if wanted.usage else {})}
        self._submitted = submitted
        self._names = names
        self._wanted = wanted
        self._places: dict[tuple[int, int], int] = {}
        self._prompt = sum(len(one.request.prompt_ids) for one in submitted)
        self._output = 0
        self._cached = [0] * len(submitted)

    async def parts(self, chunks: AsyncIterator[tuple[int, list[Chunk]]]) -> AsyncIterator[bytes]:
        """Return the events of chunks, those of a step together, and that of the usage."""
        async for place, step in chunks:
            if any(chunk.prompt_logprobs for chunk in step):  # as long as the prompt is
                made = await self._service.beside(self._caller, self._events, place, step)
            else:
                made = self._events(place, step)
            if made:
                yield made
        if self._wanted.usage:
            yield event({**self._head, "usage": self._usage()})

    def _events(self, place: int, step: Sequence[Chunk]) -> bytes:
        return b"".join(self._event(place, chunk) for chunk in step)

    def _event(self, place: int, chunk: Chunk) -> bytes:
        done, key = chunk.completion, (place, chunk.choice)
        is_first = key not in self._places
        if chunk.token_id is not None:
            self._output += 1
        if done is not None:
            check_ended(done)
            self._cached[place] = done.cached_tokens
        choice: dict[str, Any] = {
            "index": place * self._submitted[place].request.params.n + chunk.choice,
            "text": chunk.text,
            "logprobs": self._logprobs(place, chunk, is_first),
            "finish_reason": None if done is None else done.finish_reason,
            "stop_reason": None if done is None else done.stop_reason,
        }
        self._add_wanted(choice, place, chunk, is_first)
        if is_first:
            self._places[key] = 0
        self._places[key] += len(chunk.text)
        says_nothing = not chunk.text and done is None and choice["logprobs"] is None
        if says_nothing and not self._wanted.token_ids:
            return b""
        content = {**self._head, "choices": [choice]}
        if self._wanted.running_usage:
            content["usage"] = self._usage()
        return event(content)

    def _logprobs(self, place: int, chunk: Chunk, is_first: bool) -> dict[str, Any] | None:
        if self._submitted[place].request.params.logprobs is None:
            return None
        tokens: list[Any] = []
        places: list[int] = []
        start = self._places.get((place, chunk.choice), 0)
        if is_first:
            choice = self._choices[place]
            tokens, places = choice.echoed(chunk.prompt_logprobs)
            start = choice.start
        if chunk.token_id is not None:
            tokens.append((chunk.token_id, chunk.logprobs))
            places.append(start)
        return completion_logprobs(tokens, places, self._names) if tokens else None

    def _add_wanted(self, choice: dict[str, Any], place: int, chunk: Chunk, is_first: bool) -> None:
        if self._wanted.token_ids:
            choice["token_ids"] = [] if chunk.token_id is None else [chunk.token_id]
            if is_first:
                choice["prompt_token_ids"] = list(self._submitted[place].request.prompt_ids)
        if self._wanted.prompt_logprobs and is_first and chunk.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs, self._texts)

    def _usage(self) -> dict[str, Any]:
        return counted(self._prompt, self._output, sum(self._cached))
