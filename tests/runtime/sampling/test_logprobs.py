"""Logprobs are torch's log-softmax, and the likeliest tokens those of its top-k."""

from __future__ import annotations

import pytest
import torch

from pcg.runtime.sampling.logprobs import logprobs_of


@pytest.mark.parametrize("vocabulary", [1, 5, 63, 64, 640, 2563, 5120])
@pytest.mark.parametrize("most", [0, 1, 5, 20])
def test_rows_of_any_size(vocabulary: int, most: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 5 * torch.randn(6, vocabulary, generator=generator)
    tokens = torch.randint(0, vocabulary, (6,), generator=generator)
    count = min(most, vocabulary)
    expected = logits.log_softmax(-1)
    values, ids = expected.topk(count)
    for row, found in enumerate(logprobs_of(logits, tokens, most).read([most] * 6)):
        assert found.token_id == tokens[row]
        assert found.logprob == expected[row, tokens[row]]
        assert [token for token, _ in found.top] == ids[row].tolist()
        assert [value for _, value in found.top] == values[row].tolist()


def test_equal_ones_come_by_id_from_blocks_of_one_maximum() -> None:
    """As many as are asked for are equal, and lie far apart."""
    logits = torch.zeros(2, 6400)
    places = [6399, 3, 640, 70, 5000]
    logits[:, places] = 9.0
    (found, other) = logprobs_of(logits, torch.tensor([0, 3]), 5).read([5, 2])
    assert [token for token, _ in found.top] == sorted(places)
    assert [token for token, _ in other.top] == sorted(places)[:2]


def test_half_precision_is_of_the_rounded_logits() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    (first, *_) = logprobs_of(logits, torch.tensor([1, 2, 3]), 1).read([1, 1, 1])
    assert first.logprob == logits.float().log_softmax(-1)[0, 1]


def test_nan_is_no_number() -> None:
    logits = torch.zeros(2, 10)
    logits[0, 4] = torch.nan
    found = logprobs_of(logits, torch.tensor([-1, 0]), 2).read([2, 2])
    assert [one.is_number for one in found] == [False, True]
