"""/v1/responses: responses to items, and the responses that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from pcg.keys import Scope
from pcg.runtime.requests.request import Completion
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, ServiceDependency
from pcg.serve.http.wire import json_bytes, new_id
from pcg.serve.openai.call import Call
from pcg.serve.openai.chat.generation import Chat, submit_chat
from pcg.serve.openai.chat.messages import Message
from pcg.serve.openai.completions import STREAMED
from pcg.serve.openai.generation_config import GenerationConfig
from pcg.serve.openai.logprobs import LogprobWriter, TokenTexts
from pcg.serve.openai.responses.body import InputItem, ResponseBody, as_json, memory_of, messages_of
from pcg.serve.openai.responses.output import (
    OutputItems,
    ResponseEvents,
    ResponseReply,
    begun_response,
    ended_response,
    status_of,
)
from pcg.serve.openai.responses.store import KeptResponse, ResponseStore

router = APIRouter(prefix="/v1", tags=["responses"], route_class=LongBodyRoute)

Infer = Annotated[Caller, Depends(requires(Scope.INFER))]


class DeletedResponse(BaseModel):
    """A response that is no longer kept."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """Items of a response's input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True)
class _Turn:
    """A request and what came before it, to be kept with its response.

    Attributes:
        history_bytes: the memory of the items before the output.
        messages: what the model reads.
    """

    store: ResponseStore
    tenant: str
    input: Sequence[InputItem]
    before: Sequence[InputItem]
    history_bytes: int
    messages: Sequence[Message]

    def end(
        self, response: dict[str, Any], output: OutputItems, done: Completion
    ) -> dict[str, Any]:
        """Return the whole response; keeps it if it is to be kept, and can be."""
        whole = ended_response(response, output.items, done)
        if not whole["store"]:
            return whole
        items = [InputItem.model_validate(item) for item in output.items]
        size = self.history_bytes + memory_of(items)
        content = json_bytes(whole)
        if not self.store.may_keep(size + len(content)):
            return {**whole, "store": False}
        history = (*self.before, *self.input, *items)
        self.store.put(self.tenant, whole["id"], KeptResponse(content, self.input, history, size))
        return whole


@router.post("/responses", response_model=ResponseReply, responses={200: STREAMED})
async def create_response(
    body: ResponseBody, request: Request, service: ServiceDependency, caller: Infer
) -> Response:
    """Generate a response to items."""
    call = await Call.of(service, request, caller, body)
    response_id = new_id("resp").replace("-", "_")
    turn = await service.beside(caller, _turn, service.part(ResponseStore), caller.tenant, body)
    defaults = service.part(GenerationConfig).defaults
    fields = body.fields(request, defaults)
    chat = Chat(turn.messages, body.asked_tools(), fields, {"variables": body.variables()})
    call, submitted, use = await submit_chat(call, chat, response_id)
    response = begun_response(response_id, call.model.name, body, defaults)
    response["system_fingerprint"] = call.model.fingerprint
    logprobs = LogprobWriter(service.part(TokenTexts), bool(body.return_tokens_as_token_ids))
    output = OutputItems(use, logprobs if body.wants_logprobs else None)
    end: Callable[[Completion], dict[str, Any]] = partial(turn.end, response, output)
    if body.stream:
        return await call.stream([submitted], ResponseEvents(response, output, end))
    ((done,),) = await call.completions([submitted])

    def whole() -> bytes:
        output.push(done.text, done.logprobs or (), status_of(done))
        return json_bytes(end(done))

    return await call.reply(whole)


def _turn(store: ResponseStore, tenant: str, body: ResponseBody) -> _Turn:
    """Return a request's items with those before it; these may be thousands, so it is for a thread.

    ApiError: the response before it is not kept, or is another tenant's; or an item is no message.
    """
    given = body.input
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    items = [
        item if item.id else item.model_copy(update={"id": new_id("msg").replace("-", "_")})
        for item in items
    ]
    before: Sequence[InputItem] = ()
    size = memory_of(items)
    if body.previous_response_id is not None:
        kept = _kept(store, tenant, body.previous_response_id, "previous_response_id")
        before, size = kept.history, size + kept.history_bytes
    messages = messages_of([*before, *items])
    if body.instructions is not None:
        messages.insert(0, Message(role="system", content=body.instructions))
    return _Turn(store, tenant, items, before, size, messages)


@router.get("/responses/{response_id}", response_model=ResponseReply)
async def get_response(
    response_id: str,
    service: ServiceDependency,
    caller: Infer,
    stream: Annotated[bool, Query()] = False,
) -> Response:
    """Return a response that is kept."""
    if stream:
        raise ApiError(400, "A response that is kept is not streamed again.", param="stream")
    kept = _kept(service.part(ResponseStore), caller.tenant, response_id, "response_id")
    return Response(kept.content, media_type="application/json")


@router.delete("/responses/{response_id}")
async def delete_response(
    response_id: str, service: ServiceDependency, caller: Infer
) -> DeletedResponse:
    """Forget a response; those that went on from it keep what they know."""
    if not service.part(ResponseStore).delete(caller.tenant, response_id):
        raise _not_kept(response_id, "response_id")
    return DeletedResponse(id=response_id)


@router.get("/responses/{response_id}/input_items", response_model=ItemList)
async def list_input_items(
    response_id: str,
    service: ServiceDependency,
    caller: Infer,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[str | None, Query()] = None,
) -> Response:
    """List the items of a response's request."""
    kept = _kept(service.part(ResponseStore), caller.tenant, response_id, "response_id")
    items = [as_json(item) for item in kept.input]
    items = items if order == "asc" else items[::-1]
    ids = [str(item["id"]) for item in items]
    if after is not None:
        if after not in ids:
            raise ApiError(400, f"after={after[:64]!r} is no item of the response.", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = {"first_id": first, "last_id": last, "has_more": len(items) > limit}
    content = {"object": "list", "data": page, **more}
    return Response(json_bytes(content), media_type="application/json")


def _kept(store: ResponseStore, tenant: str, response_id: str, param: str) -> KeptResponse:
    kept = store.find(tenant, response_id)
    if kept is None:
        raise _not_kept(response_id, param)
    return kept


def _not_kept(response_id: str, param: str) -> ApiError:
    return ApiError(
        404 if param == "response_id" else 400,
        f"Response with id {response_id[:64]!r} not found.",
        param=param,
        code=None if param == "response_id" else "previous_response_not_found",
    )
