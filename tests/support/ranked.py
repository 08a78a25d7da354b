"""One job at any degree: what it gives on a rank, to be compared with what it gives on one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.explain import explain as explaining
from pcg.ir.program.program import Program
from pcg.peft.adalora import AdaLoraConfig
from pcg.peft.adapter import Adapter
from pcg.peft.loha import LoHaConfig
from pcg.peft.lora import LoraConfig
from pcg.peft.registry import recipe_of_fields
from pcg.ranks.group import Ranks
from pcg.ranks.mesh import SINGLE_MESH, RankMesh
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import StateDictCheckpoint
from pcg.runtime.training.optimizer import make_optimizer
from pcg.runtime.training.torch_optimizers import Optimizer
from tests.support import oracle
from tests.support.families import BY_NAME, Family
from tests.support.measured_memory import BATCH, SEQ, measured
from tests.support.prompts import prompts
from tests.support.threads import run_ranks, tp_mesh

LAYERS = 2
SEQUENCES = prompts((13, 7, 9, 5))
EXAMPLES = [Example(ids, ids) for ids in SEQUENCES]
USED = ("a", None, "b", "a")
JOB: Mapping[str, Any] = {
    # eps above the gradients' rounding errors, which AdamW's first steps else are made of.
    "epochs": 2, "batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "max_grad_norm": 0.1, "eps": 1e-4, "eval_data": EXAMPLES[:1], "progress": False,
}  # fmt: skip


def recipes(family: Family) -> dict[str, Any]:
    """`a` on every linear module, `b` of a rank that no degree divides on the usual ones."""
    excluded = tuple(family.excluded) or None
    return {
        "a": LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules="all-linear",
            target_parameters=family.parameters or None,
            exclude_modules=excluded,
        ),
        "b": LoraConfig(r=3, lora_alpha=6, target_modules=family.usual_targets),
    }


def make_program(name: str, degree: int, layers: int = LAYERS, **options: Any) -> Program:
    family = BY_NAME[name]
    options = {"dtype": "float32", "peft": recipes(family), "batch": 2, "seq": 16, **options}
    config = oracle.random_model(family.config(layers)).config.to_dict()
    return compiler.compile_program(config, tp=degree, **options)


def make_executor(
    program: Program,
    name: str,
    ranks: Ranks | RankMesh | None = None,
    shard_base: bool = False,
) -> Executor:
    """An executor of random weights, whose adapters do something, over `ranks` by shards."""
    mesh = ranks if ranks is None or isinstance(ranks, RankMesh) else tp_mesh(ranks)
    layers = len(program.base.layers)
    state = oracle.random_model(BY_NAME[name].config(layers)).state_dict()
    weights = StateDictCheckpoint(state, program.base_prefix)
    peft = {adapter: recipe_of_fields(fields) for adapter, fields in program.recipes.items()}
    if mesh is not None or shard_base:
        mesh = (mesh or SINGLE_MESH).sharing(shard_base)
    executor = compiler.make_executor(program, weights, peft, None, "cpu", mesh)
    for adapter in executor.adapters.values():
        fill(adapter.tensors)
        executor.refresh_adapter(adapter.name)
    return executor


def fill(tensors: Iterable[Tensor]) -> None:
    """Random numbers, the same each time."""
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors:
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))


@dataclass(frozen=True)
class Outcome:
    """What the job gives."""

    logits: list[Tensor]
    tokens: list[tuple[int, ...]]
    sampled: list[tuple[int, ...]]
    loss: float
    gradients: dict[str, Tensor]
    losses: tuple[float, ...]
    eval_losses: tuple[tuple[int, float], ...]
    trained: tuple[Tensor, ...]
    served: Tensor


def work(executor: Executor) -> Outcome:
    """Generate for mixed adapters, take one's gradients, finetune another, and serve that."""
    logits = executor.logits(SEQUENCES, USED)
    options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    tokens = executor.generate(SEQUENCES, USED, **options)
    sampled = executor.generate(SEQUENCES, USED, temperature=1.0, seed=3, **options)
    runner = executor.training_runner("a")
    targets = sum(len(ids) - 1 for ids in SEQUENCES)
    loss = sum(runner.forward_backward([example], targets) for example in EXAMPLES)
    runner.sum_gradients()
    gradients = {n: t.grad for n, t in runner.parameters.items() if t.grad is not None}
    wholes = runner.shards.united(runner.shards.joined(gradients))
    found = {n: g.clone() for n, g in wholes.items()}
    result = executor.finetune(EXAMPLES, "b", **JOB)
    return Outcome(
        logits,
        [c.token_ids for c in tokens],
        [c.token_ids for c in sampled],
        loss,
        found,
        result.losses,
        result.eval_losses,
        executor.adapters["b"].tensors,
        executor.logits(SEQUENCES[0], "b"),
    )


def worst_error(found: Outcome, expected: Outcome) -> float:
    """The largest relative error of all numbers; infinite where tokens differ."""
    if (found.tokens, found.sampled) != (expected.tokens, expected.sampled):
        return float("inf")
    assert found.gradients.keys() == expected.gradients.keys()
    pairs = [
        *zip(found.logits, expected.logits, strict=True),
        *((found.gradients[name], expected.gradients[name]) for name in found.gradients),
        *zip(found.trained, expected.trained, strict=True),
        (found.served, expected.served),
        *(
            (torch.tensor(a), torch.tensor(b))
            for a, b in (
                (found.losses, expected.losses),
                ([found.loss], [expected.loss]),
                ([x for _, x in found.eval_losses], [x for _, x in expected.eval_losses]),
            )
        ),
    ]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def check_same(found: Adapter, expected: Adapter) -> None:
    """The same weights at the same modules; files have them in any order."""
    assert found.weights.keys() == expected.weights.keys()
    for path, weights in expected.weights.items():
        for a, b in zip(found.weights[path].tensors, weights.tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def rank_memory(executor: Executor, adapter: str, measures: bool = True) -> dict[str, int]:
    """Bytes that a rank holds, by kind, as measured; with `measures` those of a step, too."""
    parameters = executor.training_runner(adapter).parameters
    trained = parameters.values()
    for tensor in trained:
        tensor.grad = torch.zeros_like(tensor)
    optimizer = make_optimizer(parameters, Optimizer.of("adamw"), 1e-3)
    optimizer.step()
    found = {
        "weights": executor.state.weight_store.size_bytes,
        "adapters": sum(tensor.nbytes for tensor in trained),
        "optimizer": sum(kept.nbytes for of in optimizer.state.values() for kept in of.values()),
    }
    return found | ({"activations": measured(executor, BATCH, SEQ)} if measures else {})


def predicted_memory(
    program: Program, name: str, adapter: str, stage: str = "compressed"
) -> dict[str, int]:
    """The same of each rank, as `explain` says."""
    recipe = recipes(BY_NAME[name])[adapter]
    asked = program.options
    options: dict[str, Any] = {"tp": asked.tp, "batch": BATCH, "seq": SEQ, "dtype": "float32"}
    options |= {"sequence_parallel": asked.sequence_parallel, "ep": asked.ep}
    report = explaining.explain(program.config, recipe, **options)
    (saved,) = [found.bytes for found in report.activations if found.stage == stage]
    return {
        "weights": report.memory_bytes["weights"],
        "adapters": report.memory_bytes["adapters"],
        "optimizer": report.memory_bytes["optimizer"],
        "activations": saved,
    }


def check_memory(name: str, degree: int, **options: Any) -> None:
    """Each rank holds the bytes that are predicted."""
    program = make_program(name, degree, **options)
    found = run_ranks(degree, lambda ranks: rank_memory(make_executor(program, name, ranks), "a"))
    assert found == [predicted_memory(program, name, "a")] * degree


METHODS: Mapping[str, Any] = {
    "adalora": AdaLoraConfig(init_r=4, target_r=2, target_modules="all-linear"),
    "bias": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", bias="all"),
    "bitfit": "bitfit",
    "dora": "dora",
    "dora and dropout": LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", use_dora=True, lora_dropout=0.2
    ),
    "dropout": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.2),
    "embedding": LoraConfig(
        r=4, lora_alpha=8, target_modules=r".*(wte|word_embeddings|embed_tokens)|lm_head"
    ),
    "houlsby": "houlsby",
    "ia3": "ia3",
    "loha": LoHaConfig(r=2, alpha=6, target_modules="all-linear"),
    "lora_bias": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_bias=True),
    "parallel": "parallel",
    "pfeiffer": "pfeiffer",
    "prefix": "prefix",
    "prompt": "prompt",
    "saved": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"]),
    "vera": "vera",
}


def method_work(executor: Executor, recipe: Any) -> list[Tensor]:
    executor.add_adapter("m", recipe, seed=3)
    # Around what they start as: scales are near one.
    noise = torch.Generator().manual_seed(1)
    for tensor in executor.adapters["m"].tensors:
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=noise))
    executor.refresh_adapter("m")
    logits = executor.logits(SEQUENCES, ["m", None, "m", "m"])
    result = executor.finetune(EXAMPLES, "m", **JOB)
    return [*logits, torch.tensor(result.losses), *executor.adapters["m"].tensors]
