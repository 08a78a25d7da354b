"""Defaults of sampling from generation_config.json: which there are, and that a request's win."""

import json
from dataclasses import replace

import pytest
import transformers

from pcg.errors import ConfigError
from pcg.runtime.model.step_graphs import WarmUp
from pcg.serve.openai.sampling import read_generation_config
from pcg.serve.server import announcement
from pcg_cli.options.executors import PlaceOptions, files_of
from tests.support import serving

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
WHOLE = {
    "_from_model_config": True, "do_sample": False, "eos_token_id": [1, 2], "temperature": 0.6,
    "top_p": 0.95, "top_k": 50, "min_p": None, "repetition_penalty": 1.05, "max_new_tokens": 64,
}  # fmt: skip
GREEDY = {"temperature": 0, "repetition_penalty": 1.3, "max_new_tokens": 7}


def write(directory, content, name="generation_config.json"):
    path = directory / name
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write(directory, GREEDY)
    generation = read_generation_config("auto", directory)
    with serving.service_of() as service:
        service.add(generation)
        yield service


def test_the_fields_are_transformers(tmp_path):
    """vLLM takes the fields that transformers' configuration has other than by default."""
    path = write(tmp_path, WHOLE)
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path).to_diff_dict()
    expected = {name: theirs[name] for name in NAMES if theirs.get(name) is not None}
    for asked in ("auto", str(tmp_path), str(path)):
        found = read_generation_config(asked, tmp_path).defaults.model_dump(exclude_none=True)
        assert found == expected
    assert str(read_generation_config("vllm", tmp_path)) == "temperature=1"


def test_without_a_file_or_fields_there_are_none(tmp_path):
    for model in (None, tmp_path):
        assert read_generation_config("auto", model).source is None
    write(tmp_path, {"eos_token_id": 2})
    assert read_generation_config("auto", tmp_path).source is None
    with pytest.raises(ConfigError, match=r"no .*other.*generation_config.json; .*'auto'"):
        read_generation_config(str(tmp_path / "other"), tmp_path)


@pytest.mark.parametrize(
    "content",
    [{"temperature": -1}, {"top_p": 1.5}, {"top_k": "5"}, {"max_new_tokens": 0}, {"min_p": True}],
)
def test_what_no_request_may_have_is_refused_by_name(tmp_path, content):
    write(tmp_path, content)
    (name,) = content
    with pytest.raises(ConfigError, match=f"generation_config.json has {name}="):
        read_generation_config("auto", tmp_path)


def test_a_model_and_a_program_have_their_files(tmp_path):
    model = serving.model_directory()
    assert files_of(str(model), PlaceOptions()) == model
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert files_of(str(tmp_path), PlaceOptions()) == tmp_path


def texts_of(service, **fields):
    body = {"prompt": "Hello, how", "max_tokens": 12, "ignore_eos": True, **fields}
    reply = serving.post(service, "/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def test_they_are_the_librarys_fields_and_a_requests_own_come_first(service):
    fields = [
        {},
        {"temperature": None, "repetition_penalty": None},
        {"repetition_penalty": 1},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.9, "seed": 3, "top_k": 2, "repetition_penalty": 2.0},
    ]
    for given in fields:
        own = {name: value for name, value in given.items() if value is not None}
        sampling = {"temperature": 0, "repetition_penalty": 1.3, **own}
        expected = service.client.executor.generate(
            "Hello, how", max_new_tokens=12, ignore_eos=True, **sampling
        )
        assert texts_of(service, **given) == [expected.text]


def test_outputs_of_chats_have_so_many_tokens_where_nobody_says_more(service):
    chat = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    for own, count in (({}, 7), ({"max_tokens": 9}, 9), ({"max_completion_tokens": 3}, 3)):
        reply = serving.post(service, "/v1/chat/completions", {**chat, **own}).json()
        assert reply["usage"]["completion_tokens"] == count
    reply = serving.post(service, "/v1/responses", {"input": "a", "ignore_eos": True}).json()
    assert reply["usage"]["output_tokens"] == 7
    assert (reply["temperature"], reply["top_p"]) == (0, 1)


def test_a_server_says_what_it_recorded(service, monkeypatch):
    facts = replace(service.client.facts, warmed=WarmUp(256, 41.3, 3 * 2**29))
    monkeypatch.setattr(service.client, "_facts", facts)
    lines = announcement(service, "http://127.0.0.1:1", None).splitlines()
    assert "recorded before the first request: 256 graphs of steps in 41 s, 1.5 GiB" in lines


def test_a_server_says_them(service):
    lines = announcement(service, "http://127.0.0.1:1", None).splitlines()
    said = "temperature=0, repetition_penalty=1.3, max_new_tokens=7 (generation_config.json)"
    assert f"defaults of sampling: {said}" in lines
    assert not any("recorded" in line for line in lines)  # nothing is, on a CPU
