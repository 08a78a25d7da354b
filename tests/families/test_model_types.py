"""Model types beyond the named families, by transformers and peft: tokens, gradients, ranks, bytes.

Adapters of all linear modules leave out those that no logit depends on, as indexers of attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import pcg.compiler as compiler
from pcg.explain import explain as explaining
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import Checkpoint
from pcg.runtime.training.runner import training_runner
from pcg.source import resolve
from tests.peft.test_fp64 import in_windows
from tests.support import oracle
from tests.support.architectures import IN_OUT, default_config
from tests.support.measured_memory import BATCH, SEQ, measured
from tests.support.parameters import mostly_slow
from tests.support.prompts import LENGTHS, TOLERANCE, prompts
from tests.support.threads import run_ranks, tp_mesh

KINDS = (
    "axk2", "dbrx", "deepseek_v32", "diffllama", "doge", "dots3_note_text", "glm_moe_dsa", "hy_v4",
    "jetmoe", "lara_mini", "llama4_text", "minimax", "minimax_m3_vl_text", "recurrent_gemma",
    "sarvam_moe", "xmod", "zamba", "zamba2", "zaya",
)  # fmt: skip
DEFAULT = ("llama4_text",)
EVERY = pytest.mark.parametrize("kind", mostly_slow(KINDS, *DEFAULT))
SLOW = pytest.mark.parametrize("kind", mostly_slow(KINDS))
USED = ("all-4", None, "few-3", "all-2", "few-8")
NEW = 12


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with four adapters; `saved` holds both."""

    base: Any
    wrapped: Mapping[str, Any]
    executor: Executor
    saved: Path

    def model(self, adapter: str | None) -> Any:
        return self.base if adapter is None else self.wrapped[adapter]


_FOLDERS: list[TemporaryDirectory[str]] = []


@cache
def case_of(kind: str) -> Case:
    base = oracle.random_model(default_config(kind))
    _FOLDERS.append(TemporaryDirectory())
    saved = Path(_FOLDERS[-1].name)
    oracle.save_model(base, saved)
    executor = compiler.compile(str(saved))
    linear = {n for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)}
    sites = [n for n in executor.program.base.linear_modules() if n in linear - {"lm_head"}]
    # peft takes gate and up of mixtures together alone.
    alone = [site for site in sites if not site.endswith((".gate_proj", ".up_proj"))]
    targets = {"all": sites, "few": alone[::3]}
    wrapped = {}
    for name in (name for name in USED if name is not None):
        of, rank = name.split("-")
        options: dict[str, Any] = {"rank": int(rank), "seed": len(wrapped)}
        parameters = IN_OUT.get(kind, ()) if of == "all" else ()
        wrapped[name] = oracle.with_adapter(base, targets[of], parameters=parameters, **options)
        oracle.save(wrapped[name], saved / name)
        executor.add_adapter(name, str(saved / name))
    return Case(base, wrapped, executor, saved)


@EVERY
def test_logits_and_greedy_tokens_of_a_mixed_batch(kind: str) -> None:
    case, sequences = case_of(kind), prompts(LENGTHS)
    found = case.executor.logits(sequences, list(USED))
    for logits, sequence, adapter in zip(found, sequences, USED, strict=True):
        expected = oracle.logits(case.model(adapter), sequence)
        assert oracle.relative_error(logits, expected) < TOLERANCE
    completions = case.executor.generate(sequences, list(USED), max_new_tokens=NEW, ignore_eos=True)
    expected_tokens = [
        oracle.greedy(case.model(adapter), sequence, NEW)
        for sequence, adapter in zip(sequences, USED, strict=True)
    ]
    assert [list(completion.token_ids) for completion in completions] == expected_tokens


@EVERY
@pytest.mark.parametrize("adapter", ["all-4", "few-3"])
def test_gradients_of_windows(kind: str, adapter: str) -> None:
    case, sequences = case_of(kind), prompts((40, 7, 1, 33))
    expected_loss, expected = oracle.loss_and_gradients(case.wrapped[adapter], sequences)
    examples = [Example(s, s) for s in sequences]
    targets = sum(len(s) - 1 for s in sequences)
    executor, draw = case.executor, Random(kind)
    for sizes in ((1, 2, 3, 7, 17), (1, 40)):
        runner = training_runner(executor.state, executor.adapters[adapter], windows=True)
        for parameter in runner.parameters.values():
            parameter.grad = None
        served = executor.serving.runner.model
        loss = in_windows(runner, examples, targets, lambda s=sizes: draw.choice(s), served)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert runner.parameters.keys() == expected.keys()
        for path, parameter in runner.parameters.items():
            error = (parameter.grad - expected[path]).norm() / expected[path].norm()
            assert error < TOLERANCE, (path, sizes)


@SLOW
def test_saved_bytes_are_those_predicted(kind: str) -> None:
    config, recipe = default_config(kind), LoraConfig(r=4, target_modules="all-linear")
    options: dict[str, Any] = {"batch": BATCH, "seq": SEQ}
    executor = compiler.compile(oracle.random_model(config), {"a": recipe}, **options)
    report = explaining.explain(config, recipe, dtype="float32", **options)
    (stage,) = [stage for stage in report.activations if stage.stage == "compressed"]
    assert stage.bytes == measured(executor)


@SLOW
def test_two_ranks(kind: str) -> None:
    case, sequences = case_of(kind), prompts(LENGTHS)
    peft = {name: str(case.saved / name) for name in case.wrapped}
    expected = case.executor.logits(sequences, list(USED))
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    tokens = [c.token_ids for c in case.executor.generate(sequences, list(USED), **options)]
    program = compiler.compile_program(str(case.saved), tp=2)
    source = resolve(case.saved, weights=True)

    def check(ranks: Any) -> None:
        weights = Checkpoint.open(source, program.base_prefix, program.renamings)
        executor = compiler.make_executor(program, weights, peft, None, "cpu", tp_mesh(ranks))
        for found, logits in zip(executor.logits(sequences, list(USED)), expected, strict=True):
            assert oracle.relative_error(found, logits) < TOLERANCE
        found = executor.generate(sequences, list(USED), **options)
        assert [completion.token_ids for completion in found] == tokens

    run_ranks(2, check)


@SLOW
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # beyond the rows
def test_triton_programs(kind: str) -> None:
    """Of adapters and the base in one batch, in the interpreter."""
    case, sequences, names = case_of(kind), prompts((5, 3)), ("all-4", None)
    executor = compiler.compile(str(case.saved), backend="triton")
    executor.add_adapter("all-4", str(case.saved / "all-4"))
    found = executor.logits(sequences, list(names))
    for logits, sequence, adapter in zip(found, sequences, names, strict=True):
        assert (
            oracle.relative_error(logits, oracle.logits(case.model(adapter), sequence)) < TOLERANCE
        )
