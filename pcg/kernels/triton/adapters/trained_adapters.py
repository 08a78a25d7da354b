"""Adapters in training, by the segmented kernels: of a single job, or of several jobs together.

    s = x Aᵀ                   z = y + scale · s Bᵀ
    ds = scale · dz B          dB = scale · dzᵀ s          dA = dsᵀ x          dx = dz W + ds A
    Σ dz ⊙ (y - b)             of factors of y: (IA)³, DoRA
    scale · Σ dz               of summands: biases

A bottleneck adapter's products are the same, around σ(s + scale · d).

Adapters are fp32 over activations of 16 bits, which the kernels read as they are, where PyTorch
makes fp32 tensors of tokens; ds A alone is PyTorch's where it is not added to the base's dx at
once. A parameter is its own memory of rows, and B [out, r] of columns, read and its gradient
written as they lie (`RankRows.turned`); those of several jobs are joined, for which B is turned,
which is little beside their tokens.

Tables are cached, as layers and steps have few kinds of them; each stream has its own, as another
stream does not wait for their copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.batch import AdapterSlot, ProgramBatch
from pcg.kernels.devices import table_cache, uploaded
from pcg.kernels.sizes import RANK_STEP, ROW_ALIGNMENT
from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.torch.input_gradient import InputGradientTerm, product_backward
from pcg.kernels.torch.lora import as_weight
from pcg.kernels.torch.products import Product, ProductRequest, fulfilled, joined_tokens
from pcg.kernels.triton.adapters import segmented_lora
from pcg.kernels.triton.adapters.rank_rows import RankRows, int32_on, rank_rows
from pcg.kernels.triton.adapters.segmented_activate import segment_sum, segmented_activate
from pcg.kernels.triton.adapters.segmented_vectors import segment_inner
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TokenTiles, tiles_on

MOST_RANK = 256
"""Beyond, products are PyTorch's: a guess of where a library's tiles pay, until it is measured."""

_ENOUGH_TILES = 64
"""Of 36 KiB each under way, two thirds of what hides an H200's latency of memory."""

_MOST_JOINED = 1024
"""Tokens for each job beside the first, up to which to copy them should cost less than its launch:
16 MB of 4096 columns, read and written at 4 TB/s, in 4 us. To be measured."""


def are_few(counts: Sequence[int]) -> bool:
    """Return whether joining these tokens of jobs is faster than a launch for each."""
    return sum(counts) <= _MOST_JOINED * (len(counts) - 1)


def is_column_wise(x: Tensor) -> bool:
    """Return whether rows of x [T, n] can be loaded 16 bytes at a time."""
    if x.dim() != 2 or x.stride(1) != 1 or not x.numel():
        return False
    return not (x.shape[1] % ROW_ALIGNMENT or x.stride(0) % ROW_ALIGNMENT or x.data_ptr() % 16)


def rows_of(matrices: Sequence[Tensor], memory: Tensor | None = None) -> RankRows:
    """Return matrices [r, n], each of a slot, as rows of a memory, which may hold them already."""
    return slices_of([matrices], [memory])


def slices_of(
    groups: Sequence[Sequence[Tensor]], memories: Sequence[Tensor | None] | None = None
) -> RankRows:
    """Do `rows_of` for slices with a memory each; a slot has the same rank in all of them."""
    known = memories or [None] * len(groups)
    every = [_memory_of(*pair) for pair in zip(groups, known, strict=True)]
    ranks = tuple(len(matrix) for matrix in groups[0])
    sizes = tuple(matrices[0].shape[1] for matrices in groups)
    strides, device = tuple(memory.stride(0) for memory in every), every[0].device
    layout = _layout(ranks, sizes, strides, device, _stream(device))
    return replace(layout, memory=every[0], others=tuple(every[1:]))


def _memory_of(matrices: Sequence[Tensor], memory: Tensor | None) -> Tensor:
    if memory is not None:
        assert memory.is_contiguous()
        return memory
    if len(matrices) > 1:
        return torch.cat([*matrices])
    return matrices[0] if is_column_wise(matrices[0]) else matrices[0].contiguous()


def up_rows_of(groups: Sequence[Sequence[Tensor]], tokens: int) -> RankRows:
    """Return B [out, r] of each slot as rows of Bᵀ, of several slices, without a copy if possible.

    Those of several slots are transposed and joined, and so is one of the few `tokens` that a
    kernel takes one at a time.
    """
    firsts = [matrices[0] for matrices in groups]
    lie = all(matrix.is_contiguous() and not matrix.data_ptr() % 16 for matrix in firsts)
    if len(groups[0]) > 1 or tokens <= DECODE_BLOCK or not lie:
        return slices_of([[matrix.t() for matrix in matrices] for matrices in groups])
    return turned_rows(firsts)


def turned_rows(every: Sequence[Tensor]) -> RankRows:
    """Return a matrix [n, r] of each slice, contiguous, as rows of its columns."""
    rank, device = every[0].shape[1], every[0].device
    sizes = tuple(len(matrix) for matrix in every)
    layout = _layout((rank,), sizes, (1,) * len(every), device, _stream(device))
    return replace(layout, memory=every[0], others=tuple(every[1:]), turned=rank)


def segments_of(
    counts: Sequence[int], ranks: Sequence[int], device: torch.device, slices: int = 1
) -> TokenTiles:
    """Return `counts` tokens of each slot, slot by slot, by adapter."""
    starts = accumulate(counts[:-1], initial=0)
    return segments_at(tuple(zip(starts, counts, strict=True)), ranks, device, slices)


def segments_at(
    spans: Sequence[tuple[int, int]], ranks: Sequence[int], device: torch.device, slices: int = 1
) -> TokenTiles:
    """Return the first token and tokens of each slot, with its rank in every slice."""
    return _segments(tuple(spans), tuple(ranks), slices, device, _stream(device))


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@table_cache
def _segments(
    spans: tuple[tuple[int, int], ...],
    ranks: tuple[int, ...],
    slices: int,
    device: torch.device,
    stream: int,
) -> TokenTiles:
    pairs = zip(spans, _slots(ranks, slices), strict=True)
    return tiles_on([(*span, slot) for span, slot in pairs], device)


def _slots(ranks: Sequence[int], slices: int = 1) -> Sequence[AdapterSlot]:
    """Return a slot for each rank, with consecutive entries in tables of rows."""
    widths = [padded_rank(rank) for rank in ranks]
    firsts = accumulate((slices * width for width in widths[:-1]), initial=0)
    columns = enumerate(zip(firsts, widths, strict=True))
    return [AdapterSlot(number, first, width) for number, (first, width) in columns]


def padded_rank(rank: int) -> int:
    """Return the sums that shrink makes of a token for a rank."""
    return -(-rank // RANK_STEP) * RANK_STEP


@table_cache
def _layout(
    ranks: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    device: torch.device,
    stream: int,
) -> RankRows:
    """Describe matrices of these ranks in each slice, with rows `strides` apart in a memory."""
    slices = len(sizes)
    rows = torch.zeros(slices * sum(map(padded_rank, ranks)), dtype=torch.int64)
    befores = accumulate(ranks[:-1], initial=0)
    for rank, slot, before in zip(ranks, _slots(ranks, slices), befores, strict=True):
        for j, stride in enumerate(strides):
            first = slot.first + j * slot.width
            rows[first : first + rank] = stride * torch.arange(before, before + rank)
    of_slots, nowhere = int32_on([ranks] * slices, device), torch.empty(0, device=device)
    return rank_rows(nowhere, uploaded(rows, device), 0, of_slots, (0,) * slices, sizes)


def vectors_of(each: Sequence[Tensor]) -> RankRows:
    """Return vectors, each of a slot of the same width, as the row of a memory."""
    sizes = tuple(len(vector) for vector in each)
    memory = torch.cat([*each]) if len(each) > 1 else each[0].contiguous()
    return replace(_places_of(sizes, memory.device, _stream(memory.device)), memory=memory)


@table_cache
def _places_of(sizes: tuple[int, ...], device: torch.device, stream: int) -> RankRows:
    rows = torch.zeros(sum(map(padded_rank, sizes)), dtype=torch.int64)
    for slot, before in zip(_slots(sizes), accumulate(sizes[:-1], initial=0), strict=True):
        rows[slot.first] = before
    ranks = int32_on([[1] * len(sizes)], device)
    nowhere = torch.empty(0, device=device)
    return rank_rows(nowhere, uploaded(rows, device), 0, ranks, (0,), (ROW_ALIGNMENT,))


def scales_of(groups: Sequence[Sequence[Any]], device: torch.device) -> Tensor:
    """Return the scales of adapters' weights, each of a slot, by slice: [slices, slots]."""
    scales = tuple(tuple(weight.scale for weight in weights) for weights in groups)
    return _scales(scales, device, _stream(device))


@table_cache
def _scales(scales: tuple[tuple[float, ...], ...], device: torch.device, stream: int) -> Tensor:
    return uploaded(torch.tensor(scales, dtype=torch.float32), device)


_HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


def is_tokens(x: Tensor) -> bool:
    """Return whether the kernels can read x as [T, n]."""
    return x.dtype in _HALF_OR_SINGLE and is_column_wise(x)


def is_matrix(matrix: Tensor, columns: int) -> bool:
    """Return whether the kernels can read a matrix as [r, columns]; rank 0 has no rows."""
    is_known = matrix.dim() == 2 and matrix.shape[1] == columns
    return is_known and matrix.dtype == torch.float32 and 0 < len(matrix) <= MOST_RANK


def is_summand(s: Tensor) -> bool:
    """Return whether the kernels can read s as [T, r]."""
    return s.dim() == 2 and s.dtype == torch.float32 and 0 < s.shape[1] <= MOST_RANK


def parts_for(tiles: TokenTiles, slices: int = 1) -> int | None:
    """Return the parts of shrink's sums: 1 if tiles are enough for the device, else its default.

    To add parts up takes a launch, which is as long as parts save from `_ENOUGH_TILES` on.
    """
    return 1 if len(tiles.tiles) * slices >= _ENOUGH_TILES else None


def whole_sum(s: Tensor) -> Tensor:
    """Sum the parts of `shrink`'s s: [1, slices, sums]."""
    return s if len(s) == 1 else s.sum(0, keepdim=True)


def by_slice(s: Tensor) -> Sequence[Tensor]:
    """Split s [1, slices, sums] into slices, [1, 1, sums]."""
    slices: Sequence[Tensor] = s.split(1, 1)
    return slices


def by_job(s: Tensor, counts: Sequence[int], ranks: Sequence[int]) -> Sequence[Tensor]:
    """Split s [1, 1, sums] of consecutive segments into [T, r] of each slot."""
    widths = [padded_rank(rank) for rank in ranks]
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    each = zip(s.view(-1).split(sizes), widths, ranks, strict=True)
    return [part.view(-1, width)[:, :rank] for part, width, rank in each]


def as_sums(each: Sequence[Tensor]) -> Tensor:
    """Return s [T, r] of each slot as the kernels read it, [1, 1, sums]."""
    padded = [_padded(s).view(-1) for s in each]
    return (torch.cat(padded) if len(padded) > 1 else padded[0]).view(1, 1, -1)


def as_slices(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Do `as_sums` for slices, [1, slices, sums]; without a copy of the result of `by_slice`."""
    if len(groups) == 1:
        return as_sums(groups[0])
    firsts = [_padded(each[0]) for each in groups]
    if len(groups[0]) == 1 and _lie_in_line(firsts):
        return firsts[0].as_strided((1, len(firsts), firsts[0].numel()), (0, firsts[0].numel(), 1))
    return torch.cat([as_sums(each) for each in groups], 1)


def _lie_in_line(each: Sequence[Tensor]) -> bool:
    first, size = each[0], each[0].nbytes
    return all(
        tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and tensor.data_ptr() == first.data_ptr() + number * size
        for number, tensor in enumerate(each)
    )


def _padded(s: Tensor) -> Tensor:
    missing = padded_rank(s.shape[1]) - s.shape[1]
    return F.pad(s, (0, missing)) if missing else s.contiguous()


def shrink(x: Tensor, a: Any) -> Tensor:
    """Return s = x Aᵀ, [T, r] in A's dtype."""
    (s,) = shrink_group(x, (a,))
    return s


def shrink_group(x: Tensor, a: Sequence[Any]) -> Sequence[Tensor]:
    """Return s = x Aᵀ by each A [r, in], [T, r] in A's dtype."""
    matrices = [as_weight(weight).weight for weight in a]
    if not (is_tokens(x) and all(is_matrix(matrix, x.shape[1]) for matrix in matrices)):
        return [torch_ops.shrink(x, weight) for weight in a]
    counts, ranks = [len(x)], [len(matrices[0])]
    tiles = segments_of(counts, ranks, x.device, len(a))
    down = slices_of([[matrix] for matrix in matrices])
    s = whole_sum(segmented_lora.shrink(x, down, tiles, parts=parts_for(tiles, len(a))))
    # Kept for backward.
    return [by_job(of_slice, counts, ranks)[0].contiguous() for of_slice in by_slice(s)]


def expand_add(y: Tensor, s: Tensor, b: Any) -> Tensor:
    """Return y + scale · s Bᵀ, a new tensor in y's dtype."""
    (z,) = expand_add_group((y,), (s,), (b,))
    return z


def expand_add_group(
    y: Sequence[Tensor], s: Sequence[Tensor], b: Sequence[Any]
) -> Sequence[Tensor]:
    """Return y + scale · s Bᵀ of each site, new tensors in y's dtype."""
    b = [as_weight(weight) for weight in b]
    sites, count, device = list(zip(y, s, b, strict=True)), len(y[0]), y[0].device
    if not all(
        is_tokens(y_of_site)
        and is_summand(s_of_site)
        and is_matrix(b_of_site.weight.t(), y_of_site.shape[1])
        for y_of_site, s_of_site, b_of_site in sites
    ):
        return [torch_ops.expand_add(*site) for site in sites]
    tiles = segments_of([count], [s[0].shape[1]], device, len(sites))
    if tiles.block == DECODE_BLOCK and len(sites) > 1:  # its kernel has one output
        return [expand_add(*site) for site in sites]
    up, scales = (
        up_rows_of([[b_of_site.weight] for b_of_site in b], count),
        scales_of([[b_of_site] for b_of_site in b], device),
    )
    if len(sites) > 1:
        return segmented_lora.expand_add_each(
            y, as_slices([[s_of_site] for s_of_site in s]), up, tiles, scales
        )
    return [segmented_lora.expand_add(y[0], as_sums(s), up, tiles, scales, in_place=False)]


def expand_backward(dz: Tensor, b: Any) -> Tensor:
    """Return ds = scale · dz B, [T, r] in B's dtype."""
    b = as_weight(b)
    if not (is_tokens(dz) and is_matrix(b.weight.t(), dz.shape[1])):
        return torch_ops.expand_backward(dz, b)
    counts, ranks = [len(dz)], [b.weight.shape[1]]
    up, tiles = up_rows_of([[b.weight]], len(dz)), segments_of(counts, ranks, dz.device)
    ds = segmented_lora.shrink(dz, up, tiles, scales_of([[b]], dz.device), parts_for(tiles))
    (of_job,) = by_job(whole_sum(ds), counts, ranks)
    return of_job


def outer(ds: Tensor, x: Tensor) -> Tensor:
    """Return dA = dsᵀ x, [r, in] in the dtype of ds."""
    (da,) = outer_group((ds,), x)
    return da


def outer_group(ds: Sequence[Tensor], x: Tensor) -> Sequence[Tensor]:
    """Return dA = dsᵀ x by each ds of the same rank, [r, in] in the dtype of ds."""
    if not (is_tokens(x) and all(map(is_summand, ds))):
        return [torch_ops.outer(of_site, x) for of_site in ds]
    ranks = [ds[0].shape[1]]
    tiles = segments_of([len(x)], ranks, x.device, len(ds))
    gradients = _outers(as_slices([[of_site] for of_site in ds]), [x], ranks, tiles, None)
    return [of_site for (of_site,) in gradients]


def scaled_outer(dz: Tensor, s: Tensor, b: Any) -> Tensor:
    """Return dB = scale · dzᵀ s, [out, r] in the dtype of s."""
    if not (is_tokens(dz) and is_summand(s)):
        return torch_ops.scaled_outer(dz, s, b)
    ranks, scales = [s.shape[1]], scales_of([[as_weight(b)]], dz.device)
    tiles = segments_of([len(dz)], ranks, dz.device)
    ((gradient,),) = _up_outers(as_sums([s]), [dz], ranks, tiles, scales)
    return gradient


def lora_linear_backward(
    batch: ProgramBatch, name: str, dz: Tensor, weight: Tensor, a: Any, b: Any, s: Tensor
) -> ProductRequest[Any]:
    """Request the gradients of a linear operator with LoRA: ds [T, r], dB [out, r], dx [T, in].

    `name` is that of the weight [out, in] in its layer; dz is [T, out], A [r, in], B [out, r], and
    s = x Aᵀ [T, r].
    """
    return lora_group_backward(batch, (name,), (dz,), (weight,), (a,), (b,), (s,))


def lora_group_backward(
    batch: ProgramBatch,
    names: Sequence[str],
    dz: Sequence[Tensor],
    weights: Sequence[Tensor],
    a: Sequence[Any],
    b: Sequence[Any],
    s: Sequence[Tensor],
) -> ProductRequest[Any]:
    """Request those of linear operators with the same input: every ds, every dB, and the sum of dx.

    The last ones may have no LoRA; there are fewer A, B and s then.
    """
    a, b = [as_weight(weight) for weight in a], [as_weight(weight) for weight in b]
    known = all(
        is_tokens(dz_)
        and is_summand(s_)
        and not weight.shape[1] % ROW_ALIGNMENT
        and is_matrix(b_.weight.t(), dz_.shape[1])
        and is_matrix(a_.weight, weight.shape[1])
        for dz_, weight, a_, b_, s_ in zip(dz, weights, a, b, s, strict=False)
    )
    others = list(zip(names[1:], dz[1:], weights[1:], strict=True))
    term = LoraGradients(a, b, s) if known else None
    dx = yield from product_backward(batch, names[0], dz[0], weights[0], term, others)
    if term is not None:
        return *term.gradients(), dx
    ds = [torch_ops.expand_backward(*site) for site in zip(dz, b, strict=False)]
    db = [torch_ops.scaled_outer(*site) for site in zip(dz, s, b, strict=False)]
    for site in zip(ds, a, strict=True):
        dx.add_(torch_ops.shrink_backward(*site))
    return *ds, *db, dx


@dataclass(eq=False)
class LoraGradients(InputGradientTerm):
    """The gradients of a job's LoRA at linear operators."""

    _a: Sequence[Any]
    _b: Sequence[Any]
    _s: Sequence[Tensor]
    _parts: Sequence[LoraGradients] = field(default=(), init=False)
    _ds: list[Tensor] = field(default_factory=list, init=False)
    _db: list[Tensor] = field(default_factory=list, init=False)

    def parts(self) -> Sequence[LoraGradients]:
        sites = zip(self._a, self._b, self._s, strict=True)
        self._parts = [LoraGradients((a,), (b,), (s,)) for a, b, s in sites]
        return self._parts

    def gradients(self) -> Sequence[Tensor]:
        """Return ds [T, r] of each linear operator, then dB [out, r] of each, once computed."""
        every = self._parts or (self,)
        return [gradient for term in every for gradient in term._ds] + [
            gradient for term in every for gradient in term._db
        ]

    def add(
        self,
        dys: Sequence[Tensor],
        dx: Tensor,
        jobs: Sequence[LoraGradients],
        spans: Sequence[tuple[int, int]],
    ) -> None:
        sites, counts = range(len(self._s)), [count for _, count in spans]
        dys = dys[: len(sites)]  # those behind have no LoRA
        up = up_rows_of([[job._b[j].weight for job in jobs] for j in sites], sum(counts))
        ranks = [job._s[0].shape[1] for job in jobs]
        tiles, device = segments_at(spans, ranks, dx.device, len(sites)), dx.device
        scales = scales_of([[job._b[j] for job in jobs] for j in sites], device)
        more, parts = dys[1:], parts_for(tiles, len(sites))
        ds = whole_sum(segmented_lora.shrink(dys[0], up, tiles, scales, parts, more))
        s = as_slices([[job._s[j] for job in jobs] for j in sites])
        gradients = _up_outers(s, dys, ranks, tiles, scales)
        downs = [[job._a[j].weight for job in jobs] for j in sites]
        if tiles.block != DECODE_BLOCK or len(sites) == 1:
            segmented_lora.expand_add(dx, ds, slices_of(downs), tiles)
        else:  # its kernel takes one memory
            own_tiles = segments_at(spans, ranks, device)
            for of_slice, down in zip(by_slice(ds), downs, strict=True):
                segmented_lora.expand_add(dx, of_slice.contiguous(), rows_of(down), own_tiles)
        for of_slice, of_site in zip(by_slice(ds), gradients, strict=True):
            each = zip(jobs, by_job(of_slice, counts, ranks), of_site, strict=True)
            for job, own_ds, own_db in each:
                job._ds.append(own_ds)
                job._db.append(own_db)


def asked_outer(batch: ProgramBatch, name: str, ds: Tensor, x: Tensor) -> ProductRequest[Any]:
    """Request dA = dsᵀ x, [r, in], of ds [T, r] and x [T, in]; `name` is the gradient's."""
    (da,) = yield from asked_outer_group(batch, name, (ds,), x)
    return da


def asked_outer_group(
    batch: ProgramBatch, name: str, ds: Sequence[Tensor], x: Tensor
) -> ProductRequest[Any]:
    """Request dA of each ds of the same rank; `name` is the first gradient's."""
    if not (is_tokens(x) and all(map(is_summand, ds))):
        return fulfilled([torch_ops.outer(of_site, x) for of_site in ds])
    return OuterProduct((batch.layer, name, len(ds)), x, ds).requested()


@dataclass(slots=True, eq=False)
class OuterProduct(Product):
    """dsᵀ x of a job, by each of several ds."""

    _ds: Sequence[Tensor]
    is_own: ClassVar[bool] = True

    def run(self) -> None:
        self._outputs = outer_group(self._ds, self._take_x())

    def run_with(self, others: Sequence[OuterProduct]) -> None:
        """Run it and others in a single launch if they are small; else in turn."""
        every = (self, *others)
        if not are_few([len(product._ds[0]) for product in every]):
            for product in every:
                product.run()
            return
        x, counts = joined_tokens(every)
        widths, sites = [product._ds[0].shape[1] for product in every], range(len(self._ds))
        tiles = segments_of(counts, widths, x.device, len(sites))
        ds = as_slices([[product._ds[j] for product in every] for j in sites])
        gradients = list(zip(*_outers(ds, [x], widths, tiles, None), strict=True))
        for product, of_product in zip(every, gradients, strict=True):
            product._outputs = [gradient.clone() for gradient in of_product]


def bottleneck_backward(
    batch: ProgramBatch, name: str, dz: Tensor, up: Any, s: Tensor, bias: Any, function: str
) -> ProductRequest[Any]:
    """Request the gradients of a bottleneck adapter: ds [T, size], dU [out, size], dd [size].

    `name` is that of `up`, the adapter's U [out, size], in its layer; dz is [T, out], s = x Aᵀ [T,
    size], the bias d [size], and `function` names σ.
    """
    up, bias = as_weight(up), as_weight(bias)
    if is_tokens(dz) and is_summand(s) and is_matrix(up.weight.t(), dz.shape[1]):
        return BottleneckGradients((batch.layer, name, function), dz, up, s, bias).requested()
    dh = torch_ops.expand_backward(dz, up)
    with torch.enable_grad():
        before = s.detach().requires_grad_()
        h = torch_ops.activate(before, bias, function)
        (ds,) = torch.autograd.grad(h, before, dh)
    du = torch_ops.scaled_outer(dz, h.detach(), up)
    return fulfilled((ds, du, torch_ops.sum_tokens(ds, bias)))


@dataclass(slots=True, eq=False)
class BottleneckGradients(Product):
    """The gradients of a job's bottleneck adapter; products with equal keys have the same σ."""

    _up: Any
    _s: Tensor
    _bias: Any
    is_own: ClassVar[bool] = True

    def run(self) -> None:
        self.run_with(())

    def run_with(self, others: Sequence[BottleneckGradients]) -> None:
        every = (self, *others)
        function = str(self.key[-1])
        dz, counts = joined_tokens(every)
        device, widths = dz.device, [product._s.shape[1] for product in every]
        up = up_rows_of([[product._up.weight for product in every]], sum(counts))
        tiles = segments_of(counts, widths, device)
        of_up = scales_of([[product._up for product in every]], device)
        of_bias = scales_of([[product._bias for product in every]], device)
        biases = vectors_of([product._bias.weight for product in every])
        s = as_sums([product._s for product in every])
        dh = segmented_lora.shrink(dz, up, tiles, of_up)
        h = segmented_activate(s, biases, up.ranks, tiles, function, of_bias)
        ds = segmented_activate(s, biases, up.ranks, tiles, function, of_bias, dh)
        sums = replace(biases, memory=torch.empty_like(biases.memory, dtype=torch.float32))
        segment_sum(ds, sums, up.ranks, tiles, of_bias)
        (of_rows_of_jobs,) = _up_outers(h, [dz], widths, tiles, of_up)
        gradients = zip(
            by_job(ds, counts, widths), of_rows_of_jobs, sums.memory.split(widths), strict=True
        )
        for product, (of_product, of_rows, of_vector) in zip(every, gradients, strict=True):
            product._outputs = of_product, of_rows, of_vector


def _up_outers(
    s: Tensor, dz: Sequence[Tensor], ranks: Sequence[int], tiles: TokenTiles, scales: Tensor | None
) -> Sequence[Sequence[Tensor]]:
    """Do `_outers` to the layout of B, [out, r] each; those of several jobs are transposed."""
    if len(ranks) > 1:
        turned = _outers(s, dz, ranks, tiles, scales)
        return [[tensor.t().contiguous() for tensor in of_site] for of_site in turned]
    outputs = [_fp32((tensor.shape[1], *ranks), tensor) for tensor in dz]
    segmented_lora.segment_outer(s, dz[0], turned_rows(outputs), tiles, scales, dz[1:])
    return [[tensor] for tensor in outputs]


def _outers(
    s: Tensor, x: Sequence[Tensor], ranks: Sequence[int], tiles: TokenTiles, scales: Tensor | None
) -> Sequence[Sequence[Tensor]]:
    """Return scale · Σ s ⊗ x of each site and segment, [r, columns] each.

    s is [1, sites, sums]; each site has an x, or all share one.
    """
    inputs = [*x] if len(x) == s.shape[1] else [*x] * s.shape[1]
    outputs = [_fp32((sum(ranks), tensor.shape[1]), tensor) for tensor in inputs]
    gradients = slices_of([tensor.split([*ranks]) for tensor in outputs], outputs)
    segmented_lora.segment_outer(s, x[0], gradients, tiles, scales, x[1:])
    return [tensor.split([*ranks]) for tensor in outputs]


def _fp32(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def inner(dz: Tensor, y: Tensor, base: Tensor | None = None) -> Tensor:
    """Return the sum over tokens of dz ⊙ (y - base), [n], in fp32 at least."""
    if not (is_tokens(dz) and is_tokens(y)):
        return torch_ops.inner(dz, y, base)
    return _sums([len(dz)], dz, y, base, None)[0]


def sum_tokens(dz: Tensor, bias: Any = None) -> Tensor:
    """Return the sum over tokens, in fp32 at least; scaled as a bias is."""
    if not is_tokens(dz):
        return torch_ops.sum_tokens(dz, bias)
    scales = None if bias is None else scales_of([[as_weight(bias)]], dz.device)
    return _sums([len(dz)], dz, None, None, scales)[0]


def asked_inner(
    batch: ProgramBatch, name: str, dz: Tensor, y: Tensor, base: Tensor | None = None
) -> ProductRequest[Any]:
    """Request `inner` of dz, y [T, n] and base [n]; `name` is the gradient's in its layer."""
    if not (is_tokens(dz) and is_tokens(y)):
        return fulfilled(torch_ops.inner(dz, y, base))
    return VectorGradient((batch.layer, name), dz, y, base, None).requested()


def asked_sum_tokens(
    batch: ProgramBatch, name: str, dz: Tensor, bias: Any = None
) -> ProductRequest[Any]:
    """Request `sum_tokens` of dz [T, n]; `name` is the gradient's in its layer."""
    if not is_tokens(dz):
        return fulfilled(torch_ops.sum_tokens(dz, bias))
    return VectorGradient((batch.layer, name), dz, None, None, bias).requested()


@dataclass(slots=True, eq=False)
class VectorGradient(Product):
    """The gradient of a job's vector; those with equal keys all have y and a bias, or none does."""

    _y: Tensor | None
    _base: Tensor | None
    _bias: Any
    is_own: ClassVar[bool] = True

    def run(self) -> None:
        (self._outputs,) = self._made((self,))

    def run_with(self, others: Sequence[VectorGradient]) -> None:
        """Run it and others in a single launch if they are small; else in turn."""
        every = (self, *others)
        tensors = 1 if self._y is None else 2
        of_one_base = all(product._base is self._base for product in others)
        counts = [tensors * len(product._x) for product in every if product._x is not None]
        if of_one_base and are_few(counts):
            for product, gradient in zip(every, self._made(every), strict=True):
                product._outputs = gradient.clone()
        else:
            for product in every:
                product.run()

    def _made(self, every: Sequence[VectorGradient]) -> Sequence[Tensor]:
        dz, counts = joined_tokens(every)
        y = self._y
        if y is not None and len(every) > 1:
            y = torch.cat([product._y for product in every if product._y is not None])
        for product in every:
            product._y = None
        scales = None
        if self._bias is not None:
            scales = scales_of([[as_weight(product._bias) for product in every]], dz.device)
        return _sums(counts, dz, y, self._base, scales)


def _sums(
    counts: Sequence[int], dz: Tensor, y: Tensor | None, base: Tensor | None, scales: Tensor | None
) -> Sequence[Tensor]:
    """Return the sum over the tokens of each job, [n] each, in fp32."""
    sums = torch.zeros((len(counts), dz.shape[1]), dtype=torch.float32, device=dz.device)
    rows = rows_of(sums.split(1), sums)
    segment_inner(dz, y, rows, segments_of(counts, [1] * len(counts), dz.device), base, scales)
    return [*sums]
