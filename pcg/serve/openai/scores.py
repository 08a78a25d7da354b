"""/score and /rerank: the similarity of texts by their embeddings, as vLLM has it.

A causal language model has no head that scores a pair, so a score is the cosine of two embeddings
of /v1/embeddings, as vLLM's of a model that embeds. Each text is embedded once.

Source: vllm/entrypoints/pooling/scoring; /rerank is Jina's and Cohere's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from pcg.keys import Scope
from pcg.runtime.requests.request import Completion, Pooling, RequestFields
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency
from pcg.serve.http.wire import WireModel, json_bytes, new_id
from pcg.serve.openai.call import Call
from pcg.serve.openai.sampling_fields import Truncation, Whole
from pcg.serve.openai.wire import (
    MOST_PROMPTS,
    EmptyObject,
    FieldNames,
    Nothing,
    On,
    Only,
    RequestName,
)

router = APIRouter(tags=["scores"], route_class=LongBodyRoute)

Infer = Annotated[Caller, Depends(requires(Scope.INFER))]
Text = Annotated[str, Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
_PAIRS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""The names that the two sides of a score may have."""


class PairsBody(WireModel):
    """Fields of both; `user` and `request_id` have no effect."""

    model: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    chat_template_kwargs: EmptyObject = None
    instruction: Nothing = None
    max_tokens_per_doc: Annotated[Any, Only((0,))] = None
    max_tokens_per_query: Annotated[Any, Only((0,))] = None
    mm_processor_kwargs: Nothing = None
    pooling: Pooling | None = None
    priority: int | None = None
    request_id: RequestName | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Annotated[Any, Only(("left",))] = None
    use_activation: On = None
    user: str | None = None

    def fields(self) -> RequestFields:
        """Return the fields of the engine's requests."""
        found: dict[str, Any] = {
            "pooling": self.pooling or "last",
            "normalize": True,
            "add_special_tokens": self.add_special_tokens is not False,
        }
        for name in ("cache_salt", "priority", "truncate_prompt_tokens"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found  # type: ignore[return-value]


class ScoreBody(PairsBody):
    """Two sides, each a text or texts: one with each of the other's, or as many with as many."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None

    def names(self) -> FieldNames:
        """Return the names of fields that the engine has others for."""
        return FieldNames(self._sides()[1][0])

    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts to compare.

        ApiError: the sides are not two that belong together, or not as long as each other.
        """
        (first, one), (second, other) = self._sides()
        left, right = _listed(one), _listed(other)
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise ApiError(
                400,
                f"{first} has {len(left)} texts, and {second} {len(right)}; use one text, or as "
                "many on both sides",
                param=second,
            )
        return list(zip(left, right, strict=True))

    def _sides(self) -> tuple[tuple[str, Texts], tuple[str, Texts]]:
        fields = {name for pair in _PAIRS for name in pair}
        given = {name for name in fields if getattr(self, name) is not None}
        for one, other in _PAIRS:
            if given == {one, other}:
                return (one, getattr(self, one)), (other, getattr(self, other))
        expected = "; ".join(" and ".join(pair) for pair in _PAIRS)
        raise ApiError(400, f"give two sides and no more: {expected}", param="queries")


class RerankBody(PairsBody):
    """A query, and documents to sort by their similarity to it; 0 for all of them."""

    query: Text
    documents: Texts
    top_n: Whole = 0
    return_documents: On = None

    def names(self) -> FieldNames:
        """Return the names of fields that the engine has others for."""
        return FieldNames("documents")

    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts to compare."""
        return [(self.query, document) for document in _listed(self.documents)]


class Pairs(Protocol):
    """A body that asks for the similarity of texts."""

    model: str | None

    def names(self) -> FieldNames: ...

    def fields(self) -> RequestFields: ...

    def pairs(self) -> list[tuple[str, str]]: ...


class ScoreUsage(BaseModel):
    """The tokens of all texts, each once."""

    prompt_tokens: int
    total_tokens: int


class Score(BaseModel):
    """The score of a pair, from -1 to 1."""

    object: Literal["score"]
    index: int
    score: float


class ScoreReply(BaseModel):
    """A score of each pair, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


class RankedDocument(BaseModel):
    """The text of a document."""

    text: str


class Ranked(BaseModel):
    """A document with its place in the request, and its score."""

    index: int
    document: RankedDocument
    relevance_score: float


class RerankReply(BaseModel):
    """The documents, the most similar ones first."""

    id: str
    model: str
    usage: ScoreUsage
    results: list[Ranked]


@router.post("/v1/score", response_model=ScoreReply)
@router.post("/score", response_model=ScoreReply)
async def score(
    body: ScoreBody, request: Request, service: ServiceDependency, caller: Infer
) -> Response:
    """Return the similarity of pairs of texts."""
    call, pairs, found = await _embedded(body, request, service, caller)
    head = {"id": new_id("score"), "object": "list", "created": int(time.time())}

    def whole() -> bytes:
        data = [
            {"object": "score", "index": index, "score": one}
            for index, one in enumerate(_scores(pairs, found))
        ]
        return json_bytes({**head, "model": call.model.name, "data": data, "usage": _usage(found)})

    return await call.reply(whole)


@router.post("/v2/rerank", response_model=RerankReply)
@router.post("/v1/rerank", response_model=RerankReply)
@router.post("/rerank", response_model=RerankReply)
async def rerank(
    body: RerankBody, request: Request, service: ServiceDependency, caller: Infer
) -> Response:
    """Sort documents by their similarity to a query."""
    call, pairs, found = await _embedded(body, request, service, caller)
    head = {"id": new_id("rerank"), "model": call.model.name}

    def whole() -> bytes:
        scores = _scores(pairs, found)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {"index": i, "document": {"text": pairs[i][1]}, "relevance_score": scores[i]}
            for i in order[: body.top_n or None]
        ]
        return json_bytes({**head, "usage": _usage(found), "results": results})

    return await call.reply(whole)


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


async def _embedded(
    body: Pairs, request: Request, service: Service, caller: Caller
) -> tuple[Call, list[tuple[str, str]], dict[str, Completion]]:
    """Return the call, the pairs of texts, and the embedding of each text."""
    pairs = body.pairs()
    call = await Call.of(service, request, caller, body)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    submitted = await call.submit(texts, body.fields(), new_id("score"))
    groups = await call.completions(submitted)
    return call, pairs, {text: done for text, (done,) in zip(texts, groups, strict=True)}


def _scores(pairs: Sequence[tuple[str, str]], found: dict[str, Completion]) -> list[float]:
    """Return the cosine of each pair's embeddings, whose norms are 1."""
    vectors = {text: done.embedding for text, done in found.items()}
    return [float(vectors[one] @ vectors[other]) for one, other in pairs]  # type: ignore[operator]


def _usage(found: dict[str, Completion]) -> dict[str, int]:
    tokens = sum(done.prompt_tokens for done in found.values())
    return {"prompt_tokens": tokens, "total_tokens": tokens}
