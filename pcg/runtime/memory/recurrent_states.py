"""The recurrent states of layers: slots of running sequences, and states between training windows.

A slot holds the states of one sequence in all layers, whatever its length. A sequence takes a slot
at its admission and gives it back at its end, or when it is preempted; then its tokens are computed
again from the first. A sequence without earlier tokens starts with zeros, so that no slot has to be
cleared.

A training pass has no slot. A window that continues a sequence reads the states at the end of the
window before it, which are kept until both have run backward; there the gradients of these states
travel from the later window to the earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.ir.operators.recurrent import state_bytes, state_types
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TORCH_NAMES, TensorType
from pcg.kernels.batch import SequenceStates, Snapshot, Span
from pcg.kernels.devices import uploaded_list
from pcg.runtime.memory.host_memory import untouched

LayerStates = Sequence[Sequence[TensorType]]
"""The types of the states of a sequence, by layer and number."""


def recurrent_types(model: ModelGraph) -> LayerStates:
    """Return the types of a sequence's states in each layer; empty for layers without any."""
    by_block = [state_types(block) for block in model.blocks]
    return [by_block[block] for block in model.layers]


def bytes_of_states(model: ModelGraph) -> int:
    """Return the bytes of a sequence's recurrent states in all layers."""
    return sum(state_bytes(model.blocks[block]) for block in model.layers)


def snapshots_of(running: int) -> int:
    """Return the number of snapshots of prefixes beside the states of running sequences."""
    return max(running // 4, 1)


def check_whole_sequences(model: ModelGraph, cp: int) -> None:
    """Refuse ranks that share the tokens of sequences, over recurrent states or cached latents."""
    if cp > 1 and any(n.op == "latent_attention" for block in model.blocks for n in block.nodes):
        raise UnsupportedError(
            f"cp={cp}: ranks would share the tokens of sequences, and exchange keys and values, "
            "which latent_cache=True does not hold; leave one of them out"
        )
    if cp > 1 and bytes_of_states(model):
        raise UnsupportedError(
            f"cp={cp}: ranks would share the tokens of sequences, and layers with recurrent state "
            "take them one after the other; use cp=1, with tp, pp or dp"
        )


class RecurrentStates:
    """Slots of sequences' states.

    Attributes:
        stores: the states [slots, …] of each layer, by number.
    """

    def __init__(self, types: LayerStates, slots: int, device: torch.device) -> None:
        self.stores = [
            [
                untouched((slots, *t.features), getattr(torch, TORCH_NAMES[t.dtype]), device)
                for t in layer
            ]
            for layer in types
        ]

    @property
    def size_bytes(self) -> int:
        return sum(store.nbytes for layer in self.stores for store in layer)

    def copy(self, slot: int, to: int) -> None:
        for layer in self.stores:
            for store in layer:
                store[to] = store[slot]

    def of(self, spans: Sequence[Span], device: torch.device) -> SlotStates:
        """Return the states of a batch's sequences, by the slots of their tables."""
        tables = [span.table for span in spans]
        new = [index for index, span in enumerate(spans) if not span.context]
        slots = [-1 if table is None else table.slot for table in tables]
        places, first = (uploaded_list(x, torch.int64, device) for x in (slots, new))
        snapshots = [
            Snapshot(index, place - span.context, slot)
            for index, (span, table) in enumerate(zip(spans, tables, strict=True))
            for place, slot in (() if table is None else table.snapshots)
            if 0 < place - span.context <= span.length
        ]
        return SlotStates(self.stores, places, first if new else None, snapshots)


@dataclass(frozen=True)
class SlotStates(SequenceStates):
    """The states of a batch's sequences in their slots.

    Attributes:
        slots: the slot of each sequence, [n].
        new: indices of the sequences without earlier tokens; None if all have some.
    """

    stores: Sequence[Sequence[Tensor]]
    slots: Tensor
    new: Tensor | None
    snapshots: Sequence[Snapshot] = ()

    def read(self, layer: int, number: int, into: Tensor) -> None:
        torch.index_select(self.stores[layer][number], 0, self.slots, out=into)
        if self.new is not None:
            into.index_fill_(0, self.new, 0)

    def write(self, layer: int, number: int, states: Tensor) -> None:
        self.stores[layer][number].index_copy_(0, self.slots, states)

    def slots_of(self, layer: int, number: int) -> tuple[Tensor, Tensor] | None:
        if self.new is not None or self.snapshots:
            return None
        return self.stores[layer][number], self.slots

    def keep(self, layer: int, number: int, slot: int, state: Tensor) -> None:
        self.stores[layer][number][slot] = state[0]


@dataclass(eq=False)
class Boundary:
    """States and their gradients at the end of a window whose last sequence continues.

    The keys are a layer and the number of a state in it.
    """

    states: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class WindowStates(SequenceStates):
    """The states of a training window: only its first sequence may continue an earlier window.

    Attributes:
        before: the boundary within the first sequence; None if it starts in the window.
        after: the boundary within the last sequence; None if it ends in the window.
        keeps: True to keep states for the backward.
    """

    before: Boundary | None
    after: Boundary | None
    keeps: bool

    def read(self, layer: int, number: int, into: Tensor) -> None:
        if self.before is not None:
            states = self.before.states
            into[0] = states[layer, number] if self.keeps else states.pop((layer, number))

    def write(self, layer: int, number: int, states: Tensor) -> None:
        if self.after is not None:
            self.after.states[layer, number] = states[-1].clone()

    def read_gradients(self, layer: int, number: int, into: Tensor) -> None:
        if self.after is not None:
            into[-1] = self.after.gradients.pop((layer, number))
            self.after.states.pop((layer, number), None)

    def write_gradients(self, layer: int, number: int, gradients: Tensor) -> None:
        if self.before is not None:
            self.before.gradients[layer, number] = gradients[0].clone()
