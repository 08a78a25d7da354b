"""LoRA of many adapters in one launch, against float64 loops over tokens.

Long because each kernel of LoRA has its own loop over tokens to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.batch import NO_SLOT, AdapterSlot
from pcg.kernels.triton.adapters.rank_rows import RankRows, rank_rows
from pcg.kernels.triton.adapters.segmented_lora import expand_add, segment_outer, shrink
from pcg.kernels.triton.adapters.token_tiles import TileCapacity, TokenTiles, token_tiles
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import IS_NEW_TRITON, Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized
from tests.support.parameters import mostly_slow
from tests.support.segmented_batches import (
    DTYPES,
    ROUNDING,
    Case,
    cases,
    check_close,
    columns,
    drawn,
    firsts_of,
    matrix,
    padded,
    scales_of,
    scattered,
)

bf16.install()

SUMS = 1e-5
"""Of fp32 sums of some hundred products."""

WIDE = 2.0**-16
"""Of products where a factor in fp32 keeps 16 bits."""

dtypes = st.sampled_from(DTYPES)


# ------------------------------------------------------------------------------------ references


def reference_shrink(x: Tensor, a: RankRows, case: Case, scales: Tensor) -> tuple[Tensor, Tensor]:
    """s and the sum of magnitudes of what it adds up, [slices, tokens, greatest rank]."""
    s = torch.zeros(a.slices, x.shape[0], most_rank(case), dtype=torch.float64)
    magnitude = s.clone()
    for j in range(a.slices):
        for token, slot in enumerate(case.slots):
            if slot >= 0:
                rows, own = matrix(a, j, case.adapters[slot]), columns(x, a, j)[token]
                s[j, token, : len(rows)] = scales[j, slot] * (rows @ own)
                magnitude[j, token, : len(rows)] = scales[j, slot].abs() * (rows.abs() @ own.abs())
    return s, magnitude


def reference_expand(
    y: Tensor, s: Tensor, b: RankRows, case: Case, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """y and the sum of magnitudes; s by token."""
    after, magnitude = y.double(), y.double().abs()
    for j in range(b.slices):
        own = slice(b.starts[j], b.starts[j] + b.sizes[j])
        for token, slot in enumerate(case.slots):
            if slot >= 0:
                rows = matrix(b, j, case.adapters[slot])
                of_token = scales[j, slot] * s[j, token, : len(rows)].double()
                after[token, own] += of_token @ rows
                magnitude[token, own] += of_token.abs() @ rows.abs()
    return after, magnitude


def most_rank(case: Case) -> int:
    return max(adapter.width for adapter in case.adapters)


def segments(tiles: TokenTiles) -> Iterator[tuple[int, int, int, slice]]:
    """Slot, first place, places and sums of each segment, without what blocks of ranks repeat."""
    for slot, first, count, width, _, start, _, _ in tiles.segments.tolist()[
        : tiles.capacity.segments
    ]:
        yield slot, first, count, slice(start, start + count * width)


def by_token(s: Tensor, case: Case, tiles: TokenTiles) -> Tensor:
    """s of shrink summed over parts, [slices, tokens, greatest rank], 0 beyond its definition."""
    found = torch.zeros(s.shape[1], len(case.slots), most_rank(case))
    for slot, first, count, sums in segments(tiles):
        tokens = tiles.order[first : first + count].long()
        for j in range(s.shape[1]):
            defined = padded(case.ranks[j][slot])
            own = s[:, j, sums].sum(0).view(count, case.adapters[slot].width if count else 1)
            found[j, tokens, :defined] = own[:, :defined]
    return found


def drawn_sums(parts: int, case: Case) -> Tensor:
    """Partial sums for the kernels that read them, 0 beyond ranks."""
    tiles = case.tiles
    shape = (parts, len(case.ranks), tiles.capacity.sums)
    s = torch.randn(shape, generator=case.generator)
    for j, ranks in enumerate(case.ranks):
        for slot, _, count, sums in segments(tiles):
            if count:
                s[:, j, sums].view(parts, count, -1)[..., ranks[slot] :] = 0
    return s


# ----------------------------------------------------------------------------------------- tests


@settings(max_examples=15)
@given(cases(), dtypes, dtypes, st.sampled_from((8, 136, 264)), st.sampled_from((None, 1)))
def test_shrink(
    case: Case, x_dtype: torch.dtype, dtype: torch.dtype, in_: int, parts: int | None
) -> None:
    slices = len(case.ranks)
    a = scattered(case.ranks, [0] * slices, [in_] * slices, case.adapters, dtype, case.generator)
    x, tiles, scales = drawn(case, x_dtype, in_), case.tiles, scales_of(case)
    x[[token for token, slot in enumerate(case.slots) if slot < 0]] = torch.nan  # nobody's
    with sanitized():
        s = shrink(x, a, tiles, scales, parts)
    rounded = x if dtype == torch.float32 else x.to(dtype)
    expected, magnitude = reference_shrink(rounded, a, case, scales)
    check_close(by_token(s, case, tiles), expected, magnitude, WIDE + SUMS)


@settings(max_examples=15)
@given(cases(), dtypes, dtypes, st.booleans())
def test_expand_add(case: Case, y_dtype: torch.dtype, dtype: torch.dtype, in_place: bool) -> None:
    b = scattered(case.ranks, case.starts, case.sizes, case.adapters, dtype, case.generator)
    y, tiles, scales = drawn(case, y_dtype, sum(case.sizes)), case.tiles, scales_of(case)
    before = y.clone()
    parts = drawn_sums(2, case)
    with sanitized():
        found = expand_add(y, parts, b, tiles, scales, in_place)
    s = by_token(parts, case, tiles)
    expected, magnitude = reference_expand(before, s, b, case, scales)
    if not in_place:  # what nobody has is nobody's
        assert torch.equal(y, before)
        assert found.is_contiguous()  # and keeps nothing of what y is a part of
        has = torch.zeros(y.shape, dtype=torch.bool)
        for token, slot in enumerate(case.slots):
            for j, ranks in enumerate(case.ranks):
                own = slice(b.starts[j], b.starts[j] + b.sizes[j])
                has[token, own] = slot >= 0 and ranks[slot] > 0
        found = torch.where(has, found, before)
    check_close(found, expected, magnitude, WIDE + SUMS + ROUNDING[y_dtype])
    none = torch.tensor([slot < 0 for slot in case.slots], dtype=torch.bool)
    assert torch.equal(found[none], before[none])


@settings(max_examples=15)
@given(cases(), dtypes, dtypes)
def test_the_inputs_gradient_of_many_jobs(
    case: Case, x_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    generator, ranks, slices = case.generator, case.ranks, len(case.ranks)
    a = scattered(ranks, [0] * slices, [24] * slices, case.adapters, dtype, generator)
    b = scattered(ranks, case.starts, case.sizes, case.adapters, dtype, generator)
    dy, dx, scales = (
        drawn(case, x_dtype, sum(case.sizes)),
        drawn(case, x_dtype, 24),
        scales_of(case),
    )
    before, tiles = dx.clone(), case.tiles
    with sanitized():
        ds = shrink(dy, b, tiles, scales)
        expand_add(dx, ds, a, tiles)
    rounded = dy if dtype == torch.float32 else dy.to(dtype)
    expected, magnitude = reference_shrink(rounded, b, case, scales)
    found = by_token(ds, case, tiles)
    check_close(found, expected, magnitude, WIDE + SUMS)
    expected, magnitude = reference_expand(before, found, a, case, torch.ones_like(scales))
    check_close(dx, expected, magnitude, WIDE + SUMS + ROUNDING[x_dtype])


@settings(max_examples=15)
@given(cases(), dtypes, st.booleans())
def test_the_weights_gradient_of_many_jobs(case: Case, dtype: torch.dtype, is_scaled: bool) -> None:
    generator = case.generator
    wide = torch.float32
    rows = scattered(case.ranks, case.starts, case.sizes, case.adapters, wide, generator)
    x, tiles = drawn(case, dtype, sum(case.sizes)), case.tiles
    s = drawn_sums(2, case)
    scales = scales_of(case) if is_scaled else None
    before = replace(rows, memory=rows.memory.clone())
    with sanitized():
        segment_outer(s, x, rows, tiles, scales)
    untouched = torch.ones_like(rows.memory, dtype=torch.bool)
    for j, slot, first, count, sums in (
        (j, *segment) for j in range(rows.slices) for segment in segments(tiles) if segment[2]
    ):
        tokens = tiles.order[first : first + count].long()
        own = s[:, j, sums].sum(0).view(count, -1)[:, : case.ranks[j][slot]].double()
        if scales is not None:
            own = own * scales[j, slot]
        expected, of_tokens = own.T @ columns(x, rows, j)[tokens], columns(x, rows, j)[tokens]
        magnitude = own.abs().T @ of_tokens.abs()
        check_close(matrix(rows, j, case.adapters[slot]), expected, magnitude, WIDE + SUMS)
        for start in firsts_of(rows, j, case.adapters[slot]):
            untouched[start : start + rows.sizes[j]] = False
    # Slots without tokens, and what lies between rows.
    bits, bits_before = rows.memory.view(torch.int32), before.memory.view(torch.int32)
    assert torch.equal(bits[untouched], bits_before[untouched])


@pytest.mark.parametrize("runs", [(), ((3, -1),)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_batch_without_adapters(runs: tuple[tuple[int, int], ...], is_padded: bool) -> None:
    case = Case(runs, ((8, 64),), (24,), 16, is_padded, 0)
    a = scattered(case.ranks, [0], [24], case.adapters, torch.float32, case.generator)
    x, tiles = drawn(case, torch.bfloat16, 24), case.tiles
    y, memory = x.clone(), a.memory.clone()
    with sanitized():
        s = shrink(x, a, tiles)
        expand_add(y, s, a, tiles)
        segment_outer(s, x, a, tiles)
    assert torch.equal(y, x)
    assert torch.equal(a.memory.view(torch.int32), memory.view(torch.int32))


@pytest.mark.parametrize("magnitude", [2.0**-60, 2.0**-20, 1.0, 2.0**20])
@pytest.mark.parametrize("block", [16, 64])
def test_products_of_fp16_keep_what_fp16_has_no_range_for(magnitude: float, block: int) -> None:
    case = Case(((3, 0), (2, 1)), ((16, 5),), (24,), block, False, 0)
    b = scattered(case.ranks, [0], [24], case.adapters, torch.float16, case.generator)
    s = torch.randn(1, 1, 5, 16, generator=case.generator) * magnitude
    s[..., 3:, 5:] = 0
    # Each token's has a range of its own.
    s *= torch.tensor([1.0, 2.0**-10, 0.0, 2.0**10, 1.0])[:, None]
    found = expand_add(torch.zeros(5, 24), s.view(1, 1, -1), b, case.tiles)
    expected, total = reference_expand(
        torch.zeros(5, 24), s[0], b, case, torch.ones(1, 2, dtype=torch.float64)
    )
    check_close(found, expected, total, 2.0**-20)


@settings(max_examples=2)
@given(cases(1, 17), dtypes)
def test_a_tokens_bits_do_not_depend_on_the_batch(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, runs=((2, 0), (1, 1), (18, 2), *case.runs), block=16)
    a = scattered(case.ranks, [0], [264], case.adapters, dtype, case.generator)
    b = scattered(case.ranks, [0], [72], case.adapters, dtype, case.generator)
    scales, x, y = scales_of(case), drawn(case, dtype, 264), drawn(case, dtype, 72)

    def run(tokens: slice, tiles: TokenTiles) -> Tensor:
        return expand_add(y[tokens].clone(), shrink(x[tokens], a, tiles), b, tiles, scales)

    whole = run(slice(None), case.tiles)
    for first, count, slot in ((0, 2, 0), (1, 1, 0), (2, 1, 1), (3, 18, 2), (20, 1, 2)):
        tokens = slice(first, first + count)
        alone = run(tokens, token_tiles([(0, count, case.adapters[slot])], 16))
        assert torch.equal(alone, whole[tokens])


# --------------------------------------------------------------------------------- tokens and rows


def test_tokens_are_sorted_by_slot() -> None:
    slots = [AdapterSlot(0, 100, 16), AdapterSlot(1, 0, 48), AdapterSlot(2, 200, 16)]
    runs = [(0, 2, slots[1]), (2, 3, NO_SLOT), (5, 17, slots[0]), (22, 1, slots[1])]
    tiles = token_tiles([*runs, (23, 0, slots[2])], 16)
    assert tiles.order.tolist() == [*range(5, 22), 0, 1, 22]
    # Slot, first place, places, width, first row, first sum, first rank.
    of_first, of_second = [0, 0, 17, 16, 100, 0, 0, 0], [1, 17, 3, 48, 0, 272, 0, 0]
    blocks = [[*of_second[:6], rank, 0] for rank in (16, 32)]
    assert tiles.segments.tolist() == [of_first, of_second, *blocks]
    halves = [0, 0, 16, 16, 100, 0, 0, 0], [0, 16, 1, 16, 100, 256, 0, 0]
    assert tiles.tiles.tolist() == [*halves, of_second, *blocks]
    assert tiles.by_token[:6].tolist() == [
        [1, 48, 0, 272], [1, 48, 0, 320], *[[-1, 0, 0, 0]] * 3, [0, 16, 100, 0]
    ]  # fmt: skip
    assert tiles.by_token[22].tolist() == [1, 48, 0, 368]
    assert tiles.memory.dtype == torch.int32
    of_prompts = token_tiles(runs, 64)  # whose tiles have 64 ranks at once
    assert of_prompts.tiles.tolist() == [of_first, of_second]
    nothing = token_tiles([(0, 4, NO_SLOT)], 64)
    assert not nothing.memory.numel()


@given(cases(1))
def test_a_room_takes_every_batch_of_as_many_tokens(case: Case) -> None:
    tiles, needed = replace(case, is_padded=True).tiles, replace(case, is_padded=False).tiles
    for kind in ("segments", "tiles"):
        ours, theirs = getattr(tiles, kind), getattr(needed, kind)
        before, count = getattr(tiles.capacity, kind), getattr(needed.capacity, kind)
        assert torch.equal(ours[:count], theirs[:count])
        assert not ours[count:before].any()
        wide = len(theirs) - count
        assert torch.equal(ours[before : before + wide], theirs[count:])
        assert not ours[before + wide :].any()
    own = len(needed.by_token)
    assert torch.equal(tiles.by_token[:own], needed.by_token)
    assert (tiles.by_token[own:, 0] == -1).all()  # a room's tokens have no adapter


def test_what_kernels_cannot_take_is_refused() -> None:
    with pytest.raises(CodegenError, match="begin before the span in front of them ends, at 4"):
        token_tiles([(0, 4, AdapterSlot(1, 0, 16)), (3, 2, AdapterSlot(0, 0, 16))], 16)
    with pytest.raises(
        CodegenError, match="33 places of tokens with adapters, and capacity for 32"
    ):
        token_tiles([(0, 33, AdapterSlot(1, 0, 16))], 16, TileCapacity.of(32, 2, 16))
    with pytest.raises(CodegenError, match=r"1 wide_segments of tokens.* and capacity for 0"):
        token_tiles([(0, 2, AdapterSlot(1, 0, 32))], 16, TileCapacity.of(32, 2, 16))
    with pytest.raises(CodegenError, match="a tile of 20 places"):
        token_tiles([], 20)
    rows, ranks = torch.zeros(32, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int32)
    with pytest.raises(CodegenError, match="12 columns from 0 are no multiples of 8"):
        rank_rows(torch.zeros(64), rows, 0, ranks, [0], [12])
    with pytest.raises(CodegenError, match=r"ranks \(1, 2\) take rows \[n\] and 1 starts"):
        rank_rows(torch.zeros(64), rows.view(2, 16), 0, ranks, [0], [16])
    a = rank_rows(torch.zeros(64), rows, 0, ranks, [0], [16])
    tiles = token_tiles([(0, 2, AdapterSlot(0, 0, 16))], 16)
    with pytest.raises(CodegenError, match=r"is no \[tokens, 16 columns or more"):
        shrink(torch.zeros(2, 8), a, tiles)
    with pytest.raises(CodegenError, match=r"x in torch\.float64"):
        shrink(torch.zeros(2, 16).double(), a, tiles)
    with pytest.raises(CodegenError, match="rows must be contiguous"):
        shrink(torch.zeros(2, 20)[:, :16], a, tiles)
    with pytest.raises(CodegenError, match="make it by shrink with the same tiles"):
        expand_add(torch.zeros(2, 16), torch.zeros(1, 1, 48), a, tiles)
    with pytest.raises(CodegenError, match="of adapters 8 wide: widths are multiples of 16"):
        shrink(torch.zeros(2, 16), a, token_tiles([(0, 2, AdapterSlot(0, 0, 8))], 16))
    of_16_bits = replace(a, memory=a.memory.bfloat16())
    with pytest.raises(CodegenError, match=r"gradients in torch\.bfloat16"):
        segment_outer(torch.zeros(1, 1, 32), torch.zeros(2, 16), of_16_bits, tiles)


# ----------------------------------------------------------------------------------- machine code

_MODULE = "pcg.kernels.triton.adapters.segmented_lora"
_TYPES = {
    "stride": "i32",
    "order": "*i32",
    "rows": "*i64",
    "ranks": "*i32",
    "columns": "*i32",
    "scales": "*fp32",
    "s": "*fp32",
    "first": "i32",
    "slices": "i32",
    "slots": "i32",
    "sums": "i32",
}
_ODD = ("order", "segments", "tiles", "by_token", "first", "slices", "slots", "sums")


def _shrink(block: int, ranks: int, dtype: str = "bf16", x: str = "bf16") -> Kernel:
    is_decode, is_wide = block == 16, dtype == "fp32"
    is_large = is_wide and ranks > 16
    types = {"x": f"*{x}", "tiles": "*i32", "memory": f"*{dtype}", "part_columns": "i32"}
    block_k = (256 // (2 if is_wide else 1)) if is_decode else 64 // (2 if is_large else 1)
    constants = {"HAS_SCALES": True, "BLOCK_M": block, "BLOCK_R": ranks, "BLOCK_K": block_k}
    constants |= {"INPUTS": 1, "MEMORIES": 1}
    warps, stages = 8 if is_large else 4, 2 if is_decode else 3
    return Kernel(_MODULE, "shrink_kernel", _TYPES | types, constants, _ODD, warps, stages)


def _expand(parts: int, summed: int = 1, dtype: str = "bf16") -> Kernel:
    is_wide = dtype == "fp32"
    types = {"y": "*bf16", "z": "*bf16", "z_stride": "i32", "tiles": "*i32", "memory": f"*{dtype}"}
    blocks = {"BLOCK_M": 64, "BLOCK_N": 128 // (2 if is_wide else 1)}
    constants = {"HAS_SCALES": True, "SUMMED": summed, "PARTS": parts, **blocks}
    constants |= {"OUTPUTS": 1, "MEMORIES": 1}
    warps = 8 if is_wide else 4
    return Kernel(_MODULE, "expand_kernel", _TYPES | types, constants, _ODD, warps, 2)


def _unscaled(kernel: Kernel) -> Kernel:
    """The kernel as serving launches it, whose B holds its scale."""
    types = {name: kind for name, kind in kernel.signature.items() if name != "scales"}
    constants = {**kernel.constants, "scales": None, "HAS_SCALES": False}
    return replace(kernel, signature=types, constants=constants)


def _expand_tokens(parts: int, stages: int = 1, summed: int = 1, dtype: str = "bf16") -> Kernel:
    types = {"y": "*bf16", "z": "*bf16", "z_stride": "i32", "memory": f"*{dtype}"}
    types["by_token"] = "*i32"
    block_n = 512 // (2 if dtype == "fp32" else 1)
    of_parts = {"PARTS": parts, "PART_BLOCK": 1 << (parts - 1).bit_length()}
    constants = {"HAS_SCALES": True, "SUMMED": summed, **of_parts, "BLOCK_N": block_n}
    constants["STAGES"] = stages
    name = "expand_tokens_kernel"
    return Kernel(_MODULE, name, _TYPES | types, constants, _ODD, 2, 3)


def _outer(dtype: str) -> Kernel:
    types = {"x": f"*{dtype}", "segments": "*i32", "memory": "*fp32"}
    blocks = {"BLOCK_T": 32 if dtype == "fp32" else 64, "BLOCK_N": 64, "BLOCK_R": 16}
    constants = {"HAS_SCALES": True, **blocks, "INPUTS": 1, "MEMORIES": 1}
    return Kernel(_MODULE, "outer_kernel", _TYPES | types, constants, _ODD, 4, 3)


_KERNELS = {
    "prefill shrink": _shrink(64, 64),
    "decode expand": _expand_tokens(16),
    "prefill expand": _expand(1),
    "outer": _outer("bf16"),
}

_RARE_KERNELS = {
    "decode shrink": _shrink(16, 16),
    "prefill expand of parts, unscaled": _unscaled(_expand(8)),
    "decode expand of wide adapters": _expand_tokens(14, 4),
    "decode expand of slices": _expand_tokens(16, 1, 3),
    "prefill expand of parts": _expand(8),
    "prefill expand, unscaled": _unscaled(_expand(1)),
    "prefill expand of parts and slices": _expand(8, 3),
    "fp16 outer": _outer("fp16"),
    "fp16 expand": _expand(1, 1, "fp16"),
    "fp16 decode expand": _expand_tokens(16, 1, 1, "fp16"),
    "fp32 shrink": _shrink(64, 64, "fp32", "fp32"),
    "fp32 shrink of bf16": _shrink(64, 64, "fp32"),
    "fp32 decode shrink": _shrink(16, 16, "fp32", "fp32"),
    "fp32 decode shrink of bf16": _shrink(16, 16, "fp32"),
    "fp32 shrink of bf16, rank 16": _shrink(64, 16, "fp32"),
    "fp32 expand": _expand(1, 1, "fp32"),
    "fp32 decode expand": _expand_tokens(16, 1, 1, "fp32"),
    "fp32 outer": _outer("fp32"),
}


def check_code(kernels: Mapping[str, Kernel]) -> None:
    """AssertionError: code that spills, loads too little at once, or takes no tensor cores."""
    found = compiled(list(kernels.values()))
    for name, ampere, hopper in zip(kernels, found[::2], found[1::2], strict=True):
        if ("fp32" not in name or "of bf16" in name) and "decode expand" not in name:
            assert ampere.count("HMMA"), name
            # 16 ranks by 16 tokens are too few for a wgmma.
            assert hopper.count("HMMA" if "decode shrink" in name else "HGMMA"), name
        for code in (ampere, hopper):
            code.check_in_registers(254 if "fp16" in name else 184 if IS_NEW_TRITON else 200)
            assert code.shared_bytes <= 72 * 1024, name  # of 99 KiB that every sm_8x has
            # What is narrower: tables, and sums of fp32 that a thread has two of.
            assert code.count("LDG", "128") + code.count("LDGSTS", "128") >= 4, name
            assert not code.count("LDG", "U16"), name
            assert not code.count("STG", "U16"), name


def test_machine_code() -> None:
    check_code(_KERNELS)


def _of_sites(kernel: Kernel, tensors: str, made: str = "") -> Kernel:
    """A kernel whose slices have memories of their own, and tokens where `tensors` names them."""
    types, constants = dict(kernel.signature), dict(kernel.constants)
    for number in (1, 2):
        types[f"memory_{number}"] = types["memory"]
        for name in filter(None, (tensors, made)):
            types[f"{name}_{number}"] = types[name]
        if tensors:
            types[f"stride_{number}"] = "i32"
    constants["MEMORIES"] = 3
    if tensors:
        constants["OUTPUTS" if made else "INPUTS"] = 3
    return replace(kernel, signature=types, constants=constants)


@pytest.mark.slow
def test_machine_code_of_sites_with_tensors_of_their_own() -> None:
    """In training: forward, and gradients, whose B lies by its columns."""
    shrink, expand = _shrink(64, 16, "fp32"), _expand(1, 1, "fp32")
    turned = [
        replace(one, constants={**one.constants, "TURNED": 16})
        for one in (_of_sites(shrink, "x"), _of_sites(expand, "y", "z"))
    ]
    summed = _of_sites(_expand(1, 3, "fp32"), "")
    kernels = (_of_sites(shrink, ""), summed, _of_sites(_outer("bf16"), "x"), *turned)
    wide = 4 if IS_NEW_TRITON else 2  # Triton 3.6 reads a turned B of sm_80 by narrower loads
    for code in compiled(kernels):
        code.check_in_registers(184)
        assert code.count("LDG", "128") + code.count("LDGSTS", "128") >= wide, code.kernel
        assert not code.count("LDG", "U16"), code.kernel
        assert not code.count("STG", "U16"), code.kernel


@pytest.mark.slow
@pytest.mark.parametrize("rank", mostly_slow([16, 6], 16))
def test_machine_code_of_a_matrix_that_lies_by_its_columns(rank: int) -> None:
    kernels = (_shrink(64, 16, "fp32"), _expand(1, 1, "fp32"), _outer("bf16"))
    turned = [replace(one, constants={**one.constants, "TURNED": rank}) for one in kernels]
    for code in compiled(turned, (90,)):
        code.check_in_registers(128)
        narrow = code.kernel == "outer_kernel" or not IS_NEW_TRITON
        assert code.count("STG", "128") or narrow


@pytest.mark.slow
def test_machine_code_of_rare_kernels() -> None:
    check_code(_RARE_KERNELS)
