"""Bytes and FLOPs that a task cannot do without, counted by formula: what a roofline is made of.

    floor = max(bytes / copy bandwidth, FLOPs / matrix product rate)

Bytes are those that must be read or written once, whatever the order of work: a weight that a
kernel reads twice counts once. FLOPs are 2 for a multiplication and its sum, of products alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """The bytes and FLOPs that a task cannot do without."""

    bytes: int
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def times(self, count: int) -> Work:
        """The work of so many such tasks."""
        return Work(self.bytes * count, self.flops * count)


@dataclass(frozen=True)
class Ceilings:
    """The device's best rates, measured in the same run.

    Attributes:
        bytes_per_s: rate of a large copy, read and written bytes together.
        flops_per_s: rate of a large product in bf16.
        host_bytes_per_s: rate of a large copy from pinned memory of the host.
    """

    bytes_per_s: float
    flops_per_s: float
    host_bytes_per_s: float

    def floor_us(self, work: Work) -> float:
        """The time below which the device cannot do it."""
        return 1e6 * max(work.bytes / self.bytes_per_s, work.flops / self.flops_per_s)


def copy_work(elements: int, size: int) -> Work:
    """One read and one write of each element."""
    return Work(2 * elements * size)


def product_work(m: int, n: int, k: int, size: int) -> Work:
    """[m, k] by [k, n]: both read once, the product written once."""
    return Work((m * k + k * n + m * n) * size, 2 * m * n * k)


def loss_work(tokens: int, hidden: int, vocabulary: int, size: int) -> Work:
    """Linear cross-entropy with the input's gradient: x, W and targets in, dx and the loss out.

    Two products; logits need not leave the chip. Targets are int64, the loss and its weight fp32.
    """
    moved = (2 * tokens * hidden + vocabulary * hidden) * size + tokens * (8 + 4 + 4)
    return Work(moved, 4 * tokens * vocabulary * hidden)


def pack_work(elements: int, size: int) -> Work:
    """Signs of each element read, a bit of each written."""
    return Work(elements * size + elements // 8)


def unpack_work(elements: int, size: int) -> Work:
    """A gradient and a bit of each element read, a gradient written."""
    return Work(2 * elements * size + elements // 8)


def lora_work(tokens: int, distinct: int, in_: int, out: int, rank: int, size: int) -> Work:
    """LoRA of each token's own adapter, y += x Aᵀ Bᵀ.

    Args:
        distinct: the number of their adapters; each is read once.
        out: the columns of y, which is read and written.
    """
    moved = distinct * rank * (in_ + out) + tokens * in_ + 2 * tokens * out
    return Work(moved * size, 2 * tokens * rank * (in_ + out))


def ranks_work(ranks: Sequence[int], slots: Sequence[int], in_: int, out: int, size: int) -> Work:
    """LoRA of tokens, y += x Aᵀ Bᵀ, whose adapters have ranks of their own.

    Args:
        ranks: of the adapters; each is read once.
        slots: each token's adapter.
    """
    moved = sum(ranks) * (in_ + out) + len(slots) * (in_ + 2 * out)
    return Work(moved * size, 2 * sum(ranks[slot] for slot in slots) * (in_ + out))


def attention_work(
    parts: Sequence[tuple[int, int]], heads: int, kv_heads: int, head: int, size: int
) -> Work:
    """Causal attention of parts (tokens, keys before them): q, all keys and values in, out out.

    A token sees the keys before its part, those of its part up to its own, and does two products.
    """
    tokens = sum(count for count, _ in parts)
    keys = sum(count + before for count, before in parts)
    seen = sum(count * before + count * (count + 1) // 2 for count, before in parts)
    moved = 2 * tokens * heads * head + 2 * keys * kv_heads * head
    return Work(moved * size, 4 * seen * heads * head)


# --------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama, from its config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LlamaShape:
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["vocab_size"],
        )

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """In and out of a layer's products: q, k, v, o, gate, up, down."""
        kv = self.kv_heads * self.head
        h, i = self.hidden, self.intermediate
        return ((h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h))

    @property
    def product_weights(self) -> int:
        """Elements of all matrices that a token is multiplied by, the head among them."""
        layer = sum(in_ * out for in_, out in self.linears)
        return self.layers * layer + self.vocabulary * self.hidden

    @property
    def kv_elements(self) -> int:
        """Elements of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head

    def adapter_elements(self, rank: int) -> int:
        """Elements of a LoRA on all linears of the layers."""
        return self.layers * rank * sum(in_ + out for in_, out in self.linears)


def decode_work(
    shape: LlamaShape, batch: int, context: int, distinct: int, rank: int, adapter_size: int
) -> Work:
    """One token of each sequence, in bf16: weights, keys and values, and distinct adapters, once.

    Args:
        context: the number of keys that each token sees, its own among them.
        distinct: the number of adapters; all sequences have one, or none has.
        adapter_size: the bytes of an element of an adapter.
    """
    weights = Work(2 * shape.product_weights, 2 * batch * shape.product_weights)
    seen = batch * context
    attention = Work(2 * seen * shape.kv_elements, 4 * seen * shape.layers * shape.hidden)
    adapter = shape.adapter_elements(rank)
    adapters = Work(adapter_size * distinct * adapter, 2 * batch * adapter if distinct else 0)
    return weights + attention + adapters


def prefill_work(shape: LlamaShape, batch: int, tokens: int) -> Work:
    """Whole prompts in bf16; the head runs for the last token of each alone."""
    head = shape.vocabulary * shape.hidden
    layers = shape.product_weights - head
    products = Work(2 * shape.product_weights, 2 * batch * (tokens * layers + head))
    seen = batch * tokens * (tokens + 1) // 2
    kv = Work(2 * batch * tokens * shape.kv_elements)
    return products + kv + Work(0, 4 * seen * shape.layers * shape.hidden)


def finetune_work(shape: LlamaShape, batch: int, tokens: int, rank: int) -> Work:
    """A step of LoRA on all linears, in bf16: forward, and gradients of inputs and of adapters.

    Frozen weights are read forward and backward, and have no gradient: 4 FLOPs a weight and token,
    6 for those that train. Attention's backward does five products for two forward.
    """
    count = batch * tokens
    adapter = shape.adapter_elements(rank)
    seen = batch * tokens * (tokens + 1) // 2
    attention = 4 * seen * shape.layers * shape.hidden
    flops = 4 * count * shape.product_weights + 6 * count * adapter + attention * 7 // 2
    return Work(4 * shape.product_weights, flops)
