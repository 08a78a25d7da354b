"""Every family against transformers and peft: logits, greedy tokens, gradients, adapter files.

One executor serves all checks of a case. Its two adapters are made and saved by peft: one on all
linear modules, one on the family's usual targets, with other ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import pcg.compiler as compiler
from pcg.errors import PcgError, UnsupportedError
from pcg.explain import explain as explaining
from pcg.explain.report.report import Report
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import Checkpoint
from pcg.runtime.training.trainer.datum import Datum
from pcg.source import resolve
from tests.support import compiled, oracle
from tests.support.families import BY_NAME, FAMILIES, Family
from tests.support.measured_memory import BATCH, SEQ, measured
from tests.support.prompts import LENGTHS, TOLERANCE, prompts

ADAPTERS = ("all", None, "usual", None, "all")


@dataclasses.dataclass(frozen=True)
class Case:
    family: Family
    base: Any
    wrapped: Mapping[str, Any]
    saved: Path
    executor: Executor

    def model(self, adapter: str | None) -> Any:
        return self.base if adapter is None else self.wrapped[adapter]


SAMPLE = ("llama3", "gpt2", "gemma2", "falcon-40b", "mixtral", "mpt")
"""Families of which the default run checks all; of the others it checks what `EVERY` marks."""


def cases(of_default: Sequence[str]) -> list[Any]:
    """Return every family with 2 and 3 layers; the default run has some with 3 layers."""
    return [
        pytest.param(
            (family, layers),
            id=f"{family}-{layers}",
            marks=() if layers == 3 and family.name in of_default else pytest.mark.slow,
        )
        for family in FAMILIES
        for layers in (2, 3)
    ]


KINDS = (
    *SAMPLE, "bloom", "cohere", "deepseek_v3", "falcon_h1", "gemma4", "glm4_moe", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "gptj", "granite", "lfm2", "mamba2", "minicpm3", "olmo2", "opt", "phi3",
    "qwen2.5-windows", "qwen3", "qwen3.5", "stablelm-parallel", "starcoder2",
)  # fmt: skip
"""Families of the default run: one or two of each kind of layer."""
EVERY = pytest.mark.parametrize("case", cases(KINDS), indirect=True)
SOME = pytest.mark.parametrize("case", cases(SAMPLE), indirect=True)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, layers = request.param
    base = oracle.random_model(family.config(layers))
    wrapped = {
        "all": oracle.with_adapter(
            base, "all-linear", rank=4, excluded=family.excluded, parameters=family.parameters
        ),
        "usual": oracle.with_adapter(base, family.usual_targets, rank=3, seed=2),
    }
    saved = tmp_path_factory.mktemp("adapters")
    for name, model in wrapped.items():
        oracle.save(model, saved / name)
    executor = compiled.executor(base, {name: str(saved / name) for name in wrapped})
    return Case(family, base, wrapped, saved, executor)


def check_logits(case: Case, lengths: Sequence[int]) -> None:
    sequences = prompts(lengths)
    found = case.executor.logits(sequences, list(ADAPTERS))
    for logits, sequence, adapter in zip(found, sequences, ADAPTERS, strict=True):
        expected = oracle.logits(case.model(adapter), sequence)
        assert oracle.relative_error(logits, expected) < TOLERANCE


@EVERY
def test_logits_with_and_without_adapters_in_one_batch(case: Case) -> None:
    check_logits(case, (40,) * 5)


@SOME
def test_logits_of_a_ragged_batch(case: Case) -> None:
    check_logits(case, LENGTHS)


@SOME
def test_the_base_from_sharded_files(case: Case, tmp_path: Path) -> None:
    oracle.save_model(case.base, tmp_path, "20KB")
    source, program = resolve(tmp_path, weights=True), case.executor.program
    assert len(source.weight_files) > 1
    weights = Checkpoint.open(source, program.base_prefix, program.renamings)
    executor = compiler.make_executor(program, weights, None, None)
    for sequence in prompts((9, 1)):
        assert torch.equal(executor.logits(sequence), case.executor.logits(sequence))


@EVERY
def test_greedy_tokens_of_a_ragged_batch(case: Case) -> None:
    sequences = prompts(LENGTHS)
    completions = case.executor.generate(
        sequences, list(ADAPTERS), max_new_tokens=oracle.NEW_TOKENS, ignore_eos=True
    )
    expected = [
        oracle.greedy(case.model(adapter), sequence)
        for sequence, adapter in zip(sequences, ADAPTERS, strict=True)
    ]
    assert [list(completion.token_ids) for completion in completions] == expected


@EVERY
@pytest.mark.parametrize("adapter", ["all", pytest.param("usual", marks=pytest.mark.slow)])
def test_gradients_of_every_parameter(case: Case, adapter: str) -> None:
    sequences = prompts((40, 7, 13, 40, 37))
    runner = case.executor.training_runner(adapter)
    for parameter in runner.parameters.values():
        parameter.grad = None
    targets = sum(len(sequence) - 1 for sequence in sequences)
    loss = runner.forward_backward([Example(s, s) for s in sequences], targets)
    expected_loss, expected = oracle.loss_and_gradients(case.wrapped[adapter], sequences)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert runner.parameters.keys() == expected.keys()
    for name, parameter in runner.parameters.items():
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < TOLERANCE, name


@SOME
@pytest.mark.parametrize("adapter", ["all", "usual"])
def test_peft_reads_what_we_save(case: Case, adapter: str, tmp_path: Path) -> None:
    case.executor.save_adapter(adapter, tmp_path / "ours")
    theirs = load_file(case.saved / adapter / "adapter_model.safetensors")
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    (sequence,) = prompts((9,))
    reread = oracle.load_saved(case.base, tmp_path / "ours")
    expected = oracle.logits(case.wrapped[adapter], sequence)
    assert torch.equal(oracle.logits(reread, sequence), expected)


# ---------------------------------------------------------------------- adapters outside the layers

SITES = [
    pytest.param("llama3", ("lm_head", "q_proj"), marks=pytest.mark.slow),
    ("opt-projected", ("project_out", "fc1")),
    ("opt-projected", ("project_in", "q_proj")),
    ("opt-projected", ("project_in", "project_out", "fc1")),
]


@pytest.mark.parametrize(("name", "targets"), SITES)
def test_adapters_outside_the_layers_are_served(name: str, targets: tuple[str, ...]) -> None:
    base = oracle.random_model(BY_NAME[name].config(2))
    wrapped = oracle.with_adapter(base, targets, rank=4)
    executor = compiled.executor(base)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(targets)}
    adapter = executor.add_adapter("a", fields)
    oracle.copy_lora(adapter, wrapped)
    sequences, names = prompts((9, 4, 6)), ["a", None, "a"]
    models = [wrapped, base, wrapped]
    found = executor.logits(sequences, names)
    for logits, sequence, model in zip(found, sequences, models, strict=True):
        assert oracle.relative_error(logits, oracle.logits(model, sequence)) < TOLERANCE
    completions = executor.generate(sequences, names, max_new_tokens=8, ignore_eos=True)
    expected = [oracle.greedy(m, s, 8) for m, s in zip(models, sequences, strict=True)]
    assert [list(completion.token_ids) for completion in completions] == expected


def test_an_adapter_before_the_first_layer_is_finetuned() -> None:
    """OPT projects its embeddings where they are narrower than the layers."""
    base = oracle.random_model(BY_NAME["opt-projected"].config(2))
    targets = ("project_in", "q_proj")
    wrapped = oracle.with_adapter(base, targets, rank=4)
    executor = compiled.executor(base)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(targets)}
    executor.add_adapter("a", fields)
    runner = executor.training_runner("a")
    theirs = oracle.lora_parameters(wrapped)
    assert runner.parameters.keys() == theirs.keys()
    for path, parameter in theirs.items():
        runner.parameters[path].copy_(parameter.data)
    sequences = prompts((9, 4, 6))
    examples = [Example(s, s) for s in sequences]
    loss = runner.forward_backward(examples, runner.count_targets(examples))
    expected_loss, gradients = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    for path, parameter in runner.parameters.items():
        error = (parameter.grad - gradients[path]).norm() / gradients[path].norm()
        assert error < TOLERANCE, path


# ---------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("name", ["gpt2", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_fp64(name: str) -> None:
    """Families whose norms transformers computes in the weights' dtype; RMSNorm it does in fp32."""
    base = oracle.random_model(BY_NAME[name].config(2), torch.float64)
    executor = compiled.executor(base, dtype="float64")
    wrapped = oracle.with_adapter(base, "all-linear", rank=4)
    adapter = executor.add_adapter("a", {"peft_type": "LORA", "r": 4, "lora_alpha": 8,
                                         "target_modules": "all-linear"})  # fmt: skip
    wrapped.double()
    oracle.copy_lora(adapter, wrapped)
    sequences = prompts((13, 7, 13, 4))
    for logits, sequence in zip(executor.logits(sequences), sequences, strict=True):
        assert logits.dtype == torch.float64
        assert oracle.relative_error(logits, oracle.logits(base, sequence)) < 1e-10
    runner = executor.training_runner("a")
    targets = sum(len(sequence) - 1 for sequence in sequences)
    loss = runner.forward_backward([Example(s, s) for s in sequences], targets)
    expected_loss, expected = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    for path, parameter in runner.parameters.items():
        assert (parameter.grad - expected[path]).norm() < 1e-10 * expected[path].norm(), path


@pytest.mark.parametrize(
    "name",
    [
        "falcon-7b",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama3", "gemma2", "olmo2", "cohere-qk_norm", "gptj")
        ),
    ],
)
def test_bf16_is_as_close_to_fp32_as_transformers_is(name: str) -> None:
    config = BY_NAME[name].config(2)
    exact = oracle.random_model(config)
    rounded = oracle.random_model(config, torch.bfloat16)
    for parameter, source in zip(exact.parameters(), rounded.parameters(), strict=True):
        parameter.data.copy_(source.data)
    executor = compiled.executor(rounded)
    for sequence in prompts((13, 9)):
        truth = oracle.logits(exact, sequence)
        theirs = oracle.logits(rounded, sequence).float()
        ours = executor.logits(sequence)
        assert ours.dtype == torch.bfloat16
        error = (ours.float() - truth).norm() / truth.norm()
        assert error < 1.25 * (theirs - truth).norm() / truth.norm()


# ------------------------------------------------------------------------------------- saved models


@dataclass(frozen=True)
class Form:
    """How a model is saved: its dtype, the bytes of a file, and whether the head is tied.

    Attributes:
        tolerance: relative error of logits that rounding explains.
    """

    dtype: torch.dtype
    shard: str
    is_tied: bool | None
    tolerance: float


FORMS = {
    "sharded": Form(torch.float32, "20KB", None, TOLERANCE),
    "bfloat16": Form(torch.bfloat16, "5GB", None, 2e-2),
    "tied": Form(torch.float16, "20KB", True, 4e-3),
    "untied": Form(torch.float32, "5GB", False, TOLERANCE),
}
SAVED_BY_DEFAULT = ("gpt2-sharded", "gpt2-tied", "gpt_neox-untied", "llama3.2-untied")
"""Cases of the default run; the others run in the slow one."""
SAVED = [
    pytest.param(
        family,
        form,
        id=f"{family}-{form}",
        marks=() if f"{family}-{form}" in SAVED_BY_DEFAULT else pytest.mark.slow,
    )
    for family in FAMILIES
    for form in FORMS
]


@pytest.mark.parametrize(("family", "form"), SAVED)
def test_logits_of_a_saved_model(family: Family, form: str, tmp_path: Path) -> None:
    saved = FORMS[form]
    changes = {} if saved.is_tied is None else {"tie_word_embeddings": saved.is_tied}
    model = oracle.random_model(family.config(2, **changes), saved.dtype)
    oracle.save_model(model, tmp_path, saved.shard)
    executor = compiled.executor(tmp_path)
    reread = _reread(tmp_path, model)
    for sequence in prompts(LENGTHS):
        expected = oracle.logits(reread, sequence)
        found = executor.logits(sequence)
        assert found.dtype is expected.dtype
        assert oracle.relative_error(found.float(), expected.float()) < saved.tolerance


def _reread(directory: Path, model: Any) -> Any:
    """The model that transformers reads, with the attention of the one that was saved."""
    attention = model.config._attn_implementation
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", attn_implementation=attention
    )
    return loaded.eval()


# ---------------------------------------------------------------------------------- memory budgets

LAYERS = 4
BUDGETS = (0.0, 0.4)
SAMPLE = ("llama3", "opt", "gemma2", "falcon-40b")


def recipe_of(family: Family, targets: str | tuple[str, ...]) -> LoraConfig:
    excluded = tuple(family.excluded) or None
    return LoraConfig(r=4, target_modules=targets, exclude_modules=excluded)


def planned(
    family: Family, dtype: torch.dtype, targets: str | tuple[str, ...], budget: float
) -> tuple[Executor, Report]:
    recipe = recipe_of(family, targets)
    options: dict[str, Any] = {"memory_budget": budget, "batch": BATCH, "seq": SEQ}
    model = oracle.random_model(family.config(LAYERS), dtype)
    executor = compiled.executor(model, {"a": recipe}, is_own=True, **options)
    name = str(dtype).removeprefix("torch.")
    report = explaining.explain(model.config.to_dict(), recipe, dtype=name, **options)
    return executor, report


def check_kept(
    family: Family, dtype: torch.dtype, targets: str | tuple[str, ...], budget: float
) -> None:
    executor, report = planned(family, dtype, targets, budget)
    (stage,) = [stage for stage in report.activations if stage.stage == "compressed"]
    assert stage.bytes == measured(executor)
    corners = [point for point in report.pareto if not point.restored]
    assert (stage.recompute_flops_ratio == 0) == (len(corners) == 1)


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        pytest.param(name, budget, marks=() if (name, budget) == ("opt", 0.0) else pytest.mark.slow)
        for name in SAMPLE
        for budget in BUDGETS
    ],
)
def test_a_budget_keeps_what_is_predicted(name: str, budget: float) -> None:
    check_kept(BY_NAME[name], torch.bfloat16, "all-linear", budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_keeps_what_is_predicted(
    family: Family, dtype: torch.dtype, budget: float
) -> None:
    check_kept(family, dtype, family.usual_targets, budget)


def gradients(executor: Executor, sequences: list[list[int]]) -> dict[str, Tensor]:
    runner = executor.training_runner("a")
    for parameter in runner.parameters.values():
        parameter.grad = None
    targets = sum(len(sequence) - 1 for sequence in sequences)
    runner.forward_backward([Example(s, s) for s in sequences], targets)
    return {name: parameter.grad.clone() for name, parameter in runner.parameters.items()}


def check_gradients(family: Family) -> None:
    base = oracle.random_model(family.config(LAYERS))
    wrapped = oracle.with_adapter(base, "all-linear", rank=4, excluded=family.excluded)
    sequences = prompts((40, 7, 13))
    _, expected = oracle.loss_and_gradients(wrapped, sequences)
    recipe = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        exclude_modules=tuple(family.excluded) or None,
    )
    for budget in (1.0, *BUDGETS):
        executor = compiled.executor(base, {"a": recipe}, memory_budget=budget)
        adapter = executor.adapters["a"]
        oracle.copy_lora(adapter, wrapped)
        found = gradients(executor, sequences)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < TOLERANCE, (budget, name)
        if budget == 1.0:
            first = found
        # What is made again is made by the same operators from the same numbers.
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "opt" else pytest.mark.slow) for n in SAMPLE]
)
def test_gradients_are_the_same_at_every_budget(name: str) -> None:
    check_gradients(BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_gradients_of_every_family_are_the_same_at_every_budget(family: Family) -> None:
    check_gradients(family)


def test_layers_mix_plans() -> None:
    """Between two plans, early layers make more again than late ones, and never the other way."""
    family = BY_NAME["llama3"]
    executor, report = planned(family, torch.float32, "all-linear", 0.5)
    training = executor.program.training
    assert training is not None
    kept = [len(training.plans[index].saved) for index in training.layers[1:]]
    assert kept == sorted(kept)
    assert len(set(kept)) > 1
    sizes = [point.bytes for point in report.pareto]
    ratios = [point.recompute_flops_ratio for point in report.pareto]
    assert all(a > b for a, b in itertools.pairwise(sizes))
    assert all(a < b for a, b in itertools.pairwise(ratios))


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_longrope_up_to_the_positions_of_its_short_factors(kind: str, tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 1.9, 2.1, 2.3],
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 32,
    }
    if kind == "phimoe":
        rope |= {"short_mscale": 1.2, "long_mscale": 1.3}
    fields = {"rope_scaling": rope, "original_max_position_embeddings": 32, "model_type": kind}
    base = oracle.random_model(BY_NAME["phi3"].config(2, **fields))
    oracle.save_model(base, tmp_path)
    executor = compiler.compile(str(tmp_path))
    sequence, longer = prompts((32, 33))
    expected = oracle.logits(base, sequence)
    assert oracle.relative_error(executor.logits(sequence), expected) < TOLERANCE
    assert executor.max_positions == 32
    with pytest.raises(PcgError, match="32 positions"):
        executor.generate([longer], max_new_tokens=1)
    with pytest.raises(UnsupportedError, match="33 tokens; beyond 32, the model has other rotary"):
        executor.logits(longer)
    with pytest.raises(UnsupportedError, match="rotary frequencies that change with the length"):
        compiler.compile(base)


@pytest.mark.parametrize(
    "kind", ["roberta", pytest.param("roberta-prelayernorm", marks=pytest.mark.slow)]
)
def test_roberta_counts_positions_from_its_padding_token(kind: str) -> None:
    fields = {
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 96,
        "is_decoder": True,
        "max_position_embeddings": 66,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 2,
        "vocab_size": 128,
    }
    base = oracle.random_model(fields)
    wrapped = oracle.with_adapter(base, "all-linear", rank=4)
    recipe = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    executor = compiler.compile(base, {"a": recipe})
    oracle.copy_lora(executor.adapters["a"], wrapped)
    executor.refresh_adapter("a")
    assert executor.max_positions == 63
    sequences = prompts((63, 13, 1))
    for sequence, logits in zip(sequences, executor.logits(sequences, "a"), strict=True):
        expected = oracle.logits(wrapped, sequence)
        assert oracle.relative_error(logits, expected) < TOLERANCE
    completion = executor.generate([sequences[1]], "a", max_new_tokens=32, ignore_eos=True)[0]
    assert list(completion.token_ids) == oracle.greedy(wrapped, sequences[1])
    _, expected_gradients = oracle.loss_and_gradients(wrapped, sequences[:2])
    for name, gradient in gradients(executor, sequences[:2]).items():
        error = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()
        assert error < TOLERANCE, name
    padded = [*sequences[1], 2, 5]
    for refused in (
        lambda: executor.logits(padded),
        lambda: executor.generate([padded], max_new_tokens=1),
        lambda: executor.finetune([Example(padded, padded)], "a", progress=False),
        lambda: executor.trainer("b", peft=recipe).forward_backward([Datum(padded)]),
    ):
        with pytest.raises(PcgError, match="has the padding token 2, to which this model gives"):
            refused()
