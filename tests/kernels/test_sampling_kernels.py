"""Greedy and drawn tokens against torch and fp64, and their machine code."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcg.kernels.batch import TokenLimits
from pcg.kernels.triton import sampling as template
from pcg.kernels.triton.sampling import draw, greedy
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import Code, Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized

bf16.install()

INF = float("inf")


def unlimited(temperatures: torch.Tensor) -> TokenLimits:
    none = torch.zeros_like(temperatures)
    return TokenLimits(temperatures, none, none, none, False)


@given(
    rows=st.integers(0, 5),
    vocabulary=st.integers(1, 200),
    levels=st.sampled_from([1, 3, 1000]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    block=st.sampled_from([16, 64, 16384]),
)
def test_the_most_likely_token_is_torchs(
    rows: int, vocabulary: int, levels: int, dtype: torch.dtype, block: int
) -> None:
    torch.manual_seed(vocabulary)
    logits = (torch.randint(-levels, levels, (rows, vocabulary + 3)) / 7).to(dtype)[:, :-3]
    with sanitized(), mock.patch.object(template, "GREEDY_BLOCK", block):
        found = greedy(logits)
    assert torch.equal(found, logits.argmax(-1))


def test_the_most_likely_of_what_is_no_number() -> None:
    rows = [[-INF, -INF, -INF], [0.0, float("nan"), 5.0], [1.0, INF, INF], [-INF, -1e38, -INF]]
    logits = torch.tensor(rows)
    with sanitized():
        assert torch.equal(greedy(logits), logits.argmax(-1))


@settings(max_examples=25)
@given(
    vocabulary=st.integers(1, 200),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 5.0]),
    removed=st.sampled_from([0.0, 0.5, 0.98]),
    u=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4),
    block=st.sampled_from([16, 64, 8192]),
)
def test_a_token_is_drawn_where_the_distribution_passes_u(
    vocabulary: int, temperature: float, removed: float, u: list[float], block: int
) -> None:
    torch.manual_seed(vocabulary)
    logits = 5 * torch.randn(len(u), vocabulary)
    ruled_out = torch.rand(logits.shape) < removed
    ruled_out[:, vocabulary // 2] = False
    logits = logits.masked_fill(ruled_out, -INF)
    temperatures = torch.full((len(u),), temperature)
    uniform = torch.tensor(u, dtype=torch.float64)
    with sanitized(), mock.patch.object(template, "DRAW_BLOCK", block):
        tokens, are_drawn = draw(logits, unlimited(temperatures), uniform)
    assert are_drawn.all()
    p = torch.softmax(logits.double() / temperature, -1)
    after = p.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    own = p.gather(1, tokens[:, None])[:, 0]
    assert (own > 0).all()
    # p is computed in fp32.
    assert (after - own <= uniform + 1e-6).all()
    assert (after >= uniform - 1e-6).all()


def test_rows_that_nothing_can_be_drawn_from() -> None:
    logits = torch.zeros(4, 40)
    logits[0, 7] = float("nan")
    logits[1] = -INF
    logits[2, 3] = INF
    ones, halves = torch.ones(4), torch.full((4,), 0.5, dtype=torch.float64)
    with sanitized(), mock.patch.object(template, "DRAW_BLOCK", 16), np.errstate(invalid="ignore"):
        tokens, are_drawn = draw(logits, unlimited(ones), halves)
    assert are_drawn.tolist() == [False, False, False, True]
    assert tokens.tolist() == [0, 0, 0, 20]


# ------------------------------------------------------------------------------- machine code


@pytest.fixture(scope="module")
def codes() -> dict[str, list[Code]]:
    sizes = {"V": "i32", "stride": "i32", "tokens": "*i64"}
    drawn = {"uniform": "*fp64", "are_drawn": "*i1"} | sizes
    limits = {"temperatures": "*fp32", "min_ps": "*fp32", "leasts": "*fp32", "lasts": "*i32"}
    kept = limits | {"V": "i32", "stride": "i32", "out": "*fp32"}
    block = {"BLOCK": template.GREEDY_BLOCK}
    limited = {"BLOCK": template.DRAW_BLOCK, "LIMITED": True}
    blocks = {"BLOCKS": 16, **limited}  # of 128k words
    kernels = {
        f"{name} {dtype}": Kernel(
            template.__name__, name, {"logits": f"*{dtype}", **signature}, constants, warps=32
        )
        for name, dtype, signature, constants in (
            ("greedy_rows", "bf16", sizes, block),
            ("greedy_rows", "fp32", sizes, block),
            ("draw_rows", "fp32", drawn | limits, blocks),
            ("keep_rows", "fp32", kept, limited),
        )
    }
    made = compiled(list(kernels.values()))
    return {name: made[2 * i : 2 * i + 2] for i, name in enumerate(kernels)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loads"),
    [
        ("greedy_rows bf16", 2),
        ("greedy_rows fp32", 4),
        ("draw_rows fp32", 6),
        ("keep_rows fp32", 4),
    ],
)
def test_machine_code(codes: dict[str, list[Code]], name: str, loads: int) -> None:
    for code in codes[name]:
        code.check_in_registers(64)  # of 65,536 that 1,024 threads share
        assert code.count("LDG", "128") >= loads  # more where ptxas unrolls
