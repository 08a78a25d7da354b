"""Predicted against measured: what pcg's own training program keeps for backward, to the byte."""

from __future__ import annotations

import pytest
import torch
from sympy import sympify

from pcg.explain import explain as explaining
from pcg.formats import native
from pcg.ir.operators import operator
from pcg.ir.program import saved_memory
from pcg.ir.types import CONTEXT, TOKENS
from pcg.kernels.torch import attention_math, host_kernels
from pcg.parallel.costs import operator_profiler
from pcg.parallel.costs.operator_profiler import Grid, cases
from pcg.peft.lora import LoraConfig
from tests.support import compiled, oracle
from tests.support.families import BY_NAME, FAMILIES, Family
from tests.support.interpreter import bf16
from tests.support.live_memory import peak_of
from tests.support.measured_memory import BATCH, SEQ, Step, drawn_step, measured, peak_error
from tests.support.parameters import mostly_slow

bf16.install()
FAST = ("llama3", "gpt2", "falcon-40b")


def check(
    family: Family, dtype: torch.dtype, targets: str | tuple[str, ...], backend: str = "torch"
) -> None:
    recipe = LoraConfig(r=4, target_modules=targets, exclude_modules=tuple(family.excluded) or None)
    base = oracle.random_model(family.config(3), dtype)
    executor = compiled.executor(base, {"a": recipe}, backend=backend)
    name = str(dtype).removeprefix("torch.")
    report = explaining.explain(base.config.to_dict(), recipe, batch=BATCH, seq=SEQ, dtype=name)
    (kept,) = [stage for stage in report.activations if stage.stage == "compressed"]
    assert kept.bytes == measured(executor)
    # A tensor that two layers share, one's output and the other's input, has two rows.
    rows = [row for row in report.saved if row.decision in ("save", "compress")]
    assert sum(row.bytes * row.layers for row in rows) >= kept.bytes


@pytest.mark.parametrize(
    ("name", "dtype", "budget"),
    [
        pytest.param(
            *(name, dtype, budget), marks=() if (place, turn) == (1, 3) else pytest.mark.slow
        )
        for place, name in enumerate(["llama3", "opt", "gpt_neox", "gemma2"])
        for turn, (dtype, budget) in enumerate(
            [("float32", 0.0), ("bfloat16", 0.5), ("bfloat16", 1.0), ("float32", 1.0)]
        )
    ],
)
def test_the_peak_of_a_step_is_predicted(name: str, dtype: str, budget: float) -> None:
    assert abs(peak_error(BY_NAME[name], dtype, budget)) < 0.03


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("nf4", "float32"), ("int8", "bfloat16"), ("mxfp4", "bfloat16"), ("q4_1", "float32")],
)
def test_the_peak_of_a_step_over_a_quantized_base_is_predicted(
    quantization: str, dtype: str
) -> None:
    if quantization == "int8" and not native.is_native(torch.device("cpu")):
        pytest.skip("PyTorch multiplies integers by copies in fp32")
    for budget in (1.0, 0.5):
        error = peak_error(BY_NAME["llama3"], dtype, budget, quantization=quantization)
        assert abs(error) < 0.03


@pytest.mark.parametrize("name", ["gemma2", pytest.param("mistral-window", marks=pytest.mark.slow)])
def test_the_peak_of_a_step_of_attention_in_blocks_is_predicted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention_math, saved_memory):
        monkeypatch.setattr(module, "BLOCK_BYTES", 2_000_000)
    recipe = LoraConfig(r=4, target_modules=("q_proj",))
    config = BY_NAME[name].config(2) | {"max_position_embeddings": 2048}
    error = Step(config, recipe, "float32", 1.0, batch=1, seq=1024).peak_error()
    assert -0.01 < error < 0.05  # a block's mask takes a row less than its limit


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", [5_000_000, pytest.param(8_000_000, marks=pytest.mark.slow)])
def test_the_peak_of_a_step_whose_layers_share_inputs_is_predicted(size_bytes: int) -> None:
    assert abs(peak_error(BY_NAME["llama3"], "float32", size_bytes, layers=16)) < 0.03


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 1 else pytest.mark.slow) for n in range(60)]
)
def test_the_peak_of_any_step_is_predicted(seed: int) -> None:
    step, error = drawn_step(seed)
    assert abs(error) < 0.03, step


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_temporaries_of_every_kernel_are_those_of_the_operator_table(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the cases of profiles: every operator of a training step has one, or makes views.

    What is predicted may be more, where an operator's fullest moment is before its output. Native
    norms have no temporaries.
    """
    if dtype == "bf16" and not torch.cpu._is_avx512_supported():
        pytest.skip("PyTorch copies bf16 matrices for products on this processor")
    monkeypatch.setattr(host_kernels, "_is_read", lambda x: False)
    tokens = 512
    # Each token chooses the same two experts: no expert has more rows.
    same = torch.arange(2).expand(tokens, 2)
    drawn = operator_profiler._random
    monkeypatch.setattr(
        operator_profiler,
        "_random",
        lambda type_, *rest: (
            same if type_.shape[1:] == (2,) and not type_.is_float else drawn(type_, *rest)
        ),
    )
    for case in cases(Grid((tokens,), (128,), (8,), 512, 0.0), dtype, "f32"):
        entry = operator(case.op)
        outputs = entry.infer(case.inputs, case.attributes)
        made = () if entry.is_view else outputs
        sizes = [sum(t.size_bytes for t in of) for of in (case.inputs, made)]
        sizes.append(entry.temporaries(case.inputs, outputs, case.attributes))
        read, written, scratch = (sympify(s).subs({TOKENS: tokens, CONTEXT: tokens}) for s in sizes)
        with torch.no_grad():
            found = peak_of(operator_profiler._call(case, tokens, torch.device("cpu")))
        error = (written + scratch - found) / (read + written + scratch)
        # The copy of logits within torch.logsumexp is seen by nobody.
        most = 1.0 if case.op == "cross_entropy_part" else 0.2
        assert -0.05 < error < most, (case, found)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", mostly_slow(FAST, "gpt2"))
def test_a_family_keeps_what_is_predicted(name: str, backend: str) -> None:
    check(BY_NAME[name], torch.bfloat16, "all-linear", backend)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_family_keeps_what_is_predicted(family: Family, dtype: torch.dtype) -> None:
    check(family, dtype, family.usual_targets)
