"""The device side of the engine: the emitted program with weights, adapters and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import cast

import torch

from pcg.errors import GenerationError
from pcg.parallel.ranks import of_first
from pcg.runtime.adapter_batch import AdapterStacks
from pcg.runtime.adapters import Adapter
from pcg.runtime.batch import Batch, Span
from pcg.runtime.engine.request import Request
from pcg.runtime.engine.sequence import Sequence
from pcg.runtime.engine.units import Backward, Forward
from pcg.runtime.kv_cache import KvCache
from pcg.runtime.model_runner import ModelRunner
from pcg.runtime.sampling import make_generator, sample
from pcg.runtime.tokenizer import Tokenizer


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
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        most_positions: int | None,
        device: torch.device,
    ) -> None:
        self.cache = cache
        self._runner = runner
        self._stacks = stacks
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._most_positions = most_positions
        self._device = device

    def use(self, runner: ModelRunner, stacks: AdapterStacks) -> None:
        """Go on with a program that serves other sites, too."""
        self._runner, self._stacks = runner, stacks

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
        """Run sequences' next tokens, and windows of jobs.

        Returns:
            For each sequence the token that follows; any where more are pending.
        """
        tokens = [0] * len(chunks)
        if chunks:
            order = self._stacks.order([_adapter(sequence) for sequence, _ in chunks])
            found = self._serve([chunks[i] for i in order])
            for i, token in zip(order, found, strict=True):
                tokens[i] = token
        for unit, count in windows:
            unit.run(count)
        return tokens

    def back(self, unit: Backward) -> None:
        """Run a backward unit."""
        unit.run()

    def _serve(self, chunks: List[tuple[Sequence, int]]) -> list[int]:
        """Run the sequences' next tokens, of one adapter together; the token after each."""
        ids: list[int] = []
        spans = []
        for sequence, count in chunks:
            start, end = sequence.cached, sequence.cached + count
            virtual = max(min(end, sequence.request.virtual_tokens) - start, 0)
            spans.append(Span(len(ids), count, start, sequence.table, virtual))
            ids += sequence.ids(start, end)
        batch = Batch(torch.tensor(ids, device=self._device), spans, self.cache)
        adapters = [_adapter(sequence) for sequence, _ in chunks]
        bound = self._stacks.bind(adapters, [span.length for span in spans])
        # After a chunk that is not a prompt's last nothing is sampled.
        ready = [i for i, (sequence, count) in enumerate(chunks) if sequence.pending == count]
        tokens = [0] * len(chunks)
        if not ready:
            self._runner.hidden(batch, bound)
            return tokens
        if len(ids) == len(ready):
            logits = self._runner.logits(batch, bound)
        else:
            rows = batch.last_tokens[ready]
            last = self._stacks.bind([adapters[i] for i in ready], [1] * len(ready))
            logits = self._runner.logits(batch, bound, rows, last)
        sequences = [chunks[i][0] for i in ready]
        params = [sequence.request.params for sequence in sequences]
        history = None
        if any(p.repetition_penalty != 1.0 for p in params):
            history = [[*s.request.prompt_ids, *s.generated] for s in sequences]
        found = sample(logits.float(), params, [s.sampler for s in sequences], history)
        for i, token in zip(ready, of_first(self._runner.ranks, found).tolist(), strict=True):
            tokens[i] = token
        return tokens


def _adapter(sequence: Sequence) -> Adapter | None:
    return cast("Adapter | None", sequence.request.adapter)
