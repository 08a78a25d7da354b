"""/tinker/api/v1/retrieve_future: results, for which a client waits by long polling."""

from __future__ import annotations

from fastapi import APIRouter, Response

from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, ServiceDependency
from pcg.serve.http.wire import json_bytes
from pcg.serve.tinker.future_records import FAILED, JSON, PENDING
from pcg.serve.tinker.session_routes import PREFIX, Trainer
from pcg.serve.tinker.tinker import Tinker
from pcg.serve.tinker.wire import RequestFailed, RetrieveBody, TryAgain

POLL_S = 25.0
"""The longest time that a client waits in one request; its own bound is 45 s."""

router = APIRouter(prefix=PREFIX, tags=["tinker"], route_class=LongBodyRoute)


@router.post("/retrieve_future")
async def retrieve_future(
    body: RetrieveBody, service: ServiceDependency, caller: Trainer
) -> Response:
    """Return a result, why there is none, or that it is not there yet."""
    futures = service.part(Tinker).futures
    found = await futures.retrieve(caller.tenant, body.request_id, POLL_S)
    if found.state == PENDING:
        if futures.is_closing:  # others than a 429 are asked again at once
            raise ApiError(429, "The server ends; ask again when it is back.", code="ending")
        return _json(TryAgain(request_id=found.id).model_dump())
    assert found.result is not None
    if found.state == FAILED:
        assert found.category is not None
        failed = RequestFailed(error=found.result.decode(), category=found.category)
        return _json(failed.model_dump())
    return Response(found.result, media_type=found.media_type)


def _json(content: object) -> Response:
    return Response(json_bytes(content), media_type=JSON)
