"""/v1/completions over ASGI: the library's own text, tokens and logprobs."""

import json
import re

import pytest
import torch
import transformers

from tests.support import oracle, serving, toy_tokenizers
from tests.support.text_model import save_text_model


@pytest.fixture(scope="module")
def service():
    with serving.service_of(serving.make_executor(adapters=2)) as service:
        yield service


def ask(service, body, status=200):
    reply = serving.post(service, "/v1/completions", {"model": serving.MODEL, **body})
    assert reply.status_code == status, reply.text
    return reply.json()


def stream(service, body):
    asked = {"model": serving.MODEL, "stream": True, **body}
    reply = serving.post(service, "/v1/completions", asked)
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    *events, done, end = reply.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


PROMPTS = ["Hello, how", "the quick brown fox"]


@pytest.mark.parametrize("model", [serving.MODEL, "lora-0", "lora-1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_librarys(service, model, temperature):
    sampling = {"temperature": temperature, "seed": 11, "n": 2}
    adapter = None if model == serving.MODEL else model
    expected = service.client.executor.generate(PROMPTS, adapter, max_new_tokens=12, **sampling)
    body = {"model": model, "prompt": PROMPTS, "max_tokens": 12, **sampling}
    found = ask(service, body)["choices"]
    assert [choice["text"] for choice in found] == [one.text for one in expected]
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    streamed = dict.fromkeys(range(4), "")
    for event in stream(service, body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == [one.text for one in expected]


def test_usage_of_a_stream_comes_last(service):
    body = {"prompt": "Hello, how", "max_tokens": 3, "ignore_eos": True}
    events = stream(service, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None for event in events[:-1])
    usage = ask(service, body)["usage"]
    assert usage["completion_tokens"] == 3
    assert events[-1]["usage"]["total_tokens"] == usage["total_tokens"]
    assert all("usage" not in event for event in stream(service, body))


# ------------------------------------------------------------------------------------ logprobs


@pytest.fixture(scope="module")
def oracles(service, tmp_path_factory):
    """transformers' model, and peft's with an adapter that pcg saved."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        serving.model_directory(), dtype=torch.float32
    ).eval()
    directory = tmp_path_factory.mktemp("adapter")
    service.client.executor.save_adapter("lora-0", directory)
    return {serving.MODEL: base, "lora-0": oracle.load_saved(base, directory)}


IDS = [[5, 9, 200, 33, 7, 11], [40, 41, 42], [7] * 30]


@pytest.mark.parametrize("model", [serving.MODEL, "lora-0"])
def test_logprobs_of_prompts_are_transformers(service, oracles, model):
    """As lm-eval asks for log-likelihoods, and finds out whether an output is the likeliest."""
    body = {"model": model, "prompt": IDS, "max_tokens": 1, "logprobs": 1, "echo": True}
    choices = ask(service, {**body, "temperature": 0, "seed": 1234})["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for prompt, choice in zip(IDS, choices, strict=True):
        found = choice["logprobs"]
        expected = oracle.logits(oracles[model], prompt).log_softmax(-1)
        assert len(found["token_logprobs"]) == len(prompt) + 1
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        for place, token in enumerate(prompt[1:], 1):
            row = expected[place - 1]
            assert abs(found["token_logprobs"][place] - float(row[token])) < 1e-4
            likeliest = max(found["top_logprobs"][place].values())
            is_greedy = int(row.argmax()) == token
            assert (found["token_logprobs"][place] == likeliest) == is_greedy
        assert max(found["top_logprobs"][-1].values()) == found["token_logprobs"][-1]
    # Alone, as rounding depends on the other requests of a step.
    body = {**body, "prompt": IDS[0], "temperature": 0}
    (alone,) = ask(service, body)["choices"]
    streamed = stream(service, body)[0]["choices"][0]
    assert streamed["logprobs"] == alone["logprobs"]
    assert streamed["text"] == alone["text"] == choices[0]["text"]


def test_logprobs_of_outputs(service, oracles):
    body = {"prompt": IDS[0], "max_tokens": 5, "ignore_eos": True, "temperature": 1.3, "seed": 2}
    asked = {**body, "logprobs": 3, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = ask(service, asked)["choices"]
    found, tokens = choice["logprobs"], choice["token_ids"]
    assert choice["prompt_token_ids"] == IDS[0]
    assert found["tokens"] == [f"token_id:{token}" for token in tokens]
    rows = oracle.logits(oracles[serving.MODEL], IDS[0] + tokens).log_softmax(-1)[5:-1]
    for place, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        top = found["top_logprobs"][place]
        assert set(top) == {f"token_id:{int(one)}" for one in row.topk(3).indices} | {
            f"token_id:{token}"
        }
        assert abs(top[f"token_id:{token}"] - float(row[token])) < 1e-4
    (own,) = ask(service, {**body, "logprobs": 0})["choices"]
    assert own["logprobs"]["token_logprobs"] == found["token_logprobs"]
    assert [len(one) for one in own["logprobs"]["top_logprobs"]] == [1] * 5
    assert all("token_ids" not in one["choices"][0] for one in stream(service, body))
    events = stream(service, asked)
    assert events[0]["choices"][0]["prompt_token_ids"] == IDS[0]
    assert [t for one in events for t in one["choices"][0]["token_ids"]] == tokens
    pieces = [one["choices"][0]["logprobs"]["token_logprobs"] for one in events]
    assert [number for piece in pieces for number in piece] == found["token_logprobs"]


def test_logprobs_of_what_was_drawn_from(oracles):
    """As trainers ask vLLM's --logprobs-mode for."""
    asked = {
        "prompt": IDS[0], "max_tokens": 5, "ignore_eos": True, "temperature": 1.3, "top_k": 2,
        "seed": 2, "logprobs": 5, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    with serving.service_of(logprobs_mode="processed_logprobs") as service:
        (choice,) = ask(service, asked)["choices"]
    tokens = choice["token_ids"]
    rows = oracle.logits(oracles[serving.MODEL], IDS[0] + tokens)[5:-1] / 1.3
    for token, row, found in zip(tokens, rows, choice["logprobs"]["top_logprobs"], strict=True):
        kept = row.topk(2)
        values = dict(zip(kept.indices.tolist(), kept.values.log_softmax(-1).tolist(), strict=True))
        assert abs(found[f"token_id:{token}"] - values[token]) < 1e-4
        assert sorted(found.values())[:3] == [-9999.0] * 3  # as vLLM writes what cannot come


def test_texts_of_tokens_stand_at_their_places(service):
    text = "the quick brown fox jumps"
    body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 8, "ignore_eos": True}
    (choice,) = ask(service, {**body, "temperature": 0})["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith(text)
    pairs = zip(found["tokens"], found["text_offset"], strict=True)
    for token, place in pairs:
        if not token.startswith("bytes:"):
            assert choice["text"][place:].startswith(token)


def test_prompt_logprobs_have_ranks(service, oracles):
    body = {"prompt": IDS[0], "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0}
    (choice,) = ask(service, body)["choices"]
    rows = oracle.logits(oracles[serving.MODEL], IDS[0]).log_softmax(-1)
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"][0] is None
    for token, row, found in zip(IDS[0][1:], rows, choice["prompt_logprobs"][1:], strict=False):
        assert found[str(token)]["rank"] == 1 + int((row > row[token]).sum())
        assert abs(found[str(token)]["logprob"] - float(row[token])) < 1e-4
        assert {1, 2} <= {one["rank"] for one in found.values()}
    events = stream(service, body)
    assert events[0]["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]


# --------------------------------------------------------------------------------- other fields


def test_fields_reach_the_engine(service):
    greedy = {"prompt": "Hello, how", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    (plain,) = ask(service, greedy)["choices"]
    stop = plain["text"][4:7]
    (stopped,) = ask(service, {**greedy, "stop": stop})["choices"]
    assert plain["text"].startswith(stopped["text"])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    (kept,) = ask(service, {**greedy, "stop": [stop], "include_stop_str_in_output": True})[
        "choices"
    ]
    assert kept["text"] == stopped["text"] + stop
    (guided,) = ask(service, {**greedy, "structured_outputs": {"choice": ["yes", "no"]}})["choices"]
    assert guided["text"] in ("yes", "no")
    (cut,) = ask(service, {**greedy, "prompt": [[1, 2, 3, 4]], "truncate_prompt_tokens": 2})[
        "choices"
    ]
    assert cut == ask(service, {**greedy, "prompt": [3, 4]})["choices"][0]
    best = ask(service, {**greedy, "temperature": 1, "seed": 1, "best_of": 4, "n": 2})["choices"]
    expected = service.client.executor.generate(
        "Hello, how", max_new_tokens=12, ignore_eos=True, seed=1, best_of=4, n=2, temperature=1.0
    )
    assert [choice["text"] for choice in best] == [one.text for one in expected]
    assert ask(service, {**greedy, "max_tokens": 0, "echo": True})["choices"][0]["text"] == (
        "Hello, how"
    )
    assert ask(service, {**greedy, "user": "u", "request_id": "mine"})["id"] == "cmpl-mine"
    reply = ask(service, {**greedy, "model": "lora-1"})
    assert reply["system_fingerprint"] == "lora-1@2"  # made, and then changed in place


def test_a_prompt_gets_what_there_is_room_for_beside_the_output(service):
    ids = [5 + i % 300 for i in range(400)]
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    cut = ask(service, {**greedy, "prompt": ids, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 128 - 6
    assert cut["choices"] == ask(service, {**greedy, "prompt": ids[-122:]})["choices"]
    short = ask(service, {**greedy, "prompt": ids[:9], "truncate_prompt_tokens": -1})
    assert short["usage"]["prompt_tokens"] == 9


def test_a_response_format_is_a_guide(service):
    """Of a model that goes on with white space wherever it may."""
    schema = {"type": "object", "properties": {"kind": {"enum": ["dog", "fox"]}}}
    schema = {**schema, "required": ["kind"], "additionalProperties": False}
    given = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    spaces = serving.white_space(service)
    body = {"prompt": "{", "max_tokens": 60, "temperature": 0, "logit_bias": spaces}
    (choice,) = ask(service, {**body, "response_format": given})["choices"]
    assert re.fullmatch('{"kind": "(dog|fox)"}', choice["text"])
    for guide in (
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"guided_json": schema},
    ):
        assert ask(service, {**body, **guide})["choices"] == [choice]


OPEN = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json": OPEN, "disable_any_whitespace": True}, '{"a":1,"'),
        ({"json": json.dumps(OPEN), "disable_any_whitespace": True}, '{"a":1,"'),
        ({"json": OPEN, "disable_additional_properties": True}, '{"a": 1}'),
        ({"json": OPEN, "whitespace_pattern": " {2}"}, '{  "a"  :  1  ,  "'),
        ({"json": {**OPEN, "x-guidance": {"key_separator": "::"}}}, '{"a"::1, "'),
        ({"json_object": True, "whitespace_pattern": " {3}"}, '{   "'),
    ],
)
def test_options_of_json_are_heeded(service, options, expected):
    """A model that goes on with white space, and with properties, wherever it may."""
    bias = {**serving.white_space(service), **dict.fromkeys(ids_of(service, '{"a:1,'), 50)}
    body = {"prompt": "{", "max_tokens": 30, "temperature": 0, "logit_bias": bias}
    (choice,) = ask(service, {**body, "structured_outputs": options})["choices"]
    assert choice["text"].startswith(expected)
    if "whitespace_pattern" in options:
        old = {"guided_whitespace_pattern": options["whitespace_pattern"]}
        old["guided_json"] = options.get("json", {"type": "object"})
        assert ask(service, {**body, **old})["choices"] == [choice]


def ids_of(service, texts):
    tokenizer = service.client.tokenizer
    return [str(tokenizer.encode(text, add_special_tokens=False)[0]) for text in texts]


def test_a_prompt_that_has_its_special_tokens_gets_no_further_ones(tmp_path):
    model = save_text_model(tmp_path)
    toy_tokenizers.byte_level(add_bos=True).save(str(model / "tokenizer.json"))
    oracles = transformers.PreTrainedTokenizerFast.from_pretrained(model)
    text = "<|endoftext|>Hello, how"
    with serving.service_of(serving.make_executor(adapters=0, directory=model)) as service:
        for given in (None, True, False):
            body = {"prompt": text, "add_special_tokens": given, "return_token_ids": True}
            (choice,) = ask(service, {**body, "max_tokens": 1})["choices"]
            wanted = oracles.encode(text, add_special_tokens=given is not False)
            assert choice["prompt_token_ids"] == wanted


def test_slos_by_headers(service):
    found = []
    stop = service.client.engine.engine.log.listen(lambda event: found.append(event.details))

    body = {"model": serving.MODEL, "prompt": "Hello", "max_tokens": 1}
    for given, status in (("2500", 200), ("soon", 400), ("1e-300", 400)):
        headers = {**serving.HEADERS, "x-slo-ttft-ms": given}
        assert serving.post(service, "/v1/completions", body, headers).status_code == status
    stop()
    assert found[0]["ttft_slo_s"] == 2.5
