"""Graders over HTTP by the real openai client: run, validated, judged, refused."""

import asyncio
import threading
from types import SimpleNamespace

import openai
import pytest

from pcg.errors import GradingError, QueueFullError
from pcg.graders.grader import Answer, Question
from pcg.graders.sample import Sample
from pcg.keys import Keys
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import ApiError
from pcg.serve.jobs import graders as graders_of_jobs
from tests.support import serving
from tests.support.job_client import client_of

CHECK = {
    "type": "string_check",
    "name": "same",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "ilike",
}
JUDGE = {
    "type": "score_model",
    "name": "judge",
    "model": "lora-0",
    "input": [{"role": "user", "content": "Rate {{sample.output_text}}"}],
    "range": [0, 4],
    "sampling_params": {"max_completions_tokens": 32, "temperature": 0},
}
LABELS = {
    "type": "label_model",
    "name": "label",
    "model": serving.MODEL,
    "input": [{"role": "user", "content": "Is it {{item.answer}}?"}],
    "labels": ["yes", "no"],
    "passing_labels": ["yes", "no"],
}
SOURCE = "def grade(sample, item):\n    return len(sample['output_text']) / item['most']\n"
PYTHON = {"type": "python", "name": "own", "source": SOURCE}


@pytest.fixture(scope="module")
def server():
    with serving.on_a_port(python_graders=True) as server:
        yield server


@pytest.fixture(scope="module")
def graders(server):
    with client_of(server.url) as client:
        yield client.fine_tuning.alpha.graders


def test_a_sample_is_graded(graders):
    reply = graders.run(grader=CHECK, model_sample="It is paris.", item={"answer": "Paris"})
    assert (reply.reward, reply.sub_rewards) == (1.0, {})
    assert (reply.metadata.name, reply.metadata.type) == ("same", "string_check")
    assert reply.metadata.scores == {"same": 1.0}
    assert reply.metadata.execution_time >= 0
    assert reply.metadata.token_usage is None
    assert not any(
        value for name, value in reply.metadata.errors if name.endswith("error") and value
    )


def test_judges_are_served_models(graders):
    multi = {
        "type": "multi",
        "name": "all",
        "graders": {"check": CHECK, "judge": JUDGE, "label": LABELS},
        "calculate_output": "check + label + judge / 4",
    }
    reply = graders.run(grader=multi, model_sample="paris", item={"answer": "Paris"})
    errors = reply.metadata.errors
    assert not errors.details, errors
    assert reply.sub_rewards["check"] == reply.sub_rewards["label"] == 1
    assert 0 <= reply.sub_rewards["judge"] <= 4
    assert reply.reward == pytest.approx(2 + reply.sub_rewards["judge"] / 4)
    used = reply.api_model_grader_token_usage_per_model
    assert used.keys() == {"lora-0", serving.MODEL}
    assert reply.metadata.token_usage == sum(used.values())


def test_errors_are_in_the_metadata(graders):
    reply = graders.run(grader=CHECK, model_sample="x", item={})
    assert reply.reward == 0
    assert reply.metadata.errors.invalid_variable_error is True
    assert reply.metadata.errors.other_error is False
    long = {**JUDGE, "input": [{"role": "user", "content": "{{sample.output_text}}"}]}
    reply = graders.run(grader=long, model_sample="word " * 300)
    assert reply.metadata.errors.api_model_grader_server_error is True
    assert "maximum context" in reply.metadata.errors.api_model_grader_server_error_details
    cut = {**JUDGE, "sampling_params": {"max_completions_tokens": 2}}
    reply = graders.run(grader=cut, model_sample="word")
    assert reply.metadata.errors.api_model_grader_parse_error is True


def test_python_graders(graders):
    reply = graders.run(grader=PYTHON, model_sample="abc", item={"most": 6})
    assert reply.reward == 0.5
    reply = graders.run(grader=PYTHON, model_sample="abc", item={"most": 0})
    errors = reply.metadata.errors
    assert errors.python_grader_runtime_error is True
    assert errors.python_grader_runtime_error_details == "ZeroDivisionError: division by zero"


def test_graders_are_validated(graders):
    assert graders.validate(grader=CHECK).grader.model_dump() == CHECK
    for grader, said in (
        ({**CHECK, "operation": "match"}, "grader: operation='match'"),
        ({**CHECK, "input": "{{sample.audio}}"}, "grader.input: it names"),
        ({"type": "cosine"}, "grader.type='cosine'"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            graders.validate(grader=grader)
        assert said in refused.value.message
    with pytest.raises(openai.NotFoundError, match="`nobody` does not exist"):
        graders.validate(grader={**JUDGE, "model": "nobody"})


def test_rights(server):
    keys = Keys([serving.key("trainer", "train"), serving.key("reader", "infer")])
    with serving.service_of(keys=keys) as service:
        path = "/v1/fine_tuning/alpha/graders/validate"
        for grader, name, status, said in (
            (CHECK, "trainer", 200, "same"),
            (CHECK, "reader", 403, "lacks the scope 'train'"),
            (JUDGE, "trainer", 403, "lacks the scope 'infer'"),
            ({**CHECK, "name": "\ud800"}, "trainer", 400, "unpaired surrogate"),
            (PYTHON, "trainer", 400, "may enable it by --python-graders"),
        ):
            body = {"grader": grader}
            reply = serving.post(service, path, body, serving.headers_of(name))
            assert reply.status_code == status
            assert said in reply.text
        more = {"grader": CHECK, "model_sample": "a", "colour": 1}
        reply = serving.post(service, path[:-8] + "run", more, serving.headers_of("trainer"))
        assert "Unrecognized request argument supplied: colour" in reply.text


def test_a_turn_ends_with_its_process(monkeypatch):
    """Who waits no longer for a source has no second one beside it."""
    begun, let = [], threading.Event()

    def runs(*_):
        begun.append(1)
        let.wait(60)
        return 1.0

    async def asked():
        first, second = (asyncio.create_task(own.run("t", "", Sample(""))) for _ in range(2))
        while not begun:
            await asyncio.sleep(0)
        first.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        count = len(begun)
        let.set()
        assert await second == 1.0
        return count

    monkeypatch.setattr(graders_of_jobs, "run_grader", runs)
    own = graders_of_jobs.PythonGraders(False)
    with pytest.raises(GradingError, match="runs no python graders"):  # whatever a job kept
        asyncio.run(own.run("t", "", Sample("")))
    assert not begun
    own.is_on = True
    assert asyncio.run(asked()) == 1
    own.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_job_learns_nothing_from_a_full_queue(waits, server, monkeypatch):
    """Its judges are asked again; who tries a grader is told."""
    caller = Caller("key", "tenant", frozenset())
    made = graders_of_jobs.ServedHost(server.service, caller, waits=waits)
    asked = []

    async def completion(question):
        asked.append(question)
        if len(asked) < 3:
            raise QueueFullError("full")
        return 1, SimpleNamespace(text="yes", token_ids=[5, 6])

    monkeypatch.setattr(graders_of_jobs, "_AGAIN_S", 0.0)
    monkeypatch.setattr(made, "_completion", completion)
    if waits:
        assert asyncio.run(made.ask(Question("m", []))) == Answer("yes", 3)
        return
    with pytest.raises(GradingError, match="Too many requests wait"):
        asyncio.run(made.ask(Question("m", [])))


def test_a_grader_has_a_size(graders):
    """However it is made of parts, so that the event loop and the jobs' rows have a bound."""
    parts = [{"type": "input_text", "text": "a" * 2**16} for _ in range(5)]
    with pytest.raises(openai.BadRequestError, match="use at most 262144"):
        graders.validate(grader={**JUDGE, "input": [{"role": "user", "content": parts}]})


def test_an_error_of_a_judge_is_no_fault_of_ours(server, graders, monkeypatch):
    def refuses(*_, **__):
        raise ApiError(429, "Too many requests wait; ask again later.")

    monkeypatch.setattr(server.service, "submit", refuses)
    reply = graders.run(grader=JUDGE, model_sample="word")
    errors = reply.metadata.errors
    assert errors.api_model_grader_server_error_details.startswith("Too many requests wait")
