"""Versions of adapters: what answers is what peft computes with the files that were loaded."""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pcg.compiler as compiler
from pcg.errors import AdapterConflictError, AdapterError
from pcg.peft.adapter_files import CONFIG, WEIGHTS, digest_of
from pcg.runtime.adapters import versions
from pcg.runtime.engine.engine import Engine
from pcg.runtime.requests.request import Completion
from tests.support import oracle, peft_cases
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
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


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_name_that_is_loaded_again_meets_nothing_old(
    backend: Any, models: dict[str, Any]
) -> None:
    executor = compiler.compile(models["base"], backend=backend)
    engine = executor.engine(kv_cache_bytes=2**20)
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
    executor = compiler.compile(models["base"])
    one = digest_of(executor.add_adapter("a", models["folder"] / "one"))
    executor.save_adapter("a", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    next(iter(tensors.values())).view(torch.int32)[0, 0] ^= 1
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    (tmp_path / "SHA256SUMS").unlink()
    assert digest_of(executor.add_adapter("a", tmp_path, replace=True)) != one


def test_what_may_be_replaced(models: dict[str, Any], tmp_path: Path) -> None:
    executor = compiler.compile(models["base"])
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


def test_numbers_of_names_that_are_long_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forgotten, so that memory is bounded, and still none is used twice."""
    monkeypatch.setattr(versions, "_GONE_NAMES", 2)
    executor = make_executor()
    seen = set()
    for name in ("b", "c", "b", "d", "e", "f", "b", "c", "b"):
        version = executor.state.versions.of(executor.add_adapter(name, LORA))
        executor.remove_adapter(name)
        assert version not in seen
        seen.add(version)
    assert len(executor.state.versions._gone) == 2


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
