"""Adapters of different ranks and targets in one batch, against peft one at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel

from pcg.kernels import sgmv
from pcg.kernels.batch import SegmentedWeight, Segments
from pcg.kernels.torch.ops import expand_add, shrink
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.stages import Base
from pcg.runtime.adapters import stacked_weights as adapter_stack
from pcg.runtime.adapters.padded_tables import AdapterSlots
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion, Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support.bypasses import lora
from tests.support.lora_pair import lora_pair, small_llama

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
@pytest.mark.parametrize("lengths", [(5, 9, 1, 14, 3, 7, 30, 2), (4,) * 8], ids=["ragged", "equal"])
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


def test_generation_equals_peft(pair: tuple[Executor, PeftModel]) -> None:
    executor, peft = pair
    names = ["first", None, "head", "attention", "all", "head"]
    prompts = [torch.randint(1, 96, (n,)).tolist() for n in (3, 8, 5, 1, 12, 6)]
    done = executor.generate(prompts, names, max_new_tokens=10, ignore_eos=True)
    for prompt, name, completion in zip(prompts, names, done, strict=True):
        tokens = list(prompt)
        for _ in range(10):
            tokens.append(int(logits(peft, tokens, name)[-1].argmax()))
        assert list(completion.token_ids) == tokens[len(prompt) :]


def test_serving_joins_what_shares_an_input(pair: tuple[Executor, PeftModel]) -> None:
    executor, _ = pair
    model = executor.program.base
    sites = [site for site in model.linear_sites() if "{layer}" in site]
    everywhere = lora(dict.fromkeys(sites, 4))
    some = lora({site: 4 for site in sites if "q_proj" in site})
    ops = []
    for bypasses in (everywhere, some):
        passes = pipeline(Settings(bypasses=lambda _, b=bypasses: b))
        serving = passes.emitted(Base(model)).serving.model
        ops.append([node.op for node in serving.blocks[0].nodes])
    assert ops[0].count("lora_linear") == 4  # q k v, o, gate up, down
    assert not {"linear", "linear_group", "shrink", "expand_add"} & set(ops[0])
    assert ops[1].count("lora_linear") == ops[1].count("linear_group") == 1  # q k v, gate up
    assert not {"shrink", "expand_add"} & set(ops[1])


@pytest.mark.parametrize(
    "names",
    [
        ["all", "head", "mlp", "thin"],
        [None, "first", "thin", "all", "attention", "head", "mlp"],
        ["mlp", "thin", "mlp", "head", "all"],
    ],
    ids=["one-width", "widths", "twice"],
)
def test_logits_of_prompts_beside_decoding_tokens(
    pair: tuple[Executor, PeftModel], names: list[str | None]
) -> None:
    """Most sequences have one token, and are one product; the others' segments are their own."""
    executor, peft = pair
    torch.manual_seed(2)
    lengths = [12 if i == 2 else 1 for i in range(len(names))]
    prompts = [torch.randint(1, 96, (n,)).tolist() for n in lengths]
    for prompt, name, ours in zip(prompts, names, executor.logits(prompts, names), strict=True):
        expected = logits(peft, prompt, name)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


@given(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=7).filter(any))
def test_each_segment_is_multiplied_by_its_own_weight(start: int, sizes: list[int]) -> None:
    segments = Segments.of(start, sizes, torch.device("cpu"))
    a = torch.randn(len(sizes), 2, 5, dtype=torch.float64).transpose(1, 2)
    b = torch.randn(len(sizes), 4, 2, dtype=torch.float64).transpose(1, 2)
    x, y = (torch.randn(segments.stop + 2, n, dtype=torch.float64) for n in (5, 4))
    present = (True,) * len(sizes)
    expected = y.clone()
    first = start
    for own_a, own_b, size in zip(a, b, sizes, strict=True):
        expected[first : first + size] += x[first : first + size] @ own_a @ own_b
        first += size
    s = shrink(x, SegmentedWeight(a, segments, present))
    torch.testing.assert_close(expand_add(y, s, SegmentedWeight(b, segments, present)), expected)


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


def test_stacks_made_in_inference_mode_are_written_outside(
    pair: tuple[Executor, PeftModel],
) -> None:
    executor, peft = pair
    tokens = [5, 17, 3, 40]
    for name in RECIPES:
        executor.refresh_adapter(name)
    with torch.inference_mode():
        executor.logits([tokens] * 3, ["all", "first", "head"])
    found = executor.logits([tokens], ["attention"])[0]
    torch.testing.assert_close(found, logits(peft, tokens, "attention"), rtol=1e-4, atol=1e-5)


QUERIES_AND_VALUES = {
    "r4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "r20": {"r": 20, "target_modules": ["q_proj", "v_proj"]},
    "q": {"r": 3, "target_modules": ["q_proj"]},
    "v of the first": {"r": 5, "target_modules": ["v_proj"], "layers_to_transform": [0]},
}


@pytest.mark.parametrize("joined_bytes", [0, adapter_stack.JOINED_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "pytorch"])
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


def test_a_wide_adapter_takes_what_it_needs_as_long_as_it_has_pages(
    pair: tuple[Executor, PeftModel],
) -> None:
    """Nothing is padded, no other slot is as wide, and its memory goes with its pages."""
    executor, _ = pair
    tables, wide = executor.serving.tables, executor.adapters["wide"]
    tables.reset()
    executor.logits([3, 1, 4], "wide")
    size = tables.beside_pool_bytes
    assert size < 1.5 * wide.size_bytes  # joined outputs have zeros between them
    executor.logits([3, 1, 4], "thin")
    assert tables.beside_pool_bytes - size < wide.size_bytes / 4
    tables.evict(wide)
    assert tables.beside_pool_bytes < wide.size_bytes / 4


def test_no_step_of_others_copies_an_adapter(
    pair: tuple[Executor, PeftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of a width, a wide one, and those for whom stacks grow are copied beside steps."""
    executor, peft = pair
    executor.serving.tables.reset()
    engine = executor.engine(kv_cache_bytes=2**24)
    monkeypatch.setattr(AdapterSlots, "_move", None)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    engine.submit(Request((3, 1, 4), params))
    names = [name for name in RECIPES if name != "thin"] + ["thin"]
    done: dict[int, Completion] = {}
    for name in names:
        engine.submit(Request((1, 5, 9), params, executor.adapters[name]))
        while len(engine.scheduler.running) + len(done) < engine.submitted:
            for chunk in engine.step():
                assert chunk.error is None
                if chunk.completion is not None:
                    done[chunk.index] = chunk.completion
    while not engine.is_idle:
        done |= {c.index: c.completion for c in engine.step() if c.completion is not None}
    for place, name in enumerate([None, *names]):
        tokens = [3, 1, 4] if name is None else [1, 5, 9]
        first = int(logits(peft, tokens, name)[-1].argmax())
        assert done[place].token_ids[0] == first
