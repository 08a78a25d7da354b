"""Items of responses: input items, their conversion to messages, and the stored responses.

Responses are stored in memory, for `previous_response_id` and later reads. Each tenant has its own
limits, so a tenant cannot evict others' responses; the least recently read response is evicted
first. A restart loses all of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel, json_bytes
from pcg.serve.openai.messages import (
    CalledFunction,
    Content,
    ContentPart,
    Message,
    ToolCall,
    check_parts,
    text_or_list,
)

MOST_ITEMS = 4096
MOST_RESPONSES = 1_024
MOST_BYTES = 32 * 2**20
"""The most stored responses of a tenant, and their bytes including their histories."""
_OBJECT_BYTES, _VALUE_BYTES = 1024, 64
"""Memory of an item or a part without its texts, and of each other value, bytes."""
_TYPES = ("message", "function_call", "function_call_output")
_OF_REPLIES = {"annotations", "parsed_arguments"}
"""Fields of reply items that have no meaning for a model."""


class InputItem(WireModel):
    """A message, a function call or its output; other items are refused by name."""

    model_config = ConfigDict(extra="allow")

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


Items = Annotated[
    list[InputItem], Field(min_length=1, max_length=MOST_ITEMS), BeforeValidator(check_parts)
]
Input = Annotated[
    Annotated[str, Tag("a-text")] | Annotated[Items, Tag("a-list")], Discriminator(text_or_list)
]


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """Convert items to messages; calls are added to the preceding assistant message.

    Raises:
        ApiError: an item is of another type, or lacks a field of its type.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if item.type not in _TYPES:
            raise ApiError(
                400,
                f"{place} is of type {item.type[:64]!r}; this server takes message, "
                "function_call and function_call_output",
                param=f"input.{index}",
                code="unsupported_item",
            )
        for name, value in (item.model_extra or {}).items():
            if value is not None and name not in _OF_REPLIES:
                raise ApiError(400, f"Unrecognized request argument supplied: {place}.{name[:64]}")
        if item.type == "message":
            role: Any = required(item.role, f"{place}.role")
            messages.append(Message(role=role, content=_text(item.content, f"{place}.content")))
        elif item.type == "function_call":
            _add_call(messages, item, place)
        else:
            content = _text(item.output, f"{place}.output")
            call_id = required(item.call_id, f"{place}.call_id")
            messages.append(
                Message(role="tool", content=content, tool_call_id=call_id, name=item.name)
            )
    return messages


def _add_call(messages: list[Message], item: InputItem, place: str) -> None:
    name = required(item.name, f"{place}.name")
    arguments = required(item.arguments, f"{place}.arguments")
    call_id = required(item.call_id, f"{place}.call_id")
    call = ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        calls = [*(last.tool_calls or []), call]
        messages.append(last.model_copy(update={"tool_calls": calls}))
    else:
        messages.append(Message(role="assistant", tool_calls=[call]))


def required(value: str | None, place: str) -> str:
    """Return a value. ApiError: it is None."""
    if value is None:
        raise ApiError(400, f"Missing required parameter: '{place}'.", param=place)
    return value


def _text(content: str | list[ContentPart] | None, place: str) -> str | list[ContentPart]:
    if not isinstance(content, list):
        return required(content, place)
    parts = []
    for index, part in enumerate(content):
        if part.plain is None:
            raise part.unsupported(f"{place}[{index}]", f"{place}[{index}]")
        parts.append(ContentPart(type="text", text=part.plain))
    return parts


def as_json(item: InputItem) -> dict[str, Any]:
    """Return an item in the client's form."""
    return item.model_dump(exclude_none=True)


def memory_of(items: Sequence[InputItem]) -> int:
    """Estimate the memory of items, bytes; for empty parts it is far more than their JSON."""
    values: list[Any] = [as_json(item) for item in items]
    size = len(json_bytes(values))
    while values:
        match values.pop():
            case dict() as mapping:
                size += _OBJECT_BYTES
                values += mapping.values()
            case list() as entries:
                values += entries
        size += _VALUE_BYTES
    return size


@dataclass(frozen=True)
class KeptResponse:
    """A response.

    Attributes:
        content: the response object, as JSON.
        input: the items of its request.
        history: all items including its output, which a next request continues.
        history_bytes: their memory (`memory_of`).
    """

    content: bytes
    input: Sequence[InputItem]
    history: Sequence[InputItem]
    history_bytes: int

    @property
    def size_bytes(self) -> int:
        """Memory of the response; items shared by several responses count for each."""
        return len(self.content) + self.history_bytes


class ResponseStore:
    """The responses of all tenants; any thread may use it."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._of_tenant: defaultdict[str, OrderedDict[str, KeptResponse]] = defaultdict(OrderedDict)
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def may_keep(self, size_bytes: int) -> bool:
        return size_bytes <= self._most_bytes

    def put(self, tenant: str, response_id: str, kept: KeptResponse) -> None:
        with self._lock:
            responses = self._of_tenant[tenant]
            responses[response_id] = kept
            self._bytes[tenant] += kept.size_bytes
            while len(responses) > self._most or self._bytes[tenant] > self._most_bytes:
                _, dropped = responses.popitem(last=False)
                self._bytes[tenant] -= dropped.size_bytes

    def find(self, tenant: str, response_id: str) -> KeptResponse | None:
        with self._lock:
            responses = self._of_tenant.get(tenant, OrderedDict())
            if response_id in responses:
                responses.move_to_end(response_id)
            return responses.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a tenant's response; return False for an unknown id."""
        with self._lock:
            dropped = self._of_tenant.get(tenant, OrderedDict()).pop(response_id, None)
            if dropped is not None:
                self._bytes[tenant] -= dropped.size_bytes
            return dropped is not None
