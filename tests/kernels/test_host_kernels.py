"""The native kernels of single new tokens, norms and rotary embedding, against PyTorch in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.torch import host_kernels
from pcg.kernels.torch.attention_math import Scoring
from pcg.runtime.model.batch import Singles, decode_rows

pytestmark = pytest.mark.skipif(host_kernels._library() is None, reason="there is no C++ compiler")
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


class Table:
    def __init__(self, pages: list[int]) -> None:
        self.pages = pages


class Step:
    """A step of sequences whose pages lie anywhere, or in a run."""

    def __init__(self, lengths: list[int], scattered: list[bool], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // PAGE_TOKENS) for length in lengths]
        self.lengths = lengths
        self.pages = torch.randperm(sum(counts), generator=generator).tolist()
        parts = np.split(np.array(self.pages), np.cumsum(counts)[:-1])
        self.tables = [Table(part.tolist()) for part in parts]
        firsts = []
        for table, is_scattered in zip(self.tables, scattered, strict=True):
            if not is_scattered:  # behind all others, in a run
                run = range(len(self.pages), len(self.pages) + len(table.pages))
                table.pages = list(run)
                self.pages += run
            firsts.append(-1 if is_scattered else table.pages[0] * PAGE_TOKENS)
        # The tokens lie in the batch in another order than the sequences.
        self.tokens = np.array(torch.randperm(len(lengths), generator=generator).tolist())
        self._singles = Singles(
            self.tokens, np.array(firsts), np.array(firsts), np.array(lengths), self.tables
        )
        self.rows = torch.empty(len(lengths), dtype=torch.int64)  # the last one of each token
        for i, token in enumerate(self.tokens.tolist()):
            self.rows[token] = self.rows_of(i, 0)[-1]

    def decode_rows(self, window: int) -> Any:
        return decode_rows(self._singles, window)

    def rows_of(self, i: int, window: int) -> Tensor:
        within = np.arange(PAGE_TOKENS)
        rows = (np.array(self.tables[i].pages)[:, None] * PAGE_TOKENS + within).ravel()
        length = self.lengths[i]
        return torch.from_numpy(rows[:length][-window if window else 0 :])


def expected(step: Step, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float64)
    group = q.shape[1] // k.shape[0]
    for i, token in enumerate(step.tokens.tolist()):
        rows = step.rows_of(i, scoring.window)
        keys, values = (x[:, rows].double().repeat_interleave(group, 0) for x in (k, v))
        scores = scoring.scale * torch.einsum("hd,hmd->hm", q[token].double(), keys)
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.alibi is not None:
            distance = torch.arange(len(rows)) - (len(rows) - 1)
            scores = scores + scoring.alibi.double()[:, None] * distance
        if scoring.sinks is not None:
            scores = torch.cat((scores, scoring.sinks.double()[:, None]), 1)
        weights = scores.softmax(-1)[:, : len(rows)]
        out[token] = torch.einsum("hm,hmd->hd", weights, values)
    return out


def tensors(step: Step, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    (every, kv), (size, value_size), count = heads, sizes, len(step.lengths)
    rows = (len(step.pages) + 1) * PAGE_TOKENS
    # As parts of wider tensors: a token's heads lie beside each other, tokens do not.
    q = torch.randn(count, every + 2, size).to(dtype)[:, :every]
    k, v = (torch.randn(kv, rows, s).to(dtype) for s in (size, value_size))
    return q, k, v, torch.full((count, every, value_size), torch.nan, dtype=dtype)


LENGTHS = [1, 15, 16, 17, 64, 65, 700, 2500]
SCATTERED = [False, True, False, True, True, False, True, False]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("heads", "sizes", "options"),
    [
        ((4, 4), (64, 64), {}),
        ((9, 3), (64, 64), {"window": 40}),
        ((14, 2), (128, 128), {"softcap": 2.0}),
        ((5, 1), (8, 8), {"sinks": True}),
        ((6, 2), (20, 20), {"alibi": True}),
        ((8, 8), (80, 48), {"sinks": True, "window": 16, "softcap": 5.0}),
        ((4, 1), (192, 130), {"alibi": True, "window": 100}),
    ],
)
def test_single_tokens_attend_to_their_rows(
    heads: Any, sizes: Any, options: dict[str, Any], threads: int, dtype: torch.dtype
) -> None:
    step = Step(LENGTHS, SCATTERED)
    q, k, v, out = tensors(step, heads, sizes, dtype)
    numbers = torch.linspace(0.1, 1.0, heads[0]).to(dtype)
    given = {name: numbers if value is True else value for name, value in options.items()}
    scoring = Scoring(scale=sizes[0] ** -0.5, **given)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert host_kernels.attend_single_tokens(step, q, (k, v), out, scoring)
    finally:
        torch.set_num_threads(before)
    right = expected(step, q, k, v, scoring)
    assert (out - right).norm() / right.norm() < TOLERANCES[dtype]


def test_a_token_has_the_same_bits_alone_and_nan_stays_in_its_sequence() -> None:
    step, scoring = Step(LENGTHS, SCATTERED), Scoring(scale=0.1)
    q, k, v, out = tensors(step, (6, 2), (64, 64), torch.float32)
    assert host_kernels.attend_single_tokens(step, q, (k, v), out, scoring)
    for i, token in enumerate(step.tokens.tolist()):
        alone = Step([LENGTHS[i]], [SCATTERED[i]])
        alone.tables[0].pages = step.tables[i].pages
        alone._singles.first_rows[:] = step._singles.first_rows[i]
        single = torch.empty(1, 6, 64)
        query = q[token : token + 1]
        assert host_kernels.attend_single_tokens(alone, query, (k, v), single, scoring)
        assert torch.equal(single[0], out[token])
    broken = k.clone()
    broken[0, step.rows_of(4, 0)[3], 5] = torch.nan
    damaged = torch.empty_like(out)
    assert host_kernels.attend_single_tokens(step, q, (broken, v), damaged, scoring)
    bad = step.tokens[4]
    assert damaged[bad, :3].isnan().all()
    damaged[bad, :3] = out[bad, :3]
    assert torch.equal(damaged, out)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("turned", [0, 64, 20])
@pytest.mark.parametrize("threads", [1, 2])
def test_new_tokens_are_turned_and_appended_first(
    threads: int, turned: int, dtype: torch.dtype
) -> None:
    step, scoring = Step(LENGTHS, SCATTERED), Scoring(scale=0.1)
    q, k, v, out = tensors(step, (6, 2), (64, 48), dtype)
    # As the outputs of a joined product.
    new_k, new_v = torch.randn(len(LENGTHS), 2 * 112).to(dtype).split((128, 96), -1)
    new = new_k.view(-1, 2, 64), new_v.view(-1, 2, 48)
    tables = tuple(torch.randn(len(LENGTHS), turned).to(dtype) for _ in range(2))
    q_turned, k_turned = (rope_in_fp64(x, *tables).to(dtype) if turned else x for x in (q, new[0]))
    cache = k.clone(), v.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert host_kernels.attend_single_tokens(
            step, q, cache, out, scoring, new, tables if turned else None
        )
    finally:
        torch.set_num_threads(before)
    for kept, x, rows in zip(cache, (k_turned, new[1]), (k, v), strict=True):
        right = rows.index_copy(1, step.rows, x.transpose(0, 1))
        assert (kept - right).double().norm() / right.double().norm() < TOLERANCES[dtype]
        untouched = torch.ones(rows.shape[1], dtype=torch.bool)
        untouched[step.rows] = False
        assert torch.equal(kept[:, untouched], rows[:, untouched])
    right = expected(step, q_turned, *cache, scoring)
    assert (out - right).norm() / right.norm() < TOLERANCES[dtype]
    if turned:  # as in a step with other tokens, which turns and appends in calls of its own
        apart = host_kernels.turned(new[0], *tables), host_kernels.turned(q, *tables)
        assert torch.equal(cache[0][:, step.rows], apart[0].transpose(0, 1))
        alone = torch.empty_like(out)
        assert host_kernels.attend_single_tokens(step, apart[1], cache, alone, scoring)
        assert torch.equal(alone, out)


def rope_in_fp64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = cos.shape[-1]
    part, rest = x.double().split((turned, x.shape[-1] - turned), -1)
    wide_cos, wide_sin = (table.double().unsqueeze(1) for table in (cos, sin))
    return torch.cat((part * wide_cos + rotate_half(part) * wide_sin, rest), -1)


LAYOUTS = {
    "tokens": lambda: torch.randn(5, 96),
    "columns of wider rows": lambda: torch.randn(7, 300)[:, 40:237],
    "heads": lambda: torch.randn(3, 4, 80),
    "heads of wider tokens": lambda: torch.randn(6, 9, 64)[:, 2:5],
    "many": lambda: torch.randn(700, 3, 128),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("offset", "rounds_first"), [(0.0, True), (1.0, False), (1.0, True)])
def test_norms_are_those_in_fp64(
    layout: str, offset: float, rounds_first: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    x = (3 * LAYOUTS[layout]()).to(dtype)
    for weight in (None, torch.randn(x.shape[-1]).to(dtype)):
        found = host_kernels.normed(x, weight, 1e-5, offset, rounds_first)
        assert found is not None
        factor = None if weight is None else weight.double() + offset
        right = functional.rms_norm(x.double(), x.shape[-1:], factor, 1e-5)
        assert (found - right).norm() / right.norm() < TOLERANCES[dtype]
        alone = host_kernels.normed(x[-1:], weight, 1e-5, offset, rounds_first)
        assert torch.equal(alone, found[-1:])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layout", ["heads", "heads of wider tokens", "many"])
def test_rotary_embeddings_are_those_in_fp64(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = LAYOUTS[layout]().to(dtype)
    for turned in (x.shape[-1], 32, 6):
        cos, sin = (torch.randn(len(x), turned).to(dtype) for _ in range(2))
        found = host_kernels.turned(x, cos, sin)
        assert found is not None
        right = rope_in_fp64(x, cos, sin)
        assert (found - right).norm() / right.norm() < TOLERANCES[dtype]


def test_other_tensors_are_left_to_pytorch() -> None:
    x, weight = torch.randn(4, 32), torch.ones(32)
    for wrong in (x.double(), x.half(), x.t(), x.requires_grad_(), x.to("meta")):
        assert host_kernels.normed(wrong, weight.to(wrong.dtype), 1e-5, 0.0, True) is None
    for wrong in (weight.bfloat16(), torch.ones(1), torch.ones(64)[::2]):
        assert host_kernels.normed(x.detach(), wrong, 1e-5, 0.0, True) is None
    heads, table = torch.randn(4, 2, 32), torch.randn(4, 32)
    for wrong in (table[:1], table.double(), torch.randn(32, 4).t()):
        assert host_kernels.turned(heads, wrong, table) is None
        assert host_kernels.turned(heads, table, wrong) is None


@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 70])
def test_rows_are_appended_where_they_belong(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = torch.randn(count, 5, 24).to(dtype)[:, 1:4]
    cache = torch.randn(3, 200, 24).to(dtype)
    rows = torch.randperm(200)[:count]
    expected = cache.index_copy(1, rows, x.transpose(0, 1))
    host_kernels.append(cache, x, rows)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["state space", "delta rule", "Kimi's delta rule"])
@pytest.mark.parametrize("values", [16, 64, 112])
def test_recurrences_change_states_in_their_slots(
    values: int, kind: str, dtype: torch.dtype
) -> None:
    tokens, heads, groups, keys = 5, 6, 2, 24
    generator = torch.Generator().manual_seed(values)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    states, slots = drawn(9, heads, keys, values), torch.tensor([7, 0, 3, 8, 2])
    q, k = (functional.normalize(drawn(tokens, groups, keys), dim=-1).to(dtype) for _ in range(2))
    decay = -drawn(tokens, heads, *((keys,) if kind.startswith("Kimi") else ())).abs()
    inputs = [q, k, drawn(tokens, heads, values).to(dtype), decay]
    if kind != "state space":
        inputs.append(drawn(tokens, heads).sigmoid())
    q, k, v, decay, *betas = (x.double() for x in inputs)
    q, k = (x.repeat_interleave(heads // groups, 1) for x in (q, k))
    expected = states.double()
    of_tokens = expected[slots] * decay.exp().reshape(tokens, heads, -1, 1)
    if betas:
        v = betas[0].unsqueeze(-1) * (v - torch.einsum("nhkv,nhk->nhv", of_tokens, k))
    of_tokens += torch.einsum("nhk,nhv->nhkv", k, v)
    expected[slots] = of_tokens
    out = host_kernels.recurred((states, slots), inputs)
    assert out is not None
    assert out.dtype is dtype
    torch.testing.assert_close(states.double(), expected, rtol=1e-5, atol=1e-5)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        out.double(),
        torch.einsum("nhkv,nhk->nhv", of_tokens, q),
        rtol=10 * tolerance,
        atol=10 * tolerance,
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_short_convolutions_shift_inputs_in_their_slots(has_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(6, 3, 21, generator=generator).to(dtype)
    slots, before = torch.tensor([4, 1, 5]), states.clone()
    x = torch.randn(3, 30, generator=generator).to(dtype)[:, 5:26]
    weight = torch.randn(21, 4, generator=generator).to(dtype)
    bias = torch.randn(21, generator=generator).to(dtype) if has_bias else None
    inputs = torch.cat([before[slots], x.unsqueeze(1)], 1)
    out = host_kernels.convolved((states, slots), x, weight, bias)
    assert out is not None
    expected = torch.einsum("nwc,cw->nc", inputs.double(), weight.double())
    expected += 0 if bias is None else bias.double()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=10 * tolerance)
    before[slots] = inputs[:, 1:]
    assert torch.equal(states, before)
