"""What peft's adapters save for backward beside the base, each method after its source.

`dtype` is that of the adapters' parameters; x is cast to it where the base's is another.

    LoRA   base(x) + lora_B(lora_A(dropout(x))) · scale
    DoRA   base(x) + (m/‖W'‖ - 1) (base(x) - b) + m/‖W'‖ lora_B(lora_A(x)) · scale
    VeRA   base(x) + λ_b ⊙ B (λ_d ⊙ A dropout(x))
    (IA)³  base(x) ⊙ l,   at a feedforward module base(x ⊙ l)

Source: peft 0.21 tuners/{lora/layer,lora/dora,lora/variants,vera/layer,ia3/layer}.py and
peft_model.py; of dropout, torch's native_dropout, which CUDA runs.
"""

from __future__ import annotations

from typing import Any

from pcg.explain.eager.saved_storages import SavedStorages
from pcg.ir.graph import Node
from pcg.ir.types import DTYPE_BYTES
from pcg.peft.ia3 import Ia3Site
from pcg.peft.lora import Site
from pcg.peft.vera import VeraSite


def save_for_adapter(saved: SavedStorages, node: Node, site: Any) -> None:
    """Save what an adapter's backward needs at a linear node, which has been saved of itself.

    Args:
        saved: of the node's graph.
        node: the base's linear.
        site: what the method does there; one that adapts no linear module is passed by.
    """
    of_site = _Linear(saved, node)
    match site:
        case Site(use_dora=True):
            of_site.dora(site.rank)
        case Site():
            of_site.lora(site.rank)
        case VeraSite():
            of_site.vera(site.rank)
        case Ia3Site(is_feedforward=True):
            of_site.scaled_input()
        case Ia3Site():
            of_site.scaled_output()
        case _:
            return
    saved.needs[node.name] = True


class _Linear:
    """A linear node y = W x + b of the base, with an adapter of one method."""

    def __init__(self, saved: SavedStorages, node: Node) -> None:
        types = saved.graph.types
        self._saved = saved
        self._node = node
        self._x = node.inputs[0]
        self._x_needs = saved.needs[self._x]
        self._out, self._in = types[node.inputs[1]].features
        self._base_dtype = types[self._x].dtype
        self._dtype = saved.eager.adapter_dtype
        self._dropout = bool(saved.eager.dropout)

    def lora(self, rank: int) -> None:
        self._save_input()
        self._save("lora_s", "linear", self._dtype, rank)

    def dora(self, rank: int) -> None:
        """The factor m/‖W'‖ and its norm are vectors; ‖W'‖ is a constant and saves no more.

        With dropout the base's product is recomputed of what was not dropped, by the weight in the
        adapters' dtype. Of a Conv1D's weight in that dtype peft makes a new parameter (`transpose`
        of peft/utils/other.py), which requires a gradient.
        """
        self.lora(rank)
        self._save("dora_lora", "linear", self._dtype, self._out)
        vector = self._out * DTYPE_BYTES[self._dtype]
        self._save_bytes("dora_norm", "norm", vector)
        self._save_bytes("dora_factor", "div", vector)
        base_needs = self._x_needs
        if self._dropout:
            self._save("dora_base", "linear", self._dtype, self._out)
            weight = self._saved.graph.parameters_by_name[self._node.inputs[1]]
            if self._dtype == self._base_dtype:
                base_needs = base_needs or weight.transposed
            elif self._x_needs:
                self._save_bytes("dora_weight", "cast", self._in * vector)
        else:
            self._save("dora_base", "sub", self._base_dtype, self._out)
            base_needs = self._saved.needs[self._node.name]
        if base_needs:
            self._save_bytes("dora_change", "sub", vector)

    def vera(self, rank: int) -> None:
        """The matrices are frozen, so that only what λ_d and λ_b scale is saved."""
        self._save_dropout_mask()
        self._save("vera_s", "linear", self._dtype, rank)
        self._save("vera_z", "linear", self._dtype, self._out)

    def scaled_input(self) -> None:
        if self._base_dtype == self._dtype:
            self._saved.save(self._x, reader=self._node.name)
        else:
            self._save("ia3_x", "cast", self._dtype, self._in)
        if self._x_needs:
            self._save_bytes("ia3_l", "mul", self._in * DTYPE_BYTES[self._dtype])

    def scaled_output(self) -> None:
        self._save("unscaled", "linear", self._base_dtype, self._out)
        if self._saved.needs[self._node.name]:
            self._save_bytes("ia3_l", "mul", self._out * DTYPE_BYTES[self._dtype])

    # -------------------------------------------------------------------------------------- parts

    def _save_input(self) -> None:
        """What A multiplies: x, or a copy in the adapters' dtype, or what dropout left of it."""
        if self._dropout:
            self._save_dropout_mask()
            self._save("dropped", "dropout", self._dtype, self._in)
        elif self._base_dtype == self._dtype:
            self._saved.save(self._x, reader=self._node.name)
        else:
            self._save("lora_x", "cast", self._dtype, self._in)

    def _save_dropout_mask(self) -> None:
        if self._dropout and self._x_needs:
            self._save("dropout_mask", "dropout", "bool", self._in)

    def _save(self, what: str, op: str, dtype: str, per_token: int) -> None:
        self._saved.save_new(f"{self._node.name}.{what}", op, dtype, per_token)

    def _save_bytes(self, what: str, op: str, size: int) -> None:
        self._saved.save_bytes(f"{self._node.name}.{what}", op, size)
