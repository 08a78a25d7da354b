"""The template kernels against fp64, rooflines and peers, in the sizes of Llama-3.1-8B.

What a setting needs is imported within it: one whose kernel is not there is a failed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import gpu_work as work
from gpu_case import Bench, Case, Row, Setting, check_close
from gpu_lora import lora_settings
from gpu_training import training_settings

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128_256
HEADS, KV_HEADS, HEAD = 32, 8, 128
RANK = 16
BF16 = 2
"""Bytes of an element."""
LOSSES = (2048, 8192)
"""Tokens."""
SIGNS = (8192, 16384)
"""Tokens, and OPT-6.7B's features."""
ATTENTION = ((32, 1, 4096), (1, 4096, 4096), (128, 1, 1024), (8, 1024, 1024), (1, 1, 32_768))
"""Sequences, their last tokens that are in the batch, and keys of each."""
DRAWN = (32, 1, 128)
"""Rows of logits."""


def _random(bench: Bench, *shape: int, scale: float = 1.0) -> Any:
    import torch

    return torch.randn(shape, device=bench.eager_device, dtype=torch.bfloat16) * scale


# ----------------------------------------------------------------------------------------- loss


def loss_settings(bench: Bench) -> Iterator[Setting]:
    """Linear cross-entropy: loss and the input's gradient, against whole logits and autograd."""
    for tokens in LOSSES:
        yield f"loss, {tokens} tokens", lambda tokens=tokens: loss(bench, tokens)


def loss(bench: Bench, tokens: int) -> Row:
    """Linear cross-entropy of so many tokens, an eighth of them checked first.

    Raises:
        AssertionError: the loss or its gradient is not that of fp64.
    """
    import torch
    import torch.nn.functional as F

    from pcg.kernels.triton.linear_cross_entropy import linear_cross_entropy

    device = bench.eager_device
    x, weight = _random(bench, tokens, HIDDEN), _random(bench, VOCABULARY, HIDDEN, scale=0.02)
    targets = torch.randint(VOCABULARY, (tokens,), device=device)
    slopes = torch.full((tokens,), 1 / tokens, device=device)
    some = slice(tokens // 8 or 1)
    found, dx = linear_cross_entropy(x[some], weight, targets[some], slopes[some])
    # By hand: the engine of gradients may know no such device.
    logits = x[some].double() @ weight.double().t()
    wanted = F.cross_entropy(logits, targets[some], reduction="none")
    check_close("loss", found, wanted, 2e-2)
    chosen = F.one_hot(targets[some], VOCABULARY)
    check_close("dx", dx, (logits.softmax(-1) - chosen) @ weight.double() / tokens, 2e-2)
    del logits, chosen, found, dx

    def whole() -> object:
        leaf = x.detach().requires_grad_()
        mean = F.cross_entropy((leaf @ weight.t()).float(), targets)
        return torch.autograd.grad(mean, leaf)

    def ours() -> object:
        return linear_cross_entropy(x, weight, targets, slopes)

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    ours_us = bench.timer.median_us(ours)
    peers, wrong = bench.peers_us({"F.cross_entropy": whole})
    needed = work.loss_work(tokens, HIDDEN, VOCABULARY, BF16)
    return bench.row(ours_us, needed, peers_us=peers, ours_bytes=peak, note=wrong)


# ---------------------------------------------------------------------------------------- signs


def sign_settings(bench: Bench) -> Iterator[Setting]:
    """ReLU's signs."""
    yield "signs, pack", lambda: _signs(bench, packs=True)
    yield "signs, backward", lambda: _signs(bench, packs=False)


def _signs(bench: Bench, packs: bool) -> Row:
    import torch

    from pcg.kernels.torch import ops as torch_ops
    from pcg.kernels.triton import elementwise

    y, dy = _random(bench, *SIGNS), _random(bench, *SIGNS)
    signs = elementwise.pack_signs(y)
    if not torch.equal(signs, torch_ops.pack_signs(y)):
        raise AssertionError("our signs are not torch's")
    if packs:
        ours, theirs = elementwise.pack_signs, torch_ops.pack_signs
        arguments: tuple[Any, ...] = (y,)
        needed = work.pack_work(y.numel(), BF16)
    else:
        ours, theirs = elementwise.relu_backward_packed, torch_ops.relu_backward_packed
        arguments, needed = (dy, signs), work.unpack_work(y.numel(), BF16)
    peers, wrong = bench.peers_us({"torch": lambda: theirs(*arguments)})
    ours_us = bench.timer.median_us(lambda: ours(*arguments))
    row = bench.row(ours_us, needed, peers_us=peers, note=wrong)
    return bench.aimed(row, "85 % of copy bandwidth", 0.85)


# ------------------------------------------------------------------------------------- attention


def attention_settings(bench: Bench) -> Iterator[Setting]:
    """Paged attention with Llama-3.1-8B's heads, against torch's SDPA; checked first."""
    for batch, tokens, keys in ATTENTION:
        name = f"attention, {batch} of {tokens} tokens on {keys} keys"
        yield name, lambda sizes=(batch, tokens, keys): attention(bench, *sizes)


def _paged(
    bench: Bench, batch: int, tokens: int, keys: int
) -> tuple[Callable[[], Any], tuple[Any, Any, Any]]:
    """Our attention of sequences whose last `tokens` of `keys` are in the batch.

    Returns:
        It, and queries, keys and values of each sequence side by side: [batch, heads, …, head].
    Raises:
        AssertionError: attention of the first sequence is not that of fp64.
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

    row = torch.tensor(tables, device=bench.eager_device)[:, :, None] * PAGE_TOKENS
    rows = (row + torch.arange(PAGE_TOKENS, device=bench.eager_device)).flatten(1)
    dense_k, dense_v = (x[:, rows].transpose(0, 1).contiguous() for x in (k, v))
    dense_q = q.view(batch, tokens, HEADS, HEAD).transpose(1, 2).contiguous()
    first = ours().view(batch, tokens, HEADS, HEAD)[0].double()
    wanted = _reference(dense_q[0], dense_k[0], dense_v[0], scale)
    check_close("paged attention", first.transpose(0, 1)[:, -16:], wanted, 2e-2)
    return ours, (dense_q, dense_k, dense_v)


def attention(bench: Bench, batch: int, tokens: int, keys: int) -> Row:
    """Attention of sequences whose last `tokens` of `keys` are in the batch.

    Raises:
        AssertionError: it is not that of fp64.
    """
    import torch.nn.functional as F

    ours, dense = _paged(bench, batch, tokens, keys)
    is_decode = tokens == 1

    def sdpa() -> object:
        return F.scaled_dot_product_attention(
            *dense, is_causal=not is_decode, scale=HEAD**-0.5, enable_gqa=True
        )

    peers_us, wrong = bench.peers_us({"SDPA": sdpa}, captured=is_decode)
    ours_us = bench.timer.median_us(ours, captured=is_decode)
    needed = work.attention_work([(tokens, keys - tokens)] * batch, HEADS, KV_HEADS, HEAD, BF16)
    row = bench.row(ours_us, needed, peers_us=peers_us, note=wrong)
    return bench.aimed(row, "80 % of copy bandwidth", 0.80) if is_decode else row


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
    for rows in DRAWN:
        yield f"sampling, greedy, {rows} rows", lambda rows=rows: _greedy(bench, rows)
        yield f"sampling, draw, {rows} rows", lambda rows=rows: _draw(bench, rows)
        yield (
            f"sampling, draw of top-k, top-p, {rows} rows",
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
    return bench.row(ours_us, needed, peers_us=peers, note=wrong)


def _draw(bench: Bench, rows: int, **cut: Any) -> Row:
    import torch

    from pcg.kernels.triton.sampling import draw
    from pcg.runtime.sampling.drawing import PYTORCH, limits_of
    from pcg.runtime.sampling.sampling_params import SamplingParams

    logits = 3 * torch.randn(rows, VOCABULARY, device=bench.eager_device)
    uniform = torch.rand(rows, device=bench.eager_device, dtype=torch.float64)
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
    return bench.row(ours_us, needed, peers_us=peers, note=wrong)


# ---------------------------------------------------------------------------------------- cases

_FIRST = (
    (lora_settings, 3),
    (attention_settings, 2),
    (loss_settings, 1),
    (training_settings, 3),
    (sampling_settings, 3),
    (sign_settings, 2),
)
"""The settings of each kernel, and the number of those that come before all other cases."""


def kernel_settings(bench: Bench) -> Iterable[Setting]:
    """The first settings of each kernel."""
    return chain.from_iterable(islice(settings(bench), count) for settings, count in _FIRST)


def further_settings(bench: Bench) -> Iterable[Setting]:
    """The other sizes."""
    return chain.from_iterable(islice(settings(bench), count, None) for settings, count in _FIRST)


CASES = (Case("kernels", 90, kernel_settings), Case("further kernels", 60, further_settings))
