"""Losses of a trainer against PyTorch's autograd through transformers and peft, in fp64.

Norms and rotary embeddings of transformers have fp32 in them, so 1e-6 is as near as it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import pcg
from pcg.errors import DataError, FinetuneError
from pcg.runtime.data.example import IGNORED
from pcg.runtime.executor import Executor
from pcg.runtime.training.bound_training import BoundTraining
from pcg.runtime.training.losses import Columns, loss_of
from tests.support.trainer_data import (
    VOCABULARY,
    check_step,
    data,
    log_probabilities,
    pair,
    parameters,
    put,
    sampled,
)

ROWS = sampled()
READ = ("advantages", "logprobs")
BOUNDS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}

Oracle = Callable[[list[Tensor]], Tensor]


def over_tokens(term: Callable[[Tensor, float, float], Any]) -> Oracle:
    """The sum of a term of each target: its log-probability, the sampled one, and the advantage."""

    def total(found: list[Tensor]) -> Tensor:
        terms = [
            term(values[i], row["logprobs"][i], row["advantages"][i])
            for values, row in zip(found, ROWS, strict=True)
            for i, target in enumerate(row["targets"])
            if target != IGNORED
        ]
        return torch.stack(terms).sum()

    return total


def ppo(value: Tensor, before: float, advantage: float) -> Tensor:
    ratio = torch.exp(value - before)
    near = torch.clip(ratio, 0.7, 1.1)
    return -torch.minimum(ratio * advantage, near * advantage)


def gspo(found: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for values, row in zip(found, ROWS, strict=True):
        at = [i for i, target in enumerate(row["targets"]) if target != IGNORED]
        ratio = torch.exp(torch.stack([values[i] - row["logprobs"][i] for i in at]).mean())
        for i in at:
            advantage = row["advantages"][i]
            near = torch.clip(ratio, 0.7, 1.1)
            total = total - torch.minimum(ratio * advantage, near * advantage)
    return total


def dpo(found: list[Tensor]) -> Tensor:
    margins = [
        (values - torch.tensor(row["logprobs"], dtype=torch.float64)).sum()
        for values, row in zip(found, ROWS, strict=True)
    ]
    pairs = [(margins[0], margins[1]), (margins[2], margins[3])]
    return -sum(torch.sigmoid(0.3 * (won - lost)).log() for won, lost in pairs)


def cross_entropy(found: list[Tensor]) -> Tensor:
    rows = zip(found, ROWS, strict=True)
    return -sum((v * torch.tensor(row["weights"], dtype=torch.float64)).sum() for v, row in rows)


BETA, SMOOTHING = 0.3, 0.2
COUNTS = torch.tensor([sum(t != IGNORED for t in row["targets"]) for row in ROWS]).view(-1, 2)


TAU = 0.6


def by_trl(term: str, margins: Tensor) -> Tensor:
    """A term of each pair as TRL's DPOTrainer computes it; `margins` are [pairs, 2]."""
    delta = margins[:, 0] - margins[:, 1]
    chosen, rejected = BETA * margins[:, 0], BETA * margins[:, 1]
    if term == "exo_pair":
        qw, ql = torch.sigmoid(BETA * delta), torch.sigmoid(-BETA * delta)
        return qw * (qw.log() - math.log(1 - SMOOTHING)) + ql * (ql.log() - math.log(SMOOTHING))
    if term == "nca_pair":
        return (
            -functional.logsigmoid(chosen)
            - 0.5 * functional.logsigmoid(-chosen)
            - 0.5 * functional.logsigmoid(-rejected)
        )
    if term == "bco_pair":
        return -functional.logsigmoid(chosen) - functional.logsigmoid(-rejected)
    if term == "sppo_hard":
        return (margins[:, 0] - 0.5 / BETA) ** 2 + (margins[:, 1] + 0.5 / BETA) ** 2
    if term == "aot_unpaired":
        delta = margins[:, 0].sort()[0] - margins[:, 1].sort()[0]
    if term == "apo_zero":
        return (1 - torch.sigmoid(chosen)) + torch.sigmoid(rejected)
    if term == "apo_down":
        return torch.sigmoid(chosen) + (1 - torch.sigmoid(chosen - rejected))
    if term == "discopop":
        modulation = torch.sigmoid(BETA * delta / TAU)
        logistic, exponential = -functional.logsigmoid(BETA * delta), torch.exp(-BETA * delta)
        return logistic * (1 - modulation) + exponential * modulation
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


def by_terms(weights: Mapping[str, float]) -> Oracle:
    """The loss `preference` with some weights of its terms."""

    def total(found: list[Tensor]) -> Tensor:
        references = [torch.tensor(row["logprobs"], dtype=torch.float64) for row in ROWS]
        sums = [(l - q).sum() for l, q in zip(found, references, strict=True)]  # noqa: E741
        margins = torch.stack(sums).view(-1, 2)
        terms = [w * by_trl(term, margins).sum() for term, w in weights.items() if term != "sft"]
        chosen = torch.cat(found[::2]).sum()
        return torch.stack([*terms, -weights.get("sft", 0.0) * chosen]).sum()

    return total


TERMS: tuple[dict[str, float], ...] = (
    {"sigmoid": 1.0},
    {"sigmoid": 0.0, "hinge": 0.5},
    {"sigmoid": 0.0, "ipo": 1.0},
    {"sigmoid": 0.0, "robust": 2.0},
    {"sigmoid": 0.0, "exo_pair": 1.0},
    {"sigmoid": 0.0, "nca_pair": 1.0},
    {"sigmoid": 0.0, "bco_pair": 1.0},
    {"sigmoid": 0.0, "sppo_hard": 1.0},
    {"sigmoid": 0.0, "apo_zero": 1.0},
    {"sigmoid": 0.0, "apo_down": 1.0},
    {"sigmoid": 0.0, "discopop": 1.0},
    {"sigmoid": 0.0, "sigmoid_norm": 1.0},
    {"sigmoid": 0.7, "hinge": 0.2, "sft": 0.1},
)


CASES: dict[str, tuple[tuple[str, ...], dict[str, float], Oracle]] = {
    "cross_entropy": (("weights",), {}, cross_entropy),
    "importance_sampling": (READ, {}, over_tokens(lambda v, q, a: -torch.exp(v - q) * a)),
    "ppo": (READ, BOUNDS, over_tokens(ppo)),
    "cispo": (
        READ,
        BOUNDS,
        over_tokens(lambda v, q, a: -torch.exp(v - q).clip(0.7, 1.1).detach() * v * a),
    ),
    "dro": (READ, {"beta": 0.2}, over_tokens(lambda v, q, a: -(v * a - 0.1 * (v - q) ** 2))),
    "gspo": (READ, BOUNDS, gspo),
    "dpo": (("logprobs",), {"beta": 0.3}, dpo),
    **{
        f"preference {'+'.join(name for name in terms if terms[name])}": (
            ("logprobs",),
            {"beta": BETA, "label_smoothing": SMOOTHING, "discopop_tau": TAU, **terms},
            by_terms(terms),
        )
        for terms in TERMS
    },
}


@pytest.fixture(scope="module")
def models() -> tuple[Executor, Any]:
    return pair(torch.float64)


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("case", CASES)
def test_a_loss_and_its_gradients_are_autograds(
    models: tuple[Executor, Any], case: str, batch_size: int
) -> None:
    read, options, loss = CASES[case]
    name = case.partition(" ")[0]
    expected = [log_probabilities(models[1], row) for row in ROWS]
    total, given = loss(expected), data(ROWS, *read)
    done = check_step(models, given, name, total, batch_size=batch_size, loss_options=options)
    put(*models, "a")
    with models[0].trainer("a") as trainer:
        before = trainer.forward(given, name, loss_options=options)
    assert before.loss == pytest.approx(float(total.detach()), rel=1e-6)
    for one, other, values in zip(done.logprobs, before.logprobs, expected, strict=True):
        torch.testing.assert_close(one, values.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other, values.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_engine", [False, True])
def test_log_probabilities_at_a_temperature(models: tuple[Executor, Any], in_engine: bool) -> None:
    """As TRL divides logits by the temperature of rollouts, whole and in windows."""
    read, options, loss = CASES["ppo"]
    expected = [log_probabilities(models[1], row, 0.7) for row in ROWS]
    total, given = loss(expected), data(ROWS, *read)
    arguments = {"loss_options": options, "in_engine": in_engine, "temperature": 0.7}
    done = check_step(models, given, "ppo", total, **arguments)
    for one, values in zip(done.logprobs, expected, strict=True):
        torch.testing.assert_close(one, values.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("term", ["aot", "aot_unpaired"])
def test_terms_that_sort_the_pairs_of_a_batch(term: str) -> None:
    """As TRL's DPOTrainer sorts; the columns of the pairs have other orders."""
    policy = torch.tensor([[1.0, 3.0], [2.5, 0.5]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[1.5, -0.5], [-1.0, 2.0]], dtype=torch.float64)
    if term == "aot":
        ratios = policy[:, 0] - policy[:, 1]
        delta = ratios.sort()[0] - (reference[:, 0] - reference[:, 1]).sort()[0]
        margins = torch.stack([delta, torch.zeros(2).double()], 1)
    else:
        margins = policy - reference
    expected = by_trl(term, margins).sum()
    (wanted,) = torch.autograd.grad(expected, policy)
    columns = Columns(torch.ones(4), torch.zeros(4), reference.flatten(), torch.arange(4), 4)
    loss = loss_of("preference")
    options = loss.with_options(
        {"beta": BETA, "label_smoothing": SMOOTHING, "sigmoid": 0.0, term: 1.0}
    )
    total, slopes = loss.evaluate(policy.flatten(), columns, options)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(slopes.view(2, 2), wanted)


@pytest.mark.parametrize(("targets", "runs"), [(["q_proj"], 1), (["q_proj", "lm_head"], 2)])
def test_the_head_runs_once_unless_it_is_trained(
    models: tuple[Executor, Any], monkeypatch: pytest.MonkeyPatch, targets: list[str], runs: int
) -> None:
    """The gradients are those of the same loss as a function, whose weights are known before."""
    given, plain = data(ROWS, *READ), data(ROWS)
    chosen: list[int] = []
    loss = BoundTraining.loss

    def counted(*args: Any) -> Any:
        chosen.append(len(args[2].rows))
        return loss(*args)

    def step(*what: Any, **options: Any) -> dict[str, Tensor]:
        executor = models[0]
        recipe = {"peft_type": "LORA", "r": 2, "target_modules": targets}
        with executor.trainer("fresh", peft=recipe, optimizer="sgd", batch_size=8) as trainer:
            with monkeypatch.context() as patched:
                patched.setattr(BoundTraining, "loss", counted)
                trainer.forward_backward(*what, **options)
            trainer.optim_step(learning_rate=1.0)
            trainer.snapshot()
        found = {path: one.clone() for path, one in parameters(executor, "fresh").items()}
        executor.remove_adapter("fresh")
        return found

    named = step(given, "ppo", loss_options=BOUNDS)
    predicted = sum(target != IGNORED for row in ROWS for target in row["targets"])
    assert sum(chosen) == runs * predicted
    by_function = step(plain, over_tokens(ppo))
    for path, value in by_function.items():
        torch.testing.assert_close(named[path], value, rtol=1e-9, atol=1e-12)


def entropy_like(found: list[Tensor]) -> Tensor:
    return sum(one.exp().sum() ** 2 for one in found) + found[0].sum()


def test_a_custom_loss_is_autograds_in_one_call_and_in_two(models: tuple[Executor, Any]) -> None:
    executor, wrapped = models
    for calls in (1, 2):
        total = entropy_like([log_probabilities(wrapped, row) for row in ROWS])
        given, loss = data(ROWS), entropy_like
        if calls == 2:
            put(executor, wrapped, "a")
            with executor.trainer("a") as trainer:
                leaves = [one.requires_grad_() for one in trainer.forward(given).logprobs]
            slopes = torch.autograd.grad(entropy_like(leaves), leaves)
            # A sum of weighted log-probabilities has the gradients of the loss.
            total = sum(
                (slope * log_probabilities(wrapped, row)).sum()
                for slope, row in zip(slopes, ROWS, strict=True)
            )
            given = [
                pcg.Datum(row["tokens"], row["targets"], weights=-slope)
                for row, slope in zip(ROWS, slopes, strict=True)
            ]
            loss = "cross_entropy"
        check_step(models, given, loss, total, batch_size=3)


def test_a_token_without_weight_counts_nowhere(models: tuple[Executor, Any]) -> None:
    executor, wrapped = models
    put(executor, wrapped, "a")
    far = [{**row, "weights": [1.0] * len(row["tokens"])} for row in ROWS]
    far[0]["weights"][-1] = 0.0
    near = [{**row} for row in far]
    near[0]["logprobs"] = [*far[0]["logprobs"][:-1], -2000.0]  # a ratio beyond all numbers
    with executor.trainer("a") as trainer:
        for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
            losses = [
                trainer.forward_backward(data(rows, *READ, "weights"), name).loss
                for rows in (far, near)
            ]
            assert losses[0] == losses[1]
            assert math.isfinite(losses[0])


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a name": ("ppo2", {}, "loss='ppo2'; use cross_entropy"),
    "an option": ("ppo", {"loss_options": {"clip_low": 1}}, "clip_low_threshold"),
    "an option of none": ("importance_sampling", {"loss_options": {"beta": 1}}, "no options"),
    "bounds in turns": ("ppo", {"loss_options": {"clip_low_threshold": 2}}, "is above"),
    "a negative one": ("dro", {"loss_options": {"beta": -1}}, "at least 0"),
    "no word": ("dro", {"loss_options": {5: 1}}, "unknown option '5'"),
    "a term": ("preference", {"loss_options": {"sigmoidd": 1}}, "did you mean 'sigmoid'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_named(models: tuple[Executor, Any], case: str) -> None:
    loss, options, message = BAD[case]
    with models[0].trainer("b") as trainer, pytest.raises(FinetuneError, match=message):
        trainer.forward_backward(data(ROWS, *READ), loss, **options)


def test_a_loss_that_is_no_number_is_named(models: tuple[Executor, Any]) -> None:
    options = {"beta": 0.0, "ipo": 1.0}  # 1 / 2β
    with (
        models[0].trainer("b") as trainer,
        pytest.raises(FinetuneError, match=r"is (nan|inf); look at"),
    ):
        trainer.forward(data(ROWS, "logprobs"), "preference", loss_options=options)


DAMAGED: dict[str, tuple[Any, Any, str]] = {
    "no data": ("cross_entropy", [], "no datum"),
    "one datum": ("cross_entropy", pcg.Datum([1, 2]), "list of pcg.Datum"),
    "a list": ("cross_entropy", [[1, 2]], r"data\[0\] is a list"),
    "no tokens": ("cross_entropy", [pcg.Datum([])], "no tokens"),
    "nothing to predict": ("cross_entropy", [pcg.Datum([1])], "predicts nothing"),
    "a foreign token": ("cross_entropy", [pcg.Datum([1, 60])], "vocabulary of 60"),
    "a foreign target": ("cross_entropy", [pcg.Datum([1, 2], [3, -1])], r"targets has the token"),
    "a float": ("cross_entropy", [pcg.Datum([1, 2.5])], "tokens are ints"),  # type: ignore[list-item]
    "too long": ("cross_entropy", [pcg.Datum([1] * 33)], "more than the model's 32"),
    "lengths": ("cross_entropy", [pcg.Datum([1, 2], [3])], "2 tokens and 1 targets"),
    "NaN": ("cross_entropy", [pcg.Datum([1, 2], weights=[1, math.nan])], r"weights\[1\] is nan"),
    "unread": ("cross_entropy", data(ROWS, "advantages"), "does not read"),
    "weights of a function": (entropy_like, data(ROWS, "weights"), "does not read"),
    "missing": ("ppo", data(ROWS, "advantages"), "has no logprobs"),
    "no pair": ("dpo", data(ROWS[:3], "logprobs"), "give pairs"),
    "deep tokens": ("cross_entropy", [pcg.Datum([[1], [2]])], "a list among"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("case", DAMAGED)
def test_bad_data_is_named_and_leaves_what_waits(models: tuple[Executor, Any], case: str) -> None:
    executor, wrapped = models
    put(executor, wrapped, "a")
    loss, given, message = DAMAGED[case]
    with executor.trainer("a", optimizer="sgd") as trainer:
        trainer.forward_backward(data(ROWS))
        with pytest.raises(DataError, match=message):
            trainer.forward_backward(given, loss)
        norm = trainer.optim_step(learning_rate=0.0).gradient_norm
        trainer.forward_backward(data(ROWS))
        assert trainer.optim_step(learning_rate=0.0).gradient_norm == norm


# ------------------------------------------------------------------------ several targets a token

WIDTHS = (3, 1, 2)
LENGTHS = (7, 4, 9)


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


def wide_log_probabilities(wrapped: Any, tokens: list[int], targets: Tensor) -> Tensor:
    logits = wrapped(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.log_softmax(-1).gather(1, targets.clamp(min=0)) * (targets != IGNORED)


@pytest.mark.parametrize(
    ("batch_size", "in_engine", "by_function"),
    [(1, False, False), (8, False, False), (8, False, True), (8, True, False)],
)
def test_the_cross_entropy_of_several_targets_is_autograds(
    models: tuple[Executor, Any], batch_size: int, in_engine: bool, by_function: bool
) -> None:
    expected = [wide_log_probabilities(models[1], *row[:2]) for row in rows()]
    weights = [row[2] for row in rows()]

    def loss(found: list[Tensor]) -> Tensor:
        return -sum((w * one).sum() for w, one in zip(weights, found, strict=True))

    given: Any = loss if by_function else "cross_entropy"
    datums = [pcg.Datum(*(row[:2] if by_function else row)) for row in rows()]
    done = check_step(
        models, datums, given, loss(expected), batch_size=batch_size, in_engine=in_engine
    )
    assert done.targets == sum(t.numel() - 1 for _, t, _ in rows())
    assert done.tokens == sum(LENGTHS)
    for one, values in zip(done.logprobs, expected, strict=True):
        torch.testing.assert_close(one, values.detach(), rtol=1e-6, atol=1e-6)


SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
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


@pytest.mark.parametrize("case", SHAPES)
def test_bad_shapes_are_named(models: tuple[Executor, Any], case: str) -> None:
    loss, fields, said = SHAPES[case]
    with models[0].trainer("b") as trainer, pytest.raises(DataError, match=said):
        trainer.forward([pcg.Datum([1, 2], **fields)], loss)
