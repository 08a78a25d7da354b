"""Data with several targets for each token, against PyTorch's autograd in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pcg
from pcg.errors import DataError
from pcg.runtime.data.example import IGNORED
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.trainer_data import VOCABULARY, pair, parameters, put

WIDTHS = (3, 1, 2)
LENGTHS = (7, 4, 9)


@pytest.fixture(scope="module")
def models() -> tuple[Executor, Any]:
    return pair(torch.float64)


def rows() -> list[tuple[list[int], Tensor, Tensor]]:
    """Tokens, targets [N, K] of which some are none, and weights of either sign."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for length, width in zip(LENGTHS, WIDTHS, strict=True):
        tokens, targets = (
            torch.randint(0, VOCABULARY, shape, generator=generator)
            for shape in ((length,), (length, width))
        )
        targets[0, -1] = IGNORED
        weights = torch.randn(length, width, generator=generator, dtype=torch.float64)
        found.append((tokens.tolist(), targets, weights))
    return found


def log_probabilities(wrapped: Any, tokens: list[int], targets: Tensor) -> Tensor:
    logits = wrapped(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.log_softmax(-1).gather(1, targets.clamp(min=0)) * (targets != IGNORED)


@pytest.mark.parametrize(
    ("batch_size", "in_engine", "by_function"),
    [(1, False, False), (8, False, False), (8, False, True), (8, True, False)],
)
def test_the_cross_entropy_of_several_targets_is_autograds(
    models: tuple[Executor, Any], batch_size: int, in_engine: bool, by_function: bool
) -> None:
    executor, wrapped = models
    wrapped.zero_grad()
    expected = [log_probabilities(wrapped, tokens, targets) for tokens, targets, _ in rows()]
    weights = [row[2] for row in rows()]

    def loss(found: list[Tensor]) -> Tensor:
        return -sum((w * one).sum() for w, one in zip(weights, found, strict=True))

    total = loss(expected)
    total.backward()
    put(executor, wrapped, "a")
    if by_function:
        given: Any = loss
        data = [pcg.Datum(tokens, targets) for tokens, targets, _ in rows()]
    else:
        given = "cross_entropy"
        data = [pcg.Datum(*row) for row in rows()]
    options = {"optimizer": "sgd", "batch_size": batch_size}
    if in_engine:
        with executor.engine(kv_cache_bytes=2**20).start():
            done = _update(executor, data, given, options)
    else:
        done = _update(executor, data, given, options)
    assert done.loss == pytest.approx(float(total.detach()), rel=1e-6)
    assert done.targets == sum(t.numel() - 1 for _, t, _ in rows())
    assert done.tokens == sum(LENGTHS)
    for one, values in zip(done.logprobs, expected, strict=True):
        torch.testing.assert_close(one, values.detach(), rtol=1e-6, atol=1e-6)
    for path, parameter in oracle.lora_parameters(wrapped).items():
        after = parameter.data - parameter.grad
        torch.testing.assert_close(parameters(executor, "a")[path], after, rtol=1e-6, atol=1e-6)


def _update(executor: Executor, data: list[pcg.Datum], loss: Any, options: dict[str, Any]) -> Any:
    with executor.trainer("a", **options) as trainer:
        done = trainer.forward_backward(data, loss)
        trainer.optim_step(learning_rate=1.0)
        trainer.snapshot()
    return done


def test_virtual_tokens_have_no_targets(models: tuple[Executor, Any]) -> None:
    executor, _ = models
    tokens, targets, weights = rows()[0]
    prompt = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}
    wide = [pcg.Datum(tokens, targets, weights)]
    narrow = [pcg.Datum(tokens, targets[:, k], weights[:, k]) for k in range(3)]
    norms, found = [], []
    for data in (wide, narrow):
        with executor.trainer("p", peft=prompt, optimizer="sgd", seed=1) as trainer:
            done = trainer.forward_backward(data)
            found.append((done.loss, torch.cat([one.view(7, -1) for one in done.logprobs], 1)))
            norms.append(trainer.optim_step(learning_rate=0.0).gradient_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-9, atol=1e-9)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "ragged": ("cross_entropy", {"targets": [[1, 2], [3]]}, "rows of"),
    "no columns": ("cross_entropy", {"targets": [[], []]}, "rows of"),
    "flat among them": ("cross_entropy", {"targets": [[1], 2]}, "is a int"),
    "deeper": ("cross_entropy", {"targets": [[[1]], [[2]]]}, "tokens are ints"),
    "other rows": ("cross_entropy", {"targets": [[1, 2]]}, "2 tokens and 1 targets"),
    "flat weights": ("cross_entropy", {"targets": [[1], [2]], "weights": [1, 1]}, "shapes"),
    "wide weights": ("cross_entropy", {"targets": [1, 2], "weights": [[1], [1]]}, "shapes"),
    "fewer weights": (
        "cross_entropy",
        {"targets": [[1, 2], [3, 4]], "weights": [[1], [1]]},
        "2 targets a token and 1 weights",
    ),
    "not finite": (
        "cross_entropy",
        {"targets": [[1, 2], [3, 4]], "weights": [[1, float("nan")], [1, 1]]},
        "finite",
    ),
    "no token": ("cross_entropy", {"targets": [[1, 2], [3, 99]]}, "token 99"),
    "many": ("cross_entropy", {"targets": [[1] * 1025] * 2}, "at most 1024"),
    "nothing": ("cross_entropy", {"targets": [[-100, -100], [-100, -100]]}, "predicts nothing"),
    "of ppo": (
        "ppo",
        {"targets": [[1], [2]], "advantages": [1, 1], "logprobs": [0, 0]},
        "linear losses",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_shapes_are_named(models: tuple[Executor, Any], case: str) -> None:
    loss, fields, said = BAD[case]
    with models[0].trainer("b") as trainer, pytest.raises(DataError, match=said):
        trainer.forward([pcg.Datum([1, 2], **fields)], loss)
