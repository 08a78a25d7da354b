"""Attention as eager transformers runs it by default, and what autograd saves of it.

It is flash SDPA, masked or not, SDPA's math where heads differ, or explicit scores. With a prefix,
keys and values are those of the cache, where its virtual tokens precede the sequence's own.
Source: transformers 5.23 integrations/sdpa_attention.py, and modeling_{bloom,falcon,gptj,mpt}.py
for those that have an attention of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

from pcg.explain.eager.saved_storages import SavedStorages
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.graph import Node
from pcg.ir.types import DTYPE_BYTES, promote

WIDENED = ("gptj",)
"""Architectures whose own attention multiplies q and k in fp32."""
FILLED = ("mpt",)
"""Architectures whose own attention fills scores by a mask, which all layers share."""
SLIDING_CACHES = ("gemma2", "gemma3_text")
"""Architectures for which peft puts a prefix into a cache of no more than a layer's window."""
FOLLOWED = ("bloom", *WIDENED, *FILLED)
"""Architectures with an attention of their own, which is followed to the byte."""


def save_for_attention(saved: SavedStorages, node: Node) -> None:
    """Save what the attention's backward needs."""
    _Attention(saved, node).save()


class _Attention:
    def __init__(self, saved: SavedStorages, node: Node) -> None:
        self._saved = saved
        self._node = node
        self._names = node.inputs[:3]
        self._types = tuple(saved.graph.types[name] for name in self._names)
        eager = saved.eager
        self._window = cast("int", node.get("window") or 0)
        is_cut = self._window and eager.model_type in SLIDING_CACHES
        prefix = min(eager.prefix, self._window - 1) if is_cut else eager.prefix
        self._is_prefixed = bool(eager.prefix)
        self._is_written_out = eager.attention.endswith("eager")
        self._keys = eager.rows + prefix  # of a sequence
        self._scores = saved.tokens * self._keys

    def save(self) -> None:
        saved, eager = self._saved, self._saved.eager
        saved.storages.add(self._node)
        needs = [saved.needs[name] for name in self._names]
        needs = [needs[0], *(one or self._is_prefixed for one in needs[1:])]
        if not any(needs):
            return
        saved.needs[self._node.name] = True
        heads = [type_.shape[1] for type_ in self._types]
        if self._is_written_out:
            self._written_out(needs)
        elif eager.attention == "own-sdpa" and heads[0] != heads[1]:
            self._math()
        else:
            self._flash()

    # --------------------------------------------------------------------------- implementations

    def _flash(self) -> None:
        """Flash SDPA: q, k, v, the output and its log-sum-exp."""
        saved, node, eager = self._saved, self._node, self._saved.eager
        is_masked = eager.attention == "own-sdpa" or 0 < self._window <= eager.seq
        saved.save(self._names[0], node.outputs[1].name)
        if self._is_head_major(self._names[0]):
            # The kernel's output has q's layout; what follows reads a copy with heads side by side.
            features = prod(node.output.type.features)
            saved.save_new(f"{node.name}.head_major", node.op, node.output.type.dtype, features)
        else:
            saved.save(node.name)
        if is_masked or self._is_prefixed:
            self._save_masked(1)
            self._save_masked(2)
            self._save_mask()
        else:
            saved.save(*self._names[1:])

    def _math(self) -> None:
        """SDPA's fallback for a query of more heads than the keys: all in fp32, and repeated.

        The one head of the keys of a single sequence is repeated by a view.
        """
        q = self._types[0]
        heads = q.features[0]
        dtype = promote(q.dtype, "f32")
        for name, type_ in zip("qkv", self._types, strict=True):
            copies = 1 if type_.features[0] == 1 and self._saved.eager.batch == 1 else heads
            size = copies * type_.features[1]
            self._saved.save_new(f"{self._node.name}.{name}", self._node.op, dtype, size)
        self._save_scores("probabilities", dtype)

    def _written_out(self, needs: Sequence[bool]) -> None:
        """softmax(q kᵀ · scale + mask, fp32).to(v.dtype) v, keys and values repeated."""
        q, _, v = self._types
        widened = "f32" if self._saved.eager.model_type in WIDENED else q.dtype
        if needs[1]:
            self._save_operand(0, widened)
        if needs[0]:
            self._save_operand(1, widened)
        if needs[0] or needs[1]:
            if self._node.get("softcap"):
                self._save_scores("tanh", q.dtype)
            if self._saved.eager.model_type in FILLED:
                self._saved.save_shared("attention_mask", "masked_fill", self._scores)
            self._save_scores("softmax", promote(q.dtype, "f32"))
            self._save_operand(2, v.dtype)
        if needs[2] and (v.dtype not in ("f32", "f64") or not (needs[0] or needs[1])):
            self._save_scores("probabilities", v.dtype)

    # ------------------------------------------------------------------------------------ tensors

    def _is_head_major(self, name: str) -> bool:
        """Return whether q is dense in [B, heads, S, d], as after torch.cat."""
        graph = self._saved.graph
        while (node := graph.producers.get(name)) is not None:
            if node.op == "concat":
                return True
            if node.op not in ("add", "cast", "mul"):
                return False
            name = node.inputs[0]
        return False

    def _save_operand(self, index: int, dtype: str) -> None:
        """Save q, k or v of a product written out, in that dtype.

        Sequence by sequence, heads lie side by side; the product copies them unless there is but
        one sequence.
        """
        name, type_ = self._names[index], self._types[index]
        is_copied = self._saved.eager.batch > 1 and not self._is_head_major(name)
        if index and (self._is_prefixed or self._types[0].features[0] != type_.features[0]):
            self._save_repeated(index, self._types[0].features[0], dtype)
        elif is_copied or type_.dtype != dtype:
            self._saved.save_new(f"{name}.copied", "reshape", dtype, prod(type_.features))
        else:
            self._saved.save(name)

    def _save_masked(self, index: int) -> None:
        """Save keys or values of masked flash SDPA; one head is repeated by a view."""
        type_ = self._types[index]
        heads = self._types[0].features[0] if type_.features[0] > 1 else 1
        if self._is_prefixed or heads != type_.features[0]:
            self._save_repeated(index, heads, type_.dtype)
        else:
            self._saved.save(self._names[index])

    def _save_repeated(self, index: int, heads: int, dtype: str) -> None:
        """Save keys or values of so many heads, those of a prefix included."""
        per_token = heads * self._types[index].features[1] * DTYPE_BYTES[dtype]
        size = per_token * SEQUENCES * self._keys
        self._saved.save_bytes(f"{self._names[index]}.repeated", "reshape", size)

    def _save_mask(self) -> None:
        """A boolean mask [B, 1, S, S], made floating by each call; or ALiBi's, made once."""
        saved, node, q = self._saved, self._node, self._types[0]
        size = DTYPE_BYTES[q.dtype] * self._scores
        if node.get("alibi"):
            saved.save_shared("attention_mask", "alibi", q.features[0] * size)
        else:
            saved.save_bytes(f"{node.name}.mask", node.op, size)

    def _save_scores(self, what: str, dtype: str) -> None:
        """A tensor [B, heads, S, S]."""
        heads = self._types[0].features[0]
        size = heads * DTYPE_BYTES[dtype] * self._scores
        self._saved.save_bytes(f"{self._node.name}.{what}", self._node.op, size)
