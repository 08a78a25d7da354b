"""8-bit states: bitsandbytes' own steps, exact resume, in an engine, too, and bytes."""

import copy
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import pcg
from pcg.errors import FinetuneInterrupted
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import StepRecord
from tests.support.ranked import METHODS
from tests.support.small_job import examples

CLASSES: Mapping[str, Any] = {
    "adam8bit": bitsandbytes.optim.Adam8bit,
    "adamw8bit": bitsandbytes.optim.AdamW8bit,
    "lion8bit": bitsandbytes.optim.Lion8bit,
}
LORA = {
    "peft_type": "LORA", "r": 16, "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "down_proj"],
}  # fmt: skip
"""Its weights have 4,096 and 5,120 numbers, and at k_proj 2,048, whose states stay in 32 bits."""
DATA = examples(8)
STEPS = 6
OPTIONS: Mapping[str, Any] = {
    "learning_rate": 1e-2, "weight_decay": 0.1, "max_steps": STEPS, "batch_size": 2,
    "shuffle": False, "progress": False, "max_grad_norm": None,
}  # fmt: skip


@cache
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=320, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=100, max_position_embeddings=64, attention_bias=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def shared() -> Executor:
    return pcg.compile(model(), None)


def fresh(executor: Executor) -> dict[str, Tensor]:
    """Parameters of a new adapter, whose B are not zero, by name."""
    executor.add_adapter("a", LORA, seed=0)
    generator = torch.Generator().manual_seed(1)
    for tensor in executor.adapters["a"].tensors:
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    return dict(executor.training_runner("a").parameters)


def learned(executor: Executor) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in executor.training_runner("a").parameters.items()}


def batch_of(step: int) -> list[Example]:
    return [DATA[(2 * step + i) % len(DATA)] for i in range(2)]


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", CLASSES)
def test_losses_weights_and_states_are_those_of_bitsandbytes(
    executor: Executor, tmp_path: Path, name: str
) -> None:
    """To the bit: its own class steps the same parameters with the gradients of these weights."""
    fresh(executor)
    records: list[StepRecord] = []
    executor.finetune(
        DATA, "a", optimizer=name, checkpoint_dir=tmp_path, on_step=records.append, **OPTIONS
    )
    found = learned(executor)
    executor.remove_adapter("a")
    parameters = fresh(executor)
    runner = executor.training_runner("a")
    theirs = CLASSES[name](parameters.values(), weight_decay=OPTIONS["weight_decay"])
    for step, record in enumerate(records):
        targets = sum(example.targets for example in batch_of(step))
        assert runner.forward_backward(batch_of(step), targets) / targets == record.loss
        theirs.param_groups[0]["lr"] = record.learning_rate
        theirs.step()
        theirs.zero_grad()
    assert same(found, parameters)
    saved = load_file(tmp_path / f"step-{STEPS:08d}" / "optimizer.safetensors")
    kept = {f"{path}/{k}": v for path, p in parameters.items() for k, v in theirs.state[p].items()}
    for key, value in kept.items():
        own = saved.get(key, saved.get(key.rpartition("/")[2]))
        assert own is not None
        assert torch.equal(own, torch.as_tensor(value))
    sizes = {value.dtype for key, value in kept.items() if key.endswith("state1")}
    assert sizes == {torch.uint8, torch.float32}


@pytest.mark.parametrize("name", CLASSES)
def test_the_adapter_is_nearly_that_of_peft(executor: Executor, name: str) -> None:
    """The gradients differ in rounding, which may flip a code, or Lion's sign.

    A sign that flips moves the adapter by a whole step, and with it the gradients of all later
    ones, so that Lion is compared after two.
    """
    steps, tolerance = (2, 0.1) if name == "lion8bit" else (STEPS, 5e-3)
    start = {k: v.clone() for k, v in fresh(executor).items()}
    options = {**OPTIONS, "schedule": "constant", "max_steps": steps}
    executor.finetune(DATA, "a", optimizer=name, **options)
    found = learned(executor)
    fields = {key: value for key, value in LORA.items() if key != "peft_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(copy.deepcopy(model()), peft.LoraConfig(**fields)).eval()
    named = dict(wrapped.named_parameters())
    theirs = {path: named[f"base_model.model.{path}.default.weight"] for path in start}
    for path, tensor in start.items():
        theirs[path].data = tensor.clone()
    updates = CLASSES[name](theirs.values(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        targets = sum(example.targets for example in batch_of(step))
        for example in batch_of(step):
            ids = torch.tensor([example.ids])
            logits = wrapped(ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            (loss / targets).backward()
        updates.step()
        updates.zero_grad()
    for path, tensor in found.items():
        moved = (theirs[path].detach() - start[path]).norm()
        assert (tensor - theirs[path].detach()).norm() / moved < tolerance


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_resumed_to_the_same_bits(
    executor: Executor, tmp_path: Path, name: str, is_offloaded: bool
) -> None:
    options = {**OPTIONS, "optimizer": name, "peft": LORA}
    executor.finetune(DATA, "a", **options)
    whole = learned(executor)
    executor.remove_adapter("a")
    options |= {"offload_optimizer": is_offloaded, "checkpoint_dir": tmp_path}

    def interrupt(record: StepRecord) -> None:
        if record.step == STEPS // 2:
            raise KeyboardInterrupt

    with pytest.raises(FinetuneInterrupted):
        executor.finetune(DATA, "a", on_step=interrupt, **options)
    executor.remove_adapter("a")
    assert executor.finetune(DATA, "a", **options).resumed_from == STEPS // 2
    assert same(learned(executor), whole)


def test_a_job_of_an_engine_is_resumed_to_the_same_bits(executor: Executor, tmp_path: Path) -> None:
    options = {**OPTIONS, "optimizer": "adamw8bit", "peft": LORA}

    def train(steps: int, **more: Any) -> dict[str, Tensor]:
        """The weights at the end; none of a job that is cancelled after so many steps."""
        engine = executor.engine(kv_cache_bytes=2**20)
        records: list[StepRecord] = []
        job = engine.finetune(DATA, "a", on_step=records.append, **options, **more)
        while not job.is_over:
            engine.step()
            if len(records) == steps < STEPS:
                job.cancel()
        assert job.error is None
        if steps < STEPS:
            return {}
        found = learned(executor)
        executor.remove_adapter("a")
        return found

    whole = train(STEPS)
    place = {"checkpoint_dir": tmp_path, "save_every": 1}
    train(STEPS // 2, **place)
    saved = load_file(tmp_path / f"step-{STEPS // 2:08d}" / "optimizer.safetensors")
    assert saved["qmap1"].shape == (256,)
    assert same(train(STEPS, **place), whole)


@pytest.mark.parametrize(
    "recipe",
    [
        {**LORA, "use_dora": True},
        *(pytest.param(METHODS[name], id=name, marks=pytest.mark.slow) for name in METHODS),
        pytest.param("p-tuning", id="p-tuning", marks=pytest.mark.slow),
    ],
)
def test_bytes_of_states_are_as_explained(executor: Executor, tmp_path: Path, recipe: Any) -> None:
    options, name = {**OPTIONS, "max_steps": 2}, "adamw8bit"
    executor.finetune(DATA, "a", peft=recipe, checkpoint_dir=tmp_path, optimizer=name, **options)
    saved = load_file(tmp_path / "step-00000002" / "optimizer.safetensors")
    steps = {key for key in saved if key.endswith("/step")}  # which are ints, not tensors
    measured = sum(tensor.nbytes for key, tensor in saved.items() if key not in steps)
    assert pcg.explain(model(), recipe, optimizer=name).memory_bytes["optimizer"] == measured
