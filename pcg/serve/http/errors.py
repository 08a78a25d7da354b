"""Errors of the API, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Errors of /v1/messages have Anthropic's shape: {"type": "error", "error": {"type", "message"}}.

The table `_STATUS` maps a PcgError that a caller caused to a 4xx with its message. A class that is
not in the table, and every other exception, is an internal error: a 500 without details, and a
traceback in the log.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pcg.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterNotFoundError,
    DataError,
    DrainingError,
    EngineError,
    FinetuneError,
    GenerationError,
    GraderError,
    PcgError,
    QueueFullError,
    StoreDamagedError,
    StoreFullError,
    UnsupportedError,
)
from pcg.serve.http.wire import json_bytes

LOG = logging.getLogger("pcg.serve")

INVALID = "invalid_request_error"
MESSAGES = "/v1/messages"
"""Path of Anthropic's API; its errors have a different shape."""
UNSUPPORTED = "unsupported"
"""Error code of features that this server does not have."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    507: "server_error",
}
"""Type of an error by its status; `INVALID` for other statuses."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's type of an error by its status; `INVALID` for other statuses."""

_STATUS: tuple[tuple[type[PcgError], int, str | None], ...] = (
    (DrainingError, 503, "shutting_down"),
    (GenerationError, 400, None),
    (UnsupportedError, 400, UNSUPPORTED),
    (AdapterConflictError, 409, "conflict"),
    (AdapterError, 400, "invalid_adapter"),
    (DataError, 400, "invalid_data"),
    (FinetuneError, 400, None),
    (GraderError, 400, "invalid_grader"),
)
"""Status and code by class; the first class that matches applies."""

_RETRY_S = {429: 1, 503: 5}
_LONGEST_MESSAGE = 4000
_QUOTED = r"(?<!\w)'(?:[^'\\]|\\.){0,100}'|\"(?:[^\"\\]|\\.){0,100}\""
"""A quoted text. The bound keeps the time linear; `pcg.units.shown` truncates longer values."""
_LITERAL = re.compile(rf"`[^`]*`|{_QUOTED}|[(\[{{](?:[^()\[\]{{}}'\"]|{_QUOTED})*[)\]}}]")
"""A value in brackets, in Python's notation; a quoted text is from the client."""
_WORDS = {
    "True": "true", "False": "false", "None": "null", "tuple": "list", "dict": "object",
    "dictionary": "object", "str": "string", "int": "integer", "float": "number", "bool": "boolean",
}  # fmt: skip
_WORD = re.compile(rf"{_QUOTED}|`[^`]*`|\b({'|'.join(_WORDS)})\b")
"""A quoted text, which stays, or a Python word that JSON writes differently."""
_SAID = {
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "list_type": "Input should be a list",
    "none_required": "Input should be null",
    "string_unicode": "Input has an unpaired surrogate, which is not valid text",
    "int_parsing_size": "Input should be an integer of 64 bits",
}
"""Messages that replace pydantic's, which name Python's types."""
_LONG_NUMBER = re.compile(r"(\d{20})\d{12,}")
"""A number of 32 digits or more, which is truncated; 64 bits have at most 20 digits."""


class ErrorDetail(BaseModel):
    """The content of an error."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(BaseModel):
    """The body of an error reply."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorBody, "description": "The server cannot serve now."},
}
"""The errors of a route, for /openapi.json."""


class ApiError(HTTPException):
    """An error with a message for the client.

    Args:
        status: the HTTP status.
        message: the fault, the numbers, and the fix.
        param: the invalid field or parameter.
        code: a word for programs; the status in vLLM's own endpoints.
        type: OpenAI's type of error; by default that of the status.
        headers: further headers of the reply; a 429 and a 503 also get retry-after.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | int | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        retry = {"retry-after": str(_RETRY_S[status])} if status in _RETRY_S else {}
        super().__init__(status, message, {**retry, **(headers or {})})
        self.param = param
        self.code = code
        self.type = type or _TYPES.get(status, INVALID)

    @property
    def content(self) -> dict[str, Any]:
        error = {
            "message": _sendable(in_json(_LONG_NUMBER.sub(r"\1…", self.detail)[:_LONGEST_MESSAGE])),
            "type": self.type,
            "param": None if self.param is None else _sendable(self.param),
            "code": self.code,
        }
        return {"error": error}

    def content_for(self, path: str) -> dict[str, Any]:
        """Return the reply's body in the shape of the path's API."""
        if path != MESSAGES and not path.startswith(f"{MESSAGES}/"):
            return self.content
        message = self.content["error"]["message"]
        kind = _ANTHROPIC_TYPES.get(self.status_code, INVALID)
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, path: str = "") -> Response:
        return Response(
            json_bytes(self.content_for(path)),
            self.status_code,
            headers=self.headers,
            media_type="application/json",
        )


def _sendable(text: str) -> str:
    """Replace unpaired surrogates, which JSON allows and UTF-8 does not, by "?"."""
    return text.encode(errors="replace").decode()


def in_json(message: str) -> str:
    """Rewrite a message's values and type names in JSON's notation."""
    written = _LITERAL.sub(_as_json, message)
    return _WORD.sub(lambda match: _WORDS.get(match[1], match[0]), written)


def _as_json(match: re.Match[str]) -> str:
    text = match[0]
    if text[0] not in "([{" or ("'" not in text and ",)" not in text):
        return text  # quoted, not a value, or the same in Python and JSON
    try:
        value = ast.literal_eval(text)
        return json_bytes(value).decode() if isinstance(value, tuple | list | dict) else text
    except (ValueError, SyntaxError, TypeError):  # TypeError: JSON has no such value
        return text


def not_found(model: str) -> ApiError:
    """Return the error of a model that the caller cannot see, whether or not it exists."""
    return ApiError(
        404, f"The model `{model[:256]}` does not exist.", param="model", code="model_not_found"
    )


def as_api_error(error: BaseException) -> ApiError:
    """Convert an exception to an error with a message for the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, AdapterNotFoundError):  # its text names other tenants' adapters
        return ApiError(404, "The model does not exist any more.", code="model_not_found")
    if isinstance(error, QueueFullError):  # its numbers reveal other tenants' load
        return ApiError(429, "Too many requests wait; ask again later.", code="queue_full")
    if isinstance(error, EngineError) and not isinstance(error, DrainingError):
        # Its text may reveal internals of the engine; the server logs it when it ends.
        return ApiError(503, "The engine has ended; ask again later.", code="engine_ended")
    if isinstance(error, StoreFullError):  # its text describes the machine
        LOG.error("%s", error)
        return ApiError(
            507,
            "The server has no room to keep this, and only reads and deletes until there is some; "
            "nothing of it was kept, what was there stays. Delete files, models or jobs.",
            code="storage_full",
            headers={"x-should-retry": "false"},
        )
    if isinstance(error, StoreDamagedError):
        LOG.error("%s", error)
        return ApiError(500, f"{error}.", code="storage_damaged")
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    LOG.error("a request failed", exc_info=error)
    return ApiError(500, "The server had an error; its log says more.", code="internal_error")


def of_validation(error: RequestValidationError) -> ApiError:
    """Return the first error of a body or a parameter that does not match the schema."""
    first = _telling(error.errors(), error.body)
    kind, context = first["type"], first.get("ctx", {})
    place = _place(first["loc"], error.body, is_missing=kind == "missing")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        place.append(str(context["discriminator"]).strip("'"))
    param = ".".join(place) or None
    if kind == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param)
    if kind == "json_invalid":
        return _no_json()
    if param is None and isinstance(error.body, bytes):
        return ApiError(400, "Send the body as content-type: application/json.")
    if kind == UNSUPPORTED:
        message = f"{param} is not supported; {first['msg']}."
        return ApiError(400, message, param=param, code=UNSUPPORTED)
    if kind in ("missing", "union_tag_not_found") and param is not None:
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param)
    message = _SAID.get(kind, first["msg"]).removeprefix("Value error, ")
    message = message.replace(" after validation", "")
    if kind == "union_tag_invalid":
        message = f"Input should be one of {context['expected_tags']}"
    where = f"Invalid value for '{param}': " if param else "Invalid body: "
    return ApiError(400, f"{where}{message}.", param=param)


def _telling(errors: Sequence[Any], body: Any) -> Any:
    """Return the most useful error: of a union, that of the first branch with the value's type."""
    first, where = errors[0], errors[0]["loc"][:-1]

    def place(error: Any) -> list[str]:
        return _place(error["loc"], body, is_missing=error["type"] == "missing")

    depth = len(place(first))
    if not first["type"].endswith("_type") or depth == len(first["loc"]) - 1:
        return first
    of_value = (
        error
        for error in errors
        if error["loc"][: len(where)] == where
        and (not error["type"].endswith("_type") or len(place(error)) > depth)
    )
    return next(of_value, first)


def _place(parts: Sequence[int | str], body: Any, *, is_missing: bool) -> list[str]:
    """Return the path of names and indices in the body for a location of pydantic.

    Pydantic's location also has the branches of unions, which the body does not have.

    Args:
        is_missing: True if the last part is missing in the body.
    """
    where, *names = parts
    if where != "body" or not isinstance(body, dict | list):
        return [str(name) for name in names]
    place: list[str] = []
    value: Any = body
    for index, name in enumerate(names):
        is_item = isinstance(value, list) and isinstance(name, int) and name < len(value)
        if is_item or (isinstance(value, dict) and name in value):
            value = value[name]
            place.append(str(name))
        elif is_missing and index == len(names) - 1:
            place.append(str(name))
    return place


def _no_json() -> ApiError:
    return ApiError(400, "The body is not valid JSON.", code="invalid_json")


def _of_http(error: HTTPException) -> ApiError:
    if error.status_code == 400:  # not UTF-8, or too deeply nested or too many digits for Python
        return _no_json()
    messages = {404: "There is no such endpoint.", 405: "The endpoint has no such method."}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers)


def _methods(routes: Sequence[BaseRoute], path: str) -> list[str]:
    of_path = (
        route for route in routes if isinstance(route, Route) and route.path_regex.match(path)
    )
    return sorted({method for route in of_path for method in route.methods or ()})


def add_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer every error of an application in the API's shape.

    Args:
        routes: all routes of the application; a 405 lists the methods that the path has.
    """

    async def refused(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return of_validation(error).response(request.url.path)

    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reply = _of_http(error)
        if reply.status_code == 405:
            reply.headers = {"allow": ", ".join(_methods(routes, request.url.path))}
        return reply.response(request.url.path)

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(PcgError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, missing)
