"""Generate: ragged sequences, each with its own adapter and sampling, in one batch a step.

Sequences wait, are admitted when the KV cache has room, prefill together, decode together, and make
room for the next as they end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pcg.errors import GenerationError
from pcg.parallel.ranks import of_first
from pcg.runtime.adapter_batch import AdapterStacks
from pcg.runtime.adapters import Adapter
from pcg.runtime.batch import ANY_TOKEN, Batch, Span
from pcg.runtime.detokenizer import StreamDecoder
from pcg.runtime.kv_cache import KvCache, bytes_of_page, kv_types
from pcg.runtime.model_runner import ModelRunner
from pcg.runtime.page_pool import PageTable, pages_for
from pcg.runtime.sampling import make_generator, sample
from pcg.runtime.sampling_params import SamplingParams
from pcg.runtime.stopping import StopChecker
from pcg.runtime.tokenizer import Tokenizer

PREFILL_TOKENS = 4096
"""Prompt tokens of one step at most, but for a longer single prompt."""
CACHE_BYTES = 4 * 2**30
"""KV cache of one call at most, but for a larger single sequence."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    adapter: Adapter | None = None

    @property
    def virtual_tokens(self) -> int:
        """Of the adapter's prompt, before the prompt's own."""
        return 0 if self.adapter is None else self.adapter.prompt_tokens

    @property
    def length(self) -> int:
        """Positions that it takes before anything is generated."""
        return self.virtual_tokens + len(self.prompt_ids)


@dataclass(frozen=True)
class Completion:
    """What one prompt was continued with.

    Attributes:
        text: without the stop string; empty without a tokenizer.
        token_ids: generated, the end token included.
        finish_reason: `stop` or `length`.
        adapter: the adapter's name; None for the base.
        prompt_tokens: length of the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    adapter: str | None
    prompt_tokens: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Chunk:
    """A piece of one prompt's continuation, as it is made.

    Attributes:
        index: of the prompt.
        text: new text; may be empty.
        token_id: the new token.
        completion: the whole, with the last chunk.
    """

    index: int
    text: str
    token_id: int
    completion: Completion | None = None


@dataclass
class _Running:
    """A sequence's state from admission to its end."""

    index: int
    request: Request
    table: PageTable
    generator: torch.Generator | None
    decoder: StreamDecoder | None
    stop: StopChecker
    stop_ids: frozenset[int]
    limit: int
    cached: int = 0
    generated: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    @property
    def next_tokens(self) -> list[int]:
        """Tokens that the cache lacks: the prompt at first, then the latest token."""
        if self.generated:
            return self.generated[-1:]
        return [ANY_TOKEN] * self.request.virtual_tokens + list(self.request.prompt_ids)

    def next_span(self, start: int) -> Span:
        """Where those lie in a batch, of which they are the tokens from `start`."""
        virtual = 0 if self.generated else self.request.virtual_tokens
        return Span(start, len(self.next_tokens), self.cached, self.table, virtual)

    def accept(self, token: int) -> Chunk:
        """Take a sampled token; the chunk carries the completion if it was the last."""
        self.generated.append(token)
        ended = token in self.stop_ids
        text = ""
        if self.decoder is not None:
            text = "" if ended else self.stop.push(self.decoder.push(token))
        full = len(self.generated) >= self.limit
        finished = ended or self.stop.matched is not None or full
        if finished and self.decoder is not None and self.stop.matched is None:
            text += self.stop.push(self.decoder.finish())
            text += self.stop.finish()
        self.text.append(text)
        if not finished:
            return Chunk(self.index, text, token)
        reason = "stop" if ended or self.stop.matched is not None else "length"
        name = self.request.adapter.name if self.request.adapter else None
        whole = Completion(
            "".join(self.text), tuple(self.generated), reason, name, len(self.request.prompt_ids)
        )
        return Chunk(self.index, text, token, whole)


class Generator:
    """Runs requests to their ends over one model runner."""

    def __init__(
        self,
        runner: ModelRunner,
        stacks: AdapterStacks,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        most_positions: int | None,
        device: torch.device,
    ) -> None:
        self._runner = runner
        self._stacks = stacks
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._most_positions = most_positions
        self._device = device

    def run(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """The requests' chunks as they are made.

        Raises:
            GenerationError: a prompt is empty, or longer than the model's positions.
        """
        limits = [self._limit(i, request) for i, request in enumerate(requests)]
        needs = [r.length + n for r, n in zip(requests, limits, strict=True)]
        cache = self._make_cache(needs)
        waiting = deque(range(len(requests)))
        running: list[_Running] = []
        while waiting or running:
            admitted = self._admit(waiting, requests, limits, needs, cache)
            step = sorted(admitted or running, key=lambda s: _adapter_order(s.request.adapter))
            tokens = self._step(step, cache)
            running += admitted
            for sequence, token in zip(step, tokens, strict=True):
                chunk = sequence.accept(token)
                if chunk.completion is not None:
                    running.remove(sequence)
                    cache.pool.close(sequence.table)
                yield chunk

    def _limit(self, index: int, request: Request) -> int:
        """Tokens to generate at most."""
        length = request.length
        if not request.prompt_ids:
            raise GenerationError(f"prompt {index} has no tokens; give at least one")
        if self._most_positions is not None and length >= self._most_positions:
            virtual = request.virtual_tokens
            of_adapter = f", {virtual} of them its adapter's virtual ones" if virtual else ""
            raise GenerationError(
                f"prompt {index} has {length} tokens{of_adapter}; the model has "
                f"{self._most_positions} positions, and generating needs at least one more than "
                "the prompt"
            )
        room = (self._most_positions or 2**62) - length
        return min(request.params.max_new_tokens, room)

    def _make_cache(self, needs: Sequence[int]) -> KvCache:
        types = kv_types(self._runner.model)
        most = pages_for(max(needs))
        at_once = max(1, CACHE_BYTES // (bytes_of_page(types) * most))
        return KvCache(types, most * min(len(needs), at_once), self._device)

    def _admit(
        self,
        waiting: deque[int],
        requests: Sequence[Request],
        limits: Sequence[int],
        needs: Sequence[int],
        cache: KvCache,
    ) -> list[_Running]:
        chosen: list[int] = []
        tokens = 0
        pages = pages_for(max(needs))
        room = cache.pool.free // pages
        while waiting and len(chosen) < room:
            tokens += requests[waiting[0]].length
            if chosen and tokens > PREFILL_TOKENS:
                break
            chosen.append(waiting.popleft())
        # Rows in the order of the batch, so that decoding reads them at equal distances.
        chosen.sort(key=lambda index: _adapter_order(requests[index].adapter))
        return [
            self._start(index, requests[index], limits[index], self._pages(cache, index, pages))
            for index in chosen
        ]

    @staticmethod
    def _pages(cache: KvCache, index: int, count: int) -> PageTable:
        table = cache.pool.open(f"prompt {index}", count)
        cache.pool.extend(table, count)
        return table

    def _start(self, index: int, request: Request, limit: int, table: PageTable) -> _Running:
        params = request.params
        stop_ids = frozenset(params.stop_token_ids)
        return _Running(
            index,
            request,
            table,
            None if params.greedy else make_generator(params.seed),
            self._tokenizer.stream(request.prompt_ids) if self._tokenizer else None,
            StopChecker(params.stop),
            stop_ids if params.ignore_eos else stop_ids | self._eos_ids,
            limit,
        )

    def _step(self, sequences: Sequence[_Running], cache: KvCache) -> list[int]:
        """Run the sequences' next tokens; returns the token sampled for each."""
        ids: list[int] = []
        spans = []
        for sequence in sequences:
            new = sequence.next_tokens
            spans.append(sequence.next_span(len(ids)))
            sequence.cached += len(new)
            ids += new
        batch = Batch(torch.tensor(ids, device=self._device), spans, cache)
        adapters = [sequence.request.adapter for sequence in sequences]
        bound = self._stacks.bind(adapters, [span.length for span in spans])
        if len(ids) == len(spans):
            logits = self._runner.logits(batch, bound)
        else:
            last = self._stacks.bind(adapters, [1] * len(spans))
            logits = self._runner.logits(batch, bound, batch.last_tokens, last)
        params = [sequence.request.params for sequence in sequences]
        generators = [sequence.generator for sequence in sequences]
        history = None
        if any(p.repetition_penalty != 1.0 for p in params):
            history = [[*s.request.prompt_ids, *s.generated] for s in sequences]
        tokens = sample(logits.float(), params, generators, history)
        return of_first(self._runner.ranks, tokens).tolist()


def _adapter_order(adapter: Adapter | None) -> tuple[bool, str]:
    """Sequences without an adapter first, those of one adapter together."""
    return adapter is not None, "" if adapter is None else adapter.name
