"""Every optimizer: the adapter that torch's makes of peft's gradients, exact resume, bytes."""

import copy
import inspect
import sys
import warnings
from collections.abc import Mapping
from functools import cache, partial
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
import pcg.compiler
from pcg.errors import FinetuneError, FinetuneInterrupted
from pcg.ir.program.program import Program
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training.optimizer import make_optimizer
from pcg.runtime.training.options import FinetuneOptions, StepRecord
from pcg.runtime.training.torch_optimizers import OPTIMIZERS, SHARED_KEYS, Optimizer, _defaults
from tests.support import compiled
from tests.support.ranked import EXAMPLES as RANKED
from tests.support.ranked import METHODS, make_executor, make_program
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
"""Optimizers with states in fp32."""

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
    return model, compiled.executor(model, None)


def reference(
    base: Any, start: Mapping[str, torch.Tensor], make: Any, recipe: Mapping[str, Any], steps: int
) -> dict[str, torch.Tensor]:
    """The same job in peft's eager model with the optimizer's own class."""
    fields = {key: value for key, value in recipe.items() if key != "peft_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**fields)).eval()
    named = dict(wrapped.named_parameters())
    theirs = {path: named[f"base_model.model.{path}.default.weight"] for path in start}
    for path, tensor in start.items():
        theirs[path].data = tensor.clone()
    updates = make(theirs.values())
    for step in range(steps):
        batch = batch_of(step)
        targets = sum(example.targets for example in batch)
        for example in batch:
            ids = torch.tensor([example.ids])
            logits = wrapped(ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            (loss / targets).backward()
        updates.step()
        updates.zero_grad()
    return {path: tensor.detach() for path, tensor in theirs.items()}


def batch_of(step: int) -> list[Example]:
    return [DATA[(2 * step + i) % len(DATA)] for i in range(2)]


@pytest.mark.parametrize("name", TORCH)
def test_the_adapter_is_that_of_peft_and_torch(name: str) -> None:
    model, executor = double()
    options = {**options_of(name), "schedule": "constant", "max_grad_norm": None}
    executor.add_adapter("a", LORA)
    start = {k: v.clone() for k, v in executor.training_runner("a").parameters.items()}
    optimizer = FinetuneOptions(**options).make_optimizer()
    executor.finetune(DATA, "a", **options)
    found = learned(executor)
    executor.remove_adapter("a")
    make = partial(optimizer.torch_class, lr=options["learning_rate"], **optimizer.options)
    expected = reference(model, start, make, LORA, STEPS)
    # Muon rounds to bf16 within, where the last bit of what it is given shows.
    tolerance = 5e-2 if name == "muon" else 1e-4
    for path, tensor in found.items():
        moved = (expected[path] - start[path]).norm()
        assert moved > 1e-4
        assert (tensor - expected[path]).norm() / moved < tolerance


@pytest.fixture(scope="module")
def single() -> Executor:
    return compiled.executor(make_model(), None)


FAMILY = "gpt2"


@cache
def on_ranks(degree: int) -> Program:
    return make_program(FAMILY, degree, dtype="float64")


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------- 8-bit states

CLASSES: Mapping[str, Any] = {
    "adam8bit": bitsandbytes.optim.Adam8bit,
    "adamw8bit": bitsandbytes.optim.AdamW8bit,
    "lion8bit": bitsandbytes.optim.Lion8bit,
}
ONE_OF_8BIT = [n if n == "adam8bit" else pytest.param(n, marks=pytest.mark.slow) for n in CLASSES]
WIDE = {
    "peft_type": "LORA", "r": 16, "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "down_proj"],
}  # fmt: skip
"""Its weights have 4,096 and 5,120 numbers, and at k_proj 2,048, whose states stay in 32 bits."""
JOB: Mapping[str, Any] = {
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
    return compiled.executor(model())


def fresh(executor: Executor) -> dict[str, Tensor]:
    """Parameters of a new adapter, whose B are not zero, by name."""
    executor.add_adapter("a", WIDE, seed=0)
    generator = torch.Generator().manual_seed(1)
    for tensor in executor.adapters["a"].tensors:
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    return dict(executor.training_runner("a").parameters)


def learned(executor: Executor) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in executor.training_runner("a").parameters.items()}


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ONE_OF_8BIT)
def test_losses_weights_and_states_are_those_of_bitsandbytes(
    executor: Executor, tmp_path: Path, name: str
) -> None:
    """To the bit: its own class steps the same parameters with the gradients of these weights."""
    fresh(executor)
    records: list[StepRecord] = []
    executor.finetune(
        DATA, "a", optimizer=name, checkpoint_dir=tmp_path, on_step=records.append, **JOB
    )
    found = learned(executor)
    executor.remove_adapter("a")
    parameters = fresh(executor)
    runner = executor.training_runner("a")
    theirs = CLASSES[name](parameters.values(), weight_decay=JOB["weight_decay"])
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


RESUMED = ("adafactor", "adamw", "radam", "rprop", "sgd", "adam8bit offloaded")
"""Optimizers whose exact resume the default run tests."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in RESUMED else pytest.param(name, marks=pytest.mark.slow)
        for name in (*TORCH, *CLASSES, *(f"{name} offloaded" for name in CLASSES))
    ],
)
def test_resumed_to_the_same_bits(
    executor: Executor, single: Executor, tmp_path: Path, name: str
) -> None:
    """With states in 8 bits, in host memory, too, as without a stop."""
    name, _, offloaded = name.partition(" ")
    options = {**options_of(name), "peft": WIDE if name in CLASSES else LORA}
    here = executor if name in CLASSES else single
    here.finetune(DATA, "a", **options)
    whole = learned(here)
    for stop in (1, 4):
        here.remove_adapter("a")
        kept = {"checkpoint_dir": tmp_path / str(stop), "offload_optimizer": bool(offloaded)}

        def interrupt(record: StepRecord, at: int = stop) -> None:
            if record.step == at:
                raise KeyboardInterrupt

        with pytest.raises(FinetuneInterrupted):
            here.finetune(DATA, "a", on_step=interrupt, **options, **kept)
        here.remove_adapter("a")
        assert here.finetune(DATA, "a", **options, **kept).resumed_from == stop
        assert same(learned(here), whole)
    here.remove_adapter("a")


DORA = {**WIDE, "use_dora": True}
BYTES = [
    ("asgd", DORA),
    ("adamw8bit", DORA),
    *(
        pytest.param(name, recipe, id=f"{name}-{place}", marks=pytest.mark.slow)
        for name, recipes in (
            ("adafactor", [DORA]),
            ("muon", [WIDE]),
            ("adamw8bit", [*METHODS.values(), "p-tuning"]),
        )
        for place, recipe in enumerate(recipes)
    ),
]


@pytest.mark.parametrize(("name", "recipe"), BYTES)
def test_bytes_of_states_are_as_explained(
    executor: Executor, tmp_path: Path, name: str, recipe: Any
) -> None:
    options = {**options_of(name), "max_steps": 2}
    executor.finetune(DATA, "a", peft=recipe, checkpoint_dir=tmp_path, **options)
    saved = load_file(tmp_path / "step-00000002" / "optimizer.safetensors")
    # The number of steps is an int of 8-bit classes, and no tensor.
    steps = {key for key in saved if key.endswith("/step") and name in CLASSES}
    measured = sum(tensor.nbytes for key, tensor in saved.items() if key not in steps)
    given = options.get("optimizer_options")
    report = pcg.explain(model(), recipe, optimizer=name, optimizer_options=given)
    assert report.memory_bytes["optimizer"] == measured
    assert report.optimizer == name


# ------------------------------------------------------------------------------- options and states

SHAPES = ((3, 4), (5,), (3, 1), (64, 63), (64, 64), (64, 64), (65, 63), (4100,))
"""From 4,096 numbers on 8-bit states are in blocks of 256, the last of which may be shorter."""
ELSEWHERE = {"self", "params", "lr"}
"""The learning rate has a field and a schedule."""
HOW = {"foreach", "fused", "maximize", "differentiable", "capturable"}
"""How a step is computed, or of what: of no use here."""
NONE_OF_8BIT = {"amsgrad", "optim_bits", "args", "is_paged"}
"""What 8-bit classes refuse, and paging, for which states are offloaded."""
OF_8BIT = ("adam8bit", "adamw8bit", "lion8bit")
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((name, {}) for name in OPTIMIZERS),
    ("adam", {"amsgrad": True}),
    ("adamw", {"amsgrad": True}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"centered": True, "momentum": 0.5}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adamw8bit", {"min_8bit_size": 12}),
    ("lion8bit", {"min_8bit_size": 10**6}),
)


def classes() -> dict[str, Any]:
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    found |= {name: getattr(bitsandbytes.optim, name) for name in ("Adam8bit", "AdamW8bit")}
    found["Lion8bit"] = bitsandbytes.optim.Lion8bit
    return {
        name.lower(): made
        for name, made in found.items()
        if inspect.isclass(made) and issubclass(made, torch.optim.Optimizer)
    }


def test_every_class_of_torch_is_there_or_refused_by_name() -> None:
    assert sorted({*OPTIMIZERS, "lbfgs", "sparseadam", "optimizer"}) == sorted(classes())
    for name in ("LBFGS", "SparseAdam"):
        with pytest.raises(
            FinetuneError, match=rf"'{name}' is not .*{name}.*use one of adadelta, "
        ):
            Optimizer.of(name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_and_defaults_are_torchs(name: str) -> None:
    taken = inspect.signature(classes()[name].__init__).parameters
    without = ELSEWHERE | (NONE_OF_8BIT if name in OF_8BIT else HOW)
    expected = {key: p.default for key, p in taken.items() if key not in without}
    if name == "adam":
        del expected["decoupled_weight_decay"]  # that is AdamW
    assert Optimizer.of(name.upper()).options == expected


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_what_is_kept(name: str, options: Mapping[str, Any]) -> None:
    optimizer = Optimizer.of(name, options)
    shapes = [s for s in SHAPES if len(s) == 2 or not optimizer.takes_matrices_alone]
    parameters = [torch.randn(shape) for shape in shapes]
    made = classes()[name](parameters, lr=0.1, **optimizer.options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made.step()
    kept = [made.state.get(parameter, {}) for parameter in parameters]
    expected = [optimizer.state(shape, torch.float32) for shape in shapes]
    for state, predicted in zip(kept, expected, strict=True):
        assert {key: kind_of(value) for key, value in state.items()} == {
            key: kind_of(value) for key, value in predicted.items()
        }
    found = optimizer.state_memory(shapes, torch.float32)
    assert found.device_bytes == storage_bytes(made)
    assert found.host_bytes == found.update_bytes == 0


def kind_of(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)


def storage_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the tensors in a state dict, of which several may be one."""
    found: dict[int, int] = {}

    def read(values: Mapping[Any, Any]) -> None:
        for value in values.values():
            if isinstance(value, torch.Tensor):
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            elif isinstance(value, Mapping):
                read(value)

    read(optimizer.state_dict()["state"])
    return sum(found.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_offloaded_states(name: str) -> None:
    """Scalars of the device stay there, and what codes stand for; an update has one parameter's."""
    shapes = [shape for shape in SHAPES if len(shape) == 2]
    stay = {"adam8bit": 2048, "adamw8bit": 2048, "asgd": 12 * len(shapes), "lion8bit": 1024}
    here, there = (Optimizer.of(name, None, is_offloaded) for is_offloaded in (False, True))
    found = there.state_memory(shapes, torch.float32)
    assert found.device_bytes == stay.get(name, 0)
    whole = here.state_memory(shapes, torch.float32)
    assert found.device_bytes + found.host_bytes == whole.device_bytes
    states = [here.state(shape, torch.float32) for shape in shapes]
    own = [
        [v for k, v in state.items() if k not in SHARED_KEYS and k != "step"] for state in states
    ]
    assert found.update_bytes == max(sum(v.nbytes for v in tensors if v.ndim) for tensors in own)


@pytest.mark.parametrize(
    ("name", "known", "is_offloaded"),
    [
        ("adamw_8bit", "adamw8bit", False),
        ("adamw_bnb_8bit", "adamw8bit", False),
        ("adamw_torch", "adamw", False),
        ("paged_adamw_32bit", "adamw", True),
        ("paged_adamw_8bit", "adamw8bit", True),
        ("PAGED_LION_8BIT", "lion8bit", True),
    ],
)
def test_names_of_transformers(name: str, known: str, is_offloaded: bool) -> None:
    optimizer = Optimizer.of(name)
    assert (optimizer.name, optimizer.is_offloaded) == (known, is_offloaded)


def test_numbers_of_64_bits_are_refused() -> None:
    with pytest.raises(FinetuneError, match="the adapter is float64; use adamw"):
        Optimizer.of("adamw8bit").state((3, 4), torch.float64)


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    _defaults.cache_clear()
    with pytest.raises(FinetuneError, match=r"not installed: pip install 'pcg\[bitsandbytes\]'"):
        Optimizer.of("adamw8bit")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamw2", {}, "'adamw2' is not among those that pcg trains with; use one of adadelta"),
        (3, {}, "optimizer=3 is not"),
        ("sgd", {"momentun": 0.9}, "'sgd' does not take 'momentun', did you mean 'momentum'"),
        ("sgd", {"betas": (0.9, 0.9)}, "does not take 'betas'; it takes momentum, dampening, wei"),
        ("sgd", {"nesterov": 1}, "nesterov=1; use True or False"),
        ("rprop", {"etas": (0.5,)}, r"etas=\(0.5,\); use 2 numbers, such as \(0.5, 1.2\)"),
        ("rmsprop", {"alpha": "0.9"}, "alpha='0.9'; use a number, such as 0.99"),
        ("adamw8bit", {"amsgrad": True}, "'adamw8bit' does not take 'amsgrad'"),
        ("adamw8bit", {"min_8bit_size": 0.5}, "min_8bit_size=0.5; use an int above 0"),
        ("adamw_torch_8bit", {}, "is torchao's, and adamw8bit is bitsandbytes'; use one of"),
        ("muon", {"ns_steps": 2.5}, "ns_steps=2.5; use an int above 0"),
        ("muon", {"adjust_lr_fn": 1}, "adjust_lr_fn=1; use a word"),
    ],
)
def test_refusals(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinetuneError, match=message):
        Optimizer.of(name, options)
