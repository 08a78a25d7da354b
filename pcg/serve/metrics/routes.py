"""GET /metrics, for keys that may read it, or for everyone if the operator says so."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse

from pcg.serve.metrics.engine_metrics import CONTENT_TYPE
from pcg.serve.security.caller import Caller, RequiredScope
from pcg.serve.security.keys import Scope
from pcg.serve.service import Service, ServiceDependency

PATH = "/metrics"
router = APIRouter(tags=["server"])


class ReadsMetrics(RequiredScope):
    """The dependency of the page: a key with the scope `metrics` or `admin`, unless it is open."""

    async def __call__(self, request: Request) -> Caller | None:  # type: ignore[override]
        service: Service = request.app.state.service
        if service.options.metrics_without_key:
            return None
        caller: Caller = request.state.caller
        return caller if Scope.ADMIN in caller.scopes else await super().__call__(request)


@router.get(
    PATH, response_class=PlainTextResponse, dependencies=[Depends(ReadsMetrics(Scope.METRICS))]
)
async def metrics(service: ServiceDependency) -> PlainTextResponse:
    """Return the metrics in Prometheus' text format."""
    return PlainTextResponse(service.metrics.page(), media_type=CONTENT_TYPE)
