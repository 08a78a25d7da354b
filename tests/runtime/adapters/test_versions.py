"""Versions of adapters: what answers is what peft computes with the files that were loaded."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pcg
from pcg.errors import AdapterConflictError, AdapterError
from pcg.peft.adapter import Adapter
from pcg.peft.adapter_files import CONFIG, WEIGHTS, digest_of
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.requests.request import Completion
from tests.support import compiled, oracle, peft_cases
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.live_tensors import live_bytes, memory_of, new_tensors, reached
from tests.support.prompts import prompts
from tests.support.small_engine import LORA, make_executor

bf16.install()
(TEXT,) = prompts((37,))
NEW: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
SITES = {"one": ["q_proj", "down_proj"], "two": ["v_proj", "up_proj"], "three": ["q_proj"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Peft's models of one adapter's versions, of other sites each, which are saved, too."""
    base = oracle.random_model(BY_NAME["llama3"].config(1))
    folder = tmp_path_factory.mktemp("adapters")
    made = {"base": base, "folder": folder}
    for seed, (name, targets) in enumerate(SITES.items()):
        made[name] = oracle.with_adapter(base, targets, rank=4, seed=seed)
        oracle.save(made[name], folder / name)
    return made


def served(engine: Engine) -> Iterator[Completion]:
    while not engine.is_idle:
        for chunk in engine.step():
            assert chunk.error is None
            assert chunk.adapter_version is not None
            if chunk.completion is not None:
                yield chunk.completion
        engine.check_integrity()


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_name_that_is_loaded_again_meets_nothing_old(
    backend: Any, models: dict[str, Any]
) -> None:
    executor = compiled.executor(models["base"], backend=backend)
    # However long steps take, a prompt is not cut: the next finds all its pages.
    engine = executor.engine(Limits(prompt_stretch=math.inf), kv_cache_bytes=2**20)
    theirs = {name: oracle.greedy(models[name], TEXT, NEW["max_new_tokens"]) for name in SITES}
    assert len({tuple(tokens) for tokens in theirs.values()}) == len(SITES)
    found: list[Completion] = []
    there = []
    for name in ("one", "two", "one", "three"):
        there.append(
            weakref.ref(executor.add_adapter("sql", models["folder"] / name, replace=True))
        )
        engine.submit(executor.request(TEXT, "sql", **NEW))
        engine.submit(executor.request(TEXT, "sql", **NEW))
        # What runs when the next version comes began with this one, and finishes on it.
        engine.step()
        engine.check_integrity()
    found += served(engine)
    names = [name for name in ("one", "two", "one", "three") for _ in range(2)]
    found.sort(key=lambda one: one.adapter_version.number if one.adapter_version else 0)
    assert [list(one.token_ids) for one in found] == [theirs[name] for name in names]
    assert [str(one.adapter_version) for one in found] == [
        f"sql@{i}" for i in (1, 1, 2, 2, 3, 3, 4, 4)
    ]
    assert [one.cached_tokens for one in found] == [0, 32] * 4
    digests = [one.adapter_version.digest for one in found if one.adapter_version is not None]
    assert digests[0] == digests[4] != digests[2] != digests[6]
    assert len(engine.scheduler.adapters) == 1  # the last; pages of the others are free
    gc.collect()
    assert [one() is None for one in there] == [True, True, True, False]  # and their weights
    executor.remove_adapter("sql")
    assert len(engine.scheduler.adapters) == 0
    executor.add_adapter("sql", models["folder"] / "two")
    engine.submit(executor.request(TEXT, "sql", **NEW))
    (last,) = served(engine)
    assert (str(last.adapter_version), last.cached_tokens) == ("sql@5", 0)
    assert list(last.token_ids) == theirs["two"]


def by_hand(folder: Path) -> str:
    """The digest as its description says it, of files that pcg saved."""
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    for key, value in config.items():
        if isinstance(value, list):
            config[key] = sorted(value)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for key, tensor in sorted(load_file(folder / WEIGHTS).items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([key, dtype, *tensor.shape]).encode())
        digest.update(tensor.numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def test_a_digest_is_of_what_is_saved(tmp_path: Path) -> None:
    """Of every method, whatever the adapter's name; saving it and reading it again changes none."""
    models = peft_cases.make_models("llama-biases", tmp_path / "theirs")
    digests = {}
    for name, adapter in models.executor.adapters.items():
        digests[name] = digest_of(adapter)
        models.executor.save_adapter(name, tmp_path / name)
        assert by_hand(tmp_path / name) == digests[name]
        again = models.executor.add_adapter(f"{name} again", tmp_path / name)
        assert digest_of(again) == digests[name]
    assert len(set(digests.values())) == len(digests)


def test_one_bit_changes_a_digest(models: dict[str, Any], tmp_path: Path) -> None:
    executor = compiled.executor(models["base"])
    one = digest_of(executor.add_adapter("a", models["folder"] / "one"))
    executor.save_adapter("a", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    next(iter(tensors.values())).view(torch.int32)[0, 0] ^= 1
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    (tmp_path / "SHA256SUMS").unlink()
    assert digest_of(executor.add_adapter("a", tmp_path, replace=True)) != one


def test_what_may_be_replaced(models: dict[str, Any], tmp_path: Path) -> None:
    executor = compiled.executor(models["base"])
    folder: Path = models["folder"]
    executor.add_adapter("a", folder / "one", expected_version=0)
    with pytest.raises(AdapterConflictError, match="there is an adapter 'a' already; remove it"):
        executor.add_adapter("a", folder / "two")
    with pytest.raises(AdapterConflictError, match=r"expected_version=0, and .* there is a@1"):
        executor.add_adapter("a", folder / "two", expected_version=0)
    executor.add_adapter("a", folder / "two", expected_version=1)
    with pytest.raises(AdapterConflictError, match=r"expected_version=1, and .* there is a@2"):
        executor.add_adapter("a", folder / "two", replace=True, expected_version=1)
    with pytest.raises(AdapterConflictError, match=r"expected_version=3, and .* 'b' there is none"):
        executor.add_adapter("b", folder / "two", expected_version=3)
    there = executor.adapters["a"]
    with pytest.raises(AdapterError, match="is not there"):
        executor.add_adapter("a", tmp_path / "none", replace=True)
    assert executor.adapters["a"] is there


def test_weights_that_change_in_place_are_another_version() -> None:
    executor = make_executor()
    first = executor.generate([TEXT], "a", **NEW)[0].adapter_version
    second = executor.generate([TEXT], "a", **NEW)[0].adapter_version
    assert first is not None
    assert second is first
    known = first.digest
    for tensor in executor.adapters["a"].tensors:
        tensor.mul_(2)
    executor.refresh_adapter("a")
    third = executor.generate([TEXT], "a", **NEW)[0].adapter_version
    assert third is not None
    assert third.number == first.number + 1
    assert third.digest != first.digest == known
    executor.refresh_adapter("a")
    assert executor.generate([TEXT], None, **NEW)[0].adapter_version is None


def test_a_digest_is_there_when_its_weights_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed before they go, unless more go at once than are hashed."""
    executor = make_executor()
    state = executor.state
    kept = [executor.generate([TEXT], "a", **NEW)[0].adapter_version]
    old = state.versions.of(executor.adapters["a"])
    asked = executor.adapters["a"]
    executor.add_adapter("a", LORA, seed=3, replace=True)
    del asked
    unasked = state.versions.of(executor.adapters["a"])
    executor.add_adapter("a", LORA, seed=4, replace=True)
    state.versions._hashing.shutdown(wait=True)
    gc.collect()
    assert kept == [old]
    assert old is not None
    assert old.known_digest is not None
    assert old.digest == old.known_digest
    assert unasked is not None
    assert unasked.digest is None  # nobody was answered by it


def test_a_request_may_name_an_adapter_that_was_replaced() -> None:
    executor, other = make_executor(), make_executor()
    engine, old = executor.engine(kv_cache_bytes=2**20), executor.adapters["a"]
    before = executor.generate([TEXT], "a", **NEW)[0].token_ids
    executor.add_adapter("a", LORA, replace=True)
    assert executor.generate([TEXT], "a", **NEW)[0].token_ids != before
    engine.submit(executor.request(TEXT, old, **NEW))
    (done,) = served(engine)
    assert done.token_ids == before
    assert len(engine.scheduler.adapters) == 0
    with pytest.raises(AdapterError, match="'a' was never served by this executor"):
        executor.request(TEXT, other.adapters["a"], **NEW)


# --------------------------------------------------- adapters in memory while they serve and train

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
        self.executor = compiled.executor(str(model), recipes, device="cpu", **options)
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
    ("backend", "dtype"),
    [
        ("torch", "bfloat16"),
        pytest.param("torch", "float32", marks=pytest.mark.slow),
        pytest.param("triton", "bfloat16", marks=pytest.mark.slow),
    ],
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


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
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
