"""/classify of a sequence classifier, and what it refuses."""

import pytest

import pcg
from tests.support import serving

LABELS = tuple(f"intent {number}" for number in range(21))  # more than --max-logprobs


@pytest.fixture(scope="module")
def executor():
    return pcg.compile(serving.model_directory(), {"a": "lora"}, labels=LABELS, device="cpu")


@pytest.fixture(scope="module")
def service(executor):
    with serving.service_of(executor) as service:
        yield service


def test_texts_have_the_labels_of_the_executor(service, executor):
    texts = ["win a prize", "lunch at noon", "x" * executor.state.max_positions]
    reply = serving.ask(service, "POST", "/classify", json={"input": texts, "model": "a"}).json()
    for index, (found, expected) in enumerate(
        zip(reply["data"], executor.classify(texts, "a"), strict=True)
    ):
        assert found["index"] == index
        assert found["probs"] == pytest.approx([*expected.values()])
        assert found["label"] == max(expected, key=expected.get)
        assert found["num_classes"] == len(LABELS)
    assert reply["model"] == "a"
    assert reply["usage"]["prompt_tokens"] > 0


def test_a_long_text_keeps_as_many_tokens_as_there_are_positions(service, executor):
    most = executor.state.max_positions
    for last in (-1, most):
        body = {"input": "y" + "x" * most, "truncate_prompt_tokens": last}
        reply = serving.ask(service, "POST", "/classify", json=body).json()
        (expected,) = executor.classify(["x" * most])
        assert reply["data"][0]["probs"] == pytest.approx([*expected.values()])


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/classify", {"input": "x", "pooling": "mean"}, "of the last token"),
        ("/classify", {"input": "x", "use_activation": False}, "use_activation"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}, "generates no text"),
    ],
)
def test_refusals(service, path, body, message):
    reply = serving.ask(service, "POST", path, json=body)
    assert reply.status_code == 400
    assert message in reply.text
