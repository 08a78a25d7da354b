"""Attention's machine code, cut as the launchers cut it: registers, shared memory, instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.triton.attention.paged_attention import (
    Blocks,
    key_blocks,
    query_blocks,
    split_blocks,
    tile_blocks,
)
from pcg.kernels.triton.attention.work import COLUMNS, KEY_BLOCK, SPLIT_KEYS, TILE_ROWS
from tests.support.interpreter.gpu_code import Code, Kernel, compiled
from tests.support.parameters import mostly_slow

KERNELS = "pcg.kernels.triton.attention"
SHARED_KIB = {80: 101, 89: 99, 90: 130, 120: 99}
"""Of a program at most: sm_80 has 163, sm_89 and sm_120 have 99, sm_90 227."""
STRIDES = dict.fromkeys(
    (
        *("q_token", "q_head", "key_page", "key_head", "key_token"),
        *("value_page", "value_head", "value_token", "table_width"),
    ),
    "i32",
) | {"scale": "fp32"}
LISTS = {"parts": "*i32", "pages": "*i32"}


def kernels(
    architecture: int,
    size: int,
    value_size: int | None = None,
    *,
    group: int = 4,
    window: int = 0,
    softcap: float = 0.0,
    alibi: bool = False,
    sinks: bool = False,
    paged: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Kernel]:
    """Every kernel of a model: appending, decoding, its reduction, tiles, delta, dq, dk and dv."""
    value_size = value_size or size
    widths = {
        "D": size,
        "DV": value_size,
        "BLOCK_D": 1 << (size - 1).bit_length(),
        "BLOCK_DV": 1 << (value_size - 1).bit_length(),
    }
    heads = {"H": 8 * group, "G": group, **widths}
    largest = max(widths["BLOCK_D"], widths["BLOCK_DV"])
    element = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    options = {"COLUMNS": COLUMNS, "REACH": window, "SOFTCAP": softcap, "ALIBI": alibi}
    options["PAGE"] = PAGE_TOKENS

    def made(
        module: str,
        name: str,
        elements: str,
        floats: str,
        others: dict[str, str],
        constants: dict[str, object],
        blocks: Blocks,
        odd: Sequence[str] = (),
    ) -> Kernel:
        signature = dict.fromkeys(elements.split(), element)
        signature |= dict.fromkeys(floats.split(), "*fp32") | others
        constants = dict(constants)
        for optional, there in (("alibi", alibi), ("sinks", sinks)):
            if optional in floats.split() and not there:
                del signature[optional]
                constants[optional] = None
        return Kernel(
            f"{KERNELS}.{module}",
            name,
            signature,
            constants,
            odd,
            blocks.warps,
            blocks.stages,
            blocks.registers,
        )

    def cut(rows: str, keys: str, blocks: Blocks) -> dict[str, int]:
        return {rows: blocks.rows, keys: blocks.keys}

    backward = {"dout_token": "i32", "dout_head": "i32", **STRIDES}
    simple = Blocks(0, 0, 4, 3)
    tiled = tile_blocks(largest, dtype, paged, architecture)
    split = split_blocks(largest, dtype, group)
    queries = query_blocks(largest, dtype, paged, architecture)
    keyed = key_blocks(largest, dtype, architecture)
    found = [
        made(
            "forward_kernels",
            "attend_tiles",
            "q keys values out",
            "lse alibi sinks",
            {**STRIDES, **LISTS, "tiles": "*i32"},
            {**heads, **options, **cut("BLOCK_M", "BLOCK_N", tiled), "TILE": TILE_ROWS}
            | {"SINKS": sinks, "LSE": True, "PAGED": paged, "AHEAD": tiled.ahead},
            tiled,
        ),
        made(
            "backward_kernels",
            "delta_rows",
            "dout out",
            "delta",
            dict.fromkeys(("count", "dout_token", "dout_head", "out_token", "out_head"), "i32"),
            {"H": heads["H"], "DV": value_size, "BLOCK_DV": widths["BLOCK_DV"], "BLOCK": 32},
            simple,
            ["count"],
        ),
        made(
            "backward_kernels",
            "query_gradients",
            "q keys values dout dq",
            "lse delta alibi",
            {**backward, **LISTS, "tiles": "*i32"},
            {**heads, **options, **cut("BLOCK_M", "BLOCK_N", queries), "TILE": TILE_ROWS}
            | {"PAGED": paged},
            queries,
        ),
        made(
            "backward_kernels",
            "key_gradients",
            "q keys values dout dk dv",
            "lse delta keys_sum values_sum alibi",
            {**backward, **LISTS, "key_blocks": "*i32"},
            {**heads, **options, **cut("BLOCK_M", "BLOCK_N", keyed), "TILE": KEY_BLOCK}
            | {"PAGED": paged},
            keyed,
        ),
    ]
    if not paged:
        return found
    cache = {name: kind for name, kind in STRIDES.items() if name.startswith(("key_", "value_"))}
    found += [
        made(
            "forward_kernels",
            "attend_splits",
            "q keys values out",
            "totals highest sums lse alibi sinks",
            {**STRIDES, **LISTS, "splits": "*i32"},
            {**heads, **options, **cut("BLOCK_H", "BLOCK_N", split), "SPLIT": SPLIT_KEYS}
            | {"SINKS": sinks, "LSE": True},
            split,
        ),
        made(
            "forward_kernels",
            "reduce_splits",
            "out",
            "totals highest sums lse sinks",
            {"parts": "*i32", "decodes": "*i32"},
            {"H": heads["H"], "DV": value_size, "BLOCK_DV": widths["BLOCK_DV"], "BLOCK_S": 8}
            | {"COLUMNS": COLUMNS, "REACH": window, "SINKS": sinks, "LSE": True}
            | {"SPLIT": SPLIT_KEYS},
            Blocks(0, 0, 2, 3),
        ),
        made(
            "cache_rows",
            "append_rows",
            "k v keys values",
            "",
            {"slots": "*i64", **cache}
            | dict.fromkeys(("tokens", "k_token", "k_head", "v_token", "v_head"), "i32"),
            {**widths, "BLOCK_T": 16, "PAGE": PAGE_TOKENS},
            simple,
            ["tokens"],
        ),
    ]
    return found


def check_products(code: Code, size: int) -> None:
    """Tensor cores in every product; Hopper's own where a program has rows enough."""
    own = code.architecture == 90 and not (code.kernel == "key_gradients" and size > 128)
    assert code.count("HGMMA" if own else "HMMA"), f"{code.kernel}: no tensor cores"
    assert not (own and code.count("HMMA")), f"{code.kernel}: products of both kinds"


def check_fit(found: Sequence[Code]) -> None:
    for code in found:
        code.check_in_registers(255)
        assert code.shared_bytes <= SHARED_KIB[code.architecture] * 1024, code.kernel


def check(found: Sequence[Code], size: int) -> None:
    check_fit(found)
    for code in found:
        if code.kernel in ("attend_tiles", "query_gradients", "key_gradients"):
            check_products(code, size)
            assert code.count("LDGSTS", "128") >= 8, f"{code.kernel}: rows in small pieces"
            if code.kernel == "attend_tiles" and code.architecture == 90 and size > 64:
                for loop in code.product_loops:  # products are under way beside a softmax
                    loop.check_ahead(exponentials=32 if size <= 128 else 8)
        elif code.kernel == "attend_splits":
            assert code.count("HMMA")
            assert code.count("LDGSTS", "128") >= 8
        elif code.kernel == "append_rows":
            assert code.count("LDG", "128") == code.count("STG", "128") > 0
        else:
            assert code.count("LDG", "128")


@pytest.mark.parametrize("architecture", mostly_slow([80, 90], 90))
def test_machine_code(architecture: int) -> None:
    found = compiled(kernels(architecture, 128), [architecture])
    check(found, 128)
    by_name = {code.kernel: code for code in found}
    assert len(by_name) == 7
    # Two programs of a prompt on a processor. Both loops, over keys that all rows see and over the
    # last, wait once a block and once behind it; the first products have a wait of their own.
    prompt = by_name["attend_tiles"]
    assert prompt.programs(warps=4) == 2
    if architecture == 90:
        assert prompt.count("WARPGROUP", "DEPBAR") == prompt.count("WARPGROUP", "ARRIVE") == 5
        assert len(prompt.product_loops) == 2
        assert min(map(len, prompt.loops)) <= 480, "instructions of a block that all rows see"
    # Of 227 KiB and 65,536 registers: four programs on a processor, as decoding wants.
    decoding = by_name["attend_splits"]
    assert decoding.shared_bytes <= 40 * 1024
    assert decoding.registers <= (168 if architecture == 80 else 128)


OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "64": (64, {"group": 8}),
    "256": (256, {"group": 1}),
    "80": (80, {}),
    "192-128": (192, {"value_size": 128, "group": 1}),
    "192-128-sinks": (192, {"value_size": 128, "sinks": True}),
    "group-48": (128, {"group": 48}),
    "window-softcap-64": (64, {"window": 128, "softcap": 30.0}),
    "window-softcap-128": (128, {"window": 4096, "softcap": 30.0}),
    "window-softcap-256": (256, {"window": 4096, "softcap": 50.0}),
    "alibi": (128, {"alibi": True, "group": 1}),
    "sinks-window": (64, {"sinks": True, "window": 128}),
    "unpaged": (128, {"paged": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", OPTIONS)
def test_machine_code_of_options(name: str, architecture: int) -> None:
    size, options = OPTIONS[name]
    found = compiled(kernels(architecture, size, **options), [architecture])
    if 0 < options.get("window", 0) <= SPLIT_KEYS:  # one program takes all that a token sees
        (reduction,) = (code for code in found if code.kernel == "reduce_splits")
        assert not reduction.count("LDG")
        assert not reduction.count("STG")
        found = [code for code in found if code is not reduction]
    check(found, size)


@pytest.mark.slow
def test_a_program_alone_on_its_processor_takes_the_registers_that_it_needs() -> None:
    """ptxas spills a little for a second program, which the shared memory does not hold."""
    made = kernels(89, 192, value_size=128, sinks=True)
    alone = [one for one in made if one.name in ("attend_tiles", "query_gradients")]
    for code in compiled(alone, [89]):
        assert 2 * code.shared_bytes > SHARED_KIB[89] * 1024
        code.check_in_registers()
