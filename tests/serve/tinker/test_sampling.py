"""Samples for the real tinker client."""

import math
import re
from functools import partial

import pytest
import torch
from tinker import types

from tests.support import serving, tinker_client

PROMPT = [5, 8, 13, 21, 34]


@pytest.fixture(scope="module")
def executor():
    return serving.make_executor()


@pytest.fixture(scope="module")
def url(executor, tmp_path_factory):
    with tinker_client.server(tmp_path_factory.mktemp("data"), lambda: executor) as served:
        yield served.url


@pytest.fixture(scope="module")
def sampler(url):
    with tinker_client.client(url) as client:
        yield client.create_sampling_client(base_model=tinker_client.MODEL).result(60)


def model_input(tokens=PROMPT):
    return types.ModelInput.from_ints(tokens)


def expected(executor, tokens):
    """The log-probabilities of every token behind each of some tokens, [N, V]."""
    return executor.logits([tokens])[0].float().log_softmax(-1)


def test_greedy_samples_are_the_librarys(sampler, executor):
    params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    done = sampler.sample(model_input(), num_samples=2, sampling_params=params).result(60)
    (one,) = executor.generate([PROMPT], max_new_tokens=6, ignore_eos=True)
    assert [one.tokens for one in done.sequences] == [list(one.token_ids)] * 2
    assert [one.stop_reason for one in done.sequences] == ["length"] * 2
    assert len({one.sequence_id for one in done.sequences}) == 2
    logprobs = expected(executor, [*PROMPT, *one.token_ids])
    for place, (token, found) in enumerate(
        zip(done.sequences[0].tokens, done.sequences[0].logprobs, strict=True)
    ):
        at = logprobs[len(PROMPT) - 1 + place]
        assert found == pytest.approx(float(at[token]), abs=1e-5)


def test_logprobs_of_prompts_and_the_likeliest(sampler, executor):
    done = sampler.sample(
        model_input(),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=2, seed=3, temperature=0.7, top_k=5),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result(60)
    (one,) = done.sequences
    whole = expected(executor, [*PROMPT, *one.tokens])
    assert done.prompt_logprobs[0] is None
    for place, token in enumerate(PROMPT[1:], 1):
        assert done.prompt_logprobs[place] == pytest.approx(
            float(whole[place - 1, token]), abs=1e-5
        )
        best = whole[place - 1].topk(3)
        found = done.topk_prompt_logprobs[place]
        assert [token for token, _ in found] == best.indices.tolist()
        assert [x for _, x in found] == pytest.approx(best.values.tolist(), abs=1e-5)
    for place, token in enumerate(one.tokens):  # the model's own, before temperature and top-k
        at = whole[len(PROMPT) - 1 + place]
        assert one.logprobs[place] == pytest.approx(float(at[token]), abs=1e-5)
        found = one.topk_logprobs[place]
        assert [token for token, _ in found] == at.topk(2).indices.tolist()


def test_compute_logprobs_and_the_last_ones(sampler):
    whole = sampler.compute_logprobs(model_input()).result(60)
    assert len(whole) == len(PROMPT)
    done = sampler.sample(
        model_input(),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
    ).result(60)
    assert done.prompt_logprobs == [None, None, None, *whole[-2:]]


def test_stops_are_tokens_texts_the_end_or_none(sampler, executor):
    greedy = {"max_tokens": 6, "temperature": 0.0}
    (free,) = executor.generate([PROMPT], max_new_tokens=6, ignore_eos=True)
    third = free.token_ids[2]

    def sample(stop):
        params = types.SamplingParams(**greedy, stop=stop)
        return sampler.sample(model_input(), num_samples=1, sampling_params=params).result(60)

    (one,) = sample([third]).sequences
    assert one.tokens == list(free.token_ids[: free.token_ids.index(third) + 1])
    assert one.stop_reason == "stop"
    text = executor.tokenizer.decode(list(free.token_ids[:1]))
    (one,) = sample(text).sequences
    (other,) = sample([text]).sequences
    assert one.tokens == other.tokens == list(free.token_ids[: len(one.tokens)])
    assert one.stop_reason == "stop"
    (ends,) = executor.generate([PROMPT], max_new_tokens=6)
    (one,) = sample(None).sequences
    assert one.tokens == list(ends.token_ids)


def test_a_seed_gives_the_same_samples_and_others_without(sampler):
    def sample(seed):
        params = types.SamplingParams(max_tokens=8, seed=seed, temperature=1.0, stop=[])
        done = sampler.sample(model_input(), num_samples=2, sampling_params=params).result(60)
        return [one.tokens for one in done.sequences]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert len({str(sample(None)) for _ in range(3)}) > 1


def test_a_request_is_one_by_its_number_and_outlasts_its_client(url):
    with tinker_client.raw(url) as raw:
        place = {"session_id": tinker_client.new_session(raw), "sampling_session_seq_id": 4}
        ask = {**place, "base_model": tinker_client.MODEL}
        made, again = (raw.post("create_sampling_session", json=ask).json() for _ in range(2))
        assert made == again
        id = made["sampling_session_id"]
        found = raw.get(f"samplers/{id}").json()
        assert found == {"sampler_id": id, "base_model": tinker_client.MODEL, "model_path": None}
        body = tinker_client.sample(PROMPT, sampling_session_id=id, seq_id=0, num_samples=3)
        first = raw.post("asample", json=body).json()
        assert len(first["sample_sequence_ids"]) == 3
        assert raw.post("asample", json={**body, "num_samples": 1}).json() == first
        other = raw.post("asample", json={**body, "seq_id": 1}).json()
        assert other["request_id"] != first["request_id"]
        assert raw.post("asample", json={**body, "sampling_session_id": "smp-0"}).status_code == 404
        results = [
            raw.post("retrieve_future", json={"request_id": first["request_id"]}) for _ in range(2)
        ]
        assert results[0].headers["content-type"] == "application/x-protobuf"
        assert results[0].content == results[1].content


BAD = {
    "an image": ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "image"),
    "no tokens": ({"prompt": {"chunks": []}}, "no tokens"),
    "texts among tokens": (
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": ["a"]}]}},
        "list of ints",
    ),
    "more of a chunk": (
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1], "more": 1}]}},
        "a type and tokens",
    ),
    "mixed stops": ({"sampling_params": {"stop": [1, "a"]}}, "texts, or token ids"),
    "a bool as a stop": ({"sampling_params": {"stop": [True]}}, "texts, or token ids"),
    "a temperature": ({"sampling_params": {"temperature": -1}}, "temperature"),
    "an unknown field": ({"sampling_params": {"min_p": 0.1}}, "min_p"),
    "targets": ({"target_prompt_logprobs": {"data": []}}, "target_prompt_logprobs"),
    "stability": ({"record_stability_info": True}, "stable_reinforce, is not public"),
    "too many": ({"num_samples": 129}, "num_samples"),
    "the last ones of none": ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
    "no model": ({"base_model": None}, "base_model"),
    "another base": ({"base_model": "llama"}, "no base model llama"),
    "no checkpoint": ({"model_path": "tinker://a:train:0/sampler_weights/b"}, "no checkpoint"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_by_name(url, case):
    given, said = BAD[case]
    body = {**tinker_client.sample(PROMPT), **given}
    with tinker_client.raw(url) as raw:
        reply = raw.post("asample", json=body)
        if reply.status_code == 200:
            reply = raw.post("retrieve_future", json={"request_id": reply.json()["request_id"]})
            assert reply.json()["category"] == "user"
        else:
            assert reply.status_code == 400
        assert said in reply.text


@pytest.mark.slow
def test_what_a_crash_interrupted_is_sampled_once_the_server_is_back(tmp_path, monkeypatch):
    from pcg.serve.tinker.samplers import Samplers

    load = partial(serving.make_executor, adapters=0)

    async def nothing(*_):
        return None

    body = tinker_client.sample(PROMPT)
    with monkeypatch.context() as broken:
        broken.setattr(Samplers, "_sample", nothing)
        with tinker_client.server(tmp_path, load) as served, tinker_client.raw(served.url) as raw:
            promise = raw.post("asample", json=body).json()
    with tinker_client.server(tmp_path, load) as served, tinker_client.raw(served.url) as raw:
        reply = raw.post("retrieve_future", json={"request_id": promise["request_id"]})
    assert reply.headers["content-type"] == "application/x-protobuf"
    from tinker.proto.response_conv import deserialize_sample_response

    assert len(deserialize_sample_response(reply.content).sequences[0].tokens) == 2
    assert math.isfinite(deserialize_sample_response(reply.content).sequences[0].logprobs[0])


def test_tokens_beside_the_prompts_have_their_log_probabilities(sampler, executor):
    logprobs = expected(executor, PROMPT)[:-1]
    places, vocabulary = logprobs.shape
    wanted = torch.randint(0, vocabulary, (places, 3), generator=torch.Generator().manual_seed(1))
    wanted[1, 2] = -1
    params = types.SamplingParams(max_tokens=1, temperature=0.7, seed=5)
    done = sampler.sample(
        model_input(),
        num_samples=1,
        sampling_params=params,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch(wanted),
        prompt_alt_tokens_k=400,
    ).result(60)
    found = done.target_prompt_logprobs.to_torch()
    true = logprobs.gather(1, wanted.clamp(min=0)).where(wanted >= 0, 0.0)
    torch.testing.assert_close(found, true, atol=2e-5, rtol=1e-5)
    tokens = done.prompt_alt_tokens.tokens.to_torch()
    torch.testing.assert_close(
        done.prompt_alt_tokens.logprobs.to_torch(), logprobs.gather(1, tokens), atol=2e-5, rtol=1e-5
    )
    shares = (logprobs / 0.7).softmax(-1)
    seen = torch.zeros_like(shares).scatter_add(1, tokens, torch.full(tokens.shape, 1 / 400))
    assert (seen - shares).abs().max() < 0.1  # 4 standard deviations of one half
    assert [len(row or ()) for row in done.topk_prompt_logprobs or ()][1:] == [2] * places

    listed = wanted.clone()
    listed[listed < 0] = 0
    rows, columns = [0, 2, *[3] * (places - 1)], [0, 2, 1]
    sparse = types.TensorData(
        data=[int(listed[0, 0]), int(listed[0, 2]), int(listed[1, 1])],
        dtype="int64",
        shape=[places, 3],
        sparse_crow_indices=rows,
        sparse_col_indices=columns,
    )
    again = sampler.sample(
        model_input(), num_samples=1, sampling_params=params, target_prompt_logprobs=sparse
    ).result(60)
    told = again.target_prompt_logprobs
    assert (told.sparse_crow_indices, told.sparse_col_indices) == (rows, columns)
    assert told.data == pytest.approx(found[[0, 0, 1], [0, 2, 1]].tolist(), abs=2e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": [1, 2], "shape": [2, 1]}, r"\[2, 1\]"),
        ({"data": [1] * 4, "shape": [3, 1]}, "4 numbers"),
        ({"data": [-2] * 4, "shape": [4, 1]}, "token id"),
        ({"data": [1], "shape": [4, 1], "sparse_crow_indices": [0, 2, 1, 1, 1]}, "together"),
        (
            {
                "data": [1],
                "shape": [4, 1],
                "sparse_crow_indices": [0, 2, 1, 1, 1],
                "sparse_col_indices": [0],
            },
            "rise",
        ),
    ],
)
def test_targets_that_do_not_fit_are_refused(url, fields, said):
    targets = {"dtype": "int64", **fields}
    body = tinker_client.sample([1, 2, 3, 4, 5], target_prompt_logprobs=targets)
    with tinker_client.raw(url) as raw:
        reply = raw.post("asample", json=body)
    assert reply.status_code == 400
    assert re.search(said, reply.text)
