"""Router replay: training repeats the experts of sampling, whose routers are near ties.

The trained model has routers that differ from the sampling model's by 1e-6, as rounding does: each
token's two likeliest experts change places.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import pcg
from pcg.errors import DataError, GenerationError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Completion, Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.train.grpo import GrpoOptions, train_grpo
from tests.support import compiled, oracle
from tests.support.architectures import default_config
from tests.support.families import BY_NAME
from tests.support.prompts import prompts

SEQUENCES = prompts((9, 21, 4))
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
CONFIG = BY_NAME["mixtral"].config(2, num_experts_per_tok=1)


@cache
def executor_of(gap: float) -> Executor:
    """A model of pairs of experts, whose scores differ by about `gap`."""
    model = oracle.random_model(CONFIG)
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):
            noise = torch.randn(
                2, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(1)
            )
            weight.data[1::2] = weight.data[::2] + gap * noise
    executor = compiled.executor(model)
    executor.add_adapter("a", LORA, seed=1)
    for tensor in executor.adapters["a"].tensors:
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)))
    executor.refresh_adapter("a")
    return executor


def data_of(completions: list[Completion], *, replays: bool) -> list[pcg.Datum]:
    ids = [[*p, *c.token_ids] for p, c in zip(SEQUENCES, completions, strict=True)]
    routes = [c.routed_experts if replays else None for c in completions]
    return [pcg.Datum(x[:-1], x[1:], routed_experts=r) for x, r in zip(ids, routes, strict=True)]


def largest_gap(executor: Executor, completions: list[Completion], *, replays: bool) -> float:
    """The largest difference of a token's log-probability in sampling and in training."""
    with executor.trainer("a") as trainer:
        trained = trainer.forward_backward(data_of(completions, replays=replays)).logprobs
    gaps = []
    for values, completion in zip(trained, completions, strict=True):
        assert completion.logprobs is not None
        sampled = torch.tensor([token.logprob for token in completion.logprobs])
        gaps.append(float((values[-len(sampled) :] - sampled).abs().max()))
    return max(gaps)


def check_routes(completions: list[Completion]) -> None:
    for prompt, completion in zip(SEQUENCES, completions, strict=True):
        routes = completion.routed_experts
        assert routes is not None
        assert routes.shape == (len(prompt) + len(completion.token_ids) - 1, 2, 1)
        assert (routes.dtype, int(routes.min()) >= 0, int(routes.max()) < 4) == (
            torch.int16, True, True,
        )  # fmt: skip


def test_sampled_and_trained_log_probabilities_agree() -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    completions = executor_of(1e-6).generate(
        SEQUENCES, "a", ignore_eos=True, logprobs=0, routed_experts=True, **options
    )
    check_routes(completions)
    other = executor_of(-1e-6)
    assert largest_gap(other, completions, replays=True) < 1e-5
    assert largest_gap(other, completions, replays=False) > 0.01


def test_requests_that_are_preempted_choose_the_same_experts_again() -> None:
    executor = executor_of(1e-6)
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    engine = executor.engine(Limits(running=3, tokens=16), kv_cache_bytes=5 * page_bytes)
    params = SamplingParams(
        max_new_tokens=24, ignore_eos=True, logprobs=0, routed_experts=True, temperature=1.0, seed=3
    )
    for prompt in SEQUENCES:
        engine.submit(Request(tuple(prompt), params, executor.adapters["a"]))
    completions: dict[int, Completion] = {}
    while not engine.is_idle:
        for chunk in engine.step():
            if chunk.completion is not None:
                completions[chunk.index] = chunk.completion
    assert Kind.PREEMPTED in {event.kind for event in engine.log}
    ordered = [completions[i] for i in range(len(SEQUENCES))]
    check_routes(ordered)
    assert largest_gap(executor_of(-1e-6), ordered, replays=True) < 1e-5


def test_grpo_replays_routers() -> None:
    executor = executor_of(1e-8)
    options = GrpoOptions(
        num_generations=4, batch_size=8, max_completion_length=6, max_steps=2, router_replay=True
    )

    def is_low(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token < 50 for token in ids) / len(ids) for ids in completion_ids]

    done = train_grpo(executor, SEQUENCES, is_low, options, peft=LORA)
    gaps = [numbers["sampling/sampling_logp_difference/max"] for numbers in done.history]
    assert max(gaps) < 1e-5


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (torch.zeros(9, 2, 2, dtype=torch.int16), r"shape \[9, 2, 2\] .* give ints \[n, 2, 1\]"),
        (torch.zeros(10, 2, 1, dtype=torch.int16), "for the first n of 9 tokens"),
        (torch.full((9, 2, 1), 4), "numbers outside -1 to 3"),
        ("none", "is no array of numbers"),
    ],
)
def test_routes_that_do_not_fit_are_refused(routes: Any, message: str) -> None:
    datum = pcg.Datum(SEQUENCES[0], routed_experts=routes)
    with executor_of(1e-6).trainer("a") as trainer, pytest.raises(DataError, match=message):
        trainer.forward_backward([datum])


@pytest.mark.parametrize("config", [BY_NAME["llama3"].config(2), default_config("jetmoe", 1)])
def test_models_without_a_single_choice_of_experts_record_none(config: dict[str, Any]) -> None:
    executor = compiled.executor(oracle.random_model(config))
    with pytest.raises(GenerationError, match="routed_experts, and no layer of the model chooses"):
        executor.generate([[3, 5]], routed_experts=True)
