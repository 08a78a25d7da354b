"""The device side of the engine: the emitted program with weights, adapters and the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import Any, cast

import torch
from torch import Tensor

from pcg.errors import GenerationError
from pcg.parallel.ranks import of_first
from pcg.runtime.adapter_batch import AdapterStacks, Bound
from pcg.runtime.adapters import Adapter
from pcg.runtime.batch import Batch, Span
from pcg.runtime.engine.adapter_pages import AdapterPages
from pcg.runtime.engine.request import Request
from pcg.runtime.engine.sequence import Sequence
from pcg.runtime.engine.units import Backward, Forward
from pcg.runtime.kv_cache import KvCache
from pcg.runtime.model_runner import ModelRunner
from pcg.runtime.sampling import make_generator, sample
from pcg.runtime.split_execution import Asking, alone, together
from pcg.runtime.tokenizer import Tokenizer
from pcg.runtime.training_pass import ForwardUnit


class ProgramDevice:
    """Runs steps of the engine on one program.

    Attributes:
        cache: keys and values of all sequences.
    """

    def __init__(
        self,
        runner: ModelRunner,
        stacks: AdapterStacks,
        cache: KvCache,
        adapters: AdapterPages,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        most_positions: int | None,
        device: torch.device,
    ) -> None:
        self.cache = cache
        self._adapters = adapters
        self.use(runner, stacks)
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._most_positions = most_positions
        self._device = device

    def use(self, runner: ModelRunner, stacks: AdapterStacks) -> None:
        """Go on with a program that serves other sites, too."""
        self._runner = runner
        self._stacks = stacks.in_pages(self.cache.pages, self._adapters.table)

    def open(self, request: Request, number: int) -> Sequence:
        """A request's state, before anything ran.

        Raises:
            GenerationError: the prompt is empty, or longer than the model's positions.
        """
        params = request.params
        stop_ids = frozenset(params.stop_token_ids)
        return Sequence(
            f"request {number}",
            number,
            request,
            self._limit(number, request),
            0.0,
            stop_ids if params.ignore_eos else stop_ids | self._eos_ids,
            self._tokenizer.stream(request.prompt_ids) if self._tokenizer else None,
            None if params.greedy else make_generator(params.seed),
        )

    def _limit(self, number: int, request: Request) -> int:
        """Tokens to generate at most."""
        length = request.length
        if not request.prompt_ids:
            raise GenerationError(f"prompt {number} has no tokens; give at least one")
        if self._most_positions is not None and length >= self._most_positions:
            virtual = request.virtual_tokens
            of_adapter = f", {virtual} of them its adapter's virtual ones" if virtual else ""
            raise GenerationError(
                f"prompt {number} has {length} tokens{of_adapter}; the model has "
                f"{self._most_positions} positions, and generating needs at least one more than "
                "the prompt"
            )
        room = (self._most_positions or 2**62) - length
        return min(request.params.max_new_tokens, room)

    def run(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> list[int]:
        """Run sequences' next tokens and windows of jobs, the base's products together.

        Returns:
            For each sequence the token that follows; any where more are pending.
        """
        functions: list[Asking[Any]] = []
        tokens = [0] * len(chunks)
        adapters = [cast("Adapter | None", one.request.adapter) for one, _ in chunks]
        order = self._stacks.order(adapters)
        served = _Served(
            [chunks[i] for i in order],
            [adapters[i] for i in order],
            self._stacks,
            self.cache,
            self._device,
        )
        if chunks:
            functions.append(self._runner.asking_hidden(served.batch, served.bound))
        for unit, count in windows:
            assert isinstance(unit, ForwardUnit)
            functions.append(unit.whole.asking_forward(count))
        if not windows:
            with torch.inference_mode():
                found = [alone(function) for function in functions]
        else:
            # What windows keep is read, and what is written over it, outside inference mode.
            with torch.no_grad():
                found = together(functions)
        if chunks and served.ready:
            for i, token in self._sampled(served, found[0]):
                tokens[order[i]] = token
        return tokens

    def _sampled(self, served: _Served, hidden: List[Tensor]) -> Iterator[tuple[int, int]]:
        """The token after each sequence whose pending tokens all ran, by its place."""
        rows, last = served.sampled_rows(self._stacks)
        logits = self._runner.logits_of(hidden, served.batch, served.bound, rows, last)
        sequences = [served.chunks[i][0] for i in served.ready]
        params = [sequence.request.params for sequence in sequences]
        history = None
        if any(p.repetition_penalty != 1.0 for p in params):
            history = [[*s.request.prompt_ids, *s.generated] for s in sequences]
        samplers = [sequence.sampler for sequence in sequences]
        found = sample(logits, params, samplers, history, self._runner.drawing)
        yield from zip(served.ready, of_first(self._runner.ranks, found).tolist(), strict=True)

    def back(self, unit: Backward) -> None:
        """Run a backward unit."""
        unit.run()


class _Served:
    """The sequences of one step, in the order of their adapters' slots.

    Attributes:
        chunks: sequences, and how many of their pending tokens run.
        batch: these tokens.
        bound: their adapters.
        ready: places of those whose pending tokens all run: after others nothing is sampled.
    """

    def __init__(
        self,
        chunks: List[tuple[Sequence, int]],
        adapters: List[Adapter | None],
        stacks: AdapterStacks,
        cache: KvCache,
        device: torch.device,
    ) -> None:
        self.chunks = chunks
        self.ready: list[int] = []
        ids: list[int] = []
        spans = []
        for place, (sequence, count) in enumerate(chunks):
            start, virtual, generated = sequence.cached, 0, sequence.generated
            end = start + count
            if end == sequence.length:
                self.ready.append(place)
            first = len(ids)
            if generated and count == 1 and end == sequence.length:
                ids.append(generated[-1])
            else:
                ids += sequence.ids(start, end)
                virtual = max(0, min(end, sequence.request.virtual_tokens) - start)
            spans.append(Span(first, count, start, sequence.table, virtual))
        self.batch = Batch(torch.tensor(ids, device=device), spans, cache)
        self._adapters = adapters
        self.bound = stacks.bind(self._adapters, [span.length for span in spans])

    def sampled_rows(self, stacks: AdapterStacks) -> tuple[Tensor | None, Bound | None]:
        """Tokens that are sampled after, and their adapters; None where that is all tokens."""
        if len(self.batch.input_ids) == len(self.ready):
            return None, None
        adapters = [self._adapters[i] for i in self.ready]
        return self.batch.last_tokens[self.ready], stacks.bind_epilogue(adapters)
