"""Ids of requests: x-request-id of every reply, the client's own if it sent a proper one.

The engine never sees it: its ids are made by the server, so that no client meets another's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pcg.serve.errors import LOG, MESSAGES, as_api_error
from pcg.serve.service import new_id

_PROPER = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """ASGI middleware that gives every reply an id, and answers what fails beyond the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _PROPER.fullmatch(given) else new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        has_begun = False

        def with_id(message: Message) -> Awaitable[None]:  # no coroutine of its own for each part
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if scope["path"].startswith(MESSAGES):
                    headers["request-id"] = request_id  # where Anthropic's client looks
            return send(message)

        try:
            await self.app(scope, receive, with_id)
        except Exception as error:
            if has_begun:
                LOG.log(logging.ERROR, "a reply broke off", exc_info=error)
                raise
            await as_api_error(error).response(scope["path"])(scope, receive, with_id)
