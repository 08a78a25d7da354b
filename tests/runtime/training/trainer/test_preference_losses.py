"""The loss `preference` against TRL's formulas, as autograd has them through peft, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pcg.errors import FinetuneError
from pcg.runtime.data.example import IGNORED
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.trainer_data import data, log_probabilities, pair, parameters, put, sampled

ROWS = sampled()
BETA, SMOOTHING = 0.3, 0.2
COUNTS = torch.tensor([sum(t != IGNORED for t in row["targets"]) for row in ROWS]).view(-1, 2)


def by_trl(term: str, margins: Tensor) -> Tensor:
    """A term of each pair as TRL's DPOTrainer computes it; `margins` are [pairs, 2]."""
    delta = margins[:, 0] - margins[:, 1]
    means = margins / COUNTS
    if term == "hinge":
        return torch.relu(1 - BETA * delta)
    if term == "ipo":
        return (means[:, 0] - means[:, 1] - 1 / (2 * BETA)) ** 2
    if term == "sigmoid_norm":
        return -functional.logsigmoid(BETA * (means[:, 0] - means[:, 1]))
    right, wrong = functional.logsigmoid(BETA * delta), functional.logsigmoid(-BETA * delta)
    if term == "robust":
        return (-(1 - SMOOTHING) * right + SMOOTHING * wrong) / (1 - 2 * SMOOTHING)
    return -(1 - SMOOTHING) * right - SMOOTHING * wrong


def total_of(weights: Mapping[str, float]) -> Callable[[list[Tensor]], Tensor]:
    def total(found: list[Tensor]) -> Tensor:
        references = [torch.tensor(row["logprobs"], dtype=torch.float64) for row in ROWS]
        sums = [(l - q).sum() for l, q in zip(found, references, strict=True)]  # noqa: E741
        margins = torch.stack(sums).view(-1, 2)
        terms = [w * by_trl(term, margins).sum() for term, w in weights.items() if term != "sft"]
        chosen = torch.cat(found[::2]).sum()
        return torch.stack([*terms, -weights.get("sft", 0.0) * chosen]).sum()

    return total


@pytest.fixture(scope="module")
def models() -> tuple[Executor, Any]:
    return pair(torch.float64)


@pytest.mark.parametrize(
    "weights",
    [
        {"sigmoid": 1.0},
        {"sigmoid": 0.0, "hinge": 0.5},
        {"sigmoid": 0.0, "ipo": 1.0},
        {"sigmoid": 0.0, "robust": 2.0},
        {"sigmoid": 0.0, "sigmoid_norm": 1.0},
        {"sigmoid": 0.7, "hinge": 0.2, "sft": 0.1},
    ],
    ids=lambda weights: "+".join(name for name in weights if weights[name]),
)
def test_gradients_are_those_of_trl(
    models: tuple[Executor, Any], weights: dict[str, float]
) -> None:
    executor, wrapped = models
    put(executor, wrapped, "a")
    wrapped.zero_grad()
    total = total_of(weights)([log_probabilities(wrapped, row) for row in ROWS])
    total.backward()
    with executor.trainer("a", optimizer="sgd", batch_size=2) as trainer:
        scored = trainer.forward_backward(
            data(ROWS, "logprobs"),
            "preference",
            loss_options={"beta": BETA, "label_smoothing": SMOOTHING, **weights},
        )
        trainer.optim_step(learning_rate=1.0)
        trainer.snapshot()
    assert scored.loss == pytest.approx(float(total.detach()), rel=1e-6)
    own = oracle.lora_parameters(wrapped)
    before = {path: one.detach().clone() for path, one in own.items()}
    for path, after in parameters(executor, "a").items():
        gradient = own[path].grad
        assert gradient is not None
        torch.testing.assert_close(before[path] - after, gradient, rtol=1e-6, atol=1e-6)


def test_dpo_is_a_term_of_it(models: tuple[Executor, Any]) -> None:
    executor, wrapped = models
    put(executor, wrapped, "a")
    with executor.trainer("a") as trainer:
        rows = data(ROWS, "logprobs", "weights")
        one = trainer.forward(rows, "dpo", loss_options={"beta": 0.3})
        other = trainer.forward(rows, "preference", loss_options={"beta": 0.3})
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
        with pytest.raises(FinetuneError, match="did you mean 'sigmoid'"):
            trainer.forward(rows, "preference", loss_options={"sigmoidd": 1.0})
        with pytest.raises(FinetuneError, match=r"is (nan|inf); look at"):  # 1 / 2β
            trainer.forward(rows, "preference", loss_options={"beta": 0.0, "ipo": 1.0})
