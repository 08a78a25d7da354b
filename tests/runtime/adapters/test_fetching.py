"""Adapters that are copied beside steps: no step waits for one that it does not run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import pcg.compiler as compiler
from pcg.runtime.adapters.padded_tables import AdapterSlots
from pcg.runtime.adapters.row_memory import RowMemory
from pcg.runtime.admission.limits import Limits
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.prompts import prompts

bf16.install()
WRITERS: dict[str, tuple[type, str]] = {
    "torch": (AdapterSlots, "_put"),
    "triton": (RowMemory, "_write"),
}


@pytest.mark.parametrize("backend", WRITERS)
def test_a_step_waits_for_no_copy_of_another(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(1))
    executor = compiler.compile(base, backend=backend)
    for name in ("a", "b"):
        fields = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
        for weights in executor.add_adapter(name, {"peft_type": "LORA", **fields}).weights.values():
            weights.b.normal_()
    first, second = (
        Request(
            tuple(prompt),
            SamplingParams(max_new_tokens=new, ignore_eos=True),
            executor.adapters[name],
        )
        for prompt, new, name in zip(prompts((5, 3)), (5, 2), ("a", "b"), strict=True)
    )
    alone = [
        executor.generate([r.prompt_ids], r.adapter.name, max_new_tokens=n, ignore_eos=True)[0]
        for r, n in ((first, 5), (second, 2))
        if r.adapter is not None
    ]
    executor.serving.tables.forget(executor.adapters["b"])

    engine = executor.engine(Limits(running=4), kv_cache_bytes=2**20)
    engine.submit(first)
    tokens = [[chunk.token_id for chunk in engine.step()], []]
    may_copy = threading.Event()
    owner, name = WRITERS[backend]
    write = getattr(owner, name)

    def held(self: Any, *args: Any) -> bool:
        if threading.current_thread() is not threading.main_thread():
            assert may_copy.wait(60)
        return bool(write(self, *args))

    monkeypatch.setattr(owner, name, held)
    engine.submit(second)
    for _ in range(3):
        chunks = engine.step()
        assert [chunk.index for chunk in chunks] == [0]
        tokens[0] += [chunk.token_id for chunk in chunks]
        engine.check_integrity()
    may_copy.set()
    while not engine.is_idle:
        for chunk in engine.step():
            tokens[chunk.index].append(chunk.token_id)
    assert tokens == [list(completion.token_ids) for completion in alone]
