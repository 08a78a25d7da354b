"""Measure how far off gradients are with saved activations in 8 bits, beside bf16's own rounding.

    python benchmarks/bench_lossy.py [--batch 2] [--sequence 256] [--steps 100]

A random Llama of 4 layers with LoRA on every projection, and on down_proj alone. Weights are bf16
numbers, so that each dtype computes the same function. `relative_error` is the Frobenius norm of a
gradient's difference to transformers + peft in fp64, by that gradient's, for each of the adapter's
matrices: the mean and the greatest over the layers. `losses` are those of AdamW's steps on the same
random sequences. `saved_mib` are the bytes saved for backward, as `pcg explain` accounts for them.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import write
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import pcg

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {"every projection": PROJECTIONS, "down_proj": ["down_proj"]}
CONTENDERS: dict[str, tuple[torch.dtype, str | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "bf16 and fp8": (torch.bfloat16, "fp8"),
    "fp64 and fp8": (torch.float64, "fp8"),
}
VOCABULARY = 1024


def random_llama() -> torch.nn.Module:
    """Return a Llama of 4 layers and hidden size 512 with random weights, numbers of bf16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model.to(torch.bfloat16).to(torch.float64).eval()


def peer(model: torch.nn.Module, recipe: LoraConfig) -> torch.nn.Module:
    """Return the model wrapped by peft in fp64, with an adapter of random fp32 numbers."""
    wrapped = get_peft_model(copy.deepcopy(model), recipe).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in trained(wrapped).values():
        parameter.data = (0.02 * torch.randn(parameter.shape, generator=generator)).double()
    return wrapped


def trained(wrapped: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the adapter's parameters by pcg's names."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }


def runner_of(
    model: torch.nn.Module, recipe: LoraConfig, contender: str, like: torch.nn.Module
) -> Any:
    """Return pcg's runner of a training step, with the peer's adapter."""
    dtype, lossy = CONTENDERS[contender]
    copied = copy.deepcopy(model).to(dtype)
    runner = pcg.compile(copied, {"a": recipe}, lossy_activations=lossy).training_runner("a")
    for name, parameter in trained(like).items():
        runner.parameters[name].data.copy_(parameter.data)
    return runner


def relative_errors(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, dict[str, float]]:
    """Return the mean and the greatest error over the layers, by module and matrix."""
    by_matrix: dict[str, list[float]] = {}
    for name, exact in expected.items():
        error = float((found[name].double() - exact).norm() / exact.norm())
        by_matrix.setdefault(" ".join(name.split(".")[-2:]), []).append(error)
    return {
        matrix: {"mean": rounded(sum(each) / len(each)), "greatest": rounded(max(each))}
        for matrix, each in by_matrix.items()
    }


def rounded(number: float) -> float:
    """Return the number with three digits."""
    return float(f"{number:.3g}")


def losses_of(step: Callable[[], float], parameters: list[torch.Tensor], steps: int) -> list[float]:
    """Return the losses of AdamW's steps."""
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    found = []
    for _ in range(steps):
        found.append(step())
        optimizer.step()
        optimizer.zero_grad()
    return found


def main() -> None:
    """Measure every contender and write the result file."""
    from pcg.runtime.data.example import Example

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shape = (arguments.batch, arguments.sequence)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))
    examples = [Example(row, row) for row in ids.tolist()]
    targets = arguments.batch * (arguments.sequence - 1)
    model = random_llama()
    result: dict[str, Any] = {"batch": arguments.batch, "sequence": arguments.sequence}
    for case, modules in CASES.items():
        recipe = LoraConfig(r=16, lora_alpha=32, target_modules=modules, task_type="CAUSAL_LM")
        wrapped = peer(model, recipe)
        wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        expected = {name: p.grad for name, p in trained(wrapped).items() if p.grad is not None}
        row: dict[str, Any] = {"relative_error": {}, "losses": {}, "saved_mib": {}}
        for contender, (dtype, lossy) in CONTENDERS.items():
            runner = runner_of(model, recipe, contender, wrapped)
            runner.forward_backward(examples, targets)
            found = {name: p.grad for name, p in runner.parameters.items()}
            row["relative_error"][contender] = relative_errors(found, expected)
            if dtype != torch.bfloat16:
                continue
            for parameter in runner.parameters.values():
                parameter.grad = None
            every = losses_of(
                lambda run=runner: float(run.forward_backward(examples, targets)) / targets,
                list(runner.parameters.values()),
                arguments.steps,
            )
            marks = [every[0], every[len(every) // 2], every[-1]]
            row["losses"][contender] = [round(loss, 4) for loss in marks]
            options: dict[str, Any] = {"batch": shape[0], "seq": shape[1], "dtype": "bfloat16"}
            report = pcg.explain(model, recipe, lossy_activations=lossy, **options)
            stage = report.chosen_stage
            assert stage is not None
            row["saved_mib"][contender] = round(stage.bytes / 2**20, 1)
        result[case] = row
    write("lossy", result)


if __name__ == "__main__":
    main()
