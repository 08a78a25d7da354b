import pytest
import torch
import transformers

from pcg.errors import FinetuneError
from pcg.runtime.training.options import make_schedule

RATE, STEPS = 2e-3, 57


def oracle(name, warmup, specific=None):
    """Multipliers of transformers' schedule, steps 0 … STEPS + 4."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=STEPS,
        scheduler_specific_kwargs=specific,
    )
    multipliers = []
    for _ in range(STEPS + 5):
        multipliers.append(scheduler.get_last_lr()[0] / RATE)
        optimizer.step()
        scheduler.step()
    return multipliers


def ours(name, **options):
    schedule = make_schedule(name, total_steps=STEPS, **options)
    return [schedule(step) for step in range(STEPS + 5)]


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize(
    ("name", "options", "theirs", "specific"),
    [
        ("constant_with_warmup", {}, "constant_with_warmup", None),
        ("linear", {}, "linear", None),
        ("cosine", {}, "cosine", None),
        ("cosine", {"min_lr_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_restarts", {"cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        (
            "polynomial",
            {"power": 2.0, "min_lr_ratio": 0.25},
            "polynomial",
            {"power": 2.0, "lr_end": 0.25 * RATE},
        ),
        ("linear", {"min_lr_ratio": 0.25}, "polynomial", {"lr_end": 0.25 * RATE}),
    ],
)
def test_multipliers_are_those_of_transformers(name, options, theirs, specific, warmup):
    expected = oracle(theirs, warmup, specific)
    # Past the last step their cosine swings back up; ours stays.
    end = STEPS + 1 if name == "cosine" else None
    got = ours(name, warmup_steps=warmup, **options)
    assert got[:end] == pytest.approx(expected[:end], abs=1e-9)


def test_constant():
    assert ours("constant") == oracle("constant", 0)
    assert make_schedule("constant")(10**9) == 1.0


def test_warmup_ratio_is_that_of_the_trainer():
    arguments = transformers.TrainingArguments(warmup_steps=0.1)
    steps = arguments.get_warmup_steps(STEPS)
    assert steps == 6
    assert ours("linear", warmup_ratio=0.1) == ours("linear", warmup_steps=steps)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cosin", {}, "unknown schedule 'cosin'; use one of constant, "),
        ("linear", {"total_steps": None}, "needs total_steps"),
        ("linear", {"total_steps": 0}, "at least 1 step"),
        ("linear", {"warmup_steps": 1, "warmup_ratio": 0.1}, "give one of them"),
        ("linear", {"warmup_steps": 11}, "warmup_steps=11 exceeds total_steps=10"),
        ("linear", {"warmup_steps": -1}, "warmup_steps=-1 is below 0"),
        ("linear", {"warmup_ratio": 1.5}, "outside"),
        ("linear", {"min_lr_ratio": 2.0}, "outside"),
        ("linear", {"cycles": 2}, "no effect on 'linear'"),
        ("linear", {"power": 2.0}, "no effect on 'linear'"),
        ("polynomial", {"power": 0.0}, "above 0"),
        ("cosine_with_restarts", {"cycles": 0}, "at least 1"),
        ("constant", {"warmup_steps": 1}, "use 'constant_with_warmup'"),
        ("constant", {"min_lr_ratio": 0.1}, "never decays"),
        ("constant_with_warmup", {"total_steps": None, "warmup_ratio": 0.1}, "needs total_steps"),
    ],
)
def test_wrong_options(name, options, words):
    with pytest.raises(FinetuneError, match=words):
        make_schedule(name, **{"total_steps": 10, **options})
