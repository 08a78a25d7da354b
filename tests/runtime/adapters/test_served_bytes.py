"""Adapters in memory while they serve and train: their bytes are those that `explain` says."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import pcg
from pcg.peft.adapter import Adapter
from pcg.runtime.data.example import Example
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.live_tensors import live_bytes, memory_of, new_tensors, reached

bf16.install()

RECIPES: dict[str, dict[str, Any]] = {
    "mine": {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"},
    "wide": {"peft_type": "LORA", "r": 20, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"peft_type": "LORA", "r": 4, "target_modules": ["o_proj"], "use_dora": True},
    "vectors": {
        "peft_type": "IA3",
        "target_modules": ["k_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
}
ROWS = [Example(tuple(range(3, 19)), tuple(range(3, 19)))] * 2


class Served:
    """An engine over a model with adapters, and the bytes that are alive of these."""

    def __init__(self, model: Path, recipes: Mapping[str, Any], **options: Any) -> None:
        self.executor = pcg.compile(str(model), recipes, device="cpu", **options)
        self.engine: Engine = self.executor.engine(kv_cache_bytes=2**20)

    def adapter_bytes(self) -> int:
        """The live bytes of all adapters and of what serving reads of them, in pages included."""
        state, cache = self.executor.state, self.engine.device.cache
        gc.collect()
        known = [one for one in gc.get_objects() if isinstance(one, Adapter)]
        own = [tensor for one in known for tensor in (*one.tensors, *one.shared.values())]
        stop = (state.weight_store, state.program, cache, state.serving.runner, state._served)
        tables = {id(one): one for one in (state.serving.tables, self.engine.device._tables)}
        copies = reached([_stacks_and_rows(one) for one in tables.values()], stop)
        arena = set() if cache.pages is None else {memory_of(cache.pages)}
        found = [one for one in (*own, *copies) if memory_of(one) not in arena]
        known_pages = self.engine.scheduler.adapters._residents.values()
        in_pages = sum(len(one.table.pages) for one in known_pages) if arena else 0
        page_bytes = bytes_of_page(kv_types(state.serving.runner.model))
        return live_bytes(found) + in_pages * page_bytes

    def serve(self, *names: str) -> None:
        for name in names:
            request = self.executor.request([3, 4, 5], name, max_new_tokens=1, ignore_eos=True)
            self.engine.submit(request)
        while self.engine.scheduler.running or self.engine.scheduler.waiting:
            self.engine.step()


def _stacks_and_rows(tables: Any) -> list[object]:
    """The stacks of tables, and the memory and the tables of rows, without what a batch left."""
    stacks = [slots._stacks for slots in tables._by_width.values()]
    lora = getattr(tables, "lora", None)
    return [
        stacks,
        [] if lora is None else [lora._allocator.memory, lora._table.rows, lora._table.ranks],
    ]


@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", "float32"), ("torch", "bfloat16"), ("triton", "bfloat16")]
)
def test_live_bytes_of_adapters_are_those_explained(
    backend: str, dtype: str, tmp_path: Path
) -> None:
    config = BY_NAME["qwen2"].config(1)
    oracle.random_model(config, getattr(torch, dtype)).save_pretrained(tmp_path)
    options: dict[str, Any] = {"dtype": dtype, "backend": backend}
    memory = pcg.explain(str(tmp_path), RECIPES, device="cpu", serve_tokens=1, **options)
    own = memory.memory_bytes["adapters"]
    copies = memory.memory_bytes["served_adapters"] - own
    with new_tensors():
        served = Served(tmp_path, RECIPES, **options)
        assert served.adapter_bytes() == own
        served.serve(*RECIPES)
        assert served.adapter_bytes() == own + copies
        for name in ("mine", "dora"):
            served.executor.finetune(ROWS[:1], name, epochs=1, learning_rate=0.01)
        served.serve(*RECIPES)
        assert served.adapter_bytes() == own + copies


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_job_that_publishes_holds_its_own_adapter_and_the_version(
    backend: str, tmp_path: Path
) -> None:
    oracle.random_model(BY_NAME["qwen2"].config(1), torch.bfloat16).save_pretrained(tmp_path)
    mine = {"mine": RECIPES["mine"]}
    report = pcg.explain(str(tmp_path), mine, device="cpu", serve_tokens=1, backend=backend)
    own, both = (report.memory_bytes[kind] for kind in ("adapters", "served_adapters"))
    with new_tensors():
        served = Served(tmp_path, mine, backend=backend)
        job: Job = served.engine.finetune(ROWS, "mine", epochs=2, publish_every=1)
        while job.record is None or job.record.step < 1:
            served.engine.step()
        served.serve("mine")
        assert served.adapter_bytes() == own + both
        while not job.is_over:
            served.engine.step()
        served.serve("mine")
        for _ in range(100):  # the thread of copies lets the last version go
            if served.adapter_bytes() == both:
                break
            time.sleep(0.05)
        assert served.adapter_bytes() == both
