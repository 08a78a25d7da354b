"""A client's contexts are bounded by its own memory: the base has no part of their KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

import pcg.compiler as compiler
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.live_tensors import live_bytes, reached
from tests.support.split_base import running_base

LENGTHS = (100, 2500)


def test_a_base_has_nothing_of_a_context_however_long_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**BY_NAME["llama3"].config(1), "max_position_embeddings": 4096}
    model = oracle.random_model(config)
    whole = compiler.compile(model, verify=False, packed_weights=False)
    calls: list[tuple[int, int]] = []
    held = []
    with running_base(whole) as base, base.connect(link="lan") as split:
        run = base.loop.base.run

        def watched(piece: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            found = run(piece, inputs)
            calls.append((len(found[0]), sum(one.nbytes for one in (*found, *inputs))))
            return found

        monkeypatch.setattr(base.loop.base, "run", watched)
        in_flight = []
        for length in LENGTHS:
            prompt = [5 + index % 90 for index in range(length)]
            calls.clear()
            done = split.generate([prompt], max_new_tokens=3, temperature=0, ignore_eos=True)
            assert list(done[0].token_ids) == oracle.greedy(model, prompt, 3)
            held.append(live_bytes(reached([base.loop], [])))
            assert max(rows for rows, _ in calls) == length
            decoding = calls[-2 * 3 :]  # a layer takes two calls, and the head one
            assert {rows for rows, _ in decoding} == {1}
            in_flight.append([size for _, size in decoding])
    assert in_flight[0] == in_flight[1]  # a token takes the same after any context
    assert held[0] == held[1]
