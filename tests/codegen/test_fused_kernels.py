"""Kernels written from groups: whole programs in the interpreter, and their machine code.

What transformers and peft give is the truth; half precision is as near to fp32 as transformers is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pcg.compiler as compiler
from pcg.codegen.group_kernel import group_kernel
from pcg.codegen.tile_kernel import arguments_of, deferred_numbers
from pcg.ir.analysis.kernel_group import KernelGroup, items_of
from pcg.ir.program.program import python_name
from pcg.runtime.data.example import Example
from tests.support import compiled as programs
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import Code, Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized
from tests.support.kernel_graphs import EVERY, graphs, lowered
from tests.support.parameters import mostly_slow
from tests.support.prompts import prompts

bf16.install()


@pytest.mark.parametrize("name", mostly_slow(EVERY, "gpt_neox", "mixtral", "mpt"))
def test_logits_and_gradients_are_those_of_transformers_and_peft(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    base = oracle.random_model(family.config(2))
    wrapped = oracle.with_adapter(base, "all-linear", rank=4, excluded=family.excluded)
    oracle.save(wrapped, tmp_path / "a")
    adapters = {"a": str(tmp_path / "a")}
    executor = programs.executor(base, adapters, is_own=True, backend="triton")
    sequences, adapters = prompts((13, 7, 9)), [None, "a", "a"]
    with sanitized():
        found = executor.logits(sequences, adapters)
    for logits, sequence, adapter in zip(found, sequences, adapters, strict=True):
        expected = oracle.logits(base if adapter is None else wrapped, sequence)
        assert oracle.relative_error(logits, expected) < 1e-5
    runner = executor.training_runner("a")
    targets = sum(len(sequence) - 1 for sequence in sequences)
    with sanitized():
        loss = runner.forward_backward([Example(s, s) for s in sequences], targets)
    expected_loss, gradients = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for path, parameter in runner.parameters.items():
        error = (parameter.grad - gradients[path]).norm() / gradients[path].norm()
        assert error < 1e-5, path


@pytest.mark.parametrize("name", mostly_slow(["llama3", "gemma2", "olmo2", "gptj"]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_close_to_fp32_as_transformers_is(
    name: str, dtype: torch.dtype
) -> None:
    config = BY_NAME[name].config(2)
    exact, rounded = oracle.random_model(config), oracle.random_model(config, dtype)
    for parameter, source in zip(exact.parameters(), rounded.parameters(), strict=True):
        parameter.data.copy_(source.data)
    executor = programs.executor(rounded, backend="triton")
    for sequence in prompts((13, 9)):
        truth = oracle.logits(exact, sequence)
        theirs = oracle.logits(rounded, sequence).float()
        ours = executor.logits(sequence)
        assert ours.dtype == dtype
        error = (ours.float() - truth).norm() / truth.norm()
        assert error < 1.25 * (theirs - truth).norm() / truth.norm()


@pytest.mark.parametrize("name", ["gpt_neox", "opt"])
def test_fp64_is_computed_in_fp64(name: str) -> None:
    base = oracle.random_model(BY_NAME[name].config(2), torch.float64)
    executor = programs.executor(base, backend="triton")
    for sequence in prompts((13, 9)):
        error = oracle.relative_error(executor.logits(sequence), oracle.logits(base, sequence))
        assert error < 1e-12


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_an_adapter_in_fp64(name: str) -> None:
    base = oracle.random_model(BY_NAME[name].config(2), torch.float64)
    executor = programs.executor(base, backend="triton")
    wrapped = oracle.with_adapter(base, "all-linear", rank=4)
    recipe = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    adapter = executor.add_adapter("a", recipe)
    for path, parameter in oracle.lora_parameters(wrapped).items():
        module, _, kind = path.rpartition(".")
        weights = adapter.weights[module]
        parameter.data = parameter.data.double()
        (weights.a if kind == "lora_A" else weights.b).copy_(parameter.data)
    sequences = prompts((13, 7, 4))
    for sequence in sequences:
        expected_logits = oracle.logits(wrapped, sequence)
        found = executor.logits(sequence, "a")
        assert oracle.relative_error(found, expected_logits) < 1e-12
    runner = executor.training_runner("a")
    targets = sum(len(sequence) - 1 for sequence in sequences)
    loss = runner.forward_backward([Example(s, s) for s in sequences], targets)
    expected_loss, expected = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    for path, parameter in runner.parameters.items():
        assert (parameter.grad - expected[path]).norm() < 1e-10 * expected[path].norm(), path


# ------------------------------------------------------------------------------- machine code

HEADER = """
import triton
import triton.language as tl

from pcg.kernels.triton import ops as K


"""
POINTERS = {"bf16": "*bf16", "f32": "*fp32", "i64": "*i64", "u8": "*u8"}


DEFERRED = {"by_token": "*i32", "s": "*fp32", "memory": "*bf16", "rows": "*i64", "ranks": "*i32"}
"""Tables of LoRA that a kernel adds itself, and the types of what they hold."""
PARTS = 16
"""The most parts of the sums that it reads."""


def kernels(model: str, peft: str | None = None) -> Iterator[Kernel]:
    """The different kernels of a model's programs, with a cache in pages.

    With `peft`, those of serving that add its LoRA.
    """
    options = {} if peft is None else {"peft": peft, "backend": "triton"}
    program = compiler.compile_program(model, dtype="bfloat16", **options)
    seen = set()
    for graph in graphs(program) if peft is None else program.serving.model.graphs:
        for item in items_of(lowered(graph)):
            if not isinstance(item, KernelGroup):
                continue
            made = group_kernel(item, "fused")
            if made.source in seen:
                continue
            seen.add(made.source)
            if peft is not None and not item.deferred:
                continue
            signature = dict.fromkeys(arguments_of(item), "i32")
            constants: dict[str, object] = {"PAGE": 16} if made.appends else {}
            for value in (*made.inputs, *made.outputs):
                type_, name = item.graph.types[value], python_name(value)
                if value in item.deferred:
                    signature |= {f"{name}_{key}_ptr": of for key, of in DEFERRED.items()}
                    constants[f"{name}_PARTS"] = PARTS
                else:
                    signature[f"{name}_ptr"] = POINTERS[type_.dtype]
            if made.appends:
                signature["slots_ptr"] = "*i64"
            warps = re.search(r"warps=(\d+)", made.source)
            assert warps is not None
            if item.parts:
                counts = ["tokens", *(f"first_{i}" for i in range(1, len(item.parts)))]
            else:
                counts = ["rows"]
                block = re.search(r"block=\((\d+), (\d+)\)", made.source)
                assert block is not None
                constants |= {"ROWS": int(block[1]), "COLUMNS": int(block[2])}
            yield Kernel(
                f"{HEADER}{made.source}\n",
                made.name,
                {**signature, **dict.fromkeys(counts, "i32")},
                constants,
                odd=[*counts, *deferred_numbers(item)],
                warps=int(warps[1]) if peft is None else min(32, 2 * int(warps[1])),
            )


def check(model: str, architectures: tuple[int, ...], peft: str | None = None) -> list[Code]:
    """Compile all; nothing spills, and rows are loaded and stored by 16 bytes."""
    asked = list(kernels(model, peft))
    found = compiled(asked, architectures)
    for code, kernel in zip(found, (k for k in asked for _ in architectures), strict=True):
        # Of two programs at a time; for few tokens a processor has one.
        code.check_in_registers(128 if peft is None else 65536 // (32 * kernel.warps))
        assert code.shared_bytes <= 48 * 1024
        if peft is not None:
            assert code.count("LDG", "128") >= 8 * kernel.module.count("= K.deferred_rows(")
            assert code.count("STG") == code.count("STG", "128"), kernel.module
        elif "rotary_emb" not in kernel.module:  # a few columns for each token
            assert code.count("STG") == code.count("STG", "128"), kernel.module
            # Tokens' rows of the cache are numbers; the weights of a head's norm are 256 bytes for
            # a whole tile.
            slots = code.count("LDG", "64") if "PAGE" in kernel.constants else 0
            norms = 2 * kernel.module.count("= rms_norm")  # and backward
            assert code.count("LDG") - slots <= code.count("LDG", "128") + norms, kernel.module
    return found


@pytest.mark.slow
def test_machine_code_of_llama() -> None:
    assert len(check("meta-llama/Llama-3.1-8B", (90,))) > 8


def test_machine_code_of_kernels_that_add_lora() -> None:
    """Their loads of B are as wide as those of tokens."""
    found = check("meta-llama/Llama-3.1-8B", (90,), "lora")
    assert len(found) == 5  # two norms, rotation, activation; and the norm behind the layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "facebook/opt-6.7b", "mosaicml/mpt-7b"]
)
def test_machine_code_of_other_models(model: str) -> None:
    check(model, (80, 90))
