"""Adapters of different ranks and targets in one batch, against peft one at a time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels import sgmv
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters import stacked_weights as adapter_stack
from pcg.runtime.adapters.padded_tables import AdapterSlots
from pcg.runtime.adapters.row_memory import RowMemory
from pcg.runtime.adapters.stacked_weights import ServedWeights
from pcg.runtime.admission.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.lora_pair import lora_pair, small_llama
from tests.support.prompts import prompts

RECIPES = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "attention": {"r": 20, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]},
    "head": {"r": 2, "lora_alpha": 8, "target_modules": ["down_proj", "lm_head"]},
    "mlp": {"r": 5, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "thin": {"r": 1, "target_modules": "all-linear"},
    "wide": {"r": 80, "target_modules": "all-linear"},
    "first": {"r": 11, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [0]},
}


@pytest.fixture(scope="module")
def pair() -> tuple[Executor, PeftModel]:
    return lora_pair(RECIPES, small_llama())


def logits(peft: PeftModel, tokens: list[int], name: str | None) -> torch.Tensor:
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        if name is None:
            with peft.disable_adapter():
                return peft(input_ids=ids).logits[0]
        peft.set_adapter(name)
        return peft(input_ids=ids).logits[0]


@pytest.mark.parametrize(
    "names",
    [
        ["all", "attention", None, "head", "first", "all"],
        ["attention"] * 3,
        ["head", "first"],
        [None, None, "all"],
        ["all", "first"] * 4,
        ["wide", "all", None, "wide", "first"],
    ],
    ids=["mixed", "one", "two", "mostly-base", "two-of-each", "wide"],
)
@pytest.mark.parametrize(
    "lengths",
    [(5, 9, 1, 14, 3, 7, 30, 2), (4,) * 8, (1, 1, 12, 1, 1, 1, 1, 1)],
    ids=["ragged", "equal", "decoding"],
)
@pytest.mark.parametrize("few", [0, 8, sgmv.FEW_TOKENS])
def test_logits_equal_peft(
    pair: tuple[Executor, PeftModel],
    names: list[str | None],
    lengths: tuple[int, ...],
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Segments of up to `few` tokens are the native kernel's."""
    executor, peft = pair
    monkeypatch.setattr(sgmv, "FEW_TOKENS", few)
    executor.serving.tables._bound.clear()
    torch.manual_seed(1)
    prompts = [torch.randint(1, 96, (n,)).tolist() for n in lengths[: len(names)]]
    for prompt, name, ours in zip(prompts, names, executor.logits(prompts, names), strict=True):
        expected = logits(peft, prompt, name)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


some = st.lists(st.sampled_from(list(RECIPES)), max_size=4, unique=True)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(some, some, st.sampled_from(list(RECIPES))), max_size=6))
def test_what_was_fetched_before_it_ran_is_whole(
    pair: tuple[Executor, PeftModel], steps: list[tuple[list[str], list[str], str]]
) -> None:
    executor, _ = pair
    prompt = [3, 1, 4, 1, 5]
    expected = {name: executor.logits(prompt, name) for name in RECIPES}
    stacks = executor.serving.tables
    for running, coming, gone in steps:
        stacks.prefetch([executor.adapters[name] for name in coming])
        for name, ours in zip(
            running,
            executor.logits([prompt] * len(running), running) if running else (),
            strict=True,
        ):
            torch.testing.assert_close(ours, expected[name])
        stacks.prefetch([executor.adapters[name] for name in reversed(coming)])
        stacks.forget(executor.adapters[gone])


@given(st.lists(st.lists(st.sampled_from([None, *RECIPES]), min_size=1, max_size=9), max_size=6))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_adapters_come_and_go(
    pair: tuple[Executor, PeftModel], batches: list[list[str | None]]
) -> None:
    """Whoever had a slot before, a batch gets its own adapters; one that changed is read anew."""
    executor, peft = pair
    tokens = [5, 17, 3, 40]
    for turn, names in enumerate(batches):
        if turn == 2:
            weights = next(iter(executor.adapters["all"].weights.items()))[1]
            module = peft.base_model.model.get_submodule(
                next(iter(executor.adapters["all"].weights))
            )
            weights.b.mul_(-1.0)
            module.lora_B["all"].weight.data.mul_(-1.0)
            executor.refresh_adapter("all")
        found = executor.logits([tokens] * len(names), names)
        for name, one in zip(names, found, strict=True):
            torch.testing.assert_close(one, logits(peft, tokens, name), rtol=1e-4, atol=1e-5)


QUERIES_AND_VALUES = {
    "r4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "r20": {"r": 20, "target_modules": ["q_proj", "v_proj"]},
    "q": {"r": 3, "target_modules": ["q_proj"]},
    "v of the first": {"r": 5, "target_modules": ["v_proj"], "layers_to_transform": [0]},
}


@pytest.mark.parametrize(
    ("joined_bytes", "dtype", "native"),
    [
        pytest.param(joined, dtype, native, marks=() if is_default else pytest.mark.slow)
        for joined in (0, adapter_stack.JOINED_BYTES)
        for dtype in (torch.float32, torch.bfloat16)
        for native in (True, False)
        for is_default in ((joined, dtype, native) == (0, torch.bfloat16, False),)
    ],
)
def test_where_some_of_the_joined_outputs_can_have_lora(
    joined_bytes: int, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft's default for Llama is q and v, between which k lies."""
    if not native:
        monkeypatch.setattr(sgmv, "_kernel", lambda: None)
    monkeypatch.setattr(adapter_stack, "JOINED_BYTES", joined_bytes)
    executor, peft = lora_pair(QUERIES_AND_VALUES, small_llama(dtype))
    nodes = executor.serving.runner.model.blocks[0].nodes
    assert [node.get("adapted") for node in nodes if node.op == "lora_linear"] == [(0, 2)]
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    names = [None, "r4", "q", "v of the first", "r20", "r4"]
    for lengths in [(1,) * 6, (5, 9, 1, 1, 30, 2), (40, 38, 2, 2, 41, 1), (40,) * 6]:
        prompts = [torch.randint(1, 96, (n,)).tolist() for n in lengths]
        for prompt, name, ours in zip(prompts, names, executor.logits(prompts, names), strict=True):
            expected = logits(peft, prompt, name)
            assert (ours - expected).abs().max() < tolerance * expected.abs().max(), name


# ------------------------------------------------------------------------------------ wide adapters

bf16.install()


def recipe(rank: int, **fields: Any) -> dict[str, Any]:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **fields}


# ------------------------------------------------------------------------------ copies beside steps

bf16.install()
WRITERS: dict[str, tuple[type, str]] = {
    "torch": (AdapterSlots, "_put"),
    "triton": (RowMemory, "_write"),
}


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_step_waits_for_no_copy_of_another(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(1))
    executor = compiled.executor(base, backend=backend)
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


# ------------------------------------------------------------------ adapters packed in host memory

bf16.install()


def executor(layers: int, count: int = 2) -> Executor:
    """A model for Triton with adapters of ranks 20 and 4, at all linears and at some."""
    made = compiled.executor(
        oracle.random_model(BY_NAME["llama3"].config(layers)), backend="triton"
    )
    for number in range(count):
        targets: Any = ["q_proj", "v_proj", "down_proj"] if number % 2 else "all-linear"
        recipe = {"peft_type": "LORA", "r": 4 if number % 2 else 20, "target_modules": targets}
        added = made.add_adapter(f"a{number}", recipe, seed=number)
        for weights in added.weights.values():
            weights.b.normal_(generator=torch.Generator().manual_seed(number))
    return made


def test_a_row_longer_than_a_page_is_refused() -> None:
    made = executor(1, count=1)
    with pytest.raises(UnsupportedError, match="row of 64 elements is longer than a page"):
        made.serving.tables.pages_of(made.adapters["a0"], 4 * 63)


def test_an_adapter_is_packed_when_it_is_added_and_by_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the engine's thread nor that of copies reads the adapter's own tensors."""
    made = executor(1, count=1)
    made.save_adapter("a0", tmp_path / "a0")
    expected = made.generate([[3, 5, 7]], "a0", max_new_tokens=6)[0].token_ids
    part, threads = ServedWeights.part, set[str]()

    def noted(self: ServedWeights, adapter: Adapter, path: str) -> Tensor | None:
        threads.add(threading.current_thread().name)
        return part(self, adapter, path)

    with made.engine(Limits(running=2), kv_cache_bytes=2**20).start() as engine:
        monkeypatch.setattr(ServedWeights, "part", noted)
        engine.add_adapter("b", tmp_path / "a0").result()
        assert threads
        threads.clear()
        found = engine.submit([3, 5, 7], "b", max_new_tokens=6).wait()
    assert not threads
    assert found.token_ids == expected


# ------------------------------------------------------------------------------- rows in one memory

bf16.install()
