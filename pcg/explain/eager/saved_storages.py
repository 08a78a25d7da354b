"""The storages that autograd saves of one graph run eagerly, by name, once each.

Autograd saves, of each operator that a gradient passes through, the inputs and outputs that its
derivative reads. Views share a storage (`pcg.ir.analysis.storages`); parameters are resident.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import sympy

from pcg.ir.analysis.storages import SEQUENCES, Storage, Storages
from pcg.ir.graph import Graph
from pcg.ir.module_paths import WHOLE_MODEL
from pcg.ir.types import CONTEXT, DTYPE_BYTES
from pcg.peft.method import Bypass


@dataclass(frozen=True)
class EagerRun:
    """The way that eager PyTorch runs the model.

    Attributes:
        at: what adapters do at each module path, as `pcg.explain.adapter_use.AdapterUse.at`.
        attention: as `pcg.trace.TracedModel.attention`.
        model_type: of config.json, for what an architecture's own attention does.
        batch: sequences; of one alone eager code makes views where it copies several.
        seq: length of each sequence, virtual tokens included; a window that is not longer needs a
            mask.
        biases: sources of the base biases that are trained.
        adapter_dtype: of the adapters' parameters; peft's default is fp32 over half precision.
        dropout: probability of the adapters' dropout.
        statistics_dtype: of the mean and deviation that layer norm saves; fp32 on CUDA, the
            input's dtype on the CPU.
    """

    at: Mapping[str, Collection[Bypass]]
    attention: str
    model_type: str
    batch: int
    seq: int
    biases: frozenset[str] = frozenset()
    adapter_dtype: str = "f32"
    dropout: float = 0.0
    statistics_dtype: str = "f32"

    @cached_property
    def prompt(self) -> int:
        """The number of virtual tokens whose embeddings are trained."""
        return self._virtual_tokens(lambda path: path == WHOLE_MODEL)

    @cached_property
    def prefix(self) -> int:
        """The number of virtual tokens whose keys and values are trained; no layer runs them."""
        return self._virtual_tokens(lambda path: path != WHOLE_MODEL)

    @property
    def rows(self) -> sympy.Expr:
        """The number of tokens of a sequence that run through the layers."""
        return CONTEXT - self.prefix

    def _virtual_tokens(self, is_there: Callable[[str], bool]) -> int:
        found = (one for path, at in self.at.items() if is_there(path) for one in at)
        return max((bypass.virtual_tokens for bypass in found), default=0)


@dataclass(frozen=True)
class SavedStorage:
    """A storage saved for backward.

    Attributes:
        tensor: the value that it was allocated for.
        op: the operator that computed it.
        size_bytes: its bytes, a formula in B and S.
    """

    tensor: str
    op: str
    size_bytes: sympy.Expr


@dataclass(frozen=True)
class Invariants:
    """The prologue's outputs that all layers read.

    Attributes:
        positional: the names of those that are alike in all sequences of a batch.
        recomputed: the names of those that eager code computes in each layer, and for each operator
            that reads them: sin and cos of GPT-J.
    """

    positional: frozenset[str]
    recomputed: frozenset[str]


class SavedStorages:
    """The storages saved of one graph, filled node by node.

    Attributes:
        graph: the graph, one node an ATen operator.
        eager: the way that PyTorch runs it.
        storages: the storages of the values seen so far.
        needs: the values that require a gradient are True.
        rows: the saved storages by name, without those that layers share.
        shared: the saved storages that all layers share, by name.
    """

    def __init__(
        self, graph: Graph, eager: EagerRun, carries: Collection[bool], invariants: Invariants
    ) -> None:
        self.graph = graph
        self.eager = eager
        self.storages = Storages(graph, eager=True)
        self.rows: dict[str, SavedStorage] = {}
        self.shared: dict[str, SavedStorage] = {}
        self.needs = dict.fromkeys(graph.types, False)
        for value, needs in zip(graph.inputs, carries, strict=False):
            self.needs[value.name] = needs
        for parameter in graph.parameters:
            self.needs[parameter.name] = parameter.source in eager.biases
        self._invariants = invariants
        self._invariant_names = {value.name for value in graph.inputs[len(carries) :]}

    @property
    def tokens(self) -> sympy.Expr:
        """The number of tokens of the batch that run through the layers."""
        return SEQUENCES * self.eager.rows

    def save(self, *names: str, reader: str = "") -> None:
        """Save the storages of values that a reader needs."""
        for name in names:
            storage = self.storages[name]
            if not storage.is_parameter:
                self._save_storage(storage, reader)

    def save_new(self, name: str, op: str, dtype: str, per_token: int) -> None:
        """Save a tensor outside the graph with a number of elements a token."""
        self.save_bytes(name, op, per_token * DTYPE_BYTES[dtype] * self.tokens)

    def save_bytes(self, name: str, op: str, size: sympy.Expr | int) -> None:
        """Save a tensor outside the graph with a number of bytes."""
        self.rows.setdefault(name, SavedStorage(name, op, sympy.sympify(size)))

    def save_shared(self, name: str, op: str, size: sympy.Expr) -> None:
        """Save a tensor that all layers share."""
        self.shared.setdefault(name, SavedStorage(name, op, size))

    def _save_storage(self, storage: Storage, reader: str) -> None:
        if storage.name not in self._invariant_names:
            self.save_bytes(storage.name, storage.op, storage.size_bytes(self.tokens))
            return
        is_positional = storage.name in self._invariants.positional
        size = storage.size_bytes(self.eager.rows if is_positional else self.tokens)
        if storage.name in self._invariants.recomputed:
            self.save_bytes(f"{storage.name}.{reader}", storage.op, size)
        else:
            self.save_shared(storage.name, storage.op, size)
