"""GET /metrics, for keys that may read it, or for everyone if the operator says so.

Endpoint pickers ask for it every 50 ms beside the steps, so `Scrapes` answers behind the
authentication, before the limits and the framework. The route says what there is, and refuses.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from pcg.keys import Scope
from pcg.serve.http.caller import Caller, RequiredScope
from pcg.serve.http.service import Service, ServiceDependency
from pcg.serve.metrics.engine_metrics import CONTENT_TYPE, EngineMetrics

PATH = "/metrics"
router = APIRouter(tags=["server"])


class ReadsMetrics(RequiredScope):
    """The dependency of the page: a key with the scope `metrics` or `admin`, unless it is open."""

    async def __call__(self, request: Request) -> Caller | None:  # type: ignore[override]
        service: Service = request.app.state.service
        caller: Caller | None = request.scope["state"].get("caller")
        return caller if service.may_read_metrics(caller) else await super().__call__(request)


@router.get(
    PATH, response_class=PlainTextResponse, dependencies=[Depends(ReadsMetrics(Scope.METRICS))]
)
async def metrics(service: ServiceDependency) -> PlainTextResponse:
    """Return the metrics in Prometheus' text format."""
    return PlainTextResponse(await service.part(EngineMetrics).page(), media_type=CONTENT_TYPE)


class Scrapes:
    """ASGI middleware that answers GET /metrics of those who may read it."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service
        (self._route,) = router.routes

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        asked = (scope["type"], scope.get("method"), scope.get("path"))
        service = self._service
        caller: Caller | None = scope.get("state", {}).get("caller")
        if asked != ("http", "GET", PATH) or not service.may_read_metrics(caller):
            await self.app(scope, receive, send)
            return
        scope["route"] = self._route
        page = await service.part(EngineMetrics).page()
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"content-length", b"%d" % len(page)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})
