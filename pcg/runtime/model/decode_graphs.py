"""Decode steps as CUDA graphs: recorded once for a size of batch, replayed for all such batches.

A step that only decodes is hundreds of launches of a few microseconds each, which the host makes
more slowly than the device runs them. Recorded, they are one launch. A graph keeps addresses and
numbers for good, so what it reads is memory that stays: the base's weights, the cache, tables of
adapters' rows (`lora_rows.py`), and the step's tokens in lists that its program makes room for and
fills (`decode_lists`). It runs from the prologue to the logits and each one's likeliest token.

    tokens ──▶ room, rounded up ──▶ its graph ──▶ fill lists ──▶ replay ──▶ logits, tokens

Rounded up are the tokens of the batch, pages of a sequence, splits of keys, and tiles of tokens by
adapter. A graph is recorded when batches of its room have come a few times, as to record it takes
about as long as so many steps. Where the adapters' memory has grown to lie elsewhere, graphs that
read it are recorded anew.

What no graph serves runs as ever: batches of more tokens than the largest room, adapters that have
more than rows of LoRA and virtual tokens, programs without such lists, and all where a device does
not record.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pcg.ir.types import TORCH_NAMES
from pcg.parallel.ranks.group import ALONE
from pcg.peft.adapters import Adapter
from pcg.runtime.adapters.padded_tables import Bound, PaddedTables
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.runner import ModelRunner

EAGER_STEPS = 4
"""Batches of a room before its graph is recorded. To record it the host launches everything twice,
and the driver makes it ready: taken for so many steps, so that at worst the time doubles."""
MOST_GRAPHS = 64
"""Graphs that are kept, the latest that ran: a device keeps the launches of each."""


class Recorder(Protocol):
    """What makes something that can be run again without the host's work."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a function that reads and writes memory that stays.

        Args:
            run: called any number of times; what it did then may be done or not.
        Returns:
            Does again what it did, on what lies in the same memory by then.
        """


class CudaRecorder:
    """Records CUDA graphs; their intermediate tensors share one memory, as one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels, and has libraries make their workspaces
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may read adapters or compile meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay


@dataclass(frozen=True)
class DecodeTokens:
    """The tokens of a step, one of each sequence; each attribute has one item a token.

    Attributes:
        ids: of the tokens.
        contexts: tokens before each, in the cache.
        tables: pages of each sequence.
        slots: of their adapters; -1 without one.
    """

    ids: Sequence[int]
    contexts: Sequence[int]
    tables: Sequence[PageTable]
    slots: Sequence[int]


class DecodeBatch(Batch):
    """A batch of tokens that are only on the device: it knows nothing of any sequence."""

    def __init__(self, lists: Any, cache: KvCache) -> None:
        """Describe tokens.

        Args:
            lists: their memory, as the program makes it.
            cache: that they are appended to.
        """
        self.input_ids, self.positions, self.rows = lists.input_ids, lists.positions, lists.rows
        self.known = {"decoding": lists.attention}
        self.layer = 0
        self.ranks = ALONE
        self.dropout_seed = self.chosen = self.gradients = None
        self.virtual_rows = self.virtual_places = None
        self.keeps = False
        self._cache = cache


@dataclass(frozen=True)
class Decoded:
    """What a step gave; it is written over by the next one.

    Attributes:
        logits: [n, V].
        tokens: each one's likeliest, [n], int64.
    """

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class _Graph:
    """A recorded step.

    Attributes:
        lists: that it reads.
        replay: runs it.
        outputs: that it writes, for as many tokens as its room has at least.
        bound: adapters' tables, which must not go while it reads them.
    """

    lists: Any
    replay: Callable[[], None]
    outputs: Decoded
    bound: Bound


class DecodeGraphs:
    """Recorded decode steps of one program over one cache.

    Attributes:
        recorder: that makes them; None to make none, and use none.
        recorded: how many were made.
        replayed: how many steps they ran.
    """

    def __init__(
        self,
        runner: ModelRunner,
        stacks: RaggedTables,
        cache: KvCache,
        device: torch.device,
        recorder: Recorder | None,
        eager_steps: int,
    ) -> None:
        """Record nothing yet.

        Args:
            runner: of a program that has lists for decode steps.
            stacks: of its adapters.
            cache: in pages.
            device: of all of them.
            recorder: that makes them.
            eager_steps: batches of a room before its graph is recorded.
        """
        assert runner.decoding is not None
        assert runner.drawing is not None
        self.recorder = recorder
        self.recorded = self.replayed = 0
        self._runner, self._decoding, self._drawing = runner, runner.decoding, runner.drawing
        self._stacks, self._cache, self._device = stacks, cache, device
        self._eager_steps = eager_steps
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._came: Counter[Any] = Counter()
        self._layout: object = None
        self._outputs: Decoded | None = None

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int],
        contexts: Sequence[int],
        tables: Sequence[PageTable],
        adapters: Sequence[Adapter | None],
    ) -> Decoded | None:
        """Run a step; None where no graph serves it, and nothing was done.

        Args:
            ids: of the tokens, one of each sequence.
            contexts: tokens before each, in the cache.
            tables: of the sequences.
            adapters: of the sequences; their rows are in memory.
        """
        if self.recorder is None:
            return None
        slots = self._stacks.slots(adapters)
        if slots is None:
            return None
        tokens = DecodeTokens(ids, contexts, tables, slots)
        graph = self._graph_of(tokens, self.recorder)
        if graph is None:
            return None
        graph.lists.fill(tokens)
        graph.replay()
        self.replayed += 1
        count = len(ids)
        return Decoded(graph.outputs.logits[:count], graph.outputs.tokens[:count])

    def _graph_of(self, tokens: DecodeTokens, recorder: Recorder) -> _Graph | None:
        """The graph that serves a step, recorded where it is time."""
        layout = self._stacks.layout
        if layout != self._layout:
            self._layout = layout
            for room in [room for room in self._graphs if room.tiles]:
                del self._graphs[room]
        room = self._decoding.room(tokens)
        if room is None:
            return None
        if room not in self._graphs:
            self._came[room] += 1
            if self._came[room] <= self._eager_steps:
                return None
            if len(self._graphs) == MOST_GRAPHS:
                gone, _ = self._graphs.popitem(last=False)
                del self._came[gone]
            try:
                self._graphs[room] = self._recorded(room, tokens, recorder)
            except RuntimeError as error:
                # Slower, and right: what records nothing runs everything.
                self.recorder = None
                warnings.warn(
                    f"a decode step could not be recorded as a CUDA graph, and steps run without "
                    f"from here on: {error}",
                    stacklevel=2,
                )
                return None
        self._graphs.move_to_end(room)
        return self._graphs[room]

    def _recorded(self, room: Any, tokens: DecodeTokens, recorder: Recorder) -> _Graph:
        lists = self._decoding.lists(room, self._device)
        lists.fill(tokens)
        batch, bound = DecodeBatch(lists, self._cache), self._stacks.bind_tiles(lists.tiles)
        outputs = self._outputs_for(room.tokens)
        runner, greedy = self._runner, self._drawing.greedy

        def run() -> None:
            logits = runner.logits(batch, bound)
            outputs.logits[: len(logits)].copy_(logits)
            outputs.tokens[: len(logits)].copy_(greedy(logits))

        replay = recorder.record(run)
        self.recorded += 1
        return _Graph(lists, replay, outputs, bound)

    def _outputs_for(self, tokens: int) -> Decoded:
        """Memory that graphs share, as what one gives is read before the next one runs."""
        if self._outputs is None or len(self._outputs.tokens) < tokens:
            rows = 1 << (tokens - 1).bit_length()
            epilogue = self._runner.model.epilogue
            type_ = epilogue.types[epilogue.outputs[0]]
            dtype = getattr(torch, TORCH_NAMES[type_.dtype])
            shape = (rows, int(type_.features[0]))
            logits = torch.empty(shape, dtype=dtype, device=self._device)
            self._outputs = Decoded(logits, logits.new_empty(rows, dtype=torch.int64))
        return self._outputs


def recorder_for(device: torch.device) -> Recorder | None:
    """What records on a device; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


def decode_graphs(
    runner: ModelRunner, stacks: PaddedTables, cache: KvCache, device: torch.device
) -> DecodeGraphs | None:
    """Of a program over a cache; None over ranks, without lists, or other memory for adapters."""
    if runner.ranks.size > 1 or runner.decoding is None:
        return None
    if cache.pages is None or not isinstance(stacks, RaggedTables):
        return None
    return DecodeGraphs(runner, stacks, cache, device, recorder_for(device), EAGER_STEPS)
