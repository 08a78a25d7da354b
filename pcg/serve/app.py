"""The application: its routers, in one list, and its middleware."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from pcg.errors import ServeError
from pcg.serve import health, status
from pcg.serve.adapters import control, sglang
from pcg.serve.adapters import routes as adapters
from pcg.serve.anthropic import routes as anthropic
from pcg.serve.direct_send import DirectSend
from pcg.serve.errors import ERRORS, add_handlers
from pcg.serve.files import routes as files
from pcg.serve.files import uploads
from pcg.serve.graders import routes as graders
from pcg.serve.graders.job_grading import JobGrading
from pcg.serve.jobs import permissions
from pcg.serve.jobs import report as job_report
from pcg.serve.jobs import routes as jobs
from pcg.serve.long_body import LongBodyRoute
from pcg.serve.metrics import routes as metrics
from pcg.serve.openai import completions, embeddings, models, scores, tokens
from pcg.serve.openai.chat import completions as chat_completions
from pcg.serve.openai.responses import routes as responses
from pcg.serve.page import routes as page
from pcg.serve.record import Recording
from pcg.serve.request_id import RequestId
from pcg.serve.security.caller import Authentication, RequiredScope
from pcg.serve.security.request_limits import RequestLimits
from pcg.serve.service import Service
from pcg.serve.tinker import future_routes as tinker_futures
from pcg.serve.tinker import model_routes as tinker_models
from pcg.serve.tinker import session_routes as tinker_sessions
from pcg.serve.tinker import training_routes as tinker_training
from pcg.serve.tinker.rest import copy_routes as tinker_copies
from pcg.serve.tinker.rest import routes as tinker_rest
from pcg.serve.tinker.sampling import routes as tinker_sampling
from pcg.version import __version__

ROUTERS: tuple[APIRouter, ...] = (
    adapters.router,
    anthropic.router,
    chat_completions.router,
    completions.router,
    control.router,
    embeddings.router,
    files.router,
    graders.router,
    health.router,
    jobs.router,
    job_report.router,
    metrics.router,
    models.router,
    page.router,
    permissions.router,
    responses.router,
    scores.router,
    status.router,
    sglang.router,
    tinker_copies.router,
    tinker_futures.router,
    tinker_models.router,
    tinker_rest.router,
    tinker_sampling.router,
    tinker_sessions.router,
    tinker_training.router,
    tokens.router,
    uploads.router,
)

PUBLIC = ("/", "/health")
"""The paths that need no key; `/` is a page that shows nothing without one."""
LINKED = (tinker_rest.LINK,)
"""The paths whose addresses nobody can guess; those that were given out need no key."""


def create_app(service: Service) -> FastAPI:
    """Return the application of a service.

    Raises:
        ServeError: a route declares no scope and is not public, or may hold up the event loop.
    """
    app = FastAPI(
        title="pcg",
        version=__version__,
        description="OpenAI's API over pcg's engine; adapters are models.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the Host header would say where to
    )
    app.state.service = service
    service.grading = JobGrading(service)
    app.state.public = PUBLIC
    for router in ROUTERS:
        check_routes(router)
        app.include_router(router, responses=ERRORS)
    add_handlers(app, [route for router in ROUTERS for route in router.routes])
    # The last one added is the first to see a request.
    most_values = 2 * (service.max_model_len or 0)
    app.add_middleware(RequestLimits, options=service.options, most_values=most_values)
    app.add_middleware(metrics.Scrapes, service=service)
    public = (*PUBLIC, metrics.PATH) if service.options.metrics_without_key else PUBLIC
    app.add_middleware(
        Authentication, keys=service.keys, public=public, owner_of_link=service.links.owner
    )
    app.add_middleware(RequestId)
    if service.observers:
        app.add_middleware(Recording, observers=service.observers)
    app.add_middleware(DirectSend)
    return app


def check_routes(router: APIRouter) -> None:
    """Raise a ServeError for a route without a scope, or with bodies on the event loop."""
    for route in router.routes:
        path = getattr(route, "path", str(route))
        has_scope = isinstance(route, APIRoute) and any(_scopes(route.dependant))
        if not has_scope and path not in (*PUBLIC, *LINKED):
            raise ServeError(f"the route {path} requires no scope; declare one by requires(…)")
        has_body = isinstance(route, APIRoute) and route.body_field is not None
        if has_body and not isinstance(route, LongBodyRoute):
            raise ServeError(
                f"the route {path} reads long bodies on the event loop; give its router "
                "route_class=LongBodyRoute"
            )


def _scopes(dependant: Dependant) -> Iterator[RequiredScope]:
    for one in dependant.dependencies:
        if isinstance(one.call, RequiredScope):
            yield one.call
        yield from _scopes(one)
