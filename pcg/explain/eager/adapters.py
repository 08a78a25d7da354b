"""A linear module as eager PyTorch runs it with peft's adapters, which say what they keep.

`dtype` is that of the adapters' parameters; x is cast to it where the base's is another.

Source: peft 0.21 tuners and peft_model.py; of dropout, torch's native_dropout, which CUDA runs.
"""

from __future__ import annotations

from pcg.explain.eager.saved import KeptTensors
from pcg.ir.graph import Node
from pcg.ir.types import DTYPE_BYTES
from pcg.peft.method import Bypass


def keep_of_bypass(kept: KeptTensors, node: Node, bypass: Bypass) -> None:
    """Keep what an adapter's backward needs at a linear node, which has been kept of itself.

    Args:
        kept: the tensors of the node's graph.
        node: the base's linear.
        bypass: what the adapter does there.
    """
    if bypass.keep_eager(_Linear(kept, node)):
        kept.needs[node.name] = True


class _Linear:
    """A linear node y = W x + b of the base: `pcg.peft.method.EagerModule`."""

    def __init__(self, kept: KeptTensors, node: Node) -> None:
        types = kept.graph.types
        self._kept = kept
        self._node = node
        self._x = node.inputs[0]
        weight = node.inputs[1]
        self.out, self.in_ = types[weight].features
        self.base_dtype = types[self._x].dtype
        self.dtype = kept.eager.adapter_dtype
        self.x_needs = kept.needs[self._x]
        self.y_needs = kept.needs[node.name]
        self.drops = bool(kept.eager.dropout)
        self.is_conv1d = kept.graph.parameters_by_name[weight].transposed

    def keep(self, what: str, op: str, dtype: str, per_token: int) -> None:
        self._kept.keep_new(f"{self._node.name}.{what}", op, dtype, per_token)

    def keep_once(self, what: str, op: str, elements: int) -> None:
        size = elements * DTYPE_BYTES[self.dtype]
        self._kept.keep_bytes(f"{self._node.name}.{what}", op, size)

    def keep_input(self, what: str) -> None:
        if self.base_dtype == self.dtype:
            self._kept.keep(self._x, reader=self._node.name)
        else:
            self.keep(what, "cast", self.dtype, self.in_)

    def keep_dropped_input(self, what: str) -> None:
        if self.drops:
            self.keep_dropout_mask()
            self.keep("dropped", "dropout", self.dtype, self.in_)
        else:
            self.keep_input(what)

    def keep_dropout_mask(self) -> None:
        if self.drops and self.x_needs:
            self.keep("dropout_mask", "dropout", "bool", self.in_)
