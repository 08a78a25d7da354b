"""A bound of requests' bodies, by the bytes that come and not by what a header says."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pcg.serve.errors import ApiError


class BodyLimit:
    """ASGI middleware that refuses bodies beyond a size, or that come too slowly.

    Args:
        most_bytes: the most bytes of a body.
        timeout_s: the most time between two parts of a body, seconds.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, timeout_s: float) -> None:
        self.app = app
        self._most = most_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said[:20]) > self._most:
            await self._too_large().response()(scope, receive, send)
            return
        count, is_whole = 0, False

        async def counted() -> Message:
            nonlocal count, is_whole
            if is_whole:  # then it waits for the client to leave
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._timeout_s)
            except TimeoutError:
                raise ApiError(408, "The body did not come in time.", code="body_timeout") from None
            count += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if count > self._most:
                raise self._too_large()
            return message

        await self.app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body has more than {self._most} bytes; send less, or ask the operator for a "
            "higher --max-body-mib.",
            code="body_too_large",
            headers={"connection": "close"},
        )
