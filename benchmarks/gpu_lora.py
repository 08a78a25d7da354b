"""SGMV, the products of many adapters in one batch, against a torch loop and gather-bmm.

Adapters' rows lie in pages of an arena, as in an engine, in the base's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import gpu_work as work
from gpu_case import Bench, Row, Setting, check_close

HIDDEN = 4096
RANK = 16
BF16 = 2
"""Bytes of an element."""
PAGE_ELEMENTS = 2**20
"""Elements of a page of Llama-3.1-8B's arena in bf16: 16 tokens' keys and values."""
HIGH_RANKS = (8, 16, 64, 256)
"""Ranks of the adapters of a batch, in turn."""
BATCHES = (64, 1, 32, 8, 16, 4, 2)
LAYERS = 32
"""Sites that are run one after the other, so that none finds its adapters in the L2 cache."""


def slots_of(popularity: str, batch: int) -> list[int]:
    """Each request's adapter, in Punica's four popularities (figure 8)."""
    from pcg.simulate import distributions as known

    counts = getattr(known, popularity.capitalize())().counts(batch)
    return [adapter for adapter, many in enumerate(counts) for _ in range(many)]


def lora_settings(bench: Bench) -> Iterator[Setting]:
    """One token a request: mixed ranks, and Punica's four popularities at rank 16; checked first.

    Each against a torch loop and gather-bmm, which are replayed from a graph, too.
    """
    ranks = ", ".join(map(str, HIGH_RANKS))
    for batch in BATCHES:
        for popularity in ("distinct", "identical", "uniform", "skewed"):
            name = f"LoRA, {popularity}, batch {batch}"
            yield name, lambda p=popularity, b=batch: lora(bench, p, b)
            if (popularity, batch) == ("distinct", BATCHES[0]):
                name = f"LoRA, ranks {ranks}, batch {batch}"
                yield name, lambda b=batch: lora(bench, "distinct", b, HIGH_RANKS)


def lora(bench: Bench, popularity: str, batch: int, ranks: Sequence[int] = (RANK,)) -> Row:
    """LoRA of one token a request.

    Raises:
        AssertionError: it, or a peer, is not what fp64 gives.
    """
    layers = [LoraLayer(bench, popularity, batch, ranks) for _ in range(LAYERS)]
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
    needed = work.ranks_work(layers[0].ranks, layers[0].slots, HIDDEN, HIDDEN, BF16)
    row = bench.row(ours_us, needed, peers_us=peers, note=wrong)
    if (popularity, batch, ranks) == ("distinct", BATCHES[0], (RANK,)):
        return bench.aimed(row, "70 % of copy bandwidth", 0.70)
    return row


def in_pages(matrices: Sequence[Any], seed: int = 0) -> tuple[Any, list[Any]]:
    """Lay rows of matrices out in the shuffled pages of an arena.

    Returns:
        The arena's elements, and the first element of each row of each matrix, int64.
    """
    import torch

    rows_a_page = PAGE_ELEMENTS // HIDDEN
    counts = [len(matrix) for matrix in matrices]
    pages = -(-sum(counts) // rows_a_page)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    place = torch.arange(sum(counts))
    firsts = order[place // rows_a_page] * PAGE_ELEMENTS + place % rows_a_page * HIDDEN
    device = matrices[0].device
    arena = torch.zeros(pages * PAGE_ELEMENTS, dtype=matrices[0].dtype, device=device)
    arena.view(-1, HIDDEN)[(firsts // HIDDEN).to(device)] = torch.cat(list(matrices))
    return arena, list(firsts.split(counts))


class LoraLayer:
    """One site's adapters, and the step's tokens there.

    Args:
        ranks: those of the adapters, in turn.
    """

    def __init__(
        self, bench: Bench, popularity: str, batch: int, ranks: Sequence[int] = (RANK,)
    ) -> None:
        import torch

        from pcg.kernels.triton.adapters.rank_rows import rank_rows
        from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, token_tiles

        def drawn(*shape: int) -> Any:
            return torch.randn(shape, device=bench.eager_device, dtype=torch.bfloat16)

        self.slots = slots_of(popularity, batch)
        distinct = max(self.slots) + 1
        self.x, self.y = drawn(batch, HIDDEN), drawn(batch, HIDDEN)
        self.ranks = [ranks[slot % len(ranks)] for slot in range(distinct)]
        self.a, self.b = ([0.02 * drawn(rank, HIDDEN) for rank in self.ranks] for _ in range(2))
        arena, firsts = in_pages([one for pair in zip(self.a, self.b, strict=True) for one in pair])
        counts = torch.tensor([self.ranks], dtype=torch.int32, device=bench.eager_device)
        self.rows_a, self.rows_b = (
            rank_rows(arena, _table(own).to(bench.eager_device), 0, counts, [0], [HIDDEN])
            for own in (firsts[::2], firsts[1::2])
        )
        slots = _slots(self.ranks)
        spans = [(i, 1, slots[slot]) for i, slot in enumerate(self.slots)]
        self.tiles = token_tiles(spans, DECODE_BLOCK).to(self.x.device)
        many = [self.slots.count(slot) for slot in range(distinct)]
        ends = list(accumulate(many))
        self.bounds = [(end - count, end) for end, count in zip(ends, many, strict=True)]
        # For batched products, whose matrices are padded to the largest rank.
        self.chosen = torch.tensor(self.slots, device=bench.eager_device)
        self.stacks = [
            torch.nn.utils.rnn.pad_sequence(own, batch_first=True) for own in (self.a, self.b)
        ]

    def ours(self) -> None:
        from pcg.kernels.triton.adapters.segmented_lora import expand_add, shrink

        expand_add(self.y, shrink(self.x, self.rows_a, self.tiles), self.rows_b, self.tiles)

    def loop(self) -> None:
        """One adapter after the other."""
        for (begin, end), a, b in zip(self.bounds, self.a, self.b, strict=True):
            self.y[begin:end].addmm_(self.x[begin:end] @ a.t(), b)

    def gather(self) -> None:
        """Each token's matrices copied, and two batched products."""
        import torch

        a, b = self.stacks
        s = torch.bmm(self.x[:, None], a[self.chosen].transpose(1, 2))
        self.y[:, None].baddbmm_(s, b[self.chosen])

    def check(self) -> None:
        """AssertionError: ours or a peer's y is wrong."""
        kept = self.y.clone()
        expected = kept.double()
        for i, slot in enumerate(self.slots):
            a, b = self.a[slot].double(), self.b[slot].double()
            expected[i] += self.x[i].double() @ a.t() @ b
        for run in (self.ours, self.loop, self.gather):
            self.y.copy_(kept)
            run()
            check_close(f"LoRA by {run.__name__}", self.y, expected, 1e-2)


def _table(firsts: Sequence[Any]) -> Any:
    """The rows' first elements, one adapter's behind the other's."""
    import torch

    from pcg.kernels.sizes import RANK_STEP

    pad = torch.nn.functional.pad
    return torch.cat([pad(own, (0, -len(own) % RANK_STEP)) for own in firsts])


def _slots(ranks: Sequence[int]) -> Sequence[Any]:
    """Where that table has each adapter."""
    from pcg.kernels.batch import AdapterSlot
    from pcg.kernels.sizes import RANK_STEP

    widths = [-(-rank // RANK_STEP) * RANK_STEP for rank in ranks]
    firsts = accumulate(widths[:-1], initial=0)
    columns = enumerate(zip(firsts, widths, strict=True))
    return [AdapterSlot(number, first, width) for number, (first, width) in columns]
