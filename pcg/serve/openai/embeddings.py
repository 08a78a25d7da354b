"""/v1/embeddings: the last hidden states of prompts, as OpenAI's clients read them.

A causal language model's embedding is the state that its head multiplies, of the last token or as
the mean over the prompt's, divided by its norm. A part of it is an embedding only where the model
was trained so (Matryoshka), which its config.json says by `is_matryoshka` or
`matryoshka_dimensions`; for all others `dimensions` is refused, as in vLLM.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from pcg.keys import Scope
from pcg.runtime.requests.request import Completion, Pooling, RequestFields
from pcg.serve.engine.facts import ModelFacts
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, ServiceDependency
from pcg.serve.http.wire import new_id
from pcg.serve.openai.call import Call
from pcg.serve.openai.sampling_fields import Truncation
from pcg.serve.openai.wire import AbsentOfEmbeddings, FieldNames, Prompts

router = APIRouter(prefix="/v1", tags=["embeddings"], route_class=LongBodyRoute)

Encoding = Literal["float", "base64"]


class EmbeddingsBody(AbsentOfEmbeddings):
    """Prompts to embed; `user`, `request_id` and `session_id` have no effect.

    `add_special_tokens`, `cache_salt`, `pooling`, `normalize`, `truncate_prompt_tokens` and
    `priority` are not OpenAI's.
    """

    input: Prompts
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Encoding | None = None
    model: str | None = None
    user: str | None = None

    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    normalize: bool | None = None
    pooling: Pooling | None = None
    priority: int | None = None
    truncate_prompt_tokens: Truncation | None = None

    def names(self) -> FieldNames:
        """Return the names of fields that the engine has others for."""
        return FieldNames("input")

    def fields(self) -> RequestFields:
        """Return the fields of the engine's requests."""
        found: RequestFields = {
            "pooling": self.pooling or "last",
            "normalize": self.normalize is not False,
            "add_special_tokens": self.add_special_tokens is not False,
        }
        if self.cache_salt is not None:
            found["cache_salt"] = self.cache_salt
        if self.priority is not None:
            found["priority"] = self.priority
        if self.truncate_prompt_tokens is not None:
            found["truncate_prompt_tokens"] = self.truncate_prompt_tokens
        return found


class Embedding(BaseModel):
    """An embedding: numbers, or in base64 their bytes, four each, the lowest first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """The tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(BaseModel):
    """An embedding of each prompt, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@router.post("/embeddings", response_model=EmbeddingsReply)
async def create_embeddings(
    body: EmbeddingsBody,
    request: Request,
    service: ServiceDependency,
    caller: Annotated[Caller, Depends(requires(Scope.INFER))],
) -> Response:
    """Embed prompts, given as texts or as token ids."""
    call = await Call.of(service, request, caller, body)
    check_dimensions(service.client.facts, body.dimensions)
    submitted = await call.submit(body.input, body.fields(), new_id("embd"))
    groups = await call.completions(submitted)
    found = [completion for group in groups for completion in group]
    return await call.reply(partial(_reply, body, call.model.name, found))


def check_dimensions(facts: ModelFacts, asked: int | None) -> None:
    """Raise an ApiError for a number of dimensions that the model's embeddings cannot have."""
    width, allowed = facts.width, facts.matryoshka_dimensions
    if asked is None or asked == width:
        return
    if not allowed and not facts.is_matryoshka:
        raise ApiError(
            400,
            f"dimensions={asked}: the model's embeddings have {width}, and it was not trained so "
            "that a part of one is an embedding; leave dimensions out.",
            param="dimensions",
        )
    if asked > width or (allowed and asked not in allowed):
        which = ", ".join(map(str, allowed)) if allowed else f"1 to {width}"
        raise ApiError(
            400, f"dimensions={asked}: the model's embeddings have {which}.", param="dimensions"
        )


def _reply(body: EmbeddingsBody, model: str, found: Sequence[Completion]) -> bytes:
    tokens = sum(one.prompt_tokens for one in found)
    normalize = body.normalize is not False
    vectors = [_vector(one, body.dimensions, normalize) for one in found]
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    content = {"object": "list", "data": data, "model": model, "usage": usage}
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _vector(done: Completion, dimensions: int | None, normalize: bool) -> np.ndarray[Any, Any]:
    """Return an embedding, fp32; of its first dimensions alone if some are asked for."""
    assert done.embedding is not None
    whole: np.ndarray[Any, Any] = done.embedding.numpy()
    if dimensions is None or dimensions == len(whole):
        return whole
    part = whole[:dimensions]
    norm = float(np.linalg.norm(part)) if normalize else 1.0
    return np.ascontiguousarray(part / np.float32(norm or 1.0))


def _encoded(vector: np.ndarray[Any, Any], encoding: Encoding | None) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector
