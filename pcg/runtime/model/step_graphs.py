"""Step graphs: steps of the engine as CUDA graphs, recorded once per room, then replayed.

A step has hundreds of launches of a few microseconds each, which the host issues more slowly than
the device runs them. A recorded step is a single launch. A graph has fixed addresses and sizes, and
reads memory that stays allocated: the base's weights, the cache, tables of adapters' rows
(`adapters/row_memory.py`), and the step's tokens in lists (`kernels/triton/step_lists.py`). It runs
from the prologue to the logits and each row's likeliest token.

    tokens ──▶ room, rounded up ──▶ its graph ──▶ fill lists ──▶ replay ──▶ logits, tokens

A room is a number of tokens, sequences, splits of keys, and tiles
(`kernels/triton/step_rooms.py`). `warm_up` records all rooms that steps can need, and compiles
their kernels; a step then runs in the smallest room that holds it. Without a warm-up, a room is
recorded after a few steps in it, as recording takes about the time of these steps. After adapters'
memory has moved, graphs that read the memory are recorded again on demand.

A step without a graph runs eagerly, and `eager` counts the reasons. If the device has no memory for
a graph, a warm-up fails and is repeated with a smaller pool; later recordings leave their rooms
eager. Recorders also record parts of training (`training/recorded/`).
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from pcg.errors import DeviceMemoryError
from pcg.ir.program.program import counts_on_host
from pcg.kernels.batch import StepTokens
from pcg.kernels.devices import is_out_of_memory, stream_for
from pcg.kernels.triton.step_lists import StepLists, sizes_of
from pcg.kernels.triton.step_rooms import StepRoom, StepRooms, expected_us, rooms_within
from pcg.peft.adapter import Adapter
from pcg.ranks.group import SINGLE_RANK
from pcg.runtime.adapters.padded_tables import BoundAdapters, PaddedTables
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import PageTable, pages_for
from pcg.runtime.model.batch import Batch, LatestTokens
from pcg.runtime.model.runner import ModelRunner
from pcg.units import counted, size_text


@dataclass(frozen=True)
class WarmUp:
    """The result of a warm-up, which records graphs before the first step.

    Attributes:
        graphs: the number of graphs.
        seconds: the time of recording, including compilations of kernels.
        size_bytes: device memory of the graphs, and of allocations for recording.
    """

    graphs: int
    seconds: float
    size_bytes: int


class Recorder(Protocol):
    """Records functions for replays without the host's work.

    The functions of a recorder share memory: a replay may overwrite results of a function that was
    recorded earlier. Functions are therefore replayed in order of recording, except functions with
    results that are no longer read.
    """

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a function, which may be called several times; return its replay.

        The function reads and writes memory that stays allocated; a replay uses its contents at the
        time of the replay.
        """

    def apart(self) -> Recorder:
        """Return a recorder with separate memory, for replays in any order relative to this."""


class CudaRecorder:
    """Records CUDA graphs, in its own memory pool.

    All recorders of the process capture on the same stream. Capturing does not wait for the device,
    and frees torch's cached memory only if no other memory is free.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._latest: torch.cuda.CUDAGraph | None = None

    def apart(self) -> CudaRecorder:
        return CudaRecorder(self._device)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        stream = stream_for("recorder", self._device)
        with _CAPTURING:
            current = torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run()  # compiles kernels, and has libraries load theirs
                graph = self._captured(run)
            current.wait_stream(stream)
        return graph.replay

    def _captured(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        try:
            return self._capture(run)
        except RuntimeError as error:  # dropping the error frees tensors of its frames
            if not is_out_of_memory(error):
                raise
        # Torch frees cached memory only while nothing is captured.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return self._capture(run)

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a function on the current stream; `torch.cuda.graph` would stop the device."""
        graph = torch.cuda.CUDAGraph()
        # Products have a workspace per stream. Graphs that run concurrently on two streams must not
        # share a workspace, so allocate it in the pool.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # Other threads may load adapters or compile during the capture.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            self._latest = graph  # torch needs a live graph of the pool
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # repeats the earlier error
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return graph


_CAPTURING = Lock()
"""Held during captures: torch and the stream support a single capture at a time."""


def check_memory(error: Exception, what: str, pool_bytes: int) -> None:
    """Raise a DeviceMemoryError if a recording failed for lack of memory.

    Args:
        error: the error of the recording.
        what: the recorded object, with its size.
        pool_bytes: the bytes of the KV cache.
    """
    if is_out_of_memory(error):
        raise DeviceMemoryError(
            f"{what} cannot be recorded as a CUDA graph, as the GPU has too little memory left "
            f"beside a KV cache of {size_text(pool_bytes)}; use a smaller one, by a lower "
            "gpu_memory_utilization or kv_cache_gib"
        ) from error


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder of a device; None without CUDA graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None


_LOG = logging.getLogger("pcg.engine")
EAGER_STEPS = 4
"""Eager steps of a room before recording, without a warm-up. Recording launches all work twice, and
the driver then prepares the graph: about the time of these steps, so recording at worst doubles the
time."""
MOST_GRAPHS = 1024
"""Maximum number of graphs, by latest replay, as each graph takes device memory."""


class RecordedBatch(Batch):
    """A batch with tokens only on the device, in the lists of a room."""

    def __init__(self, lists: Any, cache: KvCache) -> None:
        self.input_ids, self.positions, self.rows = lists.input_ids, lists.positions, lists.rows
        self.known = {"recorded": lists.attention}
        self.layer = 0
        self.ranks = SINGLE_RANK
        self.dropout_seed = self.chosen = self.gradients = None
        self.virtual_rows = self.virtual_places = self.parts = self.rows_of_all = None
        self.keeps, self.is_alone = False, True
        self._cache = cache


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step, valid until the next: logits [n, V], likeliest tokens [n]."""

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class _Graph:
    replay: Callable[[], None]
    outputs: StepOutputs
    bound: Sequence[BoundAdapters]


class StepGraphs:
    """Recorded steps of a program over a cache; a `recorder` of None records nothing.

    Attributes:
        cache: the KV cache.
        latest: the tokens of the previous step, as possible inputs.
        rooms: the rooms of the engine's steps.
        recorded: number of recorded graphs.
        replayed: number of replayed steps.
        eager: number of eager steps, by the reason.
        eager_steps: eager steps of a room before recording, without a warm-up.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tables: RaggedTables,
        cache: KvCache,
        rooms: StepRooms,
        recorder: Recorder | None,
    ) -> None:
        assert runner.drawing is not None
        self.rooms = rooms
        self.latest = LatestTokens(rooms.sequences, cache.keys[0].device)
        self.recorder = recorder
        self.recorded = self.replayed = 0
        self.eager: Counter[str] = Counter()
        self._runner, self._drawing = runner, runner.drawing
        self._tables, self.cache = tables, cache
        self.eager_steps = EAGER_STEPS
        self._warm: Sequence[StepRoom] = ()
        self._graphs: OrderedDict[StepRoom, _Graph] = OrderedDict()
        self._came: Counter[StepRoom] = Counter()
        self._too_large: set[StepRoom] = set()
        self._serving: dict[StepRoom, StepRoom | None] = {}
        self._layout: object = None
        self._lists: StepLists | None = None
        self._outputs: StepOutputs | None = None

    @torch.inference_mode()
    def warm_up(self, adapters: Sequence[Adapter]) -> None:
        """Record rooms that hold all steps; later steps record none.

        Args:
            adapters: adapters that may run; wider adapters need separate rooms.
        """
        self._tables.reserve(self.rooms.sequences, adapters)
        self.rooms = replace(self.rooms, widest=self._tables.widest(adapters))
        self._warm = rooms_within(self.rooms.all)
        self._serving.clear()
        self._drop_moved()
        for room in self._warm:
            if room not in self._graphs and self.recorder is not None:
                self._record(room, _NOTHING)

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        tables: Sequence[PageTable],
        adapters: Sequence[Adapter | None],
        read: Sequence[int],
    ) -> StepOutputs | None:
        """Run a step; return None without any effect if no graph fits.

        The adapters' rows must be in memory.

        Args:
            ids: the tokens of all sequences, with placeholders of `latest`.
            spans: for each sequence, the number of new tokens and of earlier tokens in the cache.
            read: indices of the sequences that need logits, in order.
        """
        if self.recorder is None:
            self.eager["the device records nothing"] += 1
            return None
        slots = self._tables.slots(adapters)
        if slots is None:
            self.eager["an adapter has more than rows of LoRA and virtual tokens"] += 1
            return None
        if any(len(table.pages) > self.rooms.pages for table in tables):
            self.eager["a sequence has more pages than any can need"] += 1
            return None
        lengths, contexts = zip(*spans, strict=True)
        tokens = StepTokens(ids, lengths, contexts, tables, slots, read)
        smallest = self.rooms.of(sizes_of(tokens))
        self._drop_moved()
        room = None if smallest is None else self._room_for(smallest)
        if room is None:
            self.eager["no room holds it"] += 1
            return None
        if room not in self._graphs and not (self._is_time(room) and self._records(room, tokens)):
            why = "no memory is left to record its room" if room in self._too_large else _NOT_YET
            self.eager[why] += 1
            return None
        self._graphs.move_to_end(room)
        graph = self._graphs[room]
        self._lists_of_rooms.fill(tokens, room)
        graph.replay()
        self.replayed += 1
        count = len(read)
        return StepOutputs(graph.outputs.logits[:count], graph.outputs.tokens[:count])

    @property
    def is_warm(self) -> bool:
        """True if all possible rooms were recorded before the first step."""
        return bool(self._warm) and self.recorder is not None

    def _room_for(self, smallest: StepRoom) -> StepRoom | None:
        """Return a room for replaying a step: a warm room or the step's own; None without any."""
        if smallest not in self._serving:
            holding = [room for room in self._warm if room.holds(smallest)]
            # A new adapter may be wider than the adapters of the warm rooms.
            mine = smallest if self._lists_of_rooms.has_room(smallest) else None
            self._serving[smallest] = min(holding, key=lambda r: (expected_us(r), r), default=mine)
        return self._serving[smallest]

    def _is_time(self, room: StepRoom) -> bool:
        """Return True to record a room now, for the first time or after its inputs have moved."""
        self._came[room] += 1
        return room in self._warm or self._came[room] > self.eager_steps

    def _drop_moved(self) -> None:
        """Drop the graphs that read adapters at old addresses."""
        layout = self._tables.layout
        if layout != self._layout:
            self._layout = layout
            for room in [room for room in self._graphs if room.adapter_tiles]:
                del self._graphs[room]

    def _records(self, room: StepRoom, tokens: StepTokens) -> bool:
        """Record a room between serving steps; return False if memory is insufficient."""
        if room in self._too_large:
            return False
        try:
            return self._record(room, tokens)
        except DeviceMemoryError as error:
            self._too_large.add(room)
            _LOG.warning("%s; its steps run without a graph, which takes longer", error)
            return False

    def _record(self, room: StepRoom, tokens: StepTokens) -> bool:
        """Record a room with the given tokens; return False if recording failed.

        DeviceMemoryError: the graph needs more memory than is free.
        """
        assert self.recorder is not None
        if len(self._graphs) == MOST_GRAPHS:
            gone, _ = self._graphs.popitem(last=False)
            del self._came[gone]
        self._lists_of_rooms.fill(tokens, room)
        lists, outputs = self._lists_of_rooms.of(room), self._outputs_for(room.sequences)
        batch, bound = RecordedBatch(lists, self.cache), self._tables.bind_tiles(lists.tiles)
        rows, of_rows = None, None
        if not room.decodes:
            rows, of_rows = lists.read, self._tables.bind_tiles(lists.row_tiles)
        runner, greedy = self._runner, self._drawing.greedy

        def run() -> None:
            batch.input_ids = self.latest.resolved(lists.input_ids)
            logits = runner.logits(batch, bound, rows, of_rows)
            outputs.logits[: len(logits)].copy_(logits)
            outputs.tokens[: len(logits)].copy_(greedy(logits))

        try:
            replay = self.recorder.record(run)
        except RuntimeError as error:
            what = f"a step of {counted(room.tokens, 'token')}"
            check_memory(error, what, self.cache.size_bytes)
            # Continue eagerly: slower, but correct.
            self.recorder = None
            warnings.warn(
                f"a step could not be recorded as a CUDA graph, and steps run without from here "
                f"on: {error}",
                stacklevel=2,
            )
            return False
        self.recorded += 1
        self._graphs[room] = _Graph(replay, outputs, (bound, of_rows or bound))
        return True

    @property
    def _lists_of_rooms(self) -> StepLists:
        if self._lists is None:
            rooms, device = self.rooms, self.cache.keys[0].device
            self._lists = StepLists(rooms.largest, rooms.pages, rooms.group, device)
        return self._lists

    def _outputs_for(self, rows: int) -> StepOutputs:
        """Return output memory, which graphs share, as results are read before the next replay."""
        if self._outputs is None or len(self._outputs.tokens) < rows:
            epilogue, dtype = self._runner.model.epilogue, self._runner.logits_dtype
            vocabulary = int(epilogue.types[epilogue.outputs[0]].features[0])
            shape = (max(rows, self.rooms.largest.sequences), vocabulary)
            logits = torch.empty(shape, dtype=dtype, device=self.cache.keys[0].device)
            self._outputs = StepOutputs(logits, logits.new_empty(shape[0], dtype=torch.int64))
        return self._outputs


_NOT_YET = "its room is not recorded"
_NOTHING = StepTokens((), (), (), (), (), ())
"""The tokens for recording in a warm-up: none, so that nothing is written."""


def step_graphs(
    runner: ModelRunner,
    tables: PaddedTables,
    cache: KvCache,
    sequences: int,
    tokens: int,
    longest: int | None,
) -> StepGraphs | None:
    """Return the step graphs of a program; None over ranks, for experts and other backends.

    Args:
        sequences: the maximum number of sequences in a step.
        tokens: the maximum number of tokens in a step.
        longest: the maximum number of tokens in a sequence; None for the cache's size.
    """
    if runner.alike.size > 1 or runner.drawing is None:
        return None
    if cache.pages is None or not isinstance(tables, RaggedTables):
        return None
    if counts_on_host(runner.model):
        return None
    pool = cache.pool.size
    pages = pool if longest is None else min(pool, pages_for(longest))
    group, has_adapters = _group_of(runner), tables.lora is not None
    rooms = StepRooms(sequences, tokens, pages, pool, group, has_adapters)
    return StepGraphs(runner, tables, cache, rooms, recorder_for(cache.keys[0].device))


def _group_of(runner: ModelRunner) -> int:
    """Return the number of query heads per KV head; 0 if layers differ."""
    groups = set()
    for block in runner.model.blocks:
        for node in block.nodes:
            if node.op == "attention":
                q, k = (block.types[name].shape[1] for name in node.inputs[:2])
                groups.add(int(q) // int(k))
    return groups.pop() if len(groups) == 1 else 0
