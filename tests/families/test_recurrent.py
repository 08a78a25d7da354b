"""Models with recurrent state or latents in windows and in engines, by transformers and peft.

Sequences are longer than a chunk of 64 tokens. Logits, tokens and gradients of whole sequences are
in `test_numbers.py`.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import pcg
import pcg.compiler as compiler
from pcg.errors import AdapterError, UnsupportedError
from pcg.ir.types import DTYPE_BYTES
from pcg.ranks.mesh import MeshSizes, RankMesh
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.memory.recurrent_states import bytes_of_states, recurrent_types, snapshots_of
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training.runner import training_runner
from tests.peft.test_fp64 import in_windows
from tests.support import compiled, oracle
from tests.support.families import BY_NAME, KIMI_DELTA
from tests.support.parameters import mostly_slow
from tests.support.prompts import TOLERANCE, prompts
from tests.support.ranked import EXAMPLES, JOB, check_same, make_executor, make_program
from tests.support.small_engine import run
from tests.support.threads import run_mesh

FAMILIES = (
    "lfm2", "lfm2-biases", "qwen3.5", "qwen3_next", "mamba", "mamba2", "bamba", "falcon_h1",
    "nemotron_h", "granite4",
)  # fmt: skip
DEFAULT = ("lfm2", "qwen3.5", "mamba2")
LATENT = ("deepseek_v3", "glm4_moe_lite", "minicpm3")
NEW = 24
POSITIONS = 256


@dataclasses.dataclass(frozen=True)
class Case:
    base: Any
    wrapped: dict[str, Any]
    executor: Executor

    def model(self, adapter: str | None) -> Any:
        return self.base if adapter is None else self.wrapped[adapter]


@cache
def case_of(name: str) -> Case:
    """A family with four adapters, of other ranks and targets."""
    family = KIMI_DELTA if name == KIMI_DELTA.name else BY_NAME[name]
    changes = {} if name in ("mamba", "mamba2") else {"max_position_embeddings": POSITIONS}
    base = oracle.random_model(family.config(3, **changes))
    targets = {"all": "all-linear", "few": family.usual_targets}
    wrapped = {
        f"{kind}-{rank}": oracle.with_adapter(
            base, targets[kind], rank=rank, seed=rank, excluded=family.excluded
        )
        for kind, rank in (("all", 4), ("few", 3), ("all", 2), ("few", 8))
    }
    executor = compiled.executor(base, None, latent_cache=name in LATENT)
    for adapter, model in wrapped.items():
        with TemporaryDirectory() as saved:
            oracle.save(model, Path(saved))
            executor.add_adapter(adapter, saved)
    return Case(base, wrapped, executor)


EVERY = pytest.mark.parametrize("name", mostly_slow(FAMILIES, *DEFAULT))
WITH_LATENT = pytest.mark.parametrize(
    "name", mostly_slow((*FAMILIES, *LATENT), "qwen3.5", "mamba2", "minicpm3")
)


@pytest.mark.parametrize(
    ("name", "adapter"),
    mostly_slow(
        product((*FAMILIES, *LATENT, KIMI_DELTA.name), ("all-4", "few-3")),
        *product((*DEFAULT, "minicpm3"), ["all-4"]),
        ("falcon_h1", "few-3"),
    ),
)
def test_gradients_of_windows(name: str, adapter: str) -> None:
    case, sequences = case_of(name), prompts((150, 40, 1, 97, 65))
    expected_loss, expected = oracle.loss_and_gradients(case.wrapped[adapter], sequences)
    examples = [Example(s, s) for s in sequences]
    targets = sum(len(s) - 1 for s in sequences)
    for sizes in ((1, 2, 3, 7, 17), (64, 65, 100), (1, 150)):
        draw = Random(f"{name} {sizes}")
        executor = case.executor
        runner = training_runner(executor.state, executor.adapters[adapter], windows=True)
        for parameter in runner.parameters.values():
            parameter.grad = None
        served = executor.serving.runner.model
        loss = in_windows(runner, examples, targets, lambda s=sizes, d=draw: d.choice(s), served)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert runner.parameters.keys() == expected.keys()
        for path, parameter in runner.parameters.items():
            error = (parameter.grad - expected[path]).norm() / expected[path].norm()
            assert error < TOLERANCE, (path, sizes)


@pytest.mark.parametrize("target", ["0.self_attn.o_proj", "1.self_attn.kv_b_proj"])
def test_windows_over_latents_without_a_gradient(target: str, tmp_path: Path) -> None:
    """Attention below the adapter has no backward, and reads the cache of latents, too."""
    base = oracle.random_model(BY_NAME["minicpm3"].config(2))
    wrapped = oracle.with_adapter(base, [f"model.layers.{target}"], rank=3)
    oracle.save(wrapped, tmp_path)
    executor = compiled.executor(base, {"a": str(tmp_path)}, latent_cache=True)
    sequences = prompts((40, 13))
    expected_loss, expected = oracle.loss_and_gradients(wrapped, sequences)
    runner = training_runner(executor.state, executor.adapters["a"], windows=True)
    examples, served = [Example(s, s) for s in sequences], executor.serving.runner.model
    loss = in_windows(runner, examples, sum(map(len, sequences)) - 2, lambda: 17, served)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    for path, parameter in runner.parameters.items():
        assert oracle.relative_error(parameter.grad, expected[path]) < TOLERANCE, path


def test_logits_of_kimis_delta_layers() -> None:
    case = case_of(KIMI_DELTA.name)
    names = [None, *case.wrapped]
    sequences = prompts((150, 40, 1, 97, 65))
    for logits, sequence, name in zip(
        case.executor.logits(sequences, names), sequences, names, strict=True
    ):
        expected = oracle.logits(case.model(name), sequence)
        assert oracle.relative_error(logits, expected) < TOLERANCE


def engine_of(executor: Executor, pages: int, limits: Limits) -> Engine:
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    return executor.engine(limits, kv_cache_bytes=pages * page_bytes)


def check_requests(case: Case, count: int, seed: int) -> set[Kind]:
    """Serve requests of the base and the adapters with little memory; what happened."""
    draw = Random(seed)
    executor = case.executor
    names = [None, *case.wrapped]
    own = prompts((13, 70, 1, 33, 20, 5, 90, 64))
    own += [
        own[-2][:cut] + tail for cut, tail in zip((66, 70, 80), prompts((3, 40, 9)), strict=True)
    ]
    kinds = [(prompt, draw.choice(names[:2])) for prompt in own]
    kinds += [(prompt, draw.choice(names)) for prompt in own]
    asked = [draw.choice(kinds) for _ in range(count)]
    expected = {
        (tuple(prompt), name): oracle.greedy(case.model(name), prompt, NEW)
        for prompt, name in kinds
    }
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    sizes = [executor.serving.tables.pages_of(a, page_bytes) for a in executor.adapters.values()]
    pages = pages_for(110 + NEW) + max(sizes) + 4
    engine = engine_of(executor, pages, Limits(running=5, tokens=48, least_chunk=3))
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    left, sent, done, found = list(asked), 0, 0, 0
    while left or not engine.is_idle:
        while left and draw.random() < 0.7:
            prompt, name = left.pop(0)
            adapter = None if name is None else executor.adapters[name]
            engine.submit(Request(tuple(prompt), params, adapter))
            sent += 1
        for chunk in engine.step():
            if chunk.completion is not None:
                prompt, name = asked[chunk.index]
                assert list(chunk.completion.token_ids) == expected[tuple(prompt), name]
                done, found = done + 1, found + chunk.completion.cached_tokens
        engine.check_integrity()
    assert sent == done == count
    assert found >= 64
    return {event.kind for event in engine.log}


@WITH_LATENT
def test_requests_that_are_preempted(name: str) -> None:
    assert Kind.PREEMPTED in check_requests(case_of(name), 40, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *LATENT])
def test_two_hundred_requests(name: str) -> None:
    assert Kind.PREEMPTED in check_requests(case_of(name), 200, seed=2)


@WITH_LATENT
def test_several_continuations_of_a_prompt(name: str) -> None:
    """The first one's states are copied where they part."""
    case = case_of(name)
    (prompt,) = prompts((37,))
    found = case.executor.generate(
        [prompt], "all-4", max_new_tokens=NEW, n=3, ignore_eos=True, temperature=0.0
    )
    expected = oracle.greedy(case.model("all-4"), prompt, NEW)
    assert [list(choice.token_ids) for choice in found] == [expected] * 3


@EVERY
def test_prompts_go_on_from_snapshots(name: str) -> None:
    """The second prompt leaves a snapshot where its prefix ends; a changed adapter drops it."""
    case = case_of(name)
    executor = case.executor
    engine = engine_of(executor, 96, Limits(running=16, tokens=150))
    head, *tails = prompts((70, 130, 125, 119, 100))
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    found = []
    for number, tail in enumerate(tails):
        if number == len(tails) - 1:
            executor.refresh_adapter("few-3")
        engine.submit(Request((*head, *tail), params, executor.adapters["few-3"]))
        chunks = run(engine)
        completion = chunks[-1].completion
        assert completion is not None
        assert list(completion.token_ids) == oracle.greedy(case.model("few-3"), [*head, *tail], NEW)
        found.append(completion.cached_tokens)
    assert found == [0, 0, 64, 0]


@EVERY
def test_memory_of_a_sequence(name: str) -> None:
    """Slots have the bytes of the formula, which explain counts for each sequence."""
    config = BY_NAME[name].config(3)
    executor = case_of(name).executor
    engine = engine_of(executor, 64, Limits(running=7))
    states = engine.device.cache.states
    assert states is not None
    types = [type_ for layer in recurrent_types(executor.program.base) for type_ in layer]
    formula = sum(prod(type_.features) * DTYPE_BYTES[type_.dtype] for type_ in types)
    assert formula == bytes_of_states(executor.program.base)
    assert states.size_bytes == (7 + snapshots_of(7)) * formula
    sizes = [
        pcg.explain(config, None, dtype="float32", batch=batch, seq=32).memory_bytes["kv_cache"]
        for batch in (1, 3)
    ]
    kv_bytes = sum(
        prod(type_.features) * DTYPE_BYTES[type_.dtype]
        for pair in kv_types(executor.program.base)
        for type_ in pair
    )
    assert sizes == [batch * (32 * kv_bytes + formula) for batch in (1, 3)]


def test_attention_behind_several_recurrent_layers() -> None:
    """Bamba's configuration has the indices of its layers with attention, 9, 18 and 27 of 32."""
    base = oracle.random_model(BY_NAME["bamba"].config(3, attn_layer_indices=[2]))
    (sequence,) = prompts((9,))
    found = compiled.executor(base).logits(sequence)
    assert oracle.relative_error(found, oracle.logits(base, sequence)) < TOLERANCE


def test_states_of_transformers_caches() -> None:
    """The states of Qwen3-Next's layers have the shapes of transformers' cache, but for its width.

    transformers keeps the last W inputs of a convolution, of which one is never read.
    """
    config = BY_NAME["qwen3_next"].config(2)
    model = oracle.random_model(config)
    out = model(torch.tensor(prompts((9,))), use_cache=True)
    layer = getattr(out, oracle.CACHE).layers[0]
    convolution, recurrence = recurrent_types(compiler.compile_program(config, None).base)[0]
    _, channels, taps = layer.conv_states[0].shape
    assert convolution.features == (taps - 1, channels)
    assert recurrence.features == layer.recurrent_states[0].shape[1:]


@pytest.mark.parametrize("sizes", [MeshSizes(tp=2), MeshSizes(pp=2)], ids=str)
@pytest.mark.parametrize("name", mostly_slow((*FAMILIES, *LATENT), "qwen3.5"))
def test_ranks(name: str, sizes: MeshSizes) -> None:
    """Parts of the states, which a split projection numbers anew, or those of some layers."""
    sequences, names = prompts((13, 40, 1, 33)), ["a", None, "b", "a"]
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    latent = name in LATENT
    alone = make_executor(make_program(name, 1, 4, latent_cache=latent), name)
    logits = alone.logits(sequences, names)
    tokens = [c.token_ids for c in alone.generate(sequences, names, **options)]
    alone.finetune(EXAMPLES, "b", **JOB)
    program = make_program(name, sizes.tp, 4, latent_cache=latent)

    def check(mesh: RankMesh) -> None:
        executor = make_executor(program, name, mesh)
        for found, expected in zip(executor.logits(sequences, names), logits, strict=True):
            assert oracle.relative_error(found, expected) < TOLERANCE
        found = executor.generate(sequences, names, **options)
        assert [completion.token_ids for completion in found] == tokens
        executor.finetune(EXAMPLES, "b", **JOB)
        check_same(executor.adapters["b"], alone.adapters["b"])

    run_mesh(sizes, check)


def test_prefix_tuning_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="prefix tuning over layers with recurrent state"):
        pcg.explain(BY_NAME["lfm2"].config(2), "prefix")
    executor = make_executor(make_program("lfm2", 1), "lfm2")
    with pytest.raises(AdapterError, match=r"no attention in layers.0 for prefix tuning; use LoRA"):
        executor.add_adapter("p", "prefix")


def test_ranks_that_share_sequences_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="cp=2: ranks would share the tokens"):
        pcg.explain(BY_NAME["lfm2"].config(2), "lora", cp=2)
    program = make_program("lfm2", 1)

    with pytest.raises(UnsupportedError, match="cp=2: ranks would share the tokens"):
        run_mesh(MeshSizes(cp=2), lambda mesh: make_executor(program, "lfm2", mesh))
