"""Masks, biases and penalties, against transformers' processors and OpenAI's formulas."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from pcg.errors import GenerationError
from pcg.runtime.sampling import sampling as sampler_module
from pcg.runtime.sampling.drawing import Drawing
from pcg.runtime.sampling.sampling import UNDRAWN, Sampler, resolved, sample, undrawn_error
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import toy_tokenizers

VOCAB = 11
TOKENS = st.integers(0, VOCAB - 1)
PROMPT = [0, 1, 1]


def processed(logits, params, output, end_ids):
    """One row's logits by transformers, which knows neither of OpenAI's penalties."""
    processors = LogitsProcessorList()
    if params.allowed_token_ids is not None:
        others = sorted(set(range(VOCAB)) - set(params.allowed_token_ids))
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
    for token in range(VOCAB):
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


PARAMS = st.builds(
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
    rows=st.lists(st.tuples(PARAMS, st.lists(TOKENS, max_size=7)), min_size=1, max_size=5),
    end_ids=st.sets(TOKENS, max_size=2),
    seed=st.integers(0, 1000),
    many=st.sampled_from([3, 1024]),
)
def test_logits_are_those_of_transformers(rows, end_ids, seed, many):
    """Whether allowed tokens are few, or many and a mask."""
    sampler_module._MANY = many
    logits = 4 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
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
    bad_words = tuple((i, i + 1) for i in range(VOCAB - 1))
    fields = {"allowed_token_ids": (*range(VOCAB),), "logit_bias": {1: 2.0}, "seed": 2**63 - 1}
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
    logits = torch.randn(4, VOCAB)
    alone = [sample(logits[i : i + 1], [Sampler(other)]).item() for i, other in enumerate(others)]
    samplers = [Sampler(each) for each in (*others, nothing, greedy)]
    assert sample(logits, samplers).tolist() == [*alone, UNDRAWN, UNDRAWN]
    assert "allowed_token_ids, bad_words and min_tokens" in str(undrawn_error(samplers[2], None))
    assert "NaN" in str(undrawn_error(samplers[0], None))


def test_half_precision_logits_are_biased_in_full():
    logits = torch.tensor([[60000.0, 60000.0]], dtype=torch.float16)
    found, _ = edited(logits, [Sampler(SamplingParams(logit_bias={1: 100.0}))])
    assert found.tolist() == [[60000.0, 60100.0]]


def test_a_sampler_is_plain_once_it_has_its_least_tokens():
    sampler = Sampler(SamplingParams(min_tokens=2), (), {4})
    found = []
    for token in (1, 2, 3):
        found.append((sampler.is_plain, sampler.forbidden()))
        sampler.commit(token)
    assert found == [(False, [4]), (False, [4]), (True, [])]
    assert Sampler(SamplingParams(min_tokens=2)).is_plain


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
