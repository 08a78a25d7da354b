"""The template kernels against their rooflines and their peers, in the sizes of Llama-3.1-8B.

What a case needs is imported within it: one whose kernel is not there is a failed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import gpu_work as work
from gpu_case import Bench, Case, Row, Setting, check_close

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128_256
HEADS, KV_HEADS, HEAD = 32, 8, 128
RANK = 16
BF16 = 2
"""Bytes of an element."""


def _random(bench: Bench, *shape: int, scale: float = 1.0) -> Any:
    import torch

    return torch.randn(shape, device=bench.device, dtype=torch.bfloat16) * scale


# ----------------------------------------------------------------------------------------- loss


def loss_settings(bench: Bench) -> Iterator[Setting]:
    """Linear cross-entropy: loss and the input's gradient, against whole logits and autograd."""
    for tokens in (2048,) if bench.quick else (2048, 8192):
        yield f"{tokens} tokens", lambda tokens=tokens: _loss(bench, tokens)


def _loss(bench: Bench, tokens: int) -> Row:
    import torch
    import torch.nn.functional as F

    from pcg.kernels.triton.linear_cross_entropy import linear_cross_entropy

    x, weight = _random(bench, tokens, HIDDEN), _random(bench, VOCABULARY, HIDDEN, scale=0.02)
    targets = torch.randint(VOCABULARY, (tokens,), device=bench.device)
    slopes = torch.full((tokens,), 1 / tokens, device=bench.device)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x @ weight.t()).float(), targets)

    compiled = torch.compile(whole)

    def run(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        leaf = x.detach().requires_grad_()
        return lambda: torch.autograd.grad(loss(leaf), leaf)

    ours_us, ours_bytes = _with_peak(
        bench, lambda: linear_cross_entropy(x, weight, targets, slopes)
    )
    peers, wrong = bench.peers_us({"F.cross_entropy": run(whole), "torch.compile": run(compiled)})
    return bench.row(
        "loss",
        f"{tokens} tokens",
        ours_us,
        work.loss_work(tokens, HIDDEN, VOCABULARY, BF16),
        peers_us=peers,
        ours_bytes=ours_bytes,
        note=wrong,
    )


def _with_peak(bench: Bench, run: Callable[[], object]) -> tuple[float, int]:
    """Return the time of a call, and the most bytes that it allocates."""
    import torch

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return bench.timer.median_us(run), peak


# ---------------------------------------------------------------------------------------- signs


def sign_settings(bench: Bench) -> Iterator[Setting]:
    """ReLU's signs, of 8,192 tokens of OPT-6.7B's 16,384 features."""
    yield "pack", lambda: _signs(bench, packs=True)
    yield "backward", lambda: _signs(bench, packs=False)


def _signs(bench: Bench, packs: bool, shape: tuple[int, int] = (8192, 16384)) -> Row:
    import torch

    from pcg.kernels.torch import ops as torch_ops
    from pcg.kernels.triton import sign_bits

    y, dy = _random(bench, *shape), _random(bench, *shape)
    signs = sign_bits.pack_signs(y)
    if not torch.equal(signs, torch_ops.pack_signs(y)):
        raise AssertionError("our signs are not torch's")
    if packs:
        ours, theirs = sign_bits.pack_signs, torch_ops.pack_signs
        arguments: tuple[Any, ...] = (y,)
        needed = work.pack_work(y.numel(), BF16)
    else:
        ours, theirs = sign_bits.relu_backward_packed, torch_ops.relu_backward_packed
        arguments, needed = (dy, signs), work.unpack_work(y.numel(), BF16)
    compiled = torch.compile(theirs)
    peers, wrong = bench.peers_us(
        {"torch": lambda: theirs(*arguments), "torch.compile": lambda: compiled(*arguments)}
    )
    ours_us = bench.timer.median_us(lambda: ours(*arguments))
    setting = "pack" if packs else "backward"
    row = bench.row("signs", setting, ours_us, needed, peers_us=peers, note=wrong)
    return bench.aimed(row, "85 % of copy bandwidth", 0.85)


# --------------------------------------------------------------------------------- segmented LoRA

BATCHES = (64, 1, 32, 8, 16, 4, 2)
LAYERS = 32
"""Sites that are run one after the other, so that none finds its adapters in the L2 cache."""


def slots_of(popularity: str, batch: int) -> list[int]:
    """Each request's adapter, in Punica's four popularities (figure 8)."""
    from pcg.simulate.workloads import popularity as known

    counts = getattr(known, popularity.capitalize())().counts(batch)
    return [adapter for adapter, many in enumerate(counts) for _ in range(many)]


def lora_settings(bench: Bench) -> Iterator[Setting]:
    """SGMV in decode: one token a request, h 4096, r 16, against a torch loop and gather-bmm."""
    times: dict[tuple[str, int], float] = {}
    batches = (64, 1) if bench.quick else BATCHES
    for batch in batches:
        for popularity in ("distinct", "identical", "uniform", "skewed"):

            def run(popularity: str = popularity, batch: int = batch) -> Row:
                row = _lora(bench, popularity, batch)
                assert row.ours_us is not None
                times[popularity, batch] = row.ours_us
                return _lora_aimed(bench, row, popularity, batch, times)

            yield f"{popularity}, batch {batch}", run


def _lora_aimed(
    bench: Bench, row: Row, popularity: str, batch: int, times: dict[tuple[str, int], float]
) -> Row:
    if (popularity, batch) == ("distinct", 64):
        return bench.aimed(row, "70 % of copy bandwidth", 0.70)
    if popularity == "identical" and batch == 1 and ("identical", 64) in times:
        ratio = times["identical", 64] / times["identical", 1]
        return replace(row, target="64 within 1.15 of 1", reached=ratio, met=ratio <= 1.15)
    return row


def _lora(bench: Bench, popularity: str, batch: int) -> Row:
    layers = [_LoraLayer(bench, popularity, batch) for _ in range(LAYERS)]
    layers[0].check()
    peers, wrong = bench.peers_us(
        {
            "torch loop": lambda: [layer.loop() for layer in layers],
            "gather-bmm": lambda: [layer.gather() for layer in layers],
        },
        captured=True,
        times=LAYERS,
    )
    ours_us = bench.timer.median_us(
        lambda: [layer.ours() for layer in layers], captured=True, times=LAYERS
    )
    distinct = max(layers[0].slots) + 1
    needed = work.lora_work(batch, distinct, HIDDEN, HIDDEN, RANK, BF16)
    setting = f"{popularity}, batch {batch}"
    return bench.row("lora", setting, ours_us, needed, peers_us=peers, note=wrong)


class _LoraLayer:
    """One site's adapters, and the step's tokens there."""

    def __init__(self, bench: Bench, popularity: str, batch: int) -> None:
        import torch

        from pcg.kernels.adapter_batch import AdapterSlot
        from pcg.kernels.triton.adapters.rank_rows import rank_rows
        from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, token_tiles

        self.slots = slots_of(popularity, batch)
        distinct = max(self.slots) + 1
        self.x, self.y = _random(bench, batch, HIDDEN), _random(bench, batch, HIDDEN)
        # Rows of A and of B, adapter by adapter, as pages of a pool hold them.
        self.a, self.b = (_random(bench, distinct, RANK, HIDDEN, scale=0.02) for _ in range(2))
        first = torch.arange(distinct * RANK, device=bench.device) * HIDDEN
        ranks = torch.full((1, distinct), RANK, dtype=torch.int32, device=bench.device)
        self.rows_a, self.rows_b = (
            rank_rows(memory.flatten(), first, 0, ranks, [0], [HIDDEN])
            for memory in (self.a, self.b)
        )
        spans = [(i, 1, AdapterSlot(s, s * RANK, RANK)) for i, s in enumerate(self.slots)]
        self.tiles = token_tiles(spans, DECODE_BLOCK).to(self.x.device)
        self.chosen = torch.tensor(self.slots, device=bench.device)
        counts = [self.slots.count(slot) for slot in range(distinct)]
        ends = list(accumulate(counts))
        self.bounds = [(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def ours(self) -> None:
        from pcg.kernels.triton.adapters.segmented_lora import expand_add, shrink

        expand_add(self.y, shrink(self.x, self.rows_a, self.tiles), self.rows_b, self.tiles)

    def loop(self) -> None:
        """One adapter after the other."""
        for slot, (begin, end) in enumerate(self.bounds):
            s = self.x[begin:end] @ self.a[slot].t()
            self.y[begin:end].addmm_(s, self.b[slot])

    def gather(self) -> None:
        """Each token's matrices copied, and two batched products."""
        import torch

        s = torch.bmm(self.x[:, None], self.a[self.chosen].transpose(1, 2))
        self.y[:, None].baddbmm_(s, self.b[self.chosen])

    def check(self) -> None:
        """AssertionError: ours or a peer's y is wrong."""
        x, a, b = (tensor.double() for tensor in (self.x, self.a, self.b))
        kept = self.y.clone()
        expected = kept.double()
        for i, slot in enumerate(self.slots):
            expected[i] += x[i] @ a[slot].t() @ b[slot]
        for run in (self.ours, self.loop, self.gather):
            self.y.copy_(kept)
            run()
            check_close(f"LoRA by {run.__name__}", self.y, expected, 1e-2)


# ------------------------------------------------------------------------------------- attention


def attention_settings(bench: Bench) -> Iterator[Setting]:
    """Paged attention with Llama-3.1-8B's heads, against torch's SDPA and FlexAttention."""
    decodes = ((32, 4096),) if bench.quick else ((32, 4096), (128, 1024), (1, 32_768))
    for batch, context in decodes:
        yield (
            f"decode, {batch} of {context} keys",
            lambda batch=batch, context=context: _attention(bench, batch, 1, context),
        )
    for batch, tokens in ((1, 4096),) if bench.quick else ((1, 4096), (8, 1024)):
        yield (
            f"prefill, {batch} of {tokens} tokens",
            lambda batch=batch, tokens=tokens: _attention(bench, batch, tokens, tokens),
        )


def _attention(bench: Bench, batch: int, tokens: int, keys: int) -> Row:
    """Sequences whose last `tokens` of `keys` are in the batch."""
    import torch

    from pcg.kernels.batch import Span
    from pcg.kernels.sizes import PAGE_TOKENS
    from pcg.kernels.torch.attention_math import Scoring
    from pcg.kernels.triton.attention.cache_rows import CacheRows, KvRows
    from pcg.kernels.triton.attention.paged_attention import paged_attention
    from pcg.kernels.triton.attention.work import AttentionWork
    from pcg.runtime.memory.pool import PageTable

    pages = keys // PAGE_TOKENS
    q = _random(bench, batch * tokens, HEADS, HEAD)
    k, v = (_random(bench, KV_HEADS, batch * keys, HEAD) for _ in range(2))
    # Pages of all sequences shuffled, as a pool that has been used gives them out.
    shuffled = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0))
    tables: Sequence[Sequence[int]] = shuffled.view(batch, pages).tolist()
    parts = [
        Span(i * tokens, tokens, keys - tokens, PageTable("benchmark", list(own)))
        for i, own in enumerate(tables)
    ]
    lists = AttentionWork.build(parts, HEADS // KV_HEADS, q.device)
    cache = KvRows(CacheRows.of_layer(k), CacheRows.of_layer(v))
    scale = HEAD**-0.5

    def ours() -> torch.Tensor:
        return paged_attention(q, cache, lists, Scoring(scale))[0]

    # Peers get keys and values of each sequence side by side: [batch, heads, …, head].
    row = torch.tensor(tables, device=bench.device)[:, :, None] * PAGE_TOKENS
    rows = (row + torch.arange(PAGE_TOKENS, device=bench.device)).flatten(1)
    dense_k, dense_v = (x[:, rows].transpose(0, 1).contiguous() for x in (k, v))
    dense_q = q.view(batch, tokens, HEADS, HEAD).transpose(1, 2).contiguous()
    peers = _attention_peers(dense_q, dense_k, dense_v, scale)
    first = ours().view(batch, tokens, HEADS, HEAD)[0].double()
    wanted = _reference(dense_q[0], dense_k[0], dense_v[0], scale)
    check_close("paged attention", first.transpose(0, 1)[:, -16:], wanted, 2e-2)
    is_decode = tokens == 1
    peers_us, wrong = bench.peers_us(peers, captured=is_decode)
    ours_us = bench.timer.median_us(ours, captured=is_decode)
    needed = work.attention_work([(tokens, keys - tokens)] * batch, HEADS, KV_HEADS, HEAD, BF16)
    kind = f"decode, {batch} of {keys} keys" if is_decode else f"prefill, {batch} of {keys} tokens"
    found = bench.row("attention", kind, ours_us, needed, peers_us=peers_us, note=wrong)
    return bench.aimed(found, "80 % of copy bandwidth", 0.80) if is_decode else found


def _attention_peers(q: Any, k: Any, v: Any, scale: float) -> dict[str, Callable[[], object]]:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    is_causal = q.shape[2] > 1
    flex = torch.compile(flex_attention)
    mask = None
    if is_causal:
        length = q.shape[2]
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=str(q.device)
        )
    options = {"scale": scale, "enable_gqa": True}
    return {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **options),
        "FlexAttention": lambda: flex(q, k, v, block_mask=mask, **options),
    }


def _reference(q: Any, k: Any, v: Any, scale: float) -> Any:
    """The last 16 tokens of one sequence in fp64: q [heads, tokens, head], k and v whole."""
    import torch

    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    last = q[:, -16:].double()
    scores = last @ k.transpose(1, 2) * scale
    count, keys = scores.shape[1:]
    i = torch.arange(keys - count, keys, device=q.device)[:, None]
    hidden = torch.arange(keys, device=q.device)[None] > i
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v


# ------------------------------------------------------------------------------------- sampling


def sampling_settings(bench: Bench) -> Iterator[Setting]:
    """Next tokens from logits, against the torch operators that do it."""
    for rows in (32,) if bench.quick else (1, 32, 128):
        yield f"greedy, {rows} rows", lambda rows=rows: _greedy(bench, rows)
        yield f"draw, {rows} rows", lambda rows=rows: _draw(bench, rows)


def _greedy(bench: Bench, rows: int) -> Row:
    import torch

    from pcg.kernels.triton.sampling import greedy

    logits = _random(bench, rows, VOCABULARY)
    if not torch.equal(greedy(logits), logits.argmax(-1)):
        raise AssertionError("our tokens are not torch's")
    peers, wrong = bench.peers_us({"argmax": lambda: logits.argmax(-1)}, captured=True)
    ours_us = bench.timer.median_us(lambda: greedy(logits), captured=True)
    needed = work.Work(rows * (VOCABULARY * BF16 + 8))
    return bench.row(
        "sampling", f"greedy, {rows} rows", ours_us, needed, peers_us=peers, note=wrong
    )


def _draw(bench: Bench, rows: int) -> Row:
    import torch

    from pcg.kernels.triton.sampling import draw

    logits = 3 * torch.randn(rows, VOCABULARY, device=bench.device)
    uniform = torch.rand(rows, device=bench.device, dtype=torch.float64)
    temperatures = torch.full((rows,), 0.8, device=bench.device)

    def theirs() -> torch.Tensor:
        sums = torch.softmax(logits / temperatures[:, None], -1).double().cumsum(-1)
        return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True).squeeze(1)

    tokens, are_drawn = draw(logits, temperatures, uniform)
    same = float((tokens == theirs()).double().mean())
    if not are_drawn.all() or same < 0.9:  # a point may lie within rounding of a border
        raise AssertionError(f"{same:.0%} of our tokens are torch's")
    peers, wrong = bench.peers_us({"torch": theirs}, captured=True)
    ours_us = bench.timer.median_us(lambda: draw(logits, temperatures, uniform), captured=True)
    needed = work.Work(rows * (VOCABULARY * 4 + 8 + 4 + 8 + 1))
    return bench.row("sampling", f"draw, {rows} rows", ours_us, needed, peers_us=peers, note=wrong)


CASES = (
    Case("loss", 34, loss_settings),
    Case("lora", 45, lora_settings),
    Case("attention", 62, attention_settings),
    Case("signs", 12, sign_settings),
    Case("sampling", 12, sampling_settings),
)
