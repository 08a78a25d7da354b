"""The step runner: runs the engine's steps on a program with adapters and a KV cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from pcg.errors import GenerationError
from pcg.ir.program.program import is_classifier, routed_layers
from pcg.kernels.devices import device_memory, uploaded_list
from pcg.kernels.torch.products import ProductRequest
from pcg.kernels.triton.backend import compiled
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.cache import AdapterCache, ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.device.device import SideStream
from pcg.runtime.engine.device.served_batch import ServedBatch, rows_of
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.model.batch import ANY_TOKEN, LatestTokens, whole_sequences
from pcg.runtime.model.host_steps import host_steps
from pcg.runtime.model.merged_execution import run_merged, run_single
from pcg.runtime.model.runner import ModelRunner
from pcg.runtime.model.state import ModelState, ServingProgram
from pcg.runtime.model.step_graphs import WarmUp, step_graphs
from pcg.runtime.requests.request import Request, classifying
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step import (
    Computed,
    DrawnTokens,
    PooledStates,
    PromptLogprobs,
    Results,
    RoutedExperts,
)
from pcg.runtime.sampling.grammars import Grammar, Grammars
from pcg.runtime.sampling.logprobs import Logprobs, PromptCells, logprobs_of
from pcg.runtime.sampling.sampling import Sampler, only_finite, resolved, sample, scored
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.text.output_text import OutputText
from pcg.runtime.training.recorded.warm_job import WarmJob
from pcg.runtime.training.runner import TrainingPass
from pcg.runtime.training.warm_jobs import KeptRunners, record_jobs
from pcg.runtime.training.work_units import Forward, Part, Phase
from pcg.units import shown
from pcg.value_checks import check_padding

# ------------------------------------------------------------------------------------- running step


@dataclass(frozen=True)
class TokenChoice:
    """Draws the tokens of a step, by the program's kernels and the requests' parameters."""

    runner: ModelRunner
    device: torch.device
    grammars: Grammars
    latest: LatestTokens

    def begin_masks(self, sequences: List[Sequence]) -> None:
        """Start computing the masks of sequences with guides, and of their followers."""
        if self.runner.alike.rank:
            return  # rank 0 draws the tokens
        guided = [first for first in sequences if first.request.params.guide is not None]
        if guided:
            every = [each.grammar for first in guided for each in (first, *first.followers)]
            self.grammars.begin_masks([grammar for grammar in every if grammar is not None])

    def drawn(
        self, sequences: List[Sequence], logits: Tensor, likeliest: Tensor | None
    ) -> DrawnTokens:
        """Draw the next token of each sequence and of its followers.

        Args:
            logits: [sequences, V].
            likeliest: the likeliest token of each sequence, if known.
        """
        if [first for first in sequences if first.followers]:
            copies = [i for i, first in enumerate(sequences) for _ in (first, *first.followers)]
            logits, likeliest = logits[uploaded_list(copies, torch.int64, self.device)], None
            sequences = [each for first in sequences for each in (first, *first.followers)]
            return self._chosen(sequences, logits, likeliest)
        chosen = self._chosen(sequences, logits, likeliest)
        self.latest.put([first.id for first in sequences], chosen.tokens)
        return chosen

    def _chosen(
        self, sequences: List[Sequence], logits: Tensor, likeliest: Tensor | None
    ) -> DrawnTokens:
        tokens, first_ns = self._tokens(sequences, logits, likeliest)
        asking = [row for row, sequence in enumerate(sequences) if sequence.likeliest is not None]
        if not asking:
            return DrawnTokens(sequences, tokens, first_ns=first_ns)
        most = max(sequences[row].likeliest or 0 for row in asking)
        drawn = tokens
        if len(asking) < len(sequences):
            rows = uploaded_list(asking, torch.int64, self.device)
            logits, drawn = logits[rows], tokens[rows]
        samplers = _samplers([sequences[row] for row in asking])
        logits = scored(logits, samplers, self.runner.drawing)
        return DrawnTokens(sequences, tokens, logprobs_of(logits, drawn, most), first_ns)

    def _tokens(
        self, sequences: List[Sequence], logits: Tensor, likeliest: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens and, over ranks, the time of rank 0, which draws them."""
        ranks = self.runner.alike
        if ranks.rank:
            broadcast = torch.empty(len(sequences) + 1, dtype=torch.int64, device=self.device)
            broadcast = ranks.broadcast(broadcast)
            return broadcast[:-1], broadcast[-1:]
        samplers = _samplers(sequences)
        if likeliest is not None and all(s.is_plain and s.is_greedy for s in samplers):
            tokens = only_finite(logits, likeliest)
        else:
            tokens = sample(logits, samplers, self.runner.drawing)
        if ranks.size == 1:
            return tokens, None
        stamped = [*tokens.tolist(), time.monotonic_ns()]
        broadcast = ranks.broadcast(torch.tensor(stamped, device=self.device))
        return broadcast[:-1], broadcast[-1:]


def _samplers(sequences: List[Sequence]) -> List[Sampler]:
    return [cast(Sampler, sequence.sampler) for sequence in sequences]


class LaunchedStep:
    """A step that was launched on the program's device.

    The results are copied to the host asynchronously. An event marks the end of the copy, so that
    the host does not wait for later steps.

    Attributes:
        is_replayed: True if recorded steps ran the whole forward.
    """

    def __init__(self, choice: TokenChoice, ready: List[Sequence]) -> None:
        """Start a step.

        Args:
            ready: the sequences to draw a token for.
        """
        self._choice = choice
        self._ready = ready
        self.is_replayed = False
        self._logits: Tensor | None = None
        self._likeliest: Tensor | None = None
        self._computed: list[Computed] = []
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        # Masks depend on the previous tokens, which the host may not know yet.
        self._has_masks = not [sequence for sequence in ready if sequence.ahead]
        if self._has_masks:
            choice.begin_masks(ready)
        if choice.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            self._events = began, ended

    def computed(
        self, logits: Tensor | None, likeliest: Tensor | None, others: List[Computed] = ()
    ) -> LaunchedStep:
        """Set the results of the forward.

        Args:
            logits: [ready, V]; None if no sequence is ready.
            likeliest: the likeliest tokens [ready], if known.
        """
        self._logits, self._likeliest, self._computed = logits, likeliest, [*others]
        return self

    def draw(self) -> None:
        """Draw the next tokens of the sequences that still run; send all results to the host."""
        if self._logits is not None:
            with torch.inference_mode():
                self._draw(self._logits, self._likeliest)
        self._logits = self._likeliest = None
        self._computed = [part.sent() for part in self._computed]
        if self._events is not None:
            self._events[1].record()

    def _draw(self, logits: Tensor, likeliest: Tensor | None) -> None:
        rows = [row for row, sequence in enumerate(self._ready) if sequence.state is State.RUNNING]
        sequences = [self._ready[row] for row in rows]
        if not sequences:
            return
        if not self._has_masks:
            self._choice.begin_masks(sequences)
        if len(rows) < len(self._ready):
            chosen = uploaded_list(rows, torch.int64, logits.device)
            logits = logits[chosen]
            likeliest = None if likeliest is None else likeliest[chosen]
        self._computed.append(self._choice.drawn(sequences, logits, likeliest))

    def read(self) -> Results:
        """Wait until the results are on the host, and return the results."""
        if self._events is not None and self._computed:
            self._events[1].synchronize()
        results = Results()
        for part in self._computed:
            part.read(results)
        return results

    @property
    def device_s(self) -> float | None:
        """The step's time on the device, after `read`; None without results, and on CPUs."""
        if self._events is None or not self._computed:
            return None
        began, ended = self._events
        return float(began.elapsed_time(ended)) / 1e3


# -------------------------------------------------------------------------------------- step runner


_WAYS_TO_CHOOSE = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
)
"""Sampling parameters that together run all sampling kernels."""


class StepRunner:
    """Runs steps of the engine on a program.

    Attributes:
        side: the second stream of a GPU; None on other devices, and over ranks, where collectives
            of both streams would need a common order.
        is_ahead: True on a GPU of a single rank, which runs in parallel to the host.
        graphs: recorded steps; None if the program does not record steps.
        warmed: counts and times of the warm-up; None without a warm-up.
    """

    def __init__(
        self, state: ModelState, cache: KvCache, adapters: AdapterCache, limits: Limits
    ) -> None:
        self.cache = cache
        self._state = state
        self._limits = limits
        self._adapters = adapters
        self._tokenizer = state.tokenizer
        self._eos_ids = state.eos_ids
        self._max_positions = state.max_positions
        self._grammars = state.grammars
        self._answering = state.answering
        self._tokens, self._vocabulary = state.program.base.tokens, state.program.base.vocabulary
        self._device = device = state.device
        self.fails_alike = state.mesh.alike.size == 1
        self.is_ahead = device.type == "cuda" and self.fails_alike
        self.side = SideStream(device) if self.is_ahead else None
        self.warmed: WarmUp | None = None
        self._bind(state.serving)

    def _bind(self, program: ServingProgram) -> None:
        self._runner = program.runner
        self._tables = program.tables.in_pages(self.cache.pages, self._adapters.table)
        self.graphs = step_graphs(
            self._runner,
            self._tables,
            self.cache,
            self._limits.running,
            self._limits.tokens,
            self._max_positions,
        )
        self._host_steps = host_steps(self._runner, self.cache)
        latest = LatestTokens(self._limits.running, self._device)
        if self.graphs is not None:
            latest = self.graphs.latest
        self._choice = TokenChoice(self._runner, self._device, self._grammars, latest)
        self._ready = self._made

    @property
    def layers(self) -> int:
        return len(self._runner.model.layers)

    @property
    def _made(self) -> Counter[str]:
        """The numbers of compiled kernels and recorded steps so far."""
        if self.graphs is None:
            return Counter()
        return Counter(kernels=compiled().total(), steps=self.graphs.recorded)

    @property
    def late(self) -> dict[str, int]:
        """The numbers of compiled kernels and recorded steps since the warm-up."""
        counts = self._made
        return {kind: counts[kind] - self._ready[kind] for kind in counts}

    @property
    def copies_bytes(self) -> int:
        return self._tables.beside_pool_bytes

    def warm_up(
        self,
        adapters: List[Adapter],
        kept: KeptRunners,
        jobs: List[WarmJob] = (),
    ) -> None:
        """Record possible steps, and compile the sampling kernels.

        Args:
            adapters: adapters that may run; larger ranks later reallocate the tables.
            kept: receives the runners of jobs that the program was compiled for.
            jobs: further possible jobs.
        """
        if self.graphs is None or self.graphs.recorder is None:
            return
        (free_bytes, _), before = device_memory(self._device), self.graphs.recorded
        started = time.monotonic()
        self.graphs.warm_up(adapters)
        of_jobs = record_jobs(self._state, self.cache, self._limits.tokens, kept, jobs)
        torch.cuda.empty_cache()  # frees memory of the eager runs before recording
        size_bytes = max(free_bytes - device_memory(self._device)[0], 0)
        recorded = self.graphs.recorded - before + of_jobs
        self.warmed = WarmUp(recorded, time.monotonic() - started, size_bytes)
        with torch.inference_mode():
            for dtype in {self._runner.logits_dtype, torch.float32}:
                logits = torch.zeros((1, self._vocabulary), dtype=dtype, device=self._device)
                for params in _WAYS_TO_CHOOSE:
                    sample(logits, [Sampler(params, (ANY_TOKEN,))], self._runner.drawing)
        self._ready = self._made

    def use(self, program: ServingProgram) -> None:
        """Switch to a program for other adapter sites."""
        late = self.late
        self._tables.close()
        self._bind(program)
        self._ready.subtract(late)

    def open(self, request: Request, number: int) -> Sequence:
        """Return the state of a new request, with other continuations as its followers.

        Raises:
            GenerationError: the prompt is empty, has a token that the model lacks, or is longer
                than the model's positions; or the parameters name a token that the model lacks.
        """
        limit = self._limit(number, request)
        params = resolved(request.params, self._tokenizer, self._vocabulary)
        sequence = self._opened(request, number, limit, params)
        for _ in range(1, params.width):
            sequence.followers.append(self._opened(request, number, limit, params, sequence))
        return sequence

    def _opened(
        self,
        request: Request,
        number: int,
        limit: int,
        params: SamplingParams,
        first: Sequence | None = None,
    ) -> Sequence:
        choice, of_first = (0, None) if first is None else (1 + len(first.followers), first.sampler)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._eos_ids
        decoder = None
        if self._tokenizer is not None:
            decoder = self._tokenizer.stream(request.prompt_ids, params.skip_special_tokens)
        grammar = self._grammar(params, request.tenant)
        return Sequence(
            request.named(number, choice),
            number,
            request,
            limit=limit,
            choice=choice,
            text=OutputText(
                decoder,
                params.stop,
                keeps_stop=params.include_stop_str_in_output,
                echoed=self._echoed(request) if first is None else first.text.echoed,
            ),
            stop_ids=stop_ids,
            sampler=Sampler(
                params, request.prompt_ids, stop_ids, grammar, first=of_first, choice=choice
            ),
            adapter_version=self._version(request) if first is None else first.adapter_version,
        )

    def _version(self, request: Request) -> AdapterVersion | None:
        adapter = request.adapter
        return None if adapter is None else self._answering(cast("Adapter", adapter))

    def _grammar(self, params: SamplingParams, tenant: str) -> Grammar | None:
        if params.guide is None:
            return None
        grammar = self._grammars.begin(params.guide, tenant)
        if not self.fails_alike:
            grammar.wait()  # ranks plan the same steps
        return grammar

    def _echoed(self, request: Request) -> str:
        if not request.params.echo or self._tokenizer is None:
            return ""
        return self._tokenizer.decode(request.prompt_ids) if request.text is None else request.text

    def _limit(self, number: int, request: Request) -> int:
        length = request.length
        name = f"request {request.request_id!r}" if request.request_id else f"prompt {number}"
        if not request.prompt_ids:
            raise GenerationError(f"{name} has no tokens; give at least one")
        new, room = request.params.max_new_tokens, (self._max_positions or 2**62) - length
        if request.pooling is None and is_classifier(self._state.program.config):
            room += 1  # a label takes no position
            asked = replace(request.params, truncate_prompt_tokens=None)
            if asked != SamplingParams(**classifying(self._vocabulary)):
                raise GenerationError(
                    f"{name}: the model is a sequence classifier, which generates no text; ask for "
                    "the labels by classify"
                )
        if min(new, 1) > room:
            virtual = request.virtual_tokens
            of_adapter = f", {virtual} of them its adapter's virtual ones" if virtual else ""
            raise GenerationError(
                f"{name} has {length} tokens{of_adapter}; the model has "
                f"{self._max_positions} positions, and generating needs at least one more than "
                "the prompt"
            )
        least, most = min(request.prompt_ids), max(request.prompt_ids)
        if least < 0 or most >= self._tokens:
            wrong = least if least < 0 else most
            raise GenerationError(
                f"{name} has token {shown(wrong)}; the model's are 0 to {self._tokens - 1}"
            )
        check_padding(request.prompt_ids, name, self._state.program.padding, GenerationError)
        if request.params.routed_experts:
            self._check_routes(name, request)
        return min(new, room)

    def _check_routes(self, name: str, request: Request) -> None:
        layers, _, _ = routed_layers(self._runner.model)
        sizes = self._state.mesh.sizes
        if not layers:
            raise GenerationError(
                f"{name} has routed_experts, and no layer of the model chooses experts by a single "
                "top-k; leave it out"
            )
        if sizes.pp > 1 or sizes.cp > 1 or request.virtual_tokens:
            raise GenerationError(
                f"{name} has routed_experts, which are recorded without pipeline stages (pp="
                f"{sizes.pp}), ranks that share tokens (cp={sizes.cp}) and virtual tokens "
                f"({request.virtual_tokens}); leave routed_experts out"
            )

    def prefetch(self, adapters: List[ServedAdapter]) -> None:
        if self.fails_alike:  # several ranks would have to agree on the copied adapters
            self._tables.prefetch(cast("List[Adapter]", adapters))

    def copy_page(self, page: int, to: int) -> None:
        self.cache.copy_page(page, to)

    def copy_states(self, slot: int, to: int) -> None:
        assert self.cache.states is not None
        self.cache.states.copy(slot, to)

    def is_copying(self, adapter: ServedAdapter) -> bool:
        return self._tables.is_copying(cast("Adapter", adapter))

    def evict(self, adapter: ServedAdapter) -> None:
        is_gone = self._adapters.is_gone(adapter)
        (self._tables.forget if is_gone else self._tables.evict)(cast("Adapter", adapter))

    def reset(self) -> None:
        if self.side is not None:
            self.side.join()
        self._tables.reset()

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> LaunchedStep:
        """Run a step as `Device.start`, with the base's products merged."""
        if self.side is not None:
            self.side.begin()
        adapters = [cast("Adapter | None", sequence.request.adapter) for sequence, _ in chunks]
        order = self._tables.order(adapters)
        chunks, adapters = [chunks[i] for i in order], [adapters[i] for i in order]
        served = ServedBatch(chunks, adapters, self._choice.latest)
        running = LaunchedStep(self._choice, [chunks[i][0] for i in served.ready])
        recorded = None
        if chunks and self.graphs is not None:
            recorded = served.run_recorded(self.graphs)
        if recorded is None:
            return self._eager(running, served, windows)
        if windows:
            # Graphs cannot merge products, so windows run after the graph.
            self._run_forward([], windows)
        running.is_replayed = all(cast(TrainingPass, w.whole).is_replayed for w, _ in windows)
        return running.computed(recorded.logits, recorded.tokens)

    def _eager(
        self, running: LaunchedStep, served: ServedBatch, windows: List[tuple[Forward, int]]
    ) -> LaunchedStep:
        """Run a step eagerly."""
        functions: list[ProductRequest[Any]] = []
        logits: Tensor | None = None
        if served.chunks:
            cp = self._state.mesh.cp
            served.put(self._tables, self.cache, self._device, self._runner, cp)
            for batch, _ in served.parts:
                batch.is_alone = not windows
            if not windows and self._host_steps is not None and served.is_decode:
                logits = self._host_steps.logits(served.batch, served.bound)
                if logits is not None:
                    return running.computed(logits, None)
            functions.append(served.hidden_requests(self._runner))
        computed = self._run_forward(functions, windows)
        others: list[Computed] = []
        if served.ready:
            rows, last = served.sampled_rows(self._tables)
            # Logprobs need the logits on all ranks; drawing tokens needs them on rank 0 only.
            served.batch.logits_on_first = not served.has_logprobs
            logits = self._runner.logits_of(computed[0], served.batch, served.bound, rows, last)
            served.batch.logits_on_first = False
        if served.scored:
            others.append(self._scored(served, computed[0]))
        if served.pooled:
            others.append(self._pooled(served, computed[0]))
        if served.routed:
            assert served.batch.routes is not None
            others.append(RoutedExperts(served.routed, served.batch.routes.recorded))
        return running.computed(logits, None, others)

    def _run_forward(
        self, functions: list[ProductRequest[Any]], windows: List[tuple[Forward, int]]
    ) -> list[Any]:
        """Run serving functions and windows; return their results."""
        for unit, count in windows:
            assert isinstance(unit.whole, TrainingPass)
            functions.append(unit.whole.forward_requests(count))
        if not windows:
            with torch.inference_mode():
                return [run_single(function) for function in functions]
        # Backward reads what windows save, so they run outside inference mode.
        with torch.no_grad():
            return self._run_beside_each_other(functions)

    def _run_beside_each_other(self, functions: list[ProductRequest[Any]]) -> list[Any]:
        """Run functions with the base's products merged; return their results.

        Over pipeline stages they run in sequence, so that each stage works on another function.
        """
        if self._runner.link is None:
            return run_merged(functions)
        return [run_single(function) for function in functions]

    def _scored(self, served: ServedBatch, hidden: List[Tensor]) -> PromptLogprobs:
        """Return the logprobs of prompts' tokens, from logits of a few rows at a time."""
        rows, adapters = rows_of(served.scored)
        targets = [token for read in served.scored for token in read.behind]
        most = max(read.sequence.request.params.of_prompt or 0 for read in served.scored)
        cells = PromptCells([(read.sequence.request.params, read.places) for read in served.scored])
        parts, size = [], self._runner.model.loss_chunk
        for start in range(0, len(rows), size):
            some = slice(start, start + size)
            chosen = uploaded_list(rows[some], torch.int64, self._device)
            of_rows = self._tables.bind_epilogue(adapters[some])
            logits = self._runner.logits_of(hidden, served.batch, served.bound, chosen, of_rows)
            wanted = uploaded_list(targets[some], torch.int64, self._device)
            parts.append(logprobs_of(logits, wanted, most, cells.of(logits, start)))
        counts = [(read.sequence, len(read.tokens)) for read in served.scored]
        return PromptLogprobs(counts, Logprobs.joined(parts), cells.counts)

    def _pooled(self, served: ServedBatch, hidden: List[Tensor]) -> PooledStates:
        """Return the sums of the last hidden states that each sequence reads."""
        rows, adapters = rows_of(served.pooled)
        chosen = uploaded_list(rows, torch.int64, self._device)
        of_rows = self._tables.bind_epilogue(adapters)
        states = self._runner.last_hidden_of(hidden, served.batch, served.bound, chosen, of_rows)
        parts = states.float().split([len(read.tokens) for read in served.pooled])
        counts = [(read.sequence, len(read.tokens)) for read in served.pooled]
        return PooledStates(counts, torch.stack([part.sum(dim=0) for part in parts]))

    def check_alive(self) -> None:
        with torch.inference_mode():
            self._runner.logits(
                whole_sequences([[ANY_TOKEN]], self._device), self._tables.bind([None], [1])
            )

    def run_parts(self, parts: List[Part]) -> None:
        if parts[0].stage.phase is Phase.LOSS:
            for part in parts:
                part.run()
            return
        functions = []
        for part in parts:
            assert isinstance(part.whole, TrainingPass)
            functions.append(part.whole.part_requests())
        with torch.no_grad():
            self._run_beside_each_other(functions)
        if self._runner.link is not None:
            self._runner.link.meet()  # so that rank 0's clock includes the time of all stages
