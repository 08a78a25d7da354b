"""Storages: which values of a graph share memory."""

from __future__ import annotations

import pytest
import torch

from pcg.ir.analysis.builder import Builder
from pcg.ir.analysis.storages import Storages
from pcg.ir.types import TOKENS, tensor


def test_views_share_memory_and_copies_do_not() -> None:
    builder = Builder("g")
    builder.input("qkv", tensor("f32", TOKENS, 2, 5, 8))
    query = builder.add("slice", ["qkv"], name="query", dim=-2, start=0, stop=3)
    joined = builder.add("reshape", [query], name="joined", shape=(-1, 6, 8))
    key = builder.add("slice", ["qkv"], name="key", dim=-2, start=3, stop=4)
    spread = builder.add("expand", [key], name="spread", shape=(-1, 2, 3, 8))
    repeated = builder.add("reshape", [spread], name="repeated", shape=(-1, 6, 8))
    row = builder.add("slice", ["qkv"], name="row", dim=-3, start=1, stop=2)
    flat = builder.add("reshape", [row], name="flat", shape=(-1, 40))
    outputs = [joined, repeated, flat]
    graph = builder.build(outputs)
    storages = Storages.of(graph)
    assert [storages[name].name for name in outputs] == ["joined", "repeated", "qkv"]


@pytest.mark.parametrize("shape", [(4, 6), (2, 2, 6), (24,), (2, 12), (8, 3), (4, 2, 3)])
@pytest.mark.parametrize("start", [0, 2])
def test_a_reshape_is_a_view_where_torch_makes_one(shape: tuple[int, ...], start: int) -> None:
    builder = Builder("g")
    builder.input("x", tensor("f32", TOKENS, 4, 6 + start))
    part = builder.add("slice", ["x"], name="part", dim=-1, start=start, stop=6 + start)
    builder.add("reshape", [part], name="y", shape=(-1, *shape))
    storages = Storages.of(builder.build(["y"]))
    x = torch.zeros(3, 4, 6 + start)
    y = x[..., start:].reshape(3, *shape)
    is_view = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert (storages["y"].name == "x") == is_view
