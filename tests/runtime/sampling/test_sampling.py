import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pcg.errors import GenerationError
from pcg.runtime.sampling.drawing import Drawing, filtered
from pcg.runtime.sampling.sampling import UNDRAWN, Sampler, sample
from pcg.runtime.sampling.sampling_params import SamplingParams

VOCAB = 97


def oracle(logits, params, history):
    """One row's distribution, through transformers' processors in transformers' order."""
    ids = torch.tensor([history])
    scores = logits[None].clone()
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k is not None:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p is not None:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p is not None:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores.softmax(dim=-1)[0]


def probabilities(logits, params, history):
    """The distributions that rows are drawn from."""
    found = []

    def draw(logits, params, numbers):
        found.append(filtered(logits, params).softmax(dim=-1))
        return numbers.long(), numbers >= 0

    samplers = [Sampler(*each) for each in zip(params, history, strict=True)]
    sample(logits, samplers, Drawing(torch.Tensor.argmax, draw))
    return found[0]


def samplers_of(*params):
    return [Sampler(each) for each in params]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3.0),
    top_k=st.none() | st.integers(1, VOCAB + 10),
    top_p=st.none() | st.floats(0.05, 0.99),
    min_p=st.none() | st.floats(0.0, 0.9),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2.0),
)


@settings(deadline=None)
@given(batch=st.lists(PARAMS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_distributions_are_those_of_transformers(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(len(batch), VOCAB, generator=generator)
    before = logits.clone()
    history = torch.randint(0, VOCAB, (len(batch), 12), generator=generator).tolist()
    got = probabilities(logits, batch, history)
    for row, params in enumerate(batch):
        expected = oracle(logits[row], params, history[row])
        torch.testing.assert_close(got[row], expected, atol=1e-6, rtol=1e-4)
    assert torch.equal(logits, before)


def test_draws_follow_the_distribution():
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
    logits = 2 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    draws = 20_000
    seeded = [dataclasses.replace(params, seed=seed) for seed in range(draws)]
    tokens = sample(logits.expand(draws, -1), samplers_of(*seeded))
    observed = torch.bincount(tokens, minlength=VOCAB) / draws
    expected = oracle(logits[0], params, [])
    assert torch.all(observed[expected == 0] == 0)
    # 5 standard deviations of each frequency.
    bound = 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9
    assert torch.all((observed - expected).abs() <= bound)


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=5, seed=2),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2, seed=4),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=5),
]


def test_tokens_do_not_depend_on_the_rest_of_the_batch():
    steps = 20
    noise = torch.Generator().manual_seed(7)
    logits = 3 * torch.randn(steps, len(MIXED), VOCAB, generator=noise)
    history = torch.randint(0, VOCAB, (len(MIXED), 9), generator=noise).tolist()

    def run(rows):
        samplers = [Sampler(MIXED[row], history[row]) for row in rows]
        found = []
        for step in range(steps):
            found.append(sample(logits[step, rows], samplers))
            for sampler, token in zip(samplers, found[-1].tolist(), strict=True):
                sampler.commit(token)
        return torch.stack(found)

    every_row = list(range(len(MIXED)))
    together = run(every_row)
    assert together.dtype == torch.int64
    for row in every_row:
        assert torch.equal(run([row])[:, 0], together[:, row])
    backwards = run(every_row[::-1])
    assert torch.equal(backwards.flip(1), together)


def test_greedy_is_one_argmax():
    logits = torch.randn(4, VOCAB)
    tokens = sample(logits, samplers_of(*[SamplingParams()] * 4))
    assert torch.equal(tokens, logits.argmax(dim=-1))


def test_a_greedy_row_heeds_the_repetition_penalty():
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 5] = 2.0, 1.5
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [3, 4])
    assert sample(logits, [sampler]).tolist() == [5]
    sampler.commit(5)
    logits[0, 5] = 1.9
    assert sample(logits, [sampler]).tolist() == [3]


def test_a_step_that_is_computed_again_has_the_same_tokens():
    logits = torch.randn(6, 1, VOCAB)
    once, again = samplers_of(*[SamplingParams(temperature=1.0, seed=11)] * 2)
    for step in range(6):
        (expected,) = sample(logits[step], [once]).tolist()
        for _ in range(step % 3 + 1):
            assert sample(logits[step], [again]).tolist() == [expected]
        once.commit(expected)
        again.commit(expected)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
    logits = 10 * torch.randn(3, VOCAB)
    tokens = sample(logits, samplers_of(*[SamplingParams(temperature=temperature)] * 3))
    assert torch.equal(tokens, logits.argmax(dim=-1))


def test_a_masked_token_is_never_drawn():
    logits = torch.full((200, 3), -math.inf)
    logits[:, 1] = 0.0
    samplers = samplers_of(*[SamplingParams(temperature=1.0)] * 200)
    assert sample(logits, samplers).unique().tolist() == [1]


def test_half_precision_logits():
    logits = torch.randn(2, VOCAB).bfloat16()
    samplers = samplers_of(*[SamplingParams(temperature=1.0, top_p=0.9)] * 2)
    assert torch.equal(sample(logits, samplers), sample(logits.float(), samplers))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(value, temperature):
    """No token is drawn from them, and those of other rows are as without them."""
    logits = torch.randn(2, VOCAB)
    samplers = samplers_of(SamplingParams(), SamplingParams(temperature=temperature))
    expected = sample(logits, samplers)
    logits[1] = value
    found = sample(logits, samplers)
    assert found.tolist() == [expected[0].item(), UNDRAWN]


def test_a_temperature_below_fp32_is_greedy():
    logits = torch.randn(3, VOCAB)
    samplers = samplers_of(*[SamplingParams(temperature=1e-320)] * 3)
    assert torch.equal(sample(logits, samplers), logits.argmax(-1))


def test_arguments_that_disagree():
    with pytest.raises(GenerationError, match="1 samplers for 2 rows"):
        sample(torch.zeros(2, 3), samplers_of(SamplingParams()))
    with pytest.raises(GenerationError, match=r"shape \(3,\); expected \[rows, vocab\]"):
        sample(torch.zeros(3), samplers_of(SamplingParams()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1; use a finite number in \[0, inf\)"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": True}, "temperature=True"),
        ({"top_k": 0}, "top_k=0; use an int of at least 1; None keeps all tokens"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"top_p": 0.0}, r"top_p=0\.0; use a finite number in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"min_p": -0.1}, r"min_p=-0\.1; use a finite number in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0; .* \[0\.01, 100\]"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "at most 9223372036854775807"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"stop": "abc"}, "stop='abc'; use a tuple of strings"),
        ({"stop": ("",)}, "use a tuple of strings that are not empty"),
        ({"stop_token_ids": [1]}, r"stop_token_ids=\[1\]; use a tuple"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids=-1"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
    ],
)
def test_params_out_of_range(options, words):
    with pytest.raises(GenerationError, match=words):
        SamplingParams(**options)
