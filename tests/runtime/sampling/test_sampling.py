"""Sampling against transformers' processors and OpenAI's formulas."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pcg.errors import GenerationError
from pcg.runtime.sampling import sampling as sampler_module
from pcg.runtime.sampling.drawing import Drawing, filtered
from pcg.runtime.sampling.logprobs import logprobs_of
from pcg.runtime.sampling.sampling import UNDRAWN, Sampler, resolved, sample, undrawn_error
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import toy_tokenizers

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


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
    logits = 10 * torch.randn(3, VOCAB)
    tokens = sample(logits, samplers_of(*[SamplingParams(temperature=temperature)] * 3))
    assert torch.equal(tokens, logits.argmax(dim=-1))


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


# ---------------------------------------------------------------------- masks, biases and penalties

FEW = 11
TOKENS = st.integers(0, FEW - 1)
PROMPT = [0, 1, 1]


def processed(logits, params, output, end_ids):
    """One row's logits by transformers, which knows neither of OpenAI's penalties."""
    processors = LogitsProcessorList()
    if params.allowed_token_ids is not None:
        others = sorted(set(range(FEW)) - set(params.allowed_token_ids))
        processors.append(SuppressTokensLogitsProcessor(others))
    if params.bad_words:
        words = [list(word) for word in params.bad_words]
        processors.append(NoBadWordsLogitsProcessor(words))
    if params.min_tokens and end_ids:
        least = MinNewTokensLengthLogitsProcessor(0, params.min_tokens, sorted(end_ids), "cpu")
        processors.append(least)
    if params.logit_bias:
        bias = [[[token], float(b)] for token, b in params.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(bias))
    scores = processors(torch.tensor([output], dtype=torch.long), logits[None].clone())
    if params.repetition_penalty != 1.0:
        repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        scores = repetition(torch.tensor([PROMPT + output]), scores)
    for token in range(FEW):
        count = output.count(token)
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return scores[0]


def edited(logits, samplers):
    """The logits that rows are drawn from, and the tokens."""
    found = []

    def greedy(logits):
        found.append(logits)
        return logits.argmax(-1)

    tokens = sample(logits, samplers, Drawing(greedy, None))
    return found[0], tokens


MASKED = st.builds(
    SamplingParams,
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2.0),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3),
    bad_words=st.lists(
        st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3, unique=True
    ).map(tuple),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=9, unique=True).map(tuple),
    min_tokens=st.integers(0, 5),
)


@given(
    rows=st.lists(st.tuples(MASKED, st.lists(TOKENS, max_size=7)), min_size=1, max_size=5),
    end_ids=st.sets(TOKENS, max_size=2),
    seed=st.integers(0, 1000),
    many=st.sampled_from([3, 1024]),
)
def test_logits_are_those_of_transformers(rows, end_ids, seed, many):
    """Whether allowed tokens are few, or many and a mask."""
    sampler_module._MANY = many
    logits = 4 * torch.randn(len(rows), FEW, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    samplers = []
    for params, output in rows:
        samplers.append(Sampler(params, PROMPT, end_ids))
        for token in output:
            samplers[-1].commit(token)
    found, tokens = edited(logits, samplers)
    assert torch.equal(logits, before)
    for row, (params, output) in enumerate(rows):
        expected = processed(logits[row], params, output, end_ids)
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)
        dead = bool(expected.isinf().all())
        assert tokens[row] == (UNDRAWN if dead else expected.argmax())


def test_continuations_share_what_is_made_of_their_fields():
    """128 of them with long lists would take everyone's step a second to begin."""
    bad_words = tuple((i, i + 1) for i in range(FEW - 1))
    fields = {"allowed_token_ids": (*range(FEW),), "logit_bias": {1: 2.0}, "seed": 2**63 - 1}
    params = SamplingParams(temperature=1.0, bad_words=bad_words, repetition_penalty=2.0, **fields)
    first = Sampler(params, PROMPT)
    other = Sampler(params, PROMPT, first=first, choice=1)
    assert other.allowed is first.allowed
    assert other.bias is first.bias
    assert other.ruled_out is first.ruled_out
    assert other.uniform() == Sampler(dataclasses.replace(params, seed=0)).uniform()
    first.commit(1)
    assert first.forbidden() == [2]
    assert other.forbidden() == []
    assert other.counts.counts.sum() == 0
    with pytest.raises(GenerationError, match="bad_words has 16,500 tokens in all words together"):
        SamplingParams(bad_words=((1,) * 165,) * 100)


def test_a_row_without_a_token_left_fails_alone():
    nothing = SamplingParams(temperature=1.0, allowed_token_ids=(3,), bad_words=((3,),))
    greedy = SamplingParams(allowed_token_ids=(3,), bad_words=((3,),))
    others = [SamplingParams(), SamplingParams(temperature=1.0, seed=1)]
    logits = torch.randn(4, FEW)
    alone = [sample(logits[i : i + 1], [Sampler(other)]).item() for i, other in enumerate(others)]
    samplers = [Sampler(each) for each in (*others, nothing, greedy)]
    assert sample(logits, samplers).tolist() == [*alone, UNDRAWN, UNDRAWN]
    assert "allowed_token_ids, bad_words and min_tokens" in str(undrawn_error(samplers[2], None))
    assert "NaN" in str(undrawn_error(samplers[0], None))


@pytest.mark.parametrize("family", ["llama2", "chatml"])
def test_a_text_of_bad_words_is_its_tokens_with_and_without_a_space(tmp_path, family):
    tokenizer = Tokenizer.load(getattr(toy_tokenizers, f"save_{family}")(tmp_path))
    params = resolved(SamplingParams(bad_words=(" dog", (5, 6))), tokenizer, 500)
    texts = {tokenizer.decode(word) for word in params.bad_words[:-1]}
    assert params.bad_words[-1] == (5, 6)
    assert texts <= {"dog", " dog"}
    assert "dog" in {text.strip() for text in texts}
    with pytest.raises(GenerationError, match=r"bad_words has the text ' dog'.*tokenizer\.json"):
        resolved(SamplingParams(bad_words=(" dog",)), None, 500)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"presence_penalty": 2.1}, r"presence_penalty=2\.1; .* \[-2, 2\]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\]; use a mapping"),
        ({"logit_bias": {True: 1.0}}, "a token of logit_bias=True"),
        ({"logit_bias": {"1" * 5000: 1.0}}, "a token of logit_bias='111"),
        ({"logit_bias": {3: 101}}, r"logit_bias of token 3=101; .* \[-100, 100\]"),
        ({"logit_bias": {3: math.inf}}, "logit_bias of token 3=inf"),
        ({"logit_bias": dict.fromkeys(range(10**6), 1.0)}, "1,000,000 entries; the limit is 4,096"),
        ({"bad_words": "no"}, "bad_words='no'; use a tuple"),
        ({"bad_words": ((),)}, r"bad_words has \(\); use"),
        ({"bad_words": ("",)}, "bad_words has ''"),
        ({"bad_words": ((1, -2),)}, "a token of a sequence of bad_words=-2"),
        ({"bad_words": ("a",) * 600}, "bad_words has 1,200 words; the limit is 1,024"),
        ({"bad_words": ("a" * 2000,)}, "2,000 characters; the limit is 1,024"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": (1.0,)}, "a token of allowed_token_ids=1.0"),
        ({"allowed_token_ids": (1,) * 300_000}, "300,000 ids; the limit is 262,144"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens=9; .* which is max_new_tokens=8"),
        ({"stop": ("a",) * 10_000}, "stop has 10,000 strings; the limit is 128"),
        ({"stop": ("a" * 2000,)}, "a string of stop has 2,000 characters; the limit is 1,024"),
        ({"stop_token_ids": (1,) * 2000}, "stop_token_ids has 2,000 ids; the limit is 1,024"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1"),
        ({"skip_special_tokens": None}, "skip_special_tokens=None"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0; .* None keeps the whole prompt"),
        ({"seed": 10**5000}, "seed=<int>; use"),
        ({"temperature": "x" * 1000}, "temperature='x+…; use"),
    ],
)
def test_values_that_are_refused(options, words):
    with pytest.raises(GenerationError, match=words):
        SamplingParams(**options)
    if not isinstance(options.get("bad_words"), str):
        with pytest.raises(GenerationError):
            SamplingParams.of(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logit_bias": {500: 1.0}}, "logit_bias has token 500; the model's are 0 to 499"),
        ({"allowed_token_ids": (1, 777)}, "allowed_token_ids has token 777"),
        ({"bad_words": ((1, 500),)}, "bad_words has token 500"),
        ({"stop_token_ids": (10**30,)}, "stop_token_ids has token 1000"),
    ],
)
def test_tokens_that_the_model_lacks(options, words):
    with pytest.raises(GenerationError, match=words):
        resolved(SamplingParams(**options), None, 500)


def test_fields_as_they_come_from_json_and_shells():
    options = {"logit_bias": {"7": -1.5}, "bad_words": ["a", [1, 2]], "allowed_token_ids": [1, 2]}
    params = SamplingParams.of(options, 1, 2)
    assert params.logit_bias == {7: -1.5}
    assert params.bad_words == ("a", (1, 2))
    assert params.allowed_token_ids == (1, 2)
    each = SamplingParams.of({"logit_bias": [{1: 1.0}, {2: 2.0}]}, 1, 2)
    assert each.logit_bias == {2: 2.0}


WORDS = [None, True, 0, -1, 2.5, math.nan, math.inf, 10**400, "", "a", "\ud800", b"x", object()]
OTHERS = [(), ("a",), (1,), ((1,),), [1], [None], [["a"]], [{}], {}, {1: 1}, {"1": 2}, {(1,): 1}]


@given(
    options=st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]),
        st.sampled_from([*WORDS, *OTHERS, {1, 2}, {"type": object()}, "1" * 5000]),
        min_size=1,
        max_size=3,
    ),
    count=st.integers(1, 2),
)
def test_values_are_taken_or_refused_by_name(options, count):
    refused = ""
    try:
        SamplingParams.of(options, 0, count).check_vocabulary(100)
    except GenerationError as error:
        refused = str(error)
    assert not refused or any(name in refused for name in options)


# ----------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("vocabulary", [1, 5, 63, 64, 640, 2563, 5120])
@pytest.mark.parametrize("most", [0, 1, 5, 20])
def test_rows_of_any_size(vocabulary: int, most: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 5 * torch.randn(6, vocabulary, generator=generator)
    tokens = torch.randint(0, vocabulary, (6,), generator=generator)
    count = min(most, vocabulary)
    expected = logits.log_softmax(-1)
    values, ids = expected.topk(count)
    for row, found in enumerate(logprobs_of(logits, tokens, most).read([most] * 6)):
        assert found.token_id == tokens[row]
        assert found.logprob == expected[row, tokens[row]]
        assert [token for token, _ in found.top] == ids[row].tolist()
        assert [value for _, value in found.top] == values[row].tolist()


def test_equal_ones_come_by_id_from_blocks_of_one_maximum() -> None:
    """As many as are asked for are equal, and lie far apart."""
    logits = torch.zeros(2, 6400)
    places = [6399, 3, 640, 70, 5000]
    logits[:, places] = 9.0
    (found, other) = logprobs_of(logits, torch.tensor([0, 3]), 5).read([5, 2])
    assert [token for token, _ in found.top] == sorted(places)
    assert [token for token, _ in other.top] == sorted(places)[:2]


def test_nan_is_no_number() -> None:
    logits = torch.zeros(2, 10)
    logits[0, 4] = torch.nan
    found = logprobs_of(logits, torch.tensor([-1, 0]), 2).read([2, 2])
    assert [one.is_number for one in found] == [False, True]
