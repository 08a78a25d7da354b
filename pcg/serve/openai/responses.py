"""/v1/responses: responses to items, whole or as a stream, and stored responses.

    event: response.created             data: {"type", "sequence_number", "response"}
    event: response.in_progress
    event: response.output_item.added   …of each item, with its parts and deltas between
    event: response.output_item.done
    event: response.completed           or response.incomplete; response.failed after an error

As in OpenAI's API, every event has its name twice and a sequence number, and there is no [DONE].
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from pcg.runtime.requests.request import Chunk, Completion, RequestFields
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.serve.http.caller import Infer
from pcg.serve.http.errors import ApiError, as_api_error
from pcg.serve.http.service import LongBodyRoute, Submitted, part
from pcg.serve.http.wire import WireModel, json_bytes, new_id
from pcg.serve.openai.chat import Chat, with_effort
from pcg.serve.openai.logprobs import LogprobWriter
from pcg.serve.openai.messages import Message, Template
from pcg.serve.openai.replies import STREAMED, CallDependency, ItemReply, named_event
from pcg.serve.openai.response_items import (
    Input,
    InputItem,
    KeptResponse,
    ResponseStore,
    as_json,
    memory_of,
    messages_of,
)
from pcg.serve.openai.sampling import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingBody,
    SamplingDefaults,
    TextFormat,
    Whole,
    content_schema,
    of_engine,
)
from pcg.serve.openai.tools import (
    MOST_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    AskedTools,
    Function,
    FunctionName,
    FunctionRef,
    NamedTool,
    Tool,
    ToolChoice,
    ToolUse,
)
from pcg.serve.openai.wire import Empty, FieldNames, Nothing, Off, Only

router = APIRouter(prefix="/v1", tags=["responses"], route_class=LongBodyRoute)

Store = Annotated[ResponseStore, part(ResponseStore)]
LOGPROBS = "message.output_text.logprobs"


class SchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextOptions(WireModel):
    """Options of the text; `verbosity` has no effect."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def response_format(self) -> ResponseFormat | None:
        if not isinstance(self.format, SchemaFormat):
            return self.format
        schema = JsonSchema(name=self.format.name, schema=self.format.schema_)
        return JsonSchemaFormat(type="json_schema", json_schema=schema)


class _Typed(WireModel):
    type: Literal["function"]


class FunctionTool(Function, _Typed):
    """A function that the model may call; other types of tools are refused."""


class FunctionChoice(WireModel):
    """The choice of a function."""

    type: Literal["function"]
    name: FunctionName

    def named(self) -> NamedTool:
        return NamedTool(type="function", function=FunctionRef(name=self.name))


class AllowedChoice(WireModel):
    """The choice among some functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MOST_TOOLS)]


Choice: TypeAlias = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


class Reasoning(WireModel):
    """Reasoning options: `effort` is a variable of the chat template, the rest has no effect."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(WireModel):
    """Options of a stream, without effect."""

    include_obfuscation: bool | None = None


class ResponseBody(SamplingBody):
    """A request for a response.

    Some fields of OpenAI's API have no effect: there is a single service tier, no built-in tool,
    and no reasoning to encrypt; `metadata` is returned.
    """

    input: Input
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    model: str | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: Choice | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    # without effect
    max_tool_calls: Whole | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    user: str | None = None

    # unsupported
    access_programs: Nothing = None
    background: Off = None
    background_options: Nothing = None
    context_management: Empty = None
    conversation: Nothing = None
    enable_response_messages: Off = None
    image: Nothing = None
    moderation: Nothing = None
    previous_input_messages: Nothing = None
    previous_response: Nothing = None
    prompt: Nothing = None
    truncation: Annotated[Any, Only(("disabled",))] = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def names(self) -> FieldNames:
        names = {
            "max_new_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "guided_json": "text.format",
        }
        return FieldNames("input", {**names, **self.guide_names()})

    def fields(self, request: Request, defaults: SamplingDefaults) -> RequestFields:
        """Return the fields of the engine's request.

        Raises:
            ApiError: a field is not supported, or excludes another field.
        """
        for name in ("prompt_logprobs", "return_token_ids"):
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ApiError(400, f"{name} is not supported; leave it out.", param=name)
        if self.n not in (None, 1):
            raise ApiError(400, "n is not supported; leave it out or send 1.", param="n")
        if self.top_logprobs and not self.wants_logprobs:
            raise ApiError(400, f"top_logprobs needs {LOGPROBS!r} in include", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        fields = self.request_fields(request, defaults)
        return of_engine(fields, {"max_new_tokens": self.max_output_tokens, "logprobs": logprobs})

    def asked_tools(self) -> AskedTools:
        tools = [
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))
            for tool in self.tools or []
        ]
        choice: ToolChoice | None
        match self.tool_choice:
            case FunctionChoice() as function:
                choice = function.named()
            case AllowedChoice(mode=mode, tools=names):
                allowed = AllowedTools(mode=mode, tools=[name.named() for name in names])
                choice = AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
            case choice:
                pass
        format = None if self.text is None else self.text.response_format()
        content = content_schema(format, self.guide, "text.format")
        is_parallel = self.parallel_tool_calls is not False
        return AskedTools(tools, choice, is_parallel, content=content, content_field="text.format")


class ResponseReply(BaseModel):
    """A response; its output items are messages and function calls."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    system_fingerprint: str


class DeletedResponse(BaseModel):
    """A deleted response."""

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
    """A request with the items before it, which may be stored with its response.

    Attributes:
        history_bytes: memory of the items before the output.
        messages: the messages for the model.
    """

    store: ResponseStore
    tenant: str
    input: Sequence[InputItem]
    before: Sequence[InputItem]
    history_bytes: int
    messages: Sequence[Message]

    def keep(self, response: dict[str, Any]) -> dict[str, Any]:
        """Store a whole response if its request asks for it, and return the response."""
        if not response["store"]:
            return response
        items = [InputItem.model_validate(item) for item in response["output"]]
        size = self.history_bytes + memory_of(items)
        content = json_bytes(response)
        if not self.store.may_keep(size + len(content)):
            return {**response, "store": False}
        history = (*self.before, *self.input, *items)
        kept = KeptResponse(content, self.input, history, size)
        self.store.put(self.tenant, response["id"], kept)
        return response


@router.post("/responses", response_model=ResponseReply, responses={200: STREAMED})
async def create_response(body: ResponseBody, call: CallDependency) -> Response:
    """Generate a response to items."""
    call = await call.of(body)
    service, caller, response_id = call.service, call.caller, new_id("resp").replace("-", "_")
    turn = await service.beside(caller, _turn, service.part(ResponseStore), caller.tenant, body)
    defaults = call.defaults
    effort = None if body.reasoning is None else body.reasoning.effort
    template = Template(variables=with_effort(body.chat_template_kwargs, effort))
    fields = body.fields(call.request, defaults)
    chat = Chat(turn.messages, body.asked_tools(), fields, template=template)
    call, submitted, use = await chat.submit(call, response_id)
    response = begun_response(response_id, call.model.name, body, defaults)
    response["system_fingerprint"] = call.model.fingerprint
    logprobs = call.logprobs(body.return_tokens_as_token_ids)
    writer = logprobs if body.wants_logprobs else None
    reply = Responses([submitted], response, use, turn.keep, logprobs=writer)
    return await call.answer([submitted], reply, streams=body.stream)


def _turn(store: ResponseStore, tenant: str, body: ResponseBody) -> _Turn:
    """Return a request with the items before it, on a thread, as there may be thousands.

    ApiError: the previous response is not stored or is another tenant's, or an item is invalid.
    """
    content = body.input
    items = [InputItem(role="user", content=content)] if isinstance(content, str) else content
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
    return _Turn(store, tenant, items, before, history_bytes=size, messages=messages)


@router.get("/responses/{response_id}", response_model=ResponseReply)
async def get_response(
    response_id: str,
    store: Store,
    caller: Infer,
    stream: Annotated[bool, Query()] = False,
) -> Response:
    """Return a stored response."""
    if stream:
        raise ApiError(400, "A stored response cannot be streamed.", param="stream")
    kept = _kept(store, caller.tenant, response_id, "response_id")
    return Response(kept.content, media_type="application/json")


@router.delete("/responses/{response_id}")
async def delete_response(response_id: str, store: Store, caller: Infer) -> DeletedResponse:
    """Delete a response; later responses of the conversation keep its items."""
    if not store.delete(caller.tenant, response_id):
        raise _not_kept(response_id, "response_id")
    return DeletedResponse(id=response_id)


@router.get("/responses/{response_id}/input_items", response_model=ItemList)
async def list_input_items(
    response_id: str,
    store: Store,
    caller: Infer,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[str | None, Query()] = None,
) -> Response:
    """List the input items of a response."""
    kept = _kept(store, caller.tenant, response_id, "response_id")
    items = [as_json(item) for item in kept.input]
    items = items if order == "asc" else items[::-1]
    ids = [str(item["id"]) for item in items]
    if after is not None:
        if after not in ids:
            raise ApiError(400, f"after={after[:64]!r} is not an input item.", param="after")
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


def begun_response(
    response_id: str, model: str, body: ResponseBody, defaults: SamplingDefaults
) -> dict[str, Any]:
    """Return the response object at the start of a request."""
    temperature, top_p = (body.value_of(name, defaults) for name in ("temperature", "top_p"))
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    choice = body.tool_choice
    effort = None if body.reasoning is None else body.reasoning.effort
    tools = [tool.model_dump() for tool in body.tools or []]
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if temperature is None else temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "tools": [
            {**tool, "parameters": tool["parameters"] or {}, "strict": bool(tool["strict"])}
            for tool in tools
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if top_p is None else top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class Responses(ItemReply):
    """Writes a response of messages and function calls.

    Args:
        response: the response object at the start.
        keep: stores the whole response, and returns it.
        logprobs: None for an output without logprobs.
    """

    repeats_output = True

    def __init__(
        self,
        submitted: Sequence[Submitted],
        response: dict[str, Any],
        use: ToolUse,
        keep: Callable[[dict[str, Any]], dict[str, Any]],
        *,
        logprobs: LogprobWriter | None = None,
    ) -> None:
        super().__init__(submitted, use)
        self._response = response
        self._keep = keep
        self._logprobs = logprobs
        self._pending: list[dict[str, Any]] = []
        self._number = 0

    def whole(self, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        ((completion,),) = groups
        self._push(completion.text, completion.logprobs or (), completion)
        return self._ended(completion)

    def _ended(self, completion: Completion) -> dict[str, Any]:
        status, output = _status_of(completion), len(completion.token_ids)
        return self._keep(
            {
                **self._response,
                "status": status,
                "completed_at": int(time.time()) if status == "completed" else None,
                "incomplete_details": (
                    {"reason": "max_output_tokens"} if status == "incomplete" else None
                ),
                "output": self.items,
                "usage": {
                    "input_tokens": completion.prompt_tokens,
                    "input_tokens_details": {
                        "cached_tokens": completion.cached_tokens,
                        "cache_write_tokens": 0,
                    },
                    "output_tokens": output,
                    "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": completion.prompt_tokens + output,
                },
            }
        )

    def begin(self) -> bytes:
        names = ("response.created", "response.in_progress")
        return b"".join([self._event({"type": name, "response": self._response}) for name in names])

    def events(self, index: int, chunk: Chunk) -> bytes:
        completion = chunk.completion
        values = [] if chunk.logprobs is None else [chunk.logprobs]
        events = self._push(chunk.text, values, completion)
        if completion is not None:
            response = self._ended(completion)
            events.append({"type": f"response.{response['status']}", "response": response})
        return b"".join([self._event(content) for content in events])

    def end(self) -> bytes:
        return b""

    def failed(self, error: Exception) -> bytes:
        refusal = as_api_error(error)
        # OpenAI's codes, of which there are fewer than statuses.
        code = "invalid_prompt" if refusal.status_code < 500 else "server_error"
        response = {
            **self._response,
            "status": "failed",
            "output": self.items,
            "error": {"code": code, "message": refusal.detail},
        }
        return self._event({"type": "response.failed", "response": response})

    def _event(self, content: dict[str, Any]) -> bytes:
        numbered = {**content, "sequence_number": self._number}
        self._number += 1
        return named_event(numbered)

    def _push(
        self, text: str, values: Iterable[TokenLogprobs], completion: Completion | None
    ) -> list[dict[str, Any]]:
        if self._logprobs is not None:
            self._pending += self._logprobs.tokens(values)
        return self.read(text, None if completion is None else _status_of(completion))

    def text_item(self) -> dict[str, Any]:
        return {
            "id": f"msg_{secrets.token_hex(16)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }

    def call_item(self, name: str) -> dict[str, Any]:
        return {
            "id": f"fc_{secrets.token_hex(16)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": self.use.new_call_id(),
            "name": name,
            "arguments": "",
        }

    def begun(self, item: dict[str, Any]) -> None:
        index = len(self.items) - 1
        self.emit("response.output_item.added", output_index=index, item=dict(item))
        if item["type"] == "message":
            item["content"] = [_part()]
            self._emit_item("response.content_part.added", content_index=0, part=_part())

    def add_text(self, item: dict[str, Any], text: str) -> None:
        pending, self._pending = self._pending, []
        part = item["content"][0]
        part["text"] += text
        part["logprobs"] += pending
        self._emit_item("response.output_text.delta", content_index=0, delta=text, logprobs=pending)

    def add_arguments(self, item: dict[str, Any], text: str) -> None:
        item["arguments"] += text
        self._emit_item("response.function_call_arguments.delta", delta=text)

    def finish(self, status: str) -> None:
        if not self.items:
            self.begin_item(self.text_item())
        super().finish(status)

    def ended(self, item: dict[str, Any], status: str) -> None:
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            part["logprobs"] += self._pending
            self._pending = []
            texts = {"text": part["text"], "logprobs": part["logprobs"]}
            self._emit_item("response.output_text.done", content_index=0, **texts)
            self._emit_item("response.content_part.done", content_index=0, part=part)
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            self._emit_item("response.function_call_arguments.done", **call)
        self.emit("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _emit_item(self, kind: str, **fields: Any) -> None:
        index = len(self.items) - 1
        self.emit(kind, item_id=self.items[-1]["id"], output_index=index, **fields)


def _part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _status_of(completion: Completion) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"
