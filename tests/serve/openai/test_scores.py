"""/score and /rerank: similarities of embeddings, which transformers' hidden states give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pcg.serve.http.service import Service
from tests.support import serving

QUERY = "what is it?"
TEXTS = ["a dog", "the quick brown fox", "what is it?", "Ein schöner Tag"]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving.service_of() as service:
        yield service


@pytest.fixture(scope="module")
def cosines() -> list[float]:
    """The cosine of the query's last hidden state and each text's."""
    directory = serving.model_directory()
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)

    def embedding(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            return model(ids, output_hidden_states=True).hidden_states[-1][0, -1]

    query = embedding(QUERY)
    return [float(torch.cosine_similarity(query, embedding(text), dim=0)) for text in TEXTS]


def ask(service: Service, path: str, **body: Any) -> Any:
    return serving.post(service, path, {"model": serving.MODEL, **body}).json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("one", "other"),
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")],
)
def test_a_score_is_the_cosine_of_embeddings(
    service: Service, cosines: Sequence[float], path: str, one: str, other: str
) -> None:
    for left in (QUERY, [QUERY], [QUERY] * len(TEXTS)):
        reply = ask(service, path, **{one: left, other: TEXTS})
        assert [row["index"] for row in reply["data"]] == [0, 1, 2, 3]
        assert [row["score"] for row in reply["data"]] == pytest.approx(cosines, abs=1e-5)
        assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 0
    reply = ask(service, path, **{one: QUERY, other: TEXTS[0]})
    assert reply["data"][0]["score"] == pytest.approx(cosines[0], abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_their_scores(
    service: Service, cosines: Sequence[float], path: str
) -> None:
    order = sorted(range(len(TEXTS)), key=lambda index: -cosines[index])
    for most in (0, 2, 9):
        reply = ask(service, path, query=QUERY, documents=TEXTS, top_n=most)
        results = reply["results"]
        assert [one["index"] for one in results] == order[: most or None]
        assert [one["document"]["text"] for one in results] == [TEXTS[i] for i in order][
            : most or None
        ]
        found = [one["relevance_score"] for one in results]
        assert found == pytest.approx([cosines[i] for i in order[: most or None]], abs=1e-5)
    adapted = ask(service, path, query=QUERY, documents=TEXTS, model="lora-0")["results"]
    assert adapted != ask(service, path, query=QUERY, documents=TEXTS)["results"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/score", {"queries": ["a", "b"], "documents": ["a"]}, "queries has 2 texts"),
        ("/score", {"queries": "a"}, "two sides"),
        ("/score", {"queries": "a", "text_2": "b"}, "two sides"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b " * 500}, "maximum context length"),
        ("/score", {"text_1": "a", "text_2": ["b", "\ud800"]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction is not"),
        ("/rerank", {"query": "a", "documents": ""}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b " * 500]}, "maximum context length"),
        ("/rerank", {"query": "a", "documents": ["b"], "return_documents": False}, "return_doc"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    service: Service, path: str, body: dict[str, Any], says: str
) -> None:
    assert says in ask(service, path, **body)["error"]["message"]


def test_the_load_is_what_runs_and_waits(service: Service) -> None:
    assert serving.ask(service, "GET", "/load").json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("documents", "param", "said"),
    [
        ([], "documents", "at least 1 item, not 0"),
        (["a"] * 5000, "documents", "at most 4096 items, not 5000"),
        (["a", ""], "documents.1", "at least 1 character"),
        (["a", 5], "documents.1", "a valid string"),
        ([{"text": "a"}], "documents.0", "a valid string"),
        ("", "documents", "at least 1 character"),
        (5, "documents", "a valid string"),
    ],
)
def test_a_wrong_value_is_told_of_by_the_branch_of_its_type(
    service: Service, documents: Any, param: str, said: str
) -> None:
    body = {"model": serving.MODEL, "query": QUERY, "documents": documents}
    reply = serving.post(service, "/rerank", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert said in reply.json()["error"]["message"]
