"""Options of supervised finetuning that peft, transformers and TRL have, against their code."""

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer

from pcg.errors import FinetuneError, FinetuneInterrupted, UnsupportedError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.data.order import Batches
from pcg.runtime.executor import Executor
from pcg.runtime.model.batch import mixed_seed
from pcg.runtime.training.options import FinetuneResult, StepRecord
from pcg.runtime.training.runner import TrainingPass
from tests.support import compiled
from tests.support.small_job import make_model

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
STEPS, SEED, RATE, EPS = 5, 3, 1e-2, 1e-4
Loss = Callable[[list[Example], list[torch.Tensor]], torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def shared(model: Any) -> Executor:
    return compiled.executor(model)


def examples(count: int = 6) -> list[Example]:
    torch.manual_seed(1)
    made = [torch.randint(2, 99, (5 + i,)).tolist() for i in range(count)]
    return [Example(ids, [IGNORED, IGNORED, *ids[2:]]) for ids in made]


def wrap(model: Any, executor: Executor, recipe: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return peft's model with the values of the executor's adapter, and its parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**recipe)).eval()
    theirs = {}
    by_name = dict(wrapped.named_parameters())
    for path, tensor in executor.training_runner("a").parameters.items():
        theirs[path] = by_name[f"base_model.model.{path}.default.weight"]
        theirs[path].data.copy_(tensor)
    assert len(theirs) == sum(p.requires_grad for p in wrapped.parameters())
    return wrapped, theirs


def cross_entropy(batch: list[Example], logits: list[torch.Tensor]) -> torch.Tensor:
    labels = torch.cat([torch.tensor(example.labels[1:]) for example in batch])
    return torch.nn.functional.cross_entropy(torch.cat(logits), labels)


def train(
    wrapped: Any, optimizer: Any, loss_of: Loss = cross_entropy, data: Sequence[Example] = ()
) -> list[float]:
    """Train peft's model on batches of two examples; return the losses."""
    schedule = transformers.get_scheduler("linear", optimizer, 0, STEPS)
    batches, losses = Batches(data or examples(), batch_size=2, seed=SEED), list[float]()
    while len(losses) < STEPS:
        for batch in batches:
            logits = [wrapped(torch.tensor([each.ids])).logits[0, :-1] for each in batch]
            loss = loss_of(batch, logits)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
    return losses


OPTIONS: dict[str, Any] = {
    "seed": SEED, "max_steps": STEPS, "batch_size": 2, "learning_rate": RATE, "eps": EPS,
    "max_grad_norm": None,
}  # fmt: skip


def finetune(
    executor: Executor, data: Sequence[Example] = (), name: str = "a", **options: Any
) -> FinetuneResult:
    return executor.finetune(data or examples(), name, **OPTIONS, **options)


def adamw(theirs: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(theirs.values(), lr=RATE, eps=EPS, weight_decay=0)


def finetune_by_windows(
    executor: Executor, data: Sequence[Example], name: str, **options: Any
) -> FinetuneResult:
    """Finetune in an engine, whose windows cut sequences."""
    engine = executor.engine(Limits(tokens=4, least_chunk=1), kv_cache_bytes=2**20)
    job = engine.finetune(data, name, **OPTIONS, **options)
    while not engine.is_idle:
        engine.step()
    assert job.result is not None
    return job.result


def assert_alike(executor: Executor, theirs: dict[str, Any]) -> None:
    for path, tensor in executor.training_runner("a").parameters.items():
        error = (tensor - theirs[path]).norm() / theirs[path].norm()
        assert error < 1e-5, (path, error)


def test_lora_plus(model: Any, executor: Executor) -> None:
    """Rates of A, B and magnitudes, as peft's optimizer has them; another ratio differs."""
    recipe = {**LORA, "use_dora": True}
    executor.add_adapter("a", {"peft_type": "LORA", **recipe})
    wrapped, theirs = wrap(model, executor, recipe)
    optimizer = create_loraplus_optimizer(
        wrapped,
        torch.optim.AdamW,
        lr=RATE,
        eps=EPS,
        loraplus_lr_ratio=8.0,
        loraplus_weight_decay=0.1,
    )
    losses = train(wrapped, optimizer)
    ours = finetune(executor, weight_decay=0.1, loraplus_lr_ratio=8.0).losses
    assert ours == pytest.approx(losses, rel=1e-5)
    assert_alike(executor, theirs)
    executor.remove_adapter("a")
    executor.add_adapter("a", {"peft_type": "LORA", **recipe})
    assert finetune(executor, weight_decay=0.1).losses[-1] != pytest.approx(losses[-1], rel=1e-3)


def test_lora_plus_is_refused(executor: Executor) -> None:
    with pytest.raises(FinetuneError, match="loraplus_lr_ratio=0; use a number above 0"):
        finetune(executor, loraplus_lr_ratio=0)
    with pytest.raises(FinetuneError, match="the rate of LoRA's matrices B, and the recipe has no"):
        finetune(executor, peft="ia3", loraplus_lr_ratio=4)


def test_weights_scale_the_losses(model: Any, executor: Executor) -> None:
    """In training and evaluation, whole and in windows; the mean is over all targets."""
    weights = [0.5, 1.0, 3.0, 2.0, 1.0, 0.25]
    data = [Example(e.ids, e.labels, weight=w) for e, w in zip(examples(), weights, strict=True)]
    executor.add_adapter("a", {"peft_type": "LORA", **LORA})
    wrapped, theirs = wrap(model, executor, LORA)

    def weighted(batch: list[Example], logits: list[torch.Tensor]) -> torch.Tensor:
        sums = [
            torch.nn.functional.cross_entropy(
                row, torch.tensor(example.labels[1:]), reduction="sum"
            ) * example.weight
            for example, row in zip(batch, logits, strict=True)
        ]  # fmt: skip
        return torch.stack(sums).sum() / sum(example.targets for example in batch)

    losses = train(wrapped, adamw(theirs), weighted, data)
    with torch.no_grad():
        logits = [wrapped(torch.tensor([each.ids])).logits[0, :-1] for each in data]
        evaluated = weighted(data, logits).item()
    result = finetune(executor, data, eval_data=data)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert result.eval_losses[-1][1] == pytest.approx(evaluated, rel=1e-5)
    assert_alike(executor, theirs)


def test_weights_by_windows(executor: Executor) -> None:
    """A job in an engine, whose windows cut sequences, has the losses of whole sequences."""
    data = [Example(each.ids, each.labels, weight=1.5 + i) for i, each in enumerate(examples())]
    executor.add_adapter("a", {"peft_type": "LORA", **LORA})
    executor.add_adapter("b", {"peft_type": "LORA", **LORA})
    whole = finetune(executor, data, "a")
    in_windows = finetune_by_windows(executor, data, "b")
    assert in_windows.losses == pytest.approx(whole.losses, rel=1e-5)


def test_label_smoothing(model: Any, executor: Executor) -> None:
    """Losses, evaluations and weights are those of transformers' trainer."""
    executor.add_adapter("a", {"peft_type": "LORA", **LORA})
    wrapped, theirs = wrap(model, executor, LORA)
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.2)

    def smoothed(batch: list[Example], logits: list[torch.Tensor]) -> torch.Tensor:
        labels = torch.cat([torch.tensor(example.labels[1:]) for example in batch])
        loss: torch.Tensor = smoother({"logits": torch.cat(logits)[None]}, labels[None])
        return loss

    losses = train(wrapped, adamw(theirs), smoothed)
    with torch.no_grad():
        logits = [wrapped(torch.tensor([each.ids])).logits[0, :-1] for each in examples()]
        evaluated = smoothed(examples(), logits).item()
    result = finetune(executor, eval_data=examples(), label_smoothing_factor=0.2)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert result.eval_losses[-1][1] == pytest.approx(evaluated, rel=1e-5)
    assert_alike(executor, theirs)


def noise_of(executor: Executor, alpha: float, batch: list[Example], seed: int) -> Any:
    """Return the noise that a training pass adds to the embeddings of whole sequences."""
    runner = executor.training_runner("a")
    inputs = []
    for noise in (alpha, None):
        runner.use_noise(noise)
        passed = TrainingPass(runner, batch, 1.0, seed)
        inputs.append(passed.begin(passed.tokens).carried[0])
    runner.use_noise(None)
    return (inputs[0] - inputs[1]).split([len(example.ids) for example in batch])


def test_neftune(
    model: Any, executor: Executor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Noise within transformers' bound; losses and weights with it; windows; and resume."""
    for name in ("a", "windows", "resumed"):
        executor.add_adapter(name, {"peft_type": "LORA", **LORA})
    module = torch.nn.Identity().train()
    module.neftune_noise_alpha = 5.0
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "uniform_", lambda x, low, high: x.fill_(high))
        hook = transformers.integrations.neftune.neftune_post_forward_hook
        bounds = [hook(module, None, torch.zeros(1, len(e.ids), 32)).max() for e in examples()]
    for noise, bound in zip(noise_of(executor, 5.0, examples(), 7), bounds, strict=True):
        assert 0.95 * bound < noise.abs().max() <= bound * (1 + 1e-6)
        assert noise.mean().abs() < 0.2 * bound

    wrapped, theirs = wrap(model, executor, LORA)
    plan = Batches(examples(), batch_size=2, seed=SEED)
    steps = [*plan, *plan][:STEPS]
    noises = [
        noise_of(executor, 5.0, batch, mixed_seed(SEED, step, 0))
        for step, batch in enumerate(steps)
    ]
    waiting = [noise for step in noises for noise in step]
    wrapped.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output + waiting.pop(0)
    )
    losses = train(wrapped, adamw(theirs))
    options = {"neftune_noise_alpha": 5.0}
    result = finetune(executor, **options)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert_alike(executor, theirs)
    whole = finetune_by_windows(executor, examples(), "windows", **options)
    assert whole.losses == pytest.approx(losses, rel=1e-5)

    def stop(record: StepRecord) -> None:
        if record.step == 2:
            raise KeyboardInterrupt

    options["checkpoint_dir"] = tmp_path
    with pytest.raises(FinetuneInterrupted):
        finetune(executor, (), "resumed", on_step=stop, **options)
    resumed = finetune(executor, (), "resumed", **options)
    assert resumed.resumed_from == 2
    assert resumed.losses == result.losses
    with pytest.raises(FinetuneError, match=r"neftune_noise_alpha was 5\.0, is None"):
        finetune(executor, (), "resumed", checkpoint_dir=tmp_path)


@pytest.mark.parametrize(
    ("family", "factor"),
    [
        pytest.param("gemma", 1.0, marks=pytest.mark.slow),
        ("granite", 3.0),
        pytest.param("bloom", None, marks=pytest.mark.slow),
    ],
)
def test_noise_is_added_behind_the_embedding(family: str, factor: float | None) -> None:
    """A scalar of Gemma's embedding is part of it; Granite's follows; Bloom's norm is refused."""
    sizes = {
        "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 64,
    }  # fmt: skip
    of_family = {
        "granite": {"embedding_multiplier": 3.0},
        "gemma": {"head_dim": 8, "num_key_value_heads": 4},
    }
    config = transformers.AutoConfig.for_model(family, **sizes, **of_family.get(family, {}))
    executor = compiled.executor(transformers.AutoModelForCausalLM.from_config(config).eval())
    executor.add_adapter("a", "lora")
    runner = executor.training_runner("a")
    if factor is None:
        with pytest.raises(UnsupportedError, match="layer_norm reads before the first layer"):
            runner.use_noise(5.0)
    else:
        runner.use_noise(5.0)
        assert runner.noise == pytest.approx(5.0 * factor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_smoothing_factor": 1.0}, r"label_smoothing_factor=1\.0; use a number in \[0, 1\)"),
        ({"neftune_noise_alpha": 0}, "neftune_noise_alpha=0; use a number above 0"),
    ],
)
def test_bad_options(executor: Executor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(FinetuneError, match=words):
        finetune(executor, **options)
