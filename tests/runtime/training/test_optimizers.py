"""Every optimizer: the adapter that torch's makes of peft's gradients, exact resume, bytes."""

import copy
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

import pcg
import pcg.compiler
from pcg.errors import FinetuneError, FinetuneInterrupted
from pcg.ir.program.program import Program
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training.optimizer import make_optimizer
from pcg.runtime.training.options import FinetuneOptions, StepRecord
from pcg.runtime.training.torch_optimizers import OPTIMIZERS, Optimizer
from tests.support.ranked import EXAMPLES as RANKED
from tests.support.ranked import make_executor, make_program
from tests.support.small_job import LORA, examples, make_model
from tests.support.threads import run_ranks

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "adadelta": {"learning_rate": 1.0, "weight_decay": 0.1},
    "adam": {"optimizer_options": {"amsgrad": True}, "weight_decay": 0.1},
    "asgd": {"optimizer_options": {"t0": 2, "lambd": 1e-3}, "learning_rate": 10.0},
    "nadam": {"betas": (0.8, 0.9), "eps": 1e-6},
    "radam": {"learning_rate": 1.0},
    "rmsprop": {"optimizer_options": {"momentum": 0.9, "centered": True}, "weight_decay": 0.1},
    "rprop": {"schedule": "constant"},
    "sgd": {"optimizer_options": {"momentum": 0.9, "nesterov": True}, "learning_rate": 10.0},
}
"""Options by optimizer that make it keep more states, or change those that it keeps."""

TORCH = [name for name in OPTIMIZERS if not Optimizer.of(name).has_8bit_states]
"""Optimizers with states in fp32; test_8bit_optimizers.py has the others."""

DATA = examples(8)
STEPS = 6


def options_of(name: str) -> dict[str, Any]:
    return {
        "optimizer": name, "learning_rate": 1e-2, "max_steps": STEPS, "batch_size": 2,
        "shuffle": False, "progress": False, **OPTIONS.get(name, {}),
    }  # fmt: skip


@cache
def double() -> tuple[Any, Executor]:
    """A model in fp64, where a gradient's sign is none of rounding's."""
    model = make_model().double()
    return model, pcg.compiler.compile(model, None)


def reference(
    base: Any, start: Mapping[str, torch.Tensor], optimizer: Optimizer, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The same job in peft's eager model with torch's own class."""
    fields = {key: value for key, value in LORA.items() if key != "peft_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**fields)).eval()
    named = dict(wrapped.named_parameters())
    theirs = {path: named[f"base_model.model.{path}.default.weight"] for path in start}
    for path, tensor in start.items():
        theirs[path].data = tensor.clone()
    updates = optimizer.torch_class(
        theirs.values(), lr=options["learning_rate"], **optimizer.options
    )
    for step in range(STEPS):
        batch = [DATA[(2 * step + i) % len(DATA)] for i in range(2)]
        targets = sum(example.targets for example in batch)
        for example in batch:
            ids = torch.tensor([example.ids])
            logits = wrapped(ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            (loss / targets).backward()
        updates.step()
        updates.zero_grad()
    return {path: tensor.detach() for path, tensor in theirs.items()}


def weights(executor: Executor) -> dict[str, torch.Tensor]:
    found = {k: v.clone() for k, v in executor.training_runner("a").parameters.items()}
    executor.remove_adapter("a")
    return found


@pytest.mark.parametrize("name", TORCH)
def test_the_adapter_is_that_of_peft_and_torch(name: str) -> None:
    model, executor = double()
    options = {**options_of(name), "schedule": "constant", "max_grad_norm": None}
    executor.add_adapter("a", LORA)
    start = {k: v.clone() for k, v in executor.training_runner("a").parameters.items()}
    optimizer = FinetuneOptions(**options).make_optimizer()
    executor.finetune(DATA, "a", **options)
    found = weights(executor)
    expected = reference(model, start, optimizer, options)
    # Muon rounds to bf16 within, where the last bit of what it is given shows.
    tolerance = 5e-2 if name == "muon" else 1e-4
    for path, tensor in found.items():
        moved = (expected[path] - start[path]).norm()
        assert moved > 1e-4
        assert (tensor - expected[path]).norm() / moved < tolerance


@pytest.fixture(scope="module")
def single() -> Executor:
    return pcg.compiler.compile(make_model(), None)


@pytest.mark.parametrize("name", TORCH)
def test_resumed_to_the_same_bits(single: Executor, tmp_path: Path, name: str) -> None:
    options = {**options_of(name), "peft": LORA}
    single.finetune(DATA, "a", **options)
    whole = weights(single)
    for stop in (1, 4):
        place = tmp_path / str(stop)

        def interrupt(record: StepRecord, at: int = stop) -> None:
            if record.step == at:
                raise KeyboardInterrupt

        with pytest.raises(FinetuneInterrupted):
            single.finetune(DATA, "a", checkpoint_dir=place, on_step=interrupt, **options)
        single.remove_adapter("a")
        result = single.finetune(DATA, "a", checkpoint_dir=place, **options)
        assert result.resumed_from == stop
        resumed = weights(single)
        assert all(torch.equal(resumed[path], whole[path]) for path in whole)


@pytest.mark.parametrize("name", ["adafactor", "asgd", "muon"])
def test_bytes_of_its_state_are_as_explained(single: Executor, tmp_path: Path, name: str) -> None:
    matrices = Optimizer.of(name).takes_matrices_alone
    recipe = {**LORA, "use_dora": not matrices}
    options = {**options_of(name), "max_steps": 2}
    single.finetune(DATA, "a", peft=recipe, checkpoint_dir=tmp_path, **options)
    single.remove_adapter("a")
    saved = load_file(tmp_path / "step-00000002" / "optimizer.safetensors")
    report = pcg.explain(
        make_model(), recipe, optimizer=name, optimizer_options=options.get("optimizer_options")
    )
    assert report.memory_bytes["optimizer"] == sum(tensor.nbytes for tensor in saved.values())
    assert report.optimizer == name


FAMILY = "gpt2"


@cache
def on_ranks(degree: int) -> Program:
    return make_program(FAMILY, degree, dtype="float64")


def test_over_ranks_the_adapter_is_that_of_one() -> None:
    """GPT-2's fused product makes pieces of it that are rows."""
    elementwise = [name for name in TORCH if Optimizer.of(name).is_elementwise]

    def train(executor: Executor) -> dict[str, tuple[torch.Tensor, ...]]:
        start = [tensor.clone() for tensor in executor.adapters["b"].tensors]
        found = {}
        for name in elementwise:
            for tensor, value in zip(executor.adapters["b"].tensors, start, strict=True):
                tensor.copy_(value)
            executor.finetune(RANKED, "b", **{**options_of(name), "max_steps": 3})
            found[name] = tuple(t.clone() for t in executor.adapters["b"].tensors)
        return found

    expected = train(make_executor(on_ranks(1), FAMILY))
    program = on_ranks(2)
    for found in run_ranks(2, lambda ranks: train(make_executor(program, FAMILY, ranks))):
        for name in elementwise:
            for a, b in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "verb"),
    [("adafactor", "takes"), ("adamw8bit", "quantizes blocks of"), ("muon", "takes")],
)
def test_what_takes_whole_matrices_is_refused_over_ranks(name: str, verb: str) -> None:
    message = f"optimizer '{name}' {verb} whole matrices, of which each of 2 ranks has a part"
    program = on_ranks(2)

    def train(ranks: Any) -> None:
        executor = make_executor(program, FAMILY, ranks)
        with pytest.raises(FinetuneError, match=message):
            executor.finetune(RANKED, "b", **options_of(name))

    run_ranks(2, train)
    with pytest.raises(FinetuneError, match=message):
        pcg.explain(make_model(), LORA, tp=2, optimizer=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lbfgs"}, "LBFGS evaluates the loss again within a step"),
        ({"optimizer": "sgd", "betas": (0.9, 0.9)}, r"betas=\(0.9, 0.9\), which optimizer 'sgd'"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "weight_decay=0.1, which optimizer 'rprop'"),
        ({"optimizer": "adafactor", "eps": 1e-8}, "options are beta2_decay, eps, d, weight_decay"),
        ({"optimizer_options": {"eps": 1e-8}}, "optimizer_options has 'eps'; give it as eps= inst"),
        ({"optimizer_options": [1]}, r"optimizer_options=\[1\]; use a dict"),
        ({"optimizer": "rprop"}, "'linear' has no effect on 'rprop'.*use schedule='constant'"),
        ({"optimizer": "adadelta", "optimizer_options": {"rho": 2.0}}, "'adadelta': Invalid rho"),
        ({"optimizer": "sgd", "optimizer_options": {"nesterov": True}}, "'sgd': Nesterov momentum"),
        ({"eps": 0.0}, "eps=0.0; use a number above 0"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinetuneError, match=message):
        FinetuneOptions(**options)


def test_muon_takes_no_vector(single: Executor) -> None:
    data = [Example(e.ids, e.ids) for e in DATA[:2]]
    with pytest.raises(FinetuneError, match=r"'muon' takes only matrices, and .*magnitude.* is \["):
        single.finetune(data, "a", peft={**LORA, "use_dora": True}, optimizer="muon")
    assert not single.adapters


def test_another_optimizer_is_another_job(single: Executor, tmp_path: Path) -> None:
    options = {**options_of("sgd"), "peft": LORA, "checkpoint_dir": tmp_path}
    single.finetune(DATA, "a", **options)
    single.remove_adapter("a")
    with pytest.raises(FinetuneError, match="optimizer was 'sgd', is 'adagrad'"):
        single.finetune(DATA, "a", **{**options, **options_of("adagrad"), "optimizer_options": {}})


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("lies", ["in order", "transposed", "a part of columns"])
def test_an_update_is_torchs_however_a_parameter_lies(name: str, lies: str) -> None:
    """A rank's shard may be a view, which torch's fused loop would read in another order."""

    def parameter() -> torch.Tensor:
        whole = torch.arange(24.0).reshape(4, 6).sin()
        return {"in order": whole, "transposed": whole.t(), "a part of columns": whole[:, 2:5]}[
            lies
        ]

    ours, theirs = parameter(), parameter()
    kind = Optimizer.of(name)
    updates = [
        make_optimizer({"weight": ours}, kind, 0.1),
        kind.torch_class([theirs], lr=0.1, **kind.options),
    ]
    for step in range(3):
        gradient = torch.linspace(-1, 1, ours.numel()).reshape(ours.shape).roll(step)
        for tensor, update in zip((ours, theirs), updates, strict=True):
            tensor.grad = gradient.clone()
            update.step()
    torch.testing.assert_close(ours, theirs)
