"""Dropout by counted random numbers against NumPy's, and its machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pcg.kernels.triton import elementwise as template
from pcg.kernels.triton.elementwise import dropout
from pcg.runtime.model.batch import Batch, whole_sequences
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized

bf16.install()
SEED, KEY, P = 0x1234_5678_9ABC_DEF0, 3, 0.25


def batch_of(lengths: tuple[int, ...], layer: int = 2) -> Batch:
    batch = whole_sequences([[1] * length for length in lengths], torch.device("cpu"))
    batch.dropout_seed, batch.layer = SEED, layer
    return batch


def philox(column: int, position: int, sequence: int, place: int, seed: int) -> int:
    """Philox-4x32-10's first word by its paper, in Python's integers."""
    c, k = [column, position, sequence, place], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        high, low = divmod(0xD2511F53 * c[0], 1 << 32)
        other_high, other_low = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [other_high ^ c[1] ^ k[0], other_low, high ^ c[3] ^ k[1], low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def test_numbers_are_philox_s() -> None:
    """By the known answer of Random123's tests, and at each place of two sequences."""
    assert philox(0, 0, 0, 0, 0) == 0x6627E8D5
    lengths, features = (3, 2), 5
    with sanitized():
        found = dropout(batch_of(lengths), torch.ones(5, features), P, KEY)
    places = [(at, number) for number, length in enumerate(lengths) for at in range(length)]
    drawn = [
        [philox(c, at, number, 2 * 65536 + KEY, SEED) for c in range(features)]
        for at, number in places
    ]
    kept = (np.array(drawn) >> 8) / 2**24 >= P
    expected = torch.from_numpy(kept).float() / (1 - P)
    torch.testing.assert_close(found, expected)


def window(batch: Batch, start: int, stop: int) -> Any:
    """Some of a batch's tokens, as a window has them."""
    tokens = batch.dropped_tokens()
    assert tokens is not None
    made = batch_of((stop - start,))
    made.known["dropped"] = tokens._replace(
        positions=tokens.positions[start:stop], sequences=tokens.sequences[start:stop]
    )
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_dropped_is_the_same_however_it_is_cut(dtype: torch.dtype) -> None:
    batch = batch_of((7, 6))
    x = torch.randn(13, 70, dtype=dtype)
    with sanitized():
        whole = dropout(batch, x, P, KEY)
        parts = [dropout(window(batch, *at), x[slice(*at)], P, KEY) for at in ((0, 5), (5, 13))]
        turned = dropout(batch, x.T.contiguous().T, P, KEY)
        batch.chosen = torch.tensor([2, 9])
        chosen = dropout(batch, x[batch.chosen], P, KEY)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(turned, whole)
    assert torch.equal(chosen, whole[[2, 9]])
    assert whole.dtype == dtype
    kept = whole != 0
    assert float((~kept).float().mean()) == pytest.approx(P, abs=0.06)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(whole[kept], (x / (1 - P))[kept], rtol=tolerance, atol=0)


def test_masks_differ_by_layer_and_operator_and_pass() -> None:
    ones = torch.ones(8, 64)
    found: list[Tensor] = []
    for layer, key, seed in ((0, 0, 5), (1, 0, 5), (0, 1, 5), (0, 0, 6), (0, 0, 5 + 2**40)):
        batch = batch_of((8,), layer)
        batch.dropout_seed = seed
        found.append(dropout(batch, ones, 0.5, key))
    for i, mask in enumerate(found):
        assert not any(torch.equal(mask, later) for later in found[i + 1 :])
        assert 0.4 < float((mask == 0).float().mean()) < 0.6


def test_nothing_is_dropped_by_a_zero_key_and_all_at_one() -> None:
    x, batch = torch.randn(4, 16), batch_of((4,))
    assert not dropout(batch, x, 1.0, KEY).any()
    tokens = batch.dropped_tokens()
    assert tokens is not None
    tokens.key.zero_()
    assert torch.equal(dropout(batch, x, P, KEY), x)
    batch.dropout_seed = None
    assert dropout(batch, x, P, KEY) is x


@pytest.mark.slow
def test_machine_code() -> None:
    signature = {
        "x": "*fp32", "y": "*fp32", "positions": "*i64", "sequences": "*i64", "key": "*i64",
        "tokens": "i32", "place": "i32", "x_stride": "i32",
    }  # fmt: skip
    constants = {"p": 0.05, "FEATURES": 4096, "ROWS": template.ROWS, "COLUMNS": template.COLUMNS}
    kernel = Kernel(template.__name__, "drop", signature, constants, odd=("tokens", "place"))
    for code in compiled([kernel]):
        code.check_in_registers(128)
        assert code.count("LDG", "128") == code.count("STG", "128") == 4
