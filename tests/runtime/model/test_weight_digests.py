"""The digest of a base's weights, which jobs and servers compare."""

from __future__ import annotations

import torch

import pcg.compiler
from pcg.runtime.model.base_weights import base_digest, row_digests
from tests.support.small_job import make_model


def test_each_entry_changes_it_and_the_type_of_loading_does_not() -> None:
    model = make_model().to(torch.bfloat16)
    stores = [
        pcg.compiler.compile(model, None, dtype=dtype).state.weight_store
        for dtype in ("bfloat16", "float32")
    ]
    exact = {base_digest(store) for store in stores}
    (rounded,) = {base_digest(store, torch.bfloat16) for store in stores}
    assert len(exact) == 2
    for name, parameter in model.named_parameters():
        entry = parameter.data.view(-1)[torch.randint(parameter.numel(), ())]
        before = entry.clone()
        entry += 0.125
        store = pcg.compiler.compile(model, None, dtype="float32").state.weight_store
        assert base_digest(store, torch.bfloat16) != rounded, name
        entry.copy_(before)


def test_a_number_has_a_digest() -> None:
    digests = {row_digests(torch.tensor(number)) for number in (1.0, 2.0)}
    assert len(digests) == 2
    assert row_digests(torch.tensor(1.0)) == row_digests(torch.tensor([1.0]))
