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
from pcg.runtime.sampling.sampling import (
    UNDRAWN,
    Drawing,
    SamplingParams,
    make_generator,
    sample,
)

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

    def draw(filtered, temperatures, numbers):
        found.append((filtered / temperatures[:, None]).softmax(dim=-1))
        return numbers.long(), numbers >= 0

    generators = [make_generator(0)] * len(params)
    sample(logits, params, generators, history, Drawing(torch.Tensor.argmax, draw))
    return found[0]


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
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3)
    logits = 2 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    draws = 20_000
    tokens = sample(
        logits.expand(draws, -1), [params] * draws, [make_generator(seed) for seed in range(draws)]
    )
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
        generators = [make_generator(MIXED[row].seed) for row in rows]
        return torch.stack(
            [
                sample(
                    logits[step, rows],
                    [MIXED[row] for row in rows],
                    generators,
                    [history[row] for row in rows],
                )
                for step in range(steps)
            ]
        )

    every_row = list(range(len(MIXED)))
    together = run(every_row)
    assert together.dtype == torch.int64
    for row in every_row:
        assert torch.equal(run([row])[:, 0], together[:, row])
    backwards = run(every_row[::-1])
    assert torch.equal(backwards.flip(1), together)


def test_greedy_is_one_argmax_and_needs_no_generator():
    logits = torch.randn(4, VOCAB)
    tokens = sample(logits, [SamplingParams()] * 4)
    assert torch.equal(tokens, logits.argmax(dim=-1))


def test_a_greedy_row_heeds_the_repetition_penalty():
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 5] = 2.0, 1.5
    params = [SamplingParams(repetition_penalty=2.0)]
    assert sample(logits, params, history=[[3, VOCAB + 5]]).tolist() == [5]


def test_a_resumed_generator_goes_on_with_the_same_tokens():
    params = [SamplingParams(temperature=1.0, seed=11)]
    logits = torch.randn(6, 1, VOCAB)
    generator = make_generator(11)
    first = [sample(logits[step], params, [generator]).item() for step in range(3)]
    state = generator.get_state()
    rest = [sample(logits[step], params, [generator]).item() for step in range(3, 6)]
    resumed = make_generator()
    resumed.set_state(state)
    assert rest == [sample(logits[step], params, [resumed]).item() for step in range(3, 6)]
    again = make_generator(11)
    assert first + rest == [sample(logits[s], params, [again]).item() for s in range(6)]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
    logits = 10 * torch.randn(3, VOCAB)
    params = [SamplingParams(temperature=temperature)] * 3
    tokens = sample(logits, params, [make_generator(row) for row in range(3)])
    assert torch.equal(tokens, logits.argmax(dim=-1))


def test_a_masked_token_is_never_drawn():
    logits = torch.full((200, 3), -math.inf)
    logits[:, 1] = 0.0
    params = [SamplingParams(temperature=1.0)] * 200
    assert sample(logits, params, [make_generator(i) for i in range(200)]).unique().tolist() == [1]


def test_half_precision_logits():
    logits = torch.randn(2, VOCAB).bfloat16()
    params = [SamplingParams(temperature=1.0, top_p=0.9)] * 2
    generators = [make_generator(0), make_generator(1)]
    expected = [make_generator(0), make_generator(1)]
    assert torch.equal(sample(logits, params, generators), sample(logits.float(), params, expected))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(value, temperature):
    """No token is drawn from them, and those of other rows are as without them."""
    logits = torch.randn(2, VOCAB)
    params = [SamplingParams(), SamplingParams(temperature=temperature)]
    expected = sample(logits, params, [None, make_generator(0)])
    logits[1] = value
    found = sample(logits, params, [None, make_generator(0)])
    assert found.tolist() == [expected[0].item(), UNDRAWN]


def test_a_temperature_below_fp32_is_greedy():
    logits = torch.randn(3, VOCAB)
    params = [SamplingParams(temperature=1e-320)] * 3
    assert torch.equal(sample(logits, params, [make_generator(0)] * 3), logits.argmax(-1))


def test_arguments_that_disagree():
    sampled, penalized = SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=1.1)
    with pytest.raises(GenerationError, match="1 params for 2 rows"):
        sample(torch.zeros(2, 3), [sampled])
    with pytest.raises(GenerationError, match=r"shape \(3,\); expected \[rows, vocab\]"):
        sample(torch.zeros(3), [sampled])
    with pytest.raises(GenerationError, match=r"row 0 has temperature=1\.0 and no generator"):
        sample(torch.zeros(1, 3), [sampled])
    with pytest.raises(GenerationError, match=r"row 0 has repetition_penalty=1\.1 and no history"):
        sample(torch.zeros(1, 3), [penalized])


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
