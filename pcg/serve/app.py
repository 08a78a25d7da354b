"""The application: the list of its routers, and its middleware."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from pcg.errors import ServeError
from pcg.keys import Keys
from pcg.serve import health, status
from pcg.serve.adapters import routes as adapters
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.options import ServeOptions
from pcg.serve.files import routes as files
from pcg.serve.files.files import Files, Quota
from pcg.serve.http.caller import Authentication, RequiredScope
from pcg.serve.http.errors import ERRORS, add_handlers
from pcg.serve.http.limits import RequestLimits
from pcg.serve.http.middleware import DirectSend, Recording, RequestId
from pcg.serve.http.service import LongBodyRoute, Service
from pcg.serve.jobs import graders
from pcg.serve.jobs import routes as jobs
from pcg.serve.jobs.graders import JobGrading, PythonGraders
from pcg.serve.jobs.runner import JobRunner
from pcg.serve.metrics import engine_metrics as metrics
from pcg.serve.metrics.engine_metrics import EngineMetrics
from pcg.serve.metrics.families import Served
from pcg.serve.observers import Observers
from pcg.serve.openai import anthropic, chat, completions, embeddings, models, responses
from pcg.serve.openai.logprobs import TokenTexts
from pcg.serve.openai.response_items import ResponseStore
from pcg.serve.openai.sampling import GenerationConfig
from pcg.serve.openai.tools import ChatSupport
from pcg.serve.store.store import Store
from pcg.serve.tinker import management as tinker_management
from pcg.serve.tinker import routes as tinker
from pcg.serve.tinker.samplers import Samplers
from pcg.serve.tinker.tinker import LINKS, Links, Tinker
from pcg.version import __version__

ROUTERS: tuple[APIRouter, ...] = (
    adapters.router,
    anthropic.router,
    chat.router,
    completions.router,
    embeddings.router,
    files.router,
    graders.router,
    health.router,
    jobs.router,
    metrics.router,
    models.router,
    status.page_router,
    responses.router,
    status.router,
    tinker.router,
    tinker_management.router,
)

PUBLIC = ("/", "/health")
"""Paths that need no key; `/` is a page that shows nothing without a key."""
LINKED = (tinker_management.LINK,)
"""Paths with unguessable addresses; addresses that the server issued need no key."""


def open_service(
    client: EngineClient,
    keys: Keys,
    options: ServeOptions,
    generation: GenerationConfig | None = None,
    store: Store | None = None,
) -> Service:
    """Return the service of an engine with all of its parts.

    Args:
        generation: default sampling parameters.
        store: the data folder; without it, the parts that need it are missing.
    """
    service = Service(client, keys, options)
    catalog = service.add(Catalog(client, options, store))
    python_graders = service.add(PythonGraders(options.python_graders))
    observers = service.add(Observers(options))
    service.ends += [python_graders.close, observers.close]
    service.add(generation or GenerationConfig())
    service.add(Links(LINKS))
    service.add(TokenTexts(client.tokenizer))
    service.add(ResponseStore())
    service.add(
        ChatSupport(
            client.tokenizer,
            chat_template=options.chat_template,
            tool_call_parser=options.tool_call_parser,
            trusts_templates=options.trust_request_chat_template,
        )
    )
    served = Served(
        catalog.names[0],
        service.max_model_len,
        options.max_num_seqs,
        service.memory.bytes,
        catalog.owned,
    )
    service.add(EngineMetrics(client, served))
    if store is not None:
        files = service.add(Files(store, Quota(options)))
        runner = service.add(JobRunner(client, files, catalog, options, JobGrading(service)))
        state = service.add(Tinker(client, catalog.loader, store, options))
        samplers = service.add(Samplers(service, catalog, state))
        service.begins += [runner.begin, state.begin, samplers.begin]
        service.stops.append(state.futures.close)
    return service


def create_app(service: Service) -> FastAPI:
    """Return the application of a service.

    Raises:
        ServeError: a route declares no scope and is not public, or may block the event loop.
    """
    app = FastAPI(
        title="pcg",
        version=__version__,
        description="OpenAI's API over pcg's engine; adapters are models.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the Host header would choose the target
    )
    app.state.service = service
    app.state.public = PUBLIC
    for router in ROUTERS:
        check_routes(router)
        app.include_router(router, responses=ERRORS)
    add_handlers(app, [route for router in ROUTERS for route in router.routes])
    # The middleware that is added last runs first.
    most_values = 2 * (service.max_model_len or 0)
    app.add_middleware(RequestLimits, options=service.options, most_values=most_values)
    app.add_middleware(metrics.Scrapes, service=service)
    public = (*PUBLIC, metrics.PATH) if service.options.metrics_without_key else PUBLIC
    app.add_middleware(
        Authentication, keys=service.keys, public=public, owner_of_link=service.part(Links).owner
    )
    app.add_middleware(RequestId)
    if observers := service.part(Observers).each:
        app.add_middleware(Recording, observers=observers)
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
    for dependency in dependant.dependencies:
        if isinstance(dependency.call, RequiredScope):
            yield dependency.call
        yield from _scopes(dependency)
