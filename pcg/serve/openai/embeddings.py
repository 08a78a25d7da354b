"""/v1/embeddings, /score, /rerank and /classify: hidden states of texts, similarities, and labels.

A causal language model's embedding is the input of its head, of the last token or averaged over the
prompt, divided by its norm. A prefix of an embedding is an embedding only for models trained so
(Matryoshka), whose config.json has `is_matryoshka` or `matryoshka_dimensions`; for other models
`dimensions` is refused, as in vLLM.

These models have no head that scores a pair, so a score is the cosine of two embeddings, as for
vLLM's embedding models. Each distinct text is embedded once.

Source: vllm/entrypoints/pooling/scoring; /rerank is Jina's and Cohere's.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response

from pcg.runtime.requests.request import (
    Completion,
    Pooling,
    RequestFields,
    classifying,
    label_probabilities,
)
from pcg.serve.engine.facts import ModelFacts
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute
from pcg.serve.http.wire import WireModel, json_bytes, new_id
from pcg.serve.openai.replies import Call, CallDependency
from pcg.serve.openai.sampling import Truncation, Whole, of_engine
from pcg.serve.openai.wire import (
    MOST_PROMPTS,
    EmptyObject,
    FieldNames,
    Nothing,
    On,
    Only,
    Prompts,
    RequestName,
)

router = APIRouter(route_class=LongBodyRoute)

Encoding = Literal["float", "base64"]
Text = Annotated[str, Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
_SIDES = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""Allowed names of the two sides of a score."""


class PooledBody(WireModel):
    """Fields of all bodies; `user` and `request_id` have no effect.

    `add_special_tokens`, `cache_salt`, `pooling`, `truncate_prompt_tokens` and `priority` are not
    in OpenAI's API.
    """

    model: str | None = None
    user: str | None = None

    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    mm_processor_kwargs: Nothing = None
    pooling: Pooling | None = None
    priority: int | None = None
    request_id: RequestName | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Annotated[Any, Only(("left",))] = None
    use_activation: On = None

    def fields(self, normalize: bool = True) -> RequestFields:
        names = ("cache_salt", "priority", "truncate_prompt_tokens")
        fields = {
            "pooling": self.pooling or "last",
            "normalize": normalize,
            "add_special_tokens": self.add_special_tokens is not False,
        }
        return of_engine(fields, {name: getattr(self, name) for name in names})


class EmbeddingsBody(PooledBody):
    """Prompts to embed; `session_id` has no effect. Numbers are little-endian fp32."""

    input: Prompts
    dimensions: Annotated[int, Field(ge=1)] | None = None
    embed_dtype: Annotated[Any, Only(("float32",))] = None
    encoding_format: Encoding | None = None
    endianness: Annotated[Any, Only(("native", "little"))] = None
    normalize: bool | None = None
    session_id: str | None = None

    def names(self) -> FieldNames:
        return FieldNames("input")

    def check_dimensions(self, facts: ModelFacts) -> None:
        dimensions, width, allowed = self.dimensions, facts.width, facts.matryoshka_dimensions
        if dimensions is None or dimensions == width:
            return
        if not allowed and not facts.is_matryoshka:
            raise ApiError(
                400,
                f"dimensions={dimensions}: the model's embeddings have {width}, and it is not a "
                "Matryoshka model, so they cannot be shortened; leave dimensions out.",
                param="dimensions",
            )
        if dimensions > width or (allowed and dimensions not in allowed):
            which = ", ".join(map(str, allowed)) if allowed else f"1 to {width}"
            message = f"dimensions={dimensions}: the model's embeddings have {which}."
            raise ApiError(400, message, param="dimensions")

    def vector(self, completion: Completion) -> np.ndarray[Any, Any] | str:
        """Return an embedding, fp32, shortened and encoded as requested."""
        assert completion.embedding is not None
        vector: np.ndarray[Any, Any] = completion.embedding.numpy()
        if self.dimensions is not None and self.dimensions != len(vector):
            vector = vector[: self.dimensions]
            norm = 1.0 if self.normalize is False else float(np.linalg.norm(vector))
            vector = np.ascontiguousarray(vector / np.float32(norm or 1.0))
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        return vector


class ClassifyBody(PooledBody):
    """Prompts to classify by a sequence classifier."""

    input: Prompts

    def names(self) -> FieldNames:
        return FieldNames("input")


class PairsBody(PooledBody):
    """Fields of scores and ranks."""

    chat_template_kwargs: EmptyObject = None
    instruction: Nothing = None
    max_tokens_per_doc: Annotated[Any, Only((0,))] = None
    max_tokens_per_query: Annotated[Any, Only((0,))] = None

    def names(self) -> FieldNames:
        return FieldNames("documents")

    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts to compare. ApiError: the body has not two sides of equal length."""
        raise NotImplementedError


class ScoreBody(PairsBody):
    """Two sides: a text and texts, or equally many texts on both sides."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None

    def names(self) -> FieldNames:
        return FieldNames(self._sides()[1])

    def pairs(self) -> list[tuple[str, str]]:
        sides = self._sides()
        left, right = (_listed(getattr(self, name)) for name in sides)
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise ApiError(
                400,
                f"{sides[0]} has {len(left)} texts, and {sides[1]} {len(right)}; use one text, or "
                "equally many on both sides",
                param=sides[1],
            )
        return list(zip(left, right, strict=True))

    def _sides(self) -> tuple[str, str]:
        fields = {name for pair in _SIDES for name in pair}
        used = {name for name in fields if getattr(self, name) is not None}
        for sides in _SIDES:
            if used == set(sides):
                return sides
        expected = "; ".join(" and ".join(pair) for pair in _SIDES)
        raise ApiError(400, f"give exactly two sides: {expected}", param="queries")


class RerankBody(PairsBody):
    """A query, and documents to rank by similarity; `top_n` of 0 returns all documents."""

    query: Text
    documents: Texts
    top_n: Whole = 0
    return_documents: On = None

    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, document) for document in _listed(self.documents)]


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class Embedding(BaseModel):
    """An embedding: numbers, or base64 of little-endian fp32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """The tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(BaseModel):
    """The embeddings, in the order of the prompts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Classification(BaseModel):
    """The likeliest label of a prompt, and the probabilities of all labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(BaseModel):
    """The labels, in the order of the prompts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


class ScoreUsage(EmbeddingUsage):
    """The tokens of all distinct texts."""


class Score(BaseModel):
    """The score of a pair, from -1 to 1."""

    object: Literal["score"]
    index: int
    score: float


class ScoreReply(BaseModel):
    """The scores, in the order of the pairs."""

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
    """A document with its index in the request, and its score."""

    index: int
    document: RankedDocument
    relevance_score: float


class RerankReply(BaseModel):
    """The documents, the most similar first."""

    id: str
    model: str
    usage: ScoreUsage
    results: list[Ranked]


@router.post("/v1/embeddings", response_model=EmbeddingsReply, tags=["embeddings"])
async def create_embeddings(body: EmbeddingsBody, call: CallDependency) -> Response:
    """Embed prompts, which are texts or token ids."""
    call = await call.of(body)
    body.check_dimensions(call.service.client.facts)
    fields = body.fields(body.normalize is not False)
    submitted = await call.submit(body.input, fields, new_id("embd"))
    completions = [each for group in await call.completions(submitted) for each in group]

    def write() -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": body.vector(completion)}
            for index, completion in enumerate(completions)
        ]
        usage = _usage(completions)
        content = {"object": "list", "data": data, "model": call.model.name, "usage": usage}
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)

    return await call.whole(write)


@router.post("/classify", response_model=ClassifyReply, tags=["labels"])
async def classify(body: ClassifyBody, call: CallDependency) -> Response:
    """Return the probabilities of a sequence classifier's labels."""
    call = await call.of(body)
    labels = call.service.client.facts.labels
    if not labels:
        raise ApiError(
            400, "The model is a causal LM, without labels; serve a sequence classifier (--labels)."
        )
    fields = {**body.fields(normalize=False), "pooling": None}
    if body.pooling == "mean":
        raise ApiError(400, "Labels are of the last token; leave pooling out.", param="pooling")
    reply_id = new_id("classify")
    submitted = await call.submit(body.input, of_engine(fields, classifying(len(labels))), reply_id)
    completions = [each for group in await call.completions(submitted) for each in group]

    def write() -> bytes:
        data = []
        for index, completion in enumerate(completions):
            probabilities = label_probabilities(completion)
            label = labels[probabilities.index(max(probabilities))]
            facts = {"probs": probabilities, "num_classes": len(labels)}
            data.append({"index": index, "label": label, **facts})
        head = {"id": reply_id, "object": "list", "created": int(time.time())}
        return json_bytes(
            {**head, "model": call.model.name, "data": data, "usage": _usage(completions)}
        )

    return await call.whole(write)


@router.post("/v1/score", response_model=ScoreReply, tags=["scores"])
@router.post("/score", response_model=ScoreReply, tags=["scores"])
async def score(body: ScoreBody, call: CallDependency) -> Response:
    """Return the similarity of pairs of texts."""

    def content(model: str, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": new_id("score"), "object": "list", "created": int(time.time())}
        data = [{"object": "score", "index": i, "score": each} for i, each in enumerate(scores)]
        return {**head, "model": model, "data": data, "usage": usage}

    return await _compared(call, body, body.pairs(), content)


@router.post("/v2/rerank", response_model=RerankReply, tags=["scores"])
@router.post("/v1/rerank", response_model=RerankReply, tags=["scores"])
@router.post("/rerank", response_model=RerankReply, tags=["scores"])
async def rerank(body: RerankBody, call: CallDependency) -> Response:
    """Sort documents by their similarity to a query."""
    pairs = body.pairs()

    def content(model: str, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {"index": i, "document": {"text": pairs[i][1]}, "relevance_score": scores[i]}
            for i in order[: body.top_n or None]
        ]
        return {"id": new_id("rerank"), "model": model, "usage": usage, "results": results}

    return await _compared(call, body, pairs, content)


async def _compared(
    call: Call,
    body: PairsBody,
    pairs: Sequence[tuple[str, str]],
    content: Callable[[str, list[float], dict[str, int]], dict[str, Any]],
) -> Response:
    """Return a reply with the cosines of pairs of texts.

    Args:
        content: builds the reply from the model's name, the scores and the usage.
    """
    call = await call.of(body)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    submitted = await call.submit(texts, body.fields(), new_id("score"))
    completions = [each for group in await call.completions(submitted) for each in group]

    def write() -> bytes:
        vectors: dict[str, Any] = {
            text: completion.embedding for text, completion in zip(texts, completions, strict=True)
        }
        scores = [float(vectors[left] @ vectors[right]) for left, right in pairs]  # unit vectors
        return json_bytes(content(call.model.name, scores, _usage(completions)))

    return await call.whole(write)


def _usage(completions: Sequence[Completion]) -> dict[str, int]:
    tokens = sum(completion.prompt_tokens for completion in completions)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
