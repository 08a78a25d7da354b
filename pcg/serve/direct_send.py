"""The server's own `send`, for the middle parts of streamed replies.

A part of a stream would be handed from middleware to middleware, six coroutines for each token,
which look at the beginning and the end of a reply alone.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_KEY = "direct_send"


class DirectSend:
    """ASGI middleware, the first to see a request, which keeps the server's `send`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})[_KEY] = send
        await self.app(scope, receive, send)


def direct_send(scope: Scope, send: Send) -> Send:
    """Return the server's `send` of a request; the given one where none was kept."""
    kept: Send = scope.get("state", {}).get(_KEY, send)
    return kept
