"""The application: keys on every route, ids of requests, and errors in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute

from pcg.errors import EngineError, ServeError
from pcg.keys import Keys, Scope
from pcg.serve.app import PUBLIC, ROUTERS, check_routes
from pcg.serve.http.caller import requires
from pcg.serve.http.errors import as_api_error
from pcg.serve.http.service import Service
from pcg.version import __version__
from tests.support import serving


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    keys = Keys([serving.key("all"), serving.key("trainer", "train")])
    with serving.service_of(keys=keys) as service:
        yield service


def ask(service: Service, method: str, path: str, **options: Any) -> httpx2.Response:
    return serving.ask(service, method, path, **{"headers": serving.headers_of("all"), **options})


def test_every_route_but_health_needs_a_key(service: Service) -> None:
    routes = [route for router in ROUTERS for route in router.routes]
    assert len(routes) > 5
    for route in routes:
        assert isinstance(route, APIRoute)
        path = route.path.replace("{model:path}", "x")
        for method in route.methods:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                status = ask(service, method, path, headers=headers).status_code
                assert status == (200 if path in PUBLIC else 401), (method, path)
    assert PUBLIC == ("/", "/health")


def test_health_without_its_body(service: Service) -> None:
    assert ask(service, "HEAD", "/health", headers={}).status_code == 200


def test_a_body_that_does_not_say_that_it_is_json(service: Service) -> None:
    headers = {**serving.headers_of("all"), "content-type": "text/plain"}
    reply = ask(service, "POST", "/v1/completions", headers=headers, content=b'{"prompt": "a"}')
    assert reply.status_code == 400
    assert "application/json" in reply.json()["error"]["message"]


def test_no_reply_sends_a_client_elsewhere(service: Service) -> None:
    """A redirect would be to what the client, or who stands before it, calls this server."""
    headers = {**serving.headers_of("all"), "host": "elsewhere.test"}
    for path in ("/version/", "/health/", "/v1/load_lora_adapter/"):
        assert ask(service, "GET", path, headers=headers).status_code == 404


def test_a_route_without_a_scope_is_refused() -> None:
    router = APIRouter()
    router.get("/open")(lambda: None)
    with pytest.raises(ServeError, match="/open requires no scope"):
        check_routes(router)


def test_a_route_that_reads_long_bodies_on_the_event_loop_is_refused() -> None:
    def act(body: dict[str, str]) -> None:
        pass

    router = APIRouter(dependencies=[Depends(requires(Scope.INFER))])
    router.post("/slow")(act)
    with pytest.raises(ServeError, match="/slow reads long bodies"):
        check_routes(router)


def test_keys_come_in_either_header_and_have_scopes(service: Service) -> None:
    for headers in (
        serving.headers_of("all"),
        {"authorization": "bearer  key-of-all"},
        {"x-api-key": "key-of-all"},
    ):
        found = ask(service, "GET", "/version", headers=headers)
        assert found.json() == {"version": __version__}
    refused = ask(service, "GET", "/v1/models", headers=serving.headers_of("trainer"))
    assert refused.status_code == 403
    assert refused.json()["error"]["type"] == "permission_error"


def test_ids_of_requests(service: Service) -> None:
    made = ask(service, "GET", "/health").headers["x-request-id"]
    assert made.startswith("req-")
    own = {**serving.headers_of("all"), "x-request-id": "mine"}
    assert ask(service, "GET", "/health", headers=own).headers["x-request-id"] == "mine"
    assert "x-request-id" in ask(service, "GET", "/none", headers={}).headers


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/none", b"", 404, None),
        ("DELETE", "/v1/completions", b"", 405, None),
        ("POST", "/v1/completions", b"{", 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"a": ' * 10_000, 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"a": ' * 100_000, 400, "body_too_large"),
        ("POST", "/v1/completions", b"\xff", 400, "invalid_json"),
        ("POST", "/v1/completions", b"[" + b"9" * 9000 + b"]", 400, "invalid_json"),
        ("POST", "/v1/completions", b"null", 400, None),
        ("POST", "/v1/completions", b"", 400, None),
    ],
)
def test_errors_have_openais_shape(
    service: Service, method: str, path: str, content: bytes, status: int, code: str | None
) -> None:
    headers = {**serving.headers_of("all"), "content-type": "application/json"}
    reply = ask(service, method, path, content=content, headers=headers)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


def test_models(service: Service) -> None:
    base, adapter = ask(service, "GET", "/v1/models").json()["data"]
    assert (base["id"], base["parent"], base["max_model_len"]) == (serving.MODEL, None, 128)
    assert (adapter["id"], adapter["parent"], adapter["max_model_len"]) == (
        "lora-0",
        serving.MODEL,
        None,
    )
    assert ask(service, "GET", "/v1/models/lora-0").json() == adapter
    assert ask(service, "GET", "/v1/models/other").status_code == 404
    schema = ask(service, "GET", "/openapi.json").json()
    assert "/v1/completions" in schema["paths"]


def test_a_method_that_a_path_lacks_is_refused_with_those_that_it_has(service: Service) -> None:
    for path, methods in (("/ping", "GET, POST"), ("/v1/completions", "POST")):
        refused = ask(service, "PUT", path)
        assert (refused.status_code, refused.headers["allow"]) == (405, methods)


def test_the_schema_names_the_keys_that_routes_need(service: Service) -> None:
    schema = ask(service, "GET", "/openapi.json").json()
    assert schema["security"] == [{"basic": []}, {"bearer": []}, {"header": []}]
    assert set(schema["components"]["securitySchemes"]) == {"basic", "bearer", "header"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert operation.get("security") == ([] if path in PUBLIC else None), path


def test_the_schema_names_the_parts_of_paths_and_the_kind_of_errors(service: Service) -> None:
    schema = ask(service, "GET", "/openapi.json").json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            given = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert given == set(re.findall(r"\{(\w+)(?::path)?\}", path)), path
            refused = operation["responses"].get("404", {}).get("content", {})
            assert set(refused) <= {"application/json"}, f"{method} {path}"


def test_how_the_engine_failed_is_no_callers_business() -> None:
    error = as_api_error(EngineError("the engine's thread ended by OSError: /srv/secret"))
    assert (error.status_code, error.code) == (503, "engine_ended")
    assert "srv" not in str(error.content)


def test_nobody_learns_how_many_prompts_came(service: Service) -> None:
    body = {"model": serving.MODEL, "prompt": [10**9]}
    for _ in range(2):
        message = ask(service, "POST", "/v1/completions", json=body).json()["error"]["message"]
        assert message.startswith("prompt 0 has token 1000000000;")
