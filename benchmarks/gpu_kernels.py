"""The template kernels against their rooflines and their peers, in the sizes of Llama-3.1-8B.

What a case needs is imported within it: one whose kernel is not there is a failed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpu_work as work
from gpu_case import Bench, Case, Row, Setting, check_close

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128_256
HEADS, KV_HEADS, HEAD = 32, 8, 128
RANK = 16
BF16 = 2
"""Bytes of an element."""
LOSSES = (2048, 8192)
"""Tokens."""
SIGNS = (8192, 16384)
"""Tokens, and OPT-6.7B's features."""
DECODES = ((32, 4096), (128, 1024), (1, 32_768))
"""Sequences, and keys of each."""
PREFILLS = ((1, 4096), (8, 1024))
"""Prompts, and tokens of each."""
DRAWN = (32, 1, 128)
"""Rows of logits."""
CHECKED_ATTENTION = ((16, 1, 1008), (1, 1024, 1024), (4, 512, 512))
"""Sequences, tokens and keys that are compared with fp64 first."""


def _random(bench: Bench, *shape: int, scale: float = 1.0) -> Any:
    import torch

    return torch.randn(shape, device=bench.device, dtype=torch.bfloat16) * scale


# ----------------------------------------------------------------------------------------- loss


def loss_settings(bench: Bench) -> Iterator[Setting]:
    """Linear cross-entropy: loss and the input's gradient, against whole logits and autograd."""
    for tokens in LOSSES[:1] if bench.quick else LOSSES:
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


def check_loss(bench: Bench) -> None:
    """AssertionError: the loss or its gradient is not that of fp64."""
    import torch
    import torch.nn.functional as F

    from pcg.kernels.triton.linear_cross_entropy import linear_cross_entropy

    tokens = LOSSES[0] // 8 or 1
    x, weight = _random(bench, tokens, HIDDEN), _random(bench, VOCABULARY, HIDDEN, scale=0.02)
    targets = torch.randint(VOCABULARY, (tokens,), device=bench.device)
    slopes = torch.full((tokens,), 1 / tokens, device=bench.device)
    loss, dx = linear_cross_entropy(x, weight, targets, slopes)
    # By hand: the engine of gradients may know no such device.
    logits = x.double() @ weight.double().t()
    check_close("loss", loss, F.cross_entropy(logits, targets, reduction="none"), 2e-2)
    chosen = F.one_hot(targets, VOCABULARY)
    check_close("dx", dx, (logits.softmax(-1) - chosen) @ weight.double() / tokens, 2e-2)


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
    """ReLU's signs."""
    yield "pack", lambda: _signs(bench, packs=True)
    yield "backward", lambda: _signs(bench, packs=False)


def _signs(bench: Bench, packs: bool) -> Row:
    import torch

    from pcg.kernels.torch import ops as torch_ops
    from pcg.kernels.triton import sign_bits

    y, dy = _random(bench, *SIGNS), _random(bench, *SIGNS)
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


# ------------------------------------------------------------------------------------- attention


def attention_settings(bench: Bench) -> Iterator[Setting]:
    """Paged attention with Llama-3.1-8B's heads, against torch's SDPA and FlexAttention."""
    for batch, context in DECODES[:1] if bench.quick else DECODES:
        yield (
            f"decode, {batch} of {context} keys",
            lambda batch=batch, context=context: _attention(bench, batch, 1, context),
        )
    for batch, tokens in PREFILLS[:1] if bench.quick else PREFILLS:
        yield (
            f"prefill, {batch} of {tokens} tokens",
            lambda batch=batch, tokens=tokens: _attention(bench, batch, tokens, tokens),
        )


def check_attention(bench: Bench, batch: int, tokens: int, keys: int) -> None:
    """AssertionError: attention of the first sequence is not that of fp64."""
    _paged(bench, batch, tokens, keys)


def _paged(
    bench: Bench, batch: int, tokens: int, keys: int
) -> tuple[Callable[[], Any], tuple[Any, Any, Any]]:
    """Our attention of sequences whose last `tokens` of `keys` are in the batch, checked.

    Returns:
        It, and queries, keys and values of each sequence side by side: [batch, heads, …, head].
    """
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

    row = torch.tensor(tables, device=bench.device)[:, :, None] * PAGE_TOKENS
    rows = (row + torch.arange(PAGE_TOKENS, device=bench.device)).flatten(1)
    dense_k, dense_v = (x[:, rows].transpose(0, 1).contiguous() for x in (k, v))
    dense_q = q.view(batch, tokens, HEADS, HEAD).transpose(1, 2).contiguous()
    first = ours().view(batch, tokens, HEADS, HEAD)[0].double()
    wanted = _reference(dense_q[0], dense_k[0], dense_v[0], scale)
    check_close("paged attention", first.transpose(0, 1)[:, -16:], wanted, 2e-2)
    return ours, (dense_q, dense_k, dense_v)


def _attention(bench: Bench, batch: int, tokens: int, keys: int) -> Row:
    ours, dense = _paged(bench, batch, tokens, keys)
    peers = _attention_peers(*dense, HEAD**-0.5)
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
    for rows in DRAWN[:1] if bench.quick else DRAWN:
        yield f"greedy, {rows} rows", lambda rows=rows: _greedy(bench, rows)
        yield f"draw, {rows} rows", lambda rows=rows: _draw(bench, rows)
        yield (
            f"draw of top-k, top-p, {rows} rows",
            lambda rows=rows: _draw(bench, rows, top_k=50, top_p=0.9),
        )


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


def _draw(bench: Bench, rows: int, **cut: Any) -> Row:
    import torch

    from pcg.kernels.triton.sampling import draw
    from pcg.runtime.sampling.drawing import PYTORCH
    from pcg.runtime.sampling.filters import limits_of
    from pcg.runtime.sampling.sampling_params import SamplingParams

    logits = 3 * torch.randn(rows, VOCABULARY, device=bench.device)
    uniform = torch.rand(rows, device=bench.device, dtype=torch.float64)
    params = [SamplingParams(temperature=0.8, **cut)] * rows
    limits = limits_of(params, logits)
    tokens, are_drawn = draw(logits, limits, uniform)
    same = float((tokens == PYTORCH.draw(logits, params, uniform)[0]).double().mean())
    if not are_drawn.all() or same < 0.9:  # a point may lie within rounding of a border
        raise AssertionError(f"{same:.0%} of our tokens are torch's")
    theirs = {"torch": lambda: PYTORCH.draw(logits, params, uniform)[0]}
    peers, wrong = bench.peers_us(theirs, captured=False)  # it uploads the limits
    ours_us = bench.timer.median_us(lambda: draw(logits, limits, uniform), captured=True)
    needed = work.Work(rows * (VOCABULARY * 4 + 8 + 4 + 8 + 1))
    name = f"draw of top-k, top-p, {rows} rows" if cut else f"draw, {rows} rows"
    return bench.row("sampling", name, ours_us, needed, peers_us=peers, note=wrong)


CASES = (
    Case("loss", 34, loss_settings),
    Case("attention", 62, attention_settings),
    Case("signs", 12, sign_settings),
    Case("sampling", 12, sampling_settings),
)
