"""Window graphs: layers of a job's windows as CUDA graphs, forward and back.

A layer of a window is some fifty launches, which the host issues more slowly than a device runs
them for few tokens. Recorded, it is one. Like a graph of a step (`model/step_graphs.py`) it reads
and writes memory that stays:

    slot      the place of a window in its pass: its tokens and lists, and for each layer its
              inputs and what it saves for backward, which so need no copy
    sums      gradients of the keys and values of all tokens of the pass, of a layer at a time
    grad      the gradients of the adapter's tensors, to which each backward adds

A slot's windows have one size (`window_sizes.py`); where one has fewer tokens, the rest are tokens
of no sequence. Their attention and all their gradients are zeros, so they add nothing.

Graphs are recorded while eager passes run: after each layer that runs eagerly, one. What they are
recorded with is such tokens alone. A slot is used once all its layers are recorded; when the size
changes, or a pass needs more room, all is recorded again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcg.ir.types import TOKENS
from pcg.kernels.batch import KvGradients
from pcg.kernels.table_cache import kept_tables
from pcg.kernels.triton.attention.work import (
    KEY_BLOCK,
    SPLIT_KEYS,
    TILE_ROWS,
    AttentionWork,
    WorkCapacity,
)
from pcg.parallel.ranks.group import SINGLE_RANK
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.model.recorder import Recorder
from pcg.runtime.training.recorded.recorded_program import RecordedProgram, groups_of
from pcg.runtime.training.recorded.window_sizes import WindowSizes


class PassSizes(NamedTuple):
    """The sizes of a pass: tokens, sequences, and pages of the longest one."""

    tokens: int
    sequences: int
    pages: int


class _WindowBatch(Batch):
    """The tokens of a slot, on the device only."""

    def __init__(self, size: int, cache: KvCache, device: torch.device) -> None:
        self.input_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.rows: Tensor = torch.full_like(self.input_ids, -1)
        self.work: dict[tuple[int, bool], AttentionWork] = {}
        self.known = {}
        self.layer = 0
        self.ranks = SINGLE_RANK
        self.dropout_seed = self.chosen = self.gradients = None
        self.virtual_rows = self.virtual_places = None
        self.keeps = True
        self._cache = cache


@dataclass
class _Layer:
    """A layer of a slot.

    Attributes:
        inputs: what it reads of the layer before.
        saved: what its forward saves.
        forward, back: its recorded functions, once they are.
        has_below: True if its backward gives gradients of the inputs.
        kept: tables that the functions read.
    """

    inputs: Sequence[Tensor] = ()
    saved: Sequence[Any] = ()
    forward: Callable[[], None] | None = None
    back: Callable[[], None] | None = None
    has_below: bool = False
    kept: Sequence[object] = ()


class WindowSlot:
    """The memory and graphs of the windows at one place of a pass.

    Attributes:
        is_complete: True once all its layers are recorded.
    """

    def __init__(
        self,
        graphs: WindowGraphs,
        batch: _WindowBatch,
        carried: Sequence[Tensor],
        shared: Sequence[Tensor | None],
    ) -> None:
        """Have memory for the tokens, the first layer's inputs, and what all layers read."""
        self._graphs = graphs
        self._batch = batch
        count = len(graphs.program.training.layers)
        self._shared = shared
        self.layers = [_Layer() for _ in range(count + 1)]  # the last holds the outputs
        self.layers[0].inputs = carried
        self._gradients: list[Tensor] = []
        self._tokens = 0
        self._left = self._recordings()
        self.is_complete = False

    def _recordings(self) -> Iterator[None]:
        for layer in range(len(self.layers) - 1):
            self._record_forward(layer)
            yield
        self._gradients = [torch.zeros_like(x) for x in self.layers[-1].inputs]
        for layer in reversed(range(len(self.layers) - 1)):
            self._record_back(layer)
            self.is_complete = layer == 0
            yield

    def record_next(self) -> None:
        """Record the next layer."""
        next(self._left)

    def _record_forward(self, layer: int) -> None:
        graphs, one, after = self._graphs, self.layers[layer], self.layers[layer + 1]

        def run() -> None:
            requests = graphs.program.layer(layer, self._batch, one.inputs, self._shared)
            after.inputs, one.saved = run_single(requests)

        with kept_tables() as kept:
            one.forward = graphs.recorder.record(run)
        one.kept = kept
        one.forward()  # what it makes is there from now on

    def _record_back(self, layer: int) -> None:
        graphs, one = self._graphs, self.layers[layer]
        below: Sequence[Tensor] = ()
        self._batch.gradients = graphs.sums(layer)

        def run() -> None:
            nonlocal below
            saved, gradients = [*one.saved], [*self._gradients]
            requests = graphs.program.layer_backward(layer, self._batch, saved, gradients)
            below = run_single(requests)
            for gradient, found in zip(self._gradients, below, strict=bool(below)):
                gradient.copy_(found)

        graphs.own_gradients(layer)
        with kept_tables() as kept:
            one.back = graphs.recorder.record(run)
        one.kept = [*one.kept, *kept]
        one.has_below = bool(below)

    def begin(
        self, batch: Batch, carried: Sequence[Tensor], shared: Sequence[Tensor | None]
    ) -> None:
        """Take a window's tokens, and what its prologue made."""
        own, count = self._batch, len(batch.input_ids)
        assert batch.rows is not None
        self._tokens = count
        own.input_ids[:count] = batch.input_ids
        own.positions[:count] = batch.positions
        own.rows[:count] = batch.rows
        own.rows[count:] = -1
        for to, x in zip((*self.layers[0].inputs, *self._shared), (*carried, *shared), strict=True):
            if to is not None and x is not None:
                to[: len(x)] = x
                to[len(x) :] = 0
        device = own.rows.device
        for (group, backward), work in own.work.items():
            capacity = work.capacity
            made = AttentionWork.build(
                batch.spans, group, device, backward=backward, capacity=capacity
            )
            work.flat.copy_(made.flat)

    def forward(self, layer: int) -> None:
        """Take the window through a layer."""
        replay = self.layers[layer].forward
        assert replay is not None
        replay()

    @property
    def outputs(self) -> list[Tensor]:
        """The last layer's outputs of the window's tokens."""
        return [x[: self._tokens] for x in self.layers[-1].inputs]

    def back(self, layer: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Take the window back through a layer, after all behind it.

        Args:
            gradients: those of the layer's outputs.
        Returns:
            Those of its inputs; none if nothing below is trained.
        """
        one = self.layers[layer]
        assert one.back is not None
        if layer == len(self.layers) - 2:
            for to, gradient in zip(self._gradients, gradients, strict=True):
                to[: self._tokens] = gradient
                to[self._tokens :] = 0
        self._graphs.own_gradients(layer)
        one.back()
        return [x[: self._tokens] for x in self._gradients] if one.has_below else []


class WindowGraphs:
    """The recorded windows of one job.

    Attributes:
        sizes: the size of windows.
        recorded, replayed: numbers of layers, forward or back.
        eager: number of layers that no graph served.
    """

    def __init__(self, program: RecordedProgram, cache: KvCache, recorder: Recorder) -> None:
        self.program = program
        self.sizes = WindowSizes()
        self.recorded = self.replayed = self.eager = 0
        self._recorder: Recorder | None = recorder
        self._cache = cache
        self._groups = groups_of(program.training.model)
        self._training = program.training
        prologue = program.training.model.prologue
        self._by_token = [prologue.types[name].shape[0] == TOKENS for name in prologue.outputs]
        self._most = PassSizes(0, 0, 0)
        self._slots: list[WindowSlot] = []
        self._sums: dict[object, KvGradients] = {}
        self._gradients: dict[int, Tensor] = {}

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    def begin_pass(self, sizes: PassSizes) -> None:
        """Have room for a pass."""
        size = self.sizes.size
        self.sizes.begin_pass()
        needed = PassSizes(*map(max, zip(sizes, self._most, strict=True)))
        is_known = needed == self._most and self.program.training is self._training
        if is_known and self.sizes.size == size:
            return
        # Rounded up, so that passes that grow little by little seldom move it.
        self._most = PassSizes(*(1 << (most - 1).bit_length() for most in needed))
        self._training = self.program.training
        self._slots.clear()
        self._sums.clear()

    def slot(
        self,
        place: int,
        batch: Batch,
        carried: Sequence[Tensor],
        shared: Sequence[Tensor | None],
    ) -> WindowSlot | None:
        """Return the slot of a window that begins; None if it runs eagerly.

        Args:
            place: the windows of the pass before it.
        """
        if not self.sizes.holds(len(batch.input_ids)):
            return None
        if place == len(self._slots) and self._recorder is not None:
            self._slots.append(self._made(batch, carried, shared))
        if place >= len(self._slots) or not self._slots[place].is_complete:
            return None
        slot = self._slots[place]
        slot.begin(batch, carried, shared)
        return slot

    def _made(
        self, batch: Batch, carried: Sequence[Tensor], shared: Sequence[Tensor | None]
    ) -> WindowSlot:
        device, most = batch.input_ids.device, self._most
        size = self.sizes.size
        own = _WindowBatch(size, self._cache, device)
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
                own.work[group, backward] = own.known["attention", group, backward, True] = work
        inputs = [_like(x, size) for x in carried]
        others = [
            None if x is None else _like(x, size if by_token else len(x))
            for x, by_token in zip(shared, self._by_token, strict=True)
        ]
        return WindowSlot(self, own, inputs, others)

    def record_next(self) -> None:
        """Record a layer, if some are left."""
        slot = next((slot for slot in self._slots if not slot.is_complete), None)
        if slot is None or self._recorder is None:
            return
        try:
            slot.record_next()
        except Exception as error:
            # Without graphs windows run eagerly: slower, but right.
            self._recorder = None
            self._slots.remove(slot)
            warnings.warn(
                "a layer of finetuning could not be recorded as a CUDA graph, and more of the job "
                f"are not tried: {error}",
                stacklevel=2,
            )
            return
        self.recorded += 1

    def sums(self, layer: int) -> KvGradients:
        """Return the gradients of keys and values of a layer, which all layers alike share."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        kind = keys.shape, values.shape, keys.dtype
        if kind not in self._sums:
            self._sums[kind] = KvGradients(keys, values, self._most.tokens)
        return self._sums[kind]

    def no_sums(self, layer: int) -> KvGradients:
        """Return zeros for a layer's gradients of keys and values."""
        found = self.sums(layer)
        found.keys.zero_()
        found.values.zero_()
        return found

    def own_gradients(self, layer: int) -> None:
        """Have gradients add up where graphs add to them; a layer without any begins with zeros."""
        for weight in self.program.trained_in(layer):
            own = self._gradients.get(id(weight))
            if own is None:
                own = self._gradients[id(weight)] = torch.zeros_like(weight)
            if weight.grad is not own:
                if weight.grad is None:
                    own.zero_()
                else:
                    own.copy_(weight.grad)
                weight.grad = own


def _like(x: Tensor, tokens: int) -> Tensor:
    return x.new_zeros((tokens, *x.shape[1:]))
