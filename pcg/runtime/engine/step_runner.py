"""The step runner: runs the engine's steps on a program with adapters and a KV cache."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any, cast

import torch
from torch import Tensor

from pcg.errors import GenerationError
from pcg.kernels.batch import Span
from pcg.kernels.torch.products import ProductRequest
from pcg.kernels.uploads import uploaded_list
from pcg.parallel.ranks.group import broadcast_from_first
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.cache import AdapterCache, ServedAdapter
from pcg.runtime.adapters.padded_tables import BoundAdapters, PaddedTables
from pcg.runtime.engine.device import SideStream
from pcg.runtime.guided.grammar import Grammar
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.batch import ANY_TOKEN, Batch, whole_sequences
from pcg.runtime.model.decode_graphs import decode_graphs
from pcg.runtime.model.merged_execution import run_merged, run_single
from pcg.runtime.model.specialised import ServingProgram
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.sampling.sampler import Sampler, resolved
from pcg.runtime.sampling.sampling import only_finite, sample
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training.training_pass import TrainingPass
from pcg.runtime.training.work_units import Backward, Forward


class StepRunner:
    """Runs steps of the engine on one program.

    Attributes:
        side: runs backward units on a GPU; None on other devices, and over ranks, where the
            collectives of both would need one order.
        graphs: recorded decode steps; None if the program has none.
    """

    def __init__(self, state: ModelState, cache: KvCache, adapters: AdapterCache) -> None:
        self.cache = cache
        self._adapters = adapters
        self._tokenizer = state.tokenizer
        self._eos_ids = state.eos_ids
        self._max_positions = state.max_positions
        self._grammars = state.grammars
        self._vocabulary = state.program.base.vocabulary
        self._device = device = state.device
        self.fails_alike = state.ranks.size == 1
        has_side = device.type == "cuda" and state.ranks.size == 1
        self.side = SideStream(device) if has_side else None
        self._bind(state.serving)

    def _bind(self, program: ServingProgram) -> None:
        self._runner = program.runner
        self._tables = program.tables.in_pages(self.cache.pages, self._adapters.table)
        self.graphs = decode_graphs(self._runner, self._tables, self.cache, self._device)

    def use(self, program: ServingProgram) -> None:
        """Serve by a program for other adapter sites."""
        self._tables.close()
        self._bind(program)

    def open(self, request: Request, number: int) -> Sequence:
        """Return the state of a new request.

        Raises:
            GenerationError: the prompt is empty, has a token that the model lacks, or is longer
                than the model's positions; or the parameters name a token that the model lacks.
        """
        params = resolved(request.params, self._tokenizer, self._vocabulary)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._eos_ids
        decoder = None
        if self._tokenizer is not None:
            decoder = self._tokenizer.stream(request.prompt_ids, params.skip_special_tokens)
        return Sequence(
            request.named(number),
            number,
            request,
            self._limit(number, request),
            0.0,
            stop_ids,
            decoder,
            Sampler(params, request.prompt_ids, stop_ids, self._grammar(params)),
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.guide is None:
            return None
        grammar = self._grammars.begin(params.guide)
        if not self.fails_alike:
            grammar.wait()  # ranks plan the same steps
        return grammar

    def _limit(self, number: int, request: Request) -> int:
        length = request.length
        if not request.prompt_ids:
            raise GenerationError(f"prompt {number} has no tokens; give at least one")
        least, most = min(request.prompt_ids), max(request.prompt_ids)
        if least < 0 or most >= self._vocabulary:
            wrong = least if least < 0 else most
            raise GenerationError(
                f"prompt {number} has token {wrong}; the model's are 0 to {self._vocabulary - 1}"
            )
        if self._max_positions is not None and length >= self._max_positions:
            virtual = request.virtual_tokens
            of_adapter = f", {virtual} of them its adapter's virtual ones" if virtual else ""
            raise GenerationError(
                f"prompt {number} has {length} tokens{of_adapter}; the model has "
                f"{self._max_positions} positions, and generating needs at least one more than "
                "the prompt"
            )
        room = (self._max_positions or 2**62) - length
        return min(request.params.max_new_tokens, room)

    def prefetch(self, adapters: List[ServedAdapter]) -> None:
        self._tables.prefetch(cast("List[Adapter]", adapters))

    def is_copying(self, adapter: ServedAdapter) -> bool:
        return self._tables.is_copying(cast("Adapter", adapter))

    def evict(self, adapter: ServedAdapter) -> None:
        self._tables.evict(cast("Adapter", adapter))

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> Callable[[], list[int]]:
        """Run a step as `Device.start`, with the base's products merged."""
        if self.side is not None:
            self.side.begin()
        adapters = [cast("Adapter | None", one.request.adapter) for one, _ in chunks]
        order = self._tables.order(adapters)
        chunks, adapters = [chunks[i] for i in order], [adapters[i] for i in order]
        guided = [one.grammar for one, count in chunks if one.grammar and count == one.pending]
        if guided:
            self._grammars.begin_masks(guided)
        ready: List[int] = range(len(chunks))
        sampled = None if windows else self._decoded(chunks, adapters)
        if sampled is None:
            ready, sampled = self._eager(chunks, adapters, windows)

        def tokens() -> list[int]:
            by_place = [0] * len(chunks)
            if sampled is not None:
                for i, token in zip(ready, sampled.tolist(), strict=True):
                    by_place[order[i]] = token
            return by_place

        return tokens

    def _decoded(
        self, chunks: List[tuple[Sequence, int]], adapters: List[Adapter | None]
    ) -> Tensor | None:
        """Return the token after each sequence by a recorded step; None if no graph serves it."""
        sequences = [sequence for sequence, _ in chunks]
        if self.graphs is None or not all(s.generated and s.pending == 1 for s in sequences):
            return None
        found = self.graphs.run(
            [sequence.generated[-1] for sequence in sequences],
            [sequence.cached for sequence in sequences],
            [cast(PageTable, sequence.table) for sequence in sequences],
            adapters,
        )
        return None if found is None else self._chosen(sequences, found.logits, found.tokens)

    def _eager(
        self,
        chunks: List[tuple[Sequence, int]],
        adapters: List[Adapter | None],
        windows: List[tuple[Forward, int]],
    ) -> tuple[List[int], Tensor | None]:
        """Run a step eagerly; returns the sequences that it samples, by index, and their tokens."""
        functions: list[ProductRequest[Any]] = []
        served = _Served(chunks, adapters, self._tables, self.cache, self._device)
        if chunks:
            functions.append(self._runner.hidden_requests(served.batch, served.bound))
        for unit, count in windows:
            assert isinstance(unit.whole, TrainingPass)
            functions.append(unit.whole.forward_requests(count))
        if not windows:
            with torch.inference_mode():
                found = [run_single(function) for function in functions]
        else:
            # Backward reads what windows save, so they run outside inference mode.
            with torch.no_grad():
                found = run_merged(functions)
        return served.ready, self._sampled(served, found[0]) if served.ready else None

    def _sampled(self, served: _Served, hidden: List[Tensor]) -> Tensor:
        rows, last = served.sampled_rows(self._tables)
        logits = self._runner.logits_of(hidden, served.batch, served.bound, rows, last)
        return self._chosen([served.chunks[i][0] for i in served.ready], logits)

    def _chosen(
        self, sequences: List[Sequence], logits: Tensor, likeliest: Tensor | None = None
    ) -> Tensor:
        """Choose the token after each sequence; `likeliest` is the likeliest of each, if known."""
        samplers = [cast(Sampler, sequence.sampler) for sequence in sequences]
        if likeliest is not None and all(s.is_plain and s.is_greedy for s in samplers):
            return only_finite(logits, likeliest)
        found = sample(logits, samplers, self._runner.drawing)
        return broadcast_from_first(self._runner.ranks, found)

    def check_alive(self) -> None:
        with torch.inference_mode():
            self._runner.logits(
                whole_sequences([[ANY_TOKEN]], self._device), self._tables.bind([None], [1])
            )

    def back(self, units: List[Backward]) -> None:
        functions = []
        for unit in units:
            assert isinstance(unit.whole, TrainingPass)
            functions.append(unit.whole.backward_requests())
        with torch.no_grad():
            run_merged(functions)


class _Served:
    """The sequences of a step, in the order of their adapters' slots; `ready` ones are sampled."""

    def __init__(
        self,
        chunks: List[tuple[Sequence, int]],
        adapters: List[Adapter | None],
        tables: PaddedTables,
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
        self.batch = Batch(uploaded_list(ids, torch.int64, device), spans, cache)
        self._adapters = adapters
        self.bound = tables.bind(self._adapters, [span.length for span in spans])

    def sampled_rows(self, tables: PaddedTables) -> tuple[Tensor | None, BoundAdapters | None]:
        """Return the tokens that are sampled after, and their adapters; None for all tokens."""
        if len(self.batch.input_ids) == len(self.ready):
            return None, None
        adapters = [self._adapters[i] for i in self.ready]
        return self.batch.last_tokens(self.ready), tables.bind_epilogue(adapters)
