"""Absorbed products of single tokens against PyTorch's attention to expanded keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pcg.ir.types import TOKENS, tensor
from pcg.kernels.batch import SegmentedWeight, Segments, Span
from pcg.kernels.torch.latent_attention import latent_attention
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.model.batch import Batch

HEADS, KEYS, VALUES, LATENT, REST, RANK = 4, 16, 20, 24, 8, 3
CONTEXTS = (0, 5, 40, 70)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "tolerance"), [("f32", 1e-5), ("bf16", 3e-2), ("f16", 4e-3)])
def test_single_tokens_of_base_and_adapters(name: str, tolerance: float) -> None:
    """The second and third sequence have adapters; fp16 has no native kernel."""
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[name]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight = 0.2 * random(HEADS * (KEYS + VALUES), LATENT)
    a, b = 0.3 * random(2, LATENT, RANK), 0.3 * random(2, RANK, len(weight))
    row = tensor(name, TOKENS, 1, LATENT + REST)
    pages = sum(pages_for(count + 1) for count in CONTEXTS)
    cache = KvCache([(row, row.with_features(0, 0))], pages, CPU)
    cache.keys[0].copy_(random(*cache.keys[0].shape))
    spans = []
    for place, count in enumerate(CONTEXTS):
        table = cache.pool.open(str(place))
        cache.pool.extend(table, pages_for(count + 1))
        spans.append(Span(place, 1, count, table))
    batch = Batch(torch.zeros(len(spans), dtype=torch.int64), spans, cache)
    segments = Segments.of(1, (1, 1), CPU)
    lora = [SegmentedWeight(each.float(), segments, (True, True)) for each in (a, b)]
    q, latents, rest = random(4, HEADS, KEYS + REST), random(4, LATENT), random(4, 1, REST)
    out, _ = latent_attention(batch, q, latents, rest, weight, *lora, scale=0.3, value_size=VALUES)
    for place, span in enumerate(spans):
        rows = cache.keys[0][0, batch.seen(span)].double()
        torch.testing.assert_close(
            rows[-1], torch.cat((latents[place], rest[place, 0])).double(), rtol=0, atol=0
        )
        whole = weight.double()
        if place in (1, 2):
            whole = whole + (a[place - 1].double() @ b[place - 1].double()).t()
        expanded = (rows[:, :LATENT] @ whole.t()).unflatten(1, (HEADS, -1)).transpose(0, 1)
        common = rows[:, LATENT:].expand(HEADS, -1, -1)
        keys = torch.cat((expanded[..., :KEYS], common), -1)
        query = q[place].double().unsqueeze(1)
        expected = scaled_dot_product_attention(query, keys, expanded[..., KEYS:], scale=0.3)
        error = (out[place].double() - expected.squeeze(1)).norm() / expected.norm()
        assert error < tolerance
