"""Routes of requests that have a place among those of a model.

A client counts a request that is refused: the next one comes behind it. So a refusal is noted with
its place, and what comes behind does not wait for it.
"""

from __future__ import annotations

import json

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError

from pcg.errors import PcgError
from pcg.serve.errors import ApiError, as_api_error
from pcg.serve.long_body import Handler, LongBodyRoute
from pcg.serve.security.caller import Caller
from pcg.serve.service import Service
from pcg.serve.tinker.future_records import PROTOBUF
from pcg.serve.tinker.passes import decompressed
from pcg.serve.tinker.proto import place_of

_REFUSALS = (400, 404, 415, 422)
"""The statuses of requests that clients do not send again."""


class PlacedRoute(LongBodyRoute):
    """A route that notes the places of requests which it refuses."""

    async def answer(self, handle: Handler, request: Request) -> Response:
        try:
            return await handle(request)
        except RequestValidationError:
            await _note(request)
            raise
        except (ApiError, PcgError) as error:
            if as_api_error(error).status_code in _REFUSALS:
                await _note(request)
            raise


async def _note(request: Request) -> None:
    service: Service = request.app.state.service
    caller: Caller = request.state.caller
    is_json = not is_protobuf(request)
    try:
        body = await body_of(request)
    except (ApiError, PcgError):
        return
    found = await service.beside(caller, _place, body, is_json=is_json)
    if found is not None:
        service.tinker.models.refuse(caller.tenant, *found)


async def body_of(request: Request) -> bytes:
    """Return a request's body, decompressed if need be.

    Raises:
        ApiError: 415, it is compressed otherwise than by zstd.
        DataError: it is no such thing, or has too many bytes.
    """
    service: Service = request.app.state.service
    caller: Caller = request.state.caller
    body, encoding = await request.body(), request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        return await service.beside(caller, decompressed, body, service.options.max_body_bytes)
    if encoding != "identity":
        raise ApiError(
            415, f"The body is encoded by {encoding[:32]!r}; use zstd, or send it as is."
        )
    return body


def is_protobuf(request: Request) -> bool:
    """Return True if a request says that its body is protobuf."""
    return request.headers.get("content-type", "").partition(";")[0].strip() == PROTOBUF


def _place(body: bytes, *, is_json: bool) -> tuple[str, int] | None:
    """Return the model that a body names, and its number there; None if it names none."""
    if not is_json:
        return place_of(body)
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model, seq = (
        (read.get(name) for name in ("model_id", "seq_id")) if type(read) is dict else ("", "")
    )
    return (model, seq) if type(model) is str and type(seq) is int else None
