"""The objective of GRPO against TRL's formula, by transformers, peft and autograd in fp64.

TRL pads completions to [B, C] and keeps a mask; `trl_loss` does as its `_compute_loss` (1.16).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.runtime.executor import Executor
from pcg.train.grpo.objective import UpdateLoss, advantages_of, update_numbers
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.rollouts import Prompt, Rollout, tokens_of
from tests.support.trainer_data import VOCABULARY, check_step, pair, put

LENGTHS = ((3, 5), (2, 9), (6, 1), (4, 7))
ADVANTAGES = (1.3, -0.7, 0.4, -1.0)


@pytest.fixture(scope="module")
def models() -> tuple[Executor, Any]:
    return pair(torch.float64)


def logprobs_of(model: Any, one: Rollout) -> Tensor:
    ids = torch.tensor([[*one.prompt_ids, *one.tokens]])
    rows = model(ids, use_cache=False).logits[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]


@pytest.fixture(scope="module")
def rollouts(models: tuple[Executor, Any]) -> list[Rollout]:
    """Completions whose ratios lie on both sides of the bounds."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for (prompt, length), advantage in zip(LENGTHS, ADVANTAGES, strict=True):
        ids = torch.randint(0, VOCABULARY, (prompt + length,), generator=generator).tolist()
        before, after = tuple(ids[:prompt]), tuple(ids[prompt:])
        one = Rollout(Prompt(before, before, {}), before, after, "", (), True, True, advantage)
        with torch.no_grad():
            values = logprobs_of(models[1], one)
            with models[1].disable_adapter():
                base = logprobs_of(models[1], one)
        noise = 0.4 * torch.randn(length, generator=generator, dtype=torch.float64)
        found.append(
            Rollout(
                one.prompt, before, after, "", tuple((values + noise).tolist()), True, True,
                advantage, tuple(base.tolist()),
            )
        )  # fmt: skip
    return found


def padded(rows: list[Tensor] | list[Any]) -> Tensor:
    tensors = [torch.as_tensor(one, dtype=torch.float64) for one in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def trl_loss(model: Any, rollouts: list[Rollout], options: GrpoOptions, items: float) -> Tensor:
    """TRL's loss of one update without gradient accumulation, [B, C] and masked."""
    logps = padded([logprobs_of(model, one) for one in rollouts])
    old, ref = (
        padded([one.logprobs for one in rollouts]),
        padded([one.reference for one in rollouts]),
    )
    mask = padded([[float(one.counts)] * len(one.tokens) for one in rollouts])
    advantages = torch.tensor([one.advantage for one in rollouts], dtype=torch.float64)[:, None]
    log_ratio = logps - old
    weights = log_ratio
    if options.importance_sampling_level == "sequence":
        weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    coef_1 = torch.exp(weights)
    kl = torch.exp(ref - logps) - (ref - logps) - 1
    if options.use_bias_correction_kl:
        kl = kl * coef_1
    epsilon_high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    if options.loss_type == "cispo":
        each = -torch.clamp(coef_1, max=epsilon_high).detach() * advantages * logps
    else:
        coef_2 = torch.clamp(coef_1, 1 - options.epsilon, 1 + epsilon_high)
        if options.delta is not None:
            coef_1 = torch.clamp(coef_1, max=options.delta)
        each = -torch.min(coef_1 * advantages, coef_2 * advantages)
    if options.beta:
        each = each + options.beta * kl
    if options.loss_type == "grpo":
        return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if options.loss_type == "bnpo":
        return (each * mask).sum() / mask.sum().clamp(min=1.0)
    if options.loss_type == "dr_grpo":
        return (each * mask).sum() / (each.size(0) * options.max_completion_length)
    return (each * mask).sum() / (items / options.steps_per_generation)


CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "dapo, shared": {"steps_per_generation": 3},
    "grpo": {"loss_type": "grpo", "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-2, "loss_type": "grpo"},
    "gspo and dapo": {"importance_sampling_level": "sequence", "epsilon": 3e-2},
    "cispo of sequences": {
        "importance_sampling_level": "sequence", "loss_type": "cispo", "epsilon_high": 1.02
    },
    "delta": {"delta": 1.1},
    "kl": {"beta": 0.3},
    "kl, plain": {"beta": 0.3, "use_bias_correction_kl": False, "loss_type": "grpo"},
    "kl of sequences": {"beta": 0.3, "importance_sampling_level": "sequence"},
    "kl and cispo": {"beta": 0.2, "loss_type": "cispo", "epsilon_high": 1.1},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_loss_and_its_gradients_are_those_of_trl(
    models: tuple[Executor, Any], rollouts: list[Rollout], case: str
) -> None:
    options = GrpoOptions(num_generations=4, batch_size=4, **CASES[case])
    total = trl_loss(models[1], rollouts, options, tokens_of(rollouts))
    objective = UpdateLoss(rollouts, options, tokens_of(rollouts))
    loss, loss_options = objective.loss()
    done = check_step(models, objective.data(), loss, total, loss_options=loss_options)
    # The function that some losses need is the same loss as the trainer's own.
    found = float(objective.evaluate(done.logprobs))
    assert found == pytest.approx(float(total.detach()), rel=1e-6, abs=1e-7)


def test_masked_and_flat_completions_are_left_out_as_in_trl(
    models: tuple[Executor, Any], rollouts: list[Rollout]
) -> None:
    executor, wrapped = models
    some = [
        replace(rollouts[0], counts=False),
        rollouts[1],
        replace(rollouts[2], advantage=0.0),
        rollouts[3],
    ]
    for kind in ("grpo", "dapo", "bnpo", "dr_grpo"):
        options = GrpoOptions(num_generations=4, batch_size=4, loss_type=kind)
        objective = UpdateLoss(some, options, tokens_of(some))
        assert objective.trained == [some[1], some[3]]
        with torch.no_grad():
            total = trl_loss(wrapped, some, options, tokens_of(some))
        put(executor, wrapped, "a")
        loss, loss_options = objective.loss()
        with executor.trainer("a") as trainer:
            done = trainer.forward(objective.data(), loss, loss_options=loss_options)
        assert done.loss == pytest.approx(float(total), rel=1e-6)


def test_clip_ratios_and_the_divergence_are_those_of_trl(
    models: tuple[Executor, Any], rollouts: list[Rollout]
) -> None:
    options = GrpoOptions(num_generations=4, batch_size=4, beta=0.1, epsilon_high=0.1)
    objective = UpdateLoss(rollouts, options, tokens_of(rollouts))
    with torch.no_grad():
        found = [logprobs_of(models[1], one) for one in rollouts]
    numbers = update_numbers(objective, found, options)
    logps, old = padded(found), padded([one.logprobs for one in rollouts])
    ref = padded([one.reference for one in rollouts])
    mask = padded([[1.0] * len(one.tokens) for one in rollouts])
    advantages = torch.tensor(ADVANTAGES)[:, None]
    ratio = torch.exp(logps - old)
    low, high = (ratio < 0.8) & (advantages < 0), (ratio > 1.1) & (advantages > 0)

    def mean(x: Tensor) -> float:
        return float((x * mask).sum() / mask.sum())

    assert 0 < mean(low) < 1
    assert 0 < mean(high) < 1
    assert numbers["clip_ratio/low_mean"] == pytest.approx(mean(low))
    assert numbers["clip_ratio/high_mean"] == pytest.approx(mean(high))
    assert numbers["clip_ratio/region_mean"] == pytest.approx(mean(low | high))
    kl = (torch.exp(ref - logps) - (ref - logps) - 1) * ratio
    assert numbers["kl"] == pytest.approx(mean(kl))


# --------------------------------------------------------------------------------------- advantages

GROUP = 4
NAN = float("nan")
REWARDS = torch.tensor(
    [[0.1, 1], [0.5, 0], [0.9, 2], [0.5, 0], [1, NAN], [NAN, 3], [0, 1], [NAN, NAN],
     [2, 2], [2, 2], [2, 2], [2, 2]],
    dtype=torch.float64,
)  # fmt: skip
WEIGHTS = torch.tensor([1.0, 0.5], dtype=torch.float64)


def nanstd(x: Tensor) -> Tensor:
    known = x[~x.isnan()]
    return known.std() if len(known) > 1 else torch.tensor(NAN, dtype=x.dtype)


def by_trl(scale: str) -> list[float]:
    """`sum_then_normalize`, a group at a time."""
    total = (REWARDS * WEIGHTS).nansum(dim=1)
    total[REWARDS.isnan().all(dim=1)] = NAN
    found = []
    for group in total.split(GROUP):
        spread = {"group": nanstd(group), "batch": nanstd(total), "none": None}[scale]
        values = group - group.nanmean()
        found += (values if spread is None else values / (spread + 1e-4)).tolist()
    return [0.0 if x != x else x for x in found]


def by_gdpo() -> list[float]:
    """`normalize_then_sum`: each function within its group, then the sum over the batch."""
    summed = torch.zeros(len(REWARDS), dtype=torch.float64)
    for column, weight in zip(REWARDS.T, WEIGHTS, strict=True):
        parts = [
            (group - group.nanmean()) / (nanstd(group) + 1e-4) for group in column.split(GROUP)
        ]
        summed += weight * torch.cat(parts).nan_to_num(nan=0.0)
    summed[REWARDS.isnan().all(dim=1)] = NAN
    values = (summed - summed.nanmean()) / (nanstd(summed) + 1e-4)
    return values.nan_to_num(nan=0.0).tolist()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_are_compared_within_their_group(scale: Any) -> None:
    found = advantages_of(REWARDS, WEIGHTS, GROUP, GrpoOptions(scale_rewards=scale))
    assert found.values.tolist() == pytest.approx(by_trl(scale), rel=1e-12)
    assert found.values[7] == 0.0  # which nothing scored
    assert found.values[8:].tolist() == [0.0] * 4


def test_several_rewards_are_normalized_before_they_are_summed() -> None:
    options = GrpoOptions(multi_objective_aggregation="normalize_then_sum")
    found = advantages_of(REWARDS, WEIGHTS, GROUP, options)
    assert found.values.tolist() == pytest.approx(by_gdpo(), rel=1e-12)


def test_groups_that_are_alike_are_flat() -> None:
    found = advantages_of(REWARDS, WEIGHTS, GROUP, GrpoOptions())
    assert found.is_flat.tolist() == [False] * 8 + [True] * 4
    assert found.rewards[:2].tolist() == [0.6, 0.5]
    assert found.rewards[7].isnan()
