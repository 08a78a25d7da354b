"""The events of a streamed completion.

    data: {"id", "object", "created", "model", "choices": [{"index", "text", "logprobs",
           "finish_reason", "stop_reason"}], "usage": null}
    data: {…, "choices": [], "usage": {…}}                    with stream_options.include_usage
    data: [DONE]

All events of one step of the engine are sent together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pcg.runtime.requests.request import Chunk
from pcg.serve.json_bytes import json_bytes
from pcg.serve.openai.completion_texts import ChoiceText
from pcg.serve.openai.event_stream import Events, check_ended, event
from pcg.serve.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from pcg.serve.openai.usage import counted
from pcg.serve.openai.wire import StreamOptions
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


class CompletionEvents(Events):
    """Makes events of chunks.

    Args:
        head: the fields that all events have.
        submitted: the requests, one for each prompt.
    """

    def __init__(
        self,
        service: Service,
        head: dict[str, Any],
        submitted: Sequence[Submitted],
        names: TokenNames,
        wanted: Wanted,
    ) -> None:
        self._texts = service.token_texts
        self._choices = [ChoiceText(service.client.tokenizer, o.request) for o in submitted]
        self._head = {**head, "choices": [], **({"usage": None} if wanted.usage else {})}
        self._submitted = submitted
        self._names = names
        self._wanted = wanted
        self._places: dict[tuple[int, int], int] = {}
        self._prompt = sum(len(one.request.prompt_ids) for one in submitted)
        self._output = 0
        self._cached = [0] * len(submitted)
        has_more = wanted.token_ids or wanted.prompt_logprobs or wanted.running_usage
        asked = (one.request.params.logprobs for one in submitted)
        self._is_text_alone = not has_more and all(one is None for one in asked)
        self._written: dict[int, tuple[bytes, bytes]] = {}

    def step(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        if len(chunks) == 1:
            return self._event(place, chunks[0])
        return b"".join([self._event(place, chunk) for chunk in chunks])

    def end(self) -> bytes:
        usage = event({**self._head, "usage": self._usage()}) if self._wanted.usage else b""
        return usage + super().end()

    def _event(self, place: int, chunk: Chunk) -> bytes:
        if self._is_text_alone and chunk.completion is None:
            return self._text_event(place, chunk)
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

    def _text_event(self, place: int, chunk: Chunk) -> bytes:
        """Return an event that has nothing but text, of which the rest was written once."""
        if chunk.token_id is not None:
            self._output += 1
        if not chunk.text:
            return b""
        index = place * self._submitted[place].request.params.n + chunk.choice
        written = self._written.get(index)
        if written is None:
            choice = {"index": index, "text": "", "logprobs": None}
            choice |= {"finish_reason": None, "stop_reason": None}
            # Within a text of JSON every quotation mark has a backslash before it.
            before, _, after = event({**self._head, "choices": [choice]}).partition(b'"text":""')
            written = self._written[index] = before + b'"text":', after
        return written[0] + json_bytes(chunk.text) + written[1]

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
