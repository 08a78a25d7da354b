"""A linear module as eager PyTorch runs it with peft's adapters, which say what they save.

`dtype` is that of the adapters' parameters; x is cast to it where the base's is another.

Source: peft 0.21 tuners and peft_model.py; of dropout, torch's native_dropout, which CUDA runs.
"""

from __future__ import annotations

from pcg.explain.eager.saved_storages import SavedStorages
from pcg.ir.graph import Node
from pcg.ir.types import DTYPE_BYTES
from pcg.peft.method import Bypass


def save_for_adapter(saved: SavedStorages, node: Node, bypass: Bypass) -> None:
    """Save what an adapter's backward needs at a linear node, which has been saved of itself.

    Args:
        saved: the tensors of the node's graph.
        node: the base's linear.
        bypass: what the adapter does there.
    """
    if bypass.save_eager(_Linear(saved, node)):
        saved.needs[node.name] = True


class _Linear:
    """A linear node y = W x + b of the base: `pcg.peft.method.EagerModule`."""

    def __init__(self, saved: SavedStorages, node: Node) -> None:
        types = saved.graph.types
        self._saved = saved
        self._node = node
        self._x = node.inputs[0]
        weight = node.inputs[1]
        self.out, self.in_ = types[weight].features
        self.base_dtype = types[self._x].dtype
        self.dtype = saved.eager.adapter_dtype
        self.x_needs = saved.needs[self._x]
        self.y_needs = saved.needs[node.name]
        self.drops = bool(saved.eager.dropout)
        self.is_conv1d = saved.graph.parameters_by_name[weight].transposed

    def save(self, what: str, op: str, dtype: str, per_token: int) -> None:
        self._saved.save_new(f"{self._node.name}.{what}", op, dtype, per_token)

    def save_once(self, what: str, op: str, elements: int, dtype: str = "") -> None:
        size = elements * DTYPE_BYTES[dtype or self.dtype]
        self._saved.save_bytes(f"{self._node.name}.{what}", op, size)

    def save_input(self, what: str) -> None:
        if self.base_dtype == self.dtype:
            self._saved.save(self._x, reader=self._node.name)
        else:
            self.save(what, "cast", self.dtype, self.in_)

    def save_dropped_input(self, what: str) -> None:
        if self.drops:
            self.save_dropout_mask()
            self.save("dropped", "dropout", self.dtype, self.in_)
        else:
            self.save_input(what)

    def save_dropout_mask(self) -> None:
        if self.drops and self.x_needs:
            self.save("dropout_mask", "dropout", "bool", self.in_)
