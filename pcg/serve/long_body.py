"""Long bodies: read as JSON and validated on a thread, so that others go on meanwhile.

Reading holds Python's lock, for 10 ms at most as the elements of a body are bounded
(`pcg.serve.security.json_elements`), and validation gives it up between two values. All of it
together would hold up the event loop for 100 ms and more.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from pcg.serve.errors import of_validation
from pcg.serve.security.caller import Caller
from pcg.serve.security.request_limits import LONG_BYTES
from pcg.serve.service import Service

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class LongBodyRoute(APIRoute):
    """A route whose long bodies come to it as objects of its model already."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field

        async def handle_request(request: Request) -> Response:
            return await self.answer(handle, _Request(field, request.scope, request.receive))

        return handle_request

    async def answer(self, handle: Handler, request: Request) -> Response:
        """Answer a request, by what FastAPI has made of the route."""
        return await handle(request)


class _Request(Request):
    """A request that validates a long body when it is read.

    Args:
        field: FastAPI's validator of the body; None for a route without one.
    """

    def __init__(self, field: Any, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self._field = field

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LONG_BYTES or self._field is None:
            return await super().json()
        service: Service = self.app.state.service
        caller: Caller = self.state.caller
        return await service.beside(caller, validated, self._field, body)


def validated(field: Any, body: bytes) -> Any:
    """Return the object that a body is.

    Args:
        field: FastAPI's validator.
    Raises:
        ApiError: it is not as the schema says.
        ValueError: it is no JSON.
    """
    try:
        content = orjson.loads(body)  # in half the time
    except orjson.JSONDecodeError:  # which also refuses NaN and half characters
        content = json.loads(body)
    value, errors = field.validate(content, {}, loc=("body",))
    if errors:
        raise of_validation(RequestValidationError(errors, body=content))
    return value
