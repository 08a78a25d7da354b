"""Decode graphs: decode steps as CUDA graphs, recorded once for a size of batch, then replayed.

A step that only decodes is hundreds of launches of a few microseconds each, which the host issues
more slowly than the device runs them. Recorded, they are one launch. A graph fixes addresses and
numbers, so it reads memory that stays: the base's weights, the cache, tables of adapters' rows
(`adapters/row_memory.py`), and the step's tokens in lists that its program allocates and fills
(`decode_lists`). It runs from the prologue to the logits and the likeliest token of each.

    tokens ──▶ room, rounded up ──▶ its graph ──▶ fill lists ──▶ replay ──▶ logits, tokens

Rounded up are the batch's tokens, the pages of a sequence, the splits of keys, and the tiles of
tokens by adapter. Recording takes about as long as a few steps, so a graph is recorded when batches
of its room have come a few times. When the adapters' memory has moved, graphs that read it are
recorded again.

A step without a graph runs eagerly: a batch with more tokens than the largest room, adapters with
weights beside rows of LoRA and virtual tokens, programs without such lists, and devices that do not
record.
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
from pcg.kernels.batch import DecodeTokens
from pcg.parallel.ranks.group import SINGLE_RANK
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.padded_tables import BoundAdapters, PaddedTables
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.runner import ModelRunner

EAGER_STEPS = 4
"""Batches of a room before its graph is recorded. Recording launches everything twice, and the
driver then prepares the graph: about the time of so many steps, so it at worst doubles the time.
"""
MOST_GRAPHS = 64
"""The most graphs that are kept, those replayed last: a device keeps the launches of each."""


class Recorder(Protocol):
    """Makes functions that run again without the host's work."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a function, which is called any number of times, and return one that repeats it.

        It reads and writes memory that stays, and the repetition takes its present contents.
        """


class CudaRecorder:
    """Records CUDA graphs; they share memory for intermediate tensors, as one runs at a time."""

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


class DecodeBatch(Batch):
    """A batch whose tokens are on the device only, in lists that the program allocates."""

    def __init__(self, lists: Any, cache: KvCache) -> None:
        self.input_ids, self.positions, self.rows = lists.input_ids, lists.positions, lists.rows
        self.known = {"decoding": lists.attention}
        self.layer = 0
        self.ranks = SINGLE_RANK
        self.dropout_seed = self.chosen = self.gradients = None
        self.virtual_rows = self.virtual_places = None
        self.keeps = False
        self._cache = cache


@dataclass(frozen=True)
class Decoded:
    """The results of a step, which the next overwrites: logits [n, V], likeliest tokens [n]."""

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class _Graph:
    """A recorded step, and the memory that it reads and writes, kept alive."""

    lists: Any
    replay: Callable[[], None]
    outputs: Decoded
    bound: BoundAdapters


class DecodeGraphs:
    """Recorded decode steps of one program over one cache; a `recorder` of None uses none."""

    def __init__(
        self,
        runner: ModelRunner,
        tables: RaggedTables,
        cache: KvCache,
        device: torch.device,
        recorder: Recorder | None,
        eager_steps: int,
    ) -> None:
        assert runner.decoding is not None
        assert runner.drawing is not None
        self.recorder = recorder
        self.recorded = self.replayed = 0
        self._runner, self._decoding, self._drawing = runner, runner.decoding, runner.drawing
        self._tables, self._cache, self._device = tables, cache, device
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
        """Run a step; returns None, having done nothing, if no graph serves it.

        The adapters' rows are in memory; `contexts` counts the tokens before each, in the cache.
        """
        if self.recorder is None:
            return None
        slots = self._tables.slots(adapters)
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
        """Return the graph that serves a step, and record it if it is time."""
        layout = self._tables.layout
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
                # Without graphs every step runs eagerly: slower, but right.
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
        batch, bound = DecodeBatch(lists, self._cache), self._tables.bind_tiles(lists.tiles)
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
        """Return memory that graphs share: results are read before the next one runs."""
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
    """Return the recorder of a device; None if it has none."""
    return CudaRecorder(device) if device.type == "cuda" else None


def decode_graphs(
    runner: ModelRunner, tables: PaddedTables, cache: KvCache, device: torch.device
) -> DecodeGraphs | None:
    """Return the decode graphs of a program; None over ranks, and without lists or pages."""
    if runner.ranks.size > 1 or runner.decoding is None:
        return None
    if cache.pages is None or not isinstance(tables, RaggedTables):
        return None
    return DecodeGraphs(runner, tables, cache, device, recorder_for(device), EAGER_STEPS)
