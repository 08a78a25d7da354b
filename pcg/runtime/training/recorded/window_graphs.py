"""Window graphs: layers of a job's windows as CUDA graphs, forward and backward.

A layer of a window has about fifty launches; for few tokens, the host issues launches more slowly
than the device runs them. A graph is a single launch. Like a graph of a decode step, a window graph
reads and writes fixed memory:

    slot      the memory of a window by its index in the pass: tokens, attention lists, and the
              inputs and saved tensors of each layer, which need no copy
    sums      gradients of the keys and values of all tokens of the pass, for a layer at a time
    grad      the gradients of the adapter's tensors, to which each backward adds

All windows of a slot have the same size (`window_sizes.py`); a shorter window is padded with tokens
of no sequence, whose attention and gradients are zeros.

Graphs are recorded during eager passes, one for each layer that ran: in a serving step, after the
step's launches, while the device runs them. Recording uses only padding tokens. A slot is used once
all its layers are recorded. When the window size changes, or a pass needs more room, all graphs are
recorded again.

The backward runs from the last window to the first, layer by layer, while slots are recorded in
another order. Each slot therefore has its own memory pool: in a shared pool, intermediate results
of a window's layer would overwrite saved tensors of another window. Losses and updates share a
pool, as their results are read immediately.

In evaluation, all windows run through the first slot in turn, forward only: saved tensors are not
read, and the outputs of each window are copied before the next window.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcg.kernels.batch import KvGradients
from pcg.kernels.devices import kept_tables
from pcg.kernels.triton.attention.work import (
    KEY_BLOCK,
    SPLIT_KEYS,
    TILE_ROWS,
    AttentionWork,
    WorkCapacity,
)
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.model.step_graphs import Recorder, check_memory
from pcg.runtime.training.recorded.loss_graphs import LossGraphs
from pcg.runtime.training.recorded.recorded_program import (
    OwnGradients,
    RecordedProgram,
    RecordedTokens,
    groups_of,
)
from pcg.runtime.training.recorded.window_sizes import WindowSizes
from pcg.units import counted


class PassSizes(NamedTuple):
    """The sizes of a pass: tokens, sequences, and pages of the longest sequence."""

    tokens: int
    sequences: int
    pages: int


@dataclass
class _Layer:
    """A layer of a slot: its tensors in fixed memory, and its recorded functions."""

    inputs: Sequence[Tensor] = ()
    saved: Sequence[Any] = ()
    forward: Callable[[], None] | None = None
    back: Callable[[], None] | None = None
    has_below: bool = False
    kept: Sequence[object] = ()


class WindowSlot:
    """The memory and graphs of the windows at the same index in their passes.

    Attributes:
        is_complete: True once the forward and backward of all layers are recorded.
        has_forward: True once the forward of all layers is recorded.
    """

    def __init__(self, graphs: WindowGraphs, batch: RecordedTokens) -> None:
        """Create a slot with fixed memory for tokens."""
        self._graphs = graphs
        # Saved tensors are read after layers of other slots ran, in an order unlike recording's.
        self._recorder = graphs.recorder.apart()
        self._batch = batch
        count = len(graphs.program.training.layers)
        self.shared: Sequence[Tensor | None] = ()
        self._prologue: Callable[[], None] | None = None
        self.layers = [_Layer() for _ in range(count + 1)]  # the last holds the outputs
        self._gradients: list[Tensor] = []
        self._tokens = 0
        self._left = self._recordings()
        self.is_complete = self.has_forward = False

    def _recordings(self) -> Iterator[None]:
        self._record_prologue()
        for layer in range(len(self.layers) - 1):
            self._record_forward(layer)
            self.has_forward = layer == len(self.layers) - 2
            yield
        self._gradients = [torch.zeros_like(x) for x in self.layers[-1].inputs]
        for layer in reversed(range(len(self.layers) - 1)):
            self._record_back(layer)
            self.is_complete = layer == 0
            yield

    def record_next(self) -> None:
        """Record the next layer."""
        next(self._left)

    def _record_prologue(self) -> None:
        graphs, first = self._graphs, self.layers[0]

        def run() -> None:
            first.inputs, self.shared = graphs.program.prologue(self._batch)

        with kept_tables() as kept:
            self._prologue = self._recorder.record(run)
        first.kept = kept
        self._prologue()  # fills the graph's memory

    def _record_forward(self, layer: int) -> None:
        graphs, bound, after = self._graphs, self.layers[layer], self.layers[layer + 1]

        def run() -> None:
            requests = graphs.program.layer(layer, self._batch, bound.inputs, self.shared)
            after.inputs, bound.saved = run_single(requests)

        with kept_tables() as kept:
            bound.forward = self._recorder.record(run)
        bound.kept = [*bound.kept, *kept]
        bound.forward()  # fills the graph's memory

    def _record_back(self, layer: int) -> None:
        graphs, bound = self._graphs, self.layers[layer]
        below: Sequence[Tensor] = ()
        self._batch.gradients = graphs.sums(layer)

        def run() -> None:
            nonlocal below
            saved, gradients = [*bound.saved], [*self._gradients]
            requests = graphs.program.layer_backward(layer, self._batch, saved, gradients)
            below = run_single(requests)
            for gradient, gradient_below in zip(self._gradients, below, strict=bool(below)):
                gradient.copy_(gradient_below)

        graphs.gradients.hold(graphs.program.trained_in(layer))
        with kept_tables() as kept:
            bound.back = self._recorder.record(run)
        bound.kept = [*bound.kept, *kept]
        bound.has_below = bool(below)

    def begin(self, batch: Batch) -> None:
        """Copy a window's tokens, and run the prologue."""
        self._tokens = len(batch.input_ids)
        self._batch.take(batch)
        assert self._prologue is not None
        self._prologue()

    def forward(self, layer: int) -> None:
        """Run the window forward through a layer."""
        replay = self.layers[layer].forward
        assert replay is not None
        replay()

    @property
    def outputs(self) -> list[Tensor]:
        """The last layer's outputs for the window's tokens."""
        return [x[: self._tokens] for x in self.layers[-1].inputs]

    def back(self, layer: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the window backward through a layer, after the layers above.

        Returns:
            The gradients of the layer's inputs; empty if nothing below is trained.
        """
        bound = self.layers[layer]
        assert bound.back is not None
        if layer == len(self.layers) - 2:
            for to, gradient in zip(self._gradients, gradients, strict=True):
                to[: self._tokens] = gradient
                to[self._tokens :] = 0
        self._graphs.gradients.hold(self._graphs.program.trained_in(layer))
        bound.back()
        return [x[: self._tokens] for x in self._gradients] if bound.has_below else []


class WindowGraphs:
    """The recorded windows of a job."""

    def __init__(self, program: RecordedProgram, cache: KvCache, recorder: Recorder) -> None:
        self.program = program
        self.sizes = WindowSizes()
        self.recorded = 0
        self.gradients = OwnGradients()
        self.loss = LossGraphs(program, self.gradients, cache, recorder)
        self._recorder: Recorder | None = recorder
        self._is_warming = False
        self._cache = cache
        self._groups = groups_of(program.training.model)
        self._training = program.training
        self._most = PassSizes(0, 0, 0)
        self._slots: list[WindowSlot] = []
        self._sums: dict[object, KvGradients] = {}

    @property
    def records(self) -> bool:
        """True unless a layer could not be recorded."""
        return self._recorder is not None

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    def begin_pass(self, sizes: PassSizes) -> None:
        """Reserve memory for a pass; if the sizes grow, drop all slots."""
        size = self.sizes.size
        self.sizes.begin_pass()
        needed = PassSizes(*map(max, zip(sizes, self._most, strict=True)))
        is_known = needed == self._most and self.program.training is self._training
        if is_known and self.sizes.size == size:
            return
        # Round up, so that slowly growing passes rarely drop the slots.
        self._most = PassSizes(*(1 << (most - 1).bit_length() for most in needed))
        self._training = self.program.training
        self._slots.clear()
        self._sums.clear()

    def warm_up(self, sizes: PassSizes, window: int) -> int:
        """Record all windows of a pass, of `window` tokens each, and their losses.

        Returns the number of graphs.

        DeviceMemoryError: the graphs need more memory than is free.
        """
        self._is_warming = True
        self.sizes.begin_with(window)
        self.begin_pass(sizes)
        device = self._cache.keys[0].device
        for _ in range(-(-sizes.tokens // self.sizes.size)):
            self._slots.append(self._made(device))
        while self._recorder is not None and not all(slot.is_complete for slot in self._slots):
            self.record_next()
        if self._recorder is not None:
            last = self._slots[-1]
            inputs = self.program.loss_inputs(last.layers[-1].inputs, last.shared)
            self.loss.warm_up(inputs, self.sizes.size)
        self._is_warming = False
        return len(self._slots) + self.recorded + self.loss.recorded

    def slot(self, place: int, batch: Batch, trains: bool = True) -> WindowSlot | None:
        """Return the started slot of a window; None if the window runs eagerly.

        Args:
            place: number of earlier windows of the pass that are still needed.
            trains: False for evaluation.
        """
        if not self.sizes.holds(len(batch.input_ids)):
            return None
        if place == len(self._slots) and self._recorder is not None:
            self._slots.append(self._made(batch.input_ids.device))
        if place >= len(self._slots):
            return None
        slot = self._slots[place]
        if not (slot.is_complete if trains else slot.has_forward):
            return None
        slot.begin(batch)
        return slot

    def _made(self, device: torch.device) -> WindowSlot:
        most, size = self._most, self.sizes.size
        tokens = RecordedTokens(size, self._cache, device)
        for group in self._groups:
            for backward in (False, True):
                # Each sequence may end in a tile and a block that are not full.
                tiles = -(-size * group // TILE_ROWS) + most.sequences
                blocks = (most.tokens // KEY_BLOCK + most.sequences) if backward else 0
                splits = most.sequences * -(-most.tokens // SPLIT_KEYS)
                capacity = WorkCapacity(
                    most.sequences, most.pages, tiles, splits, most.sequences, blocks
                )
                flat = torch.zeros(capacity.size, dtype=torch.int32, device=device)
                work = replace(AttentionWork.of(flat, capacity), has_others=True)
                tokens.work[group, backward] = tokens.known["attention", group, backward, True] = (
                    work
                )
        return WindowSlot(self, tokens)

    def _unrecorded(self, trains: bool) -> WindowSlot | None:
        """Return the next slot with unrecorded layers; only forward layers unless a pass trains."""
        if self._recorder is None:
            return None
        left = (
            slot for slot in self._slots if not (slot.is_complete if trains else slot.has_forward)
        )
        return next(left, None)

    def has_unrecorded(self, trains: bool) -> bool:
        """Return True if a slot has unrecorded layers."""
        return self._unrecorded(trains) is not None

    def record_next(self, trains: bool = True) -> None:
        """Record the next unrecorded layer, if any; only a forward layer unless a pass trains."""
        slot = self._unrecorded(trains)
        if slot is None:
            return
        try:
            slot.record_next()
        except Exception as error:
            if self._is_warming:
                what = f"a window of {counted(self.sizes.size, 'token')}"
                check_memory(error, what, self._cache.size_bytes)
            # Continue eagerly: slower, but correct.
            self._recorder = None
            self._slots.remove(slot)
            warnings.warn(
                "a layer of finetuning could not be recorded as a CUDA graph; the job's layers now "
                f"run eagerly: {error}",
                stacklevel=2,
            )
            return
        self.recorded += 1

    def sums(self, layer: int) -> KvGradients:
        """Return the gradients of a layer's keys and values; layers of equal shapes share them."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        kind = keys.shape, values.shape, keys.dtype
        if kind not in self._sums:
            self._sums[kind] = KvGradients(keys, values, self._most.tokens)
        return self._sums[kind]

    def no_sums(self, layer: int) -> KvGradients:
        """Return zeros for a layer's gradients of keys and values."""
        sums = self.sums(layer)
        sums.keys.zero_()
        sums.values.zero_()
        return sums
