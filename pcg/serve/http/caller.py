"""Authenticate the caller of a request by its key, before the body is read."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from pcg.keys import Keys, Scope
from pcg.serve.http.errors import ApiError

_NONE: frozenset[Scope] = frozenset()


@dataclass(frozen=True)
class Caller:
    """The caller of a request.

    Attributes:
        key: the name of the key.
        tenant: owner of the caller's objects; the caller sees this tenant's and the operator's
            objects.
        scopes: the permissions of the key.
    """

    key: str
    tenant: str
    scopes: frozenset[Scope]


class RequiredScope:
    """A route dependency that returns the caller and requires a scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Caller:  # FastAPI runs sync ones on threads
        caller: Caller = request.state.caller
        if self.scope not in caller.scopes:
            raise ApiError(
                403,
                f"The key {caller.key!r} lacks the scope {self.scope.value!r}.",
                code="insufficient_permissions",
            )
        return caller


def requires(scope: Scope) -> RequiredScope:
    """Return a route's dependency that requires a scope, for `Depends`."""
    return RequiredScope(scope)


Infer: TypeAlias = Annotated[Caller, Depends(requires(Scope.INFER))]
Trainer: TypeAlias = Annotated[Caller, Depends(requires(Scope.TRAIN))]
Admin: TypeAlias = Annotated[Caller, Depends(requires(Scope.ADMIN))]
"""Parameter types of routes: a caller with the scope."""


class Authentication:
    """ASGI middleware that answers requests without a valid key by 401 before reading them.

    Args:
        public: the paths that need no key.
        owner_of_link: returns the owner of a link, a path that needs no key either, or None for
            other paths. A request of a link counts as its owner's.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        public: Collection[str],
        owner_of_link: Callable[[str], str | None] = lambda path: None,
    ) -> None:
        self.app = app
        self._keys = keys
        self._public = frozenset(public)
        self._owner_of_link = owner_of_link

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path in self._public:
            await self.app(scope, receive, send)
            return
        owner = self._owner_of_link(path)
        if owner is not None:
            scope.setdefault("state", {})["caller"] = Caller(f"links of {owner}", owner, _NONE)
            await self.app(scope, receive, send)
            return
        sent = _given(Headers(scope=scope))
        key = None if sent is None else self._keys.find(sent)
        if key is None:
            await _refusal(sent).response(path)(scope, receive, send)
            return
        caller = Caller(key.name, key.tenant, key.scopes)
        scope.setdefault("state", {})["caller"] = caller
        await self.app(scope, receive, send)


def _given(headers: Headers) -> str | None:
    """Return the key of a request: a bearer token, X-API-Key, or a basic password.

    The password is for clients that can set only an address, http://anyone:KEY@127.0.0.1:8000.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):  # not base64, or not UTF-8
            _, _, password = base64.b64decode(token.strip(), validate=True).decode().partition(":")
            return password
    return headers.get("x-api-key")


def _refusal(sent: str | None) -> ApiError:
    headers = {"www-authenticate": "Bearer", "connection": "close"}
    if sent is None:
        message = "You didn't provide an API key; send it as 'Authorization: Bearer KEY'."
        return ApiError(401, message, code="missing_api_key", headers=headers)
    return ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=headers)
