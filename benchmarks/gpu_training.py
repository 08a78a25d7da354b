"""Adapters' products in training against PyTorch's, in the sizes of Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import gpu_work as work
from gpu_case import Bench, Row, Setting, check_close

HIDDEN, INTERMEDIATE = 4096, 14336
RANK = 16
BF16 = 2
"""Bytes of an element."""
FORWARD = 4096
"""Tokens of a forward."""
BACKWARDS: tuple[tuple[int, ...], ...] = ((4096,), (64,) * 8, (512,) * 4)
"""Tokens of each job that goes back."""


def training_settings(bench: Bench) -> Iterator[Setting]:
    """LoRA of a gate projection: forward, and backward beside the base's product, of some jobs."""
    yield f"trained LoRA, {FORWARD} tokens", lambda: _forward(bench, FORWARD)
    for counts in BACKWARDS:
        tokens = f"{len(counts)} of {counts[0]}" if len(counts) > 1 else str(counts[0])
        name = f"trained LoRA, {tokens} tokens backward"
        yield name, lambda counts=counts: _backward(bench, counts)


class _Site:
    """A job's adapter and tokens: bf16 over fp32."""

    def __init__(self, bench: Bench, tokens: int, in_: int, out: int) -> None:
        import torch

        from pcg.peft.weights import AdapterWeight

        def drawn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
            return torch.randn(shape, device=bench.eager_device, dtype=dtype)

        self.x, self.y, self.dz = drawn(tokens, in_), drawn(tokens, out), drawn(tokens, out)
        self.s = drawn(tokens, RANK, dtype=torch.float32)
        self.a = AdapterWeight(0.02 * drawn(RANK, in_, dtype=torch.float32))
        self.b = AdapterWeight(0.02 * drawn(out, RANK, dtype=torch.float32), 2.0)


def _forward(bench: Bench, tokens: int) -> Row:
    """Measure s = x Aᵀ and z = y + scale · s Bᵀ against the peers."""
    from pcg.kernels.torch import ops as torch_ops
    from pcg.kernels.triton import ops as triton_ops

    in_, out = HIDDEN, INTERMEDIATE
    site = _Site(bench, tokens, in_, out)

    def run(ops: Any) -> Any:
        return ops.expand_add(site.y, ops.shrink(site.x, site.a), site.b)

    check_close("z", run(triton_ops), run(torch_ops), 1e-2)
    peers, wrong = bench.peers_us({"torch": lambda: run(torch_ops)})
    ours_us = bench.timer.median_us(lambda: run(triton_ops))
    moved = BF16 * tokens * (in_ + 2 * out) + 4 * RANK * (in_ + out)
    needed = work.Work(moved, 2 * tokens * RANK * (in_ + out))
    return bench.row(ours_us, needed, peers_us=peers, note=wrong)


def _gradients(
    bench: Bench, counts: Sequence[int]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Our ds, dB, dA and dx of some jobs, with the base's product once, and PyTorch's; compared."""
    import torch

    from pcg.kernels.torch import ops as torch_ops
    from pcg.kernels.triton import ops as triton_ops
    from pcg.runtime.model.merged_execution import run_merged

    in_, out = HIDDEN, INTERMEDIATE
    sites = [_Site(bench, count, in_, out) for count in counts]
    weight = 0.02 * torch.randn(out, in_, device=bench.eager_device, dtype=torch.bfloat16)
    batch = SimpleNamespace(layer=0)

    def ours() -> list[tuple[Any, ...]]:
        asked = [
            triton_ops.lora_linear_backward(batch, "w", one.dz, weight, one.a, one.b, one.s)
            for one in sites
        ]
        made = zip(run_merged(asked), sites, strict=True)
        return [(db, dx, triton_ops.outer(ds, one.x)) for (ds, db, dx), one in made]

    def theirs() -> list[tuple[Any, ...]]:
        through = torch.cat([one.dz for one in sites]) @ weight
        found = []
        for one, dx in zip(sites, through.split([*counts]), strict=True):
            ds = torch_ops.expand_backward(one.dz, one.b)
            dx = dx + torch_ops.shrink_backward(ds, one.a).to(dx.dtype)
            db = torch_ops.scaled_outer(one.dz, one.s, one.b)
            found.append((db, dx, torch_ops.outer(ds, one.x)))
        return found

    for mine, other in zip(ours(), theirs(), strict=True):
        for name, one, expected in zip(("dB", "dx", "dA"), mine, other, strict=True):
            check_close(name, one, expected, 1e-2)
    return ours, theirs


def _backward(bench: Bench, counts: Sequence[int]) -> Row:
    in_, out = HIDDEN, INTERMEDIATE
    ours, theirs = _gradients(bench, counts)
    peers, wrong = bench.peers_us({"torch": theirs})
    ours_us = bench.timer.median_us(ours)
    tokens = sum(counts)
    # dz and x are read, dx is written; the base's weight, and each job's adapter and gradients.
    moved = BF16 * (tokens * (out + 2 * in_) + in_ * out) + 8 * len(counts) * RANK * (in_ + out)
    needed = work.Work(moved, 2 * tokens * (in_ * out + 2 * RANK * (in_ + out)))
    return bench.row(ours_us, needed, peers_us=peers, note=wrong)
