"""The application: keys on every route, ids of requests, errors in the shape and words of JSON."""

import asyncio
import json
import re
from itertools import islice

import pytest
from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute

from pcg.errors import EngineError, ServeError
from pcg.keys import Keys, Scope
from pcg.serve.app import PUBLIC, ROUTERS, check_routes, create_app
from pcg.serve.health import schema_of
from pcg.serve.http.caller import requires
from pcg.serve.http.errors import as_api_error, in_json
from pcg.version import __version__
from tests.support import serving


@pytest.fixture(scope="module")
def service():
    keys = Keys([serving.key("all"), serving.key("trainer", "train")])
    with serving.service_of(keys=keys) as service:
        yield service


def ask(service, method, path, **options):
    return serving.ask(service, method, path, **{"headers": serving.headers_of("all"), **options})


def test_every_route_but_health_needs_a_key(service):
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


def test_health_without_its_body(service):
    assert ask(service, "HEAD", "/health", headers={}).status_code == 200


def test_a_body_that_does_not_say_that_it_is_json(service):
    headers = {**serving.headers_of("all"), "content-type": "text/plain"}
    reply = ask(service, "POST", "/v1/completions", headers=headers, content=b'{"prompt": "a"}')
    assert reply.status_code == 400
    assert "application/json" in reply.json()["error"]["message"]


def test_no_reply_sends_a_client_elsewhere(service):
    """A redirect would be to what the client, or who stands before it, calls this server."""
    headers = {**serving.headers_of("all"), "host": "elsewhere.test"}
    for path in ("/version/", "/health/", "/v1/load_lora_adapter/"):
        assert ask(service, "GET", path, headers=headers).status_code == 404


def test_a_context_longer_than_the_model_is_refused():
    with (
        pytest.raises(ServeError, match=r"the model has .* positions; use at most"),
        serving.service_of(max_model_len=10**6),
    ):
        pass


def test_a_route_without_a_scope_is_refused():
    router = APIRouter()
    router.get("/open")(lambda: None)
    with pytest.raises(ServeError, match="/open requires no scope"):
        check_routes(router)


def test_a_route_that_reads_long_bodies_on_the_event_loop_is_refused():
    def act(body: dict[str, str]):
        pass

    router = APIRouter(dependencies=[Depends(requires(Scope.INFER))])
    router.post("/slow")(act)
    with pytest.raises(ServeError, match="/slow reads long bodies"):
        check_routes(router)


def test_keys_come_in_either_header_and_have_scopes(service):
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


def test_ids_of_requests(service):
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
def test_errors_have_openais_shape(service, method, path, content, status, code):
    headers = {**serving.headers_of("all"), "content-type": "application/json"}
    reply = ask(service, method, path, content=content, headers=headers)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


def test_models(service):
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


def test_a_method_that_a_path_lacks_is_refused_with_those_that_it_has(service):
    for path, methods in (("/ping", "GET, POST"), ("/v1/completions", "POST")):
        refused = ask(service, "PUT", path)
        assert (refused.status_code, refused.headers["allow"]) == (405, methods)


def test_the_schema_names_the_keys_that_routes_need(service):
    schema = ask(service, "GET", "/openapi.json").json()
    assert schema["security"] == [{"basic": []}, {"bearer": []}, {"header": []}]
    assert set(schema["components"]["securitySchemes"]) == {"basic", "bearer", "header"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert operation.get("security") == ([] if path in PUBLIC else None), path


def test_the_schema_names_the_parts_of_paths_and_the_kind_of_errors(service):
    schema = ask(service, "GET", "/openapi.json").json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            given = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert given == set(re.findall(r"\{(\w+)(?::path)?\}", path)), path
            refused = operation["responses"].get("404", {}).get("content", {})
            assert set(refused) <= {"application/json"}, f"{method} {path}"


def test_how_the_engine_failed_is_no_callers_business():
    error = as_api_error(EngineError("the engine's thread ended by OSError: /srv/secret"))
    assert (error.status_code, error.code) == (503, "engine_ended")
    assert "srv" not in str(error.content)


def test_nobody_learns_how_many_prompts_came(service):
    body = {"model": serving.MODEL, "prompt": [10**9]}
    for _ in range(2):
        message = ask(service, "POST", "/v1/completions", json=body).json()["error"]["message"]
        assert message.startswith("prompt 0 has token 1000000000;")


WRONG = (True, -1, 10**30, "", "\ud800", [""], [[]], {}, {"a": {}})
INNER = (True, -1.5, "x", [""], {})
"""Values for fields, and for those of objects in them; most are wrong for any field."""
PYTHON = re.compile(
    r"(?<![\w'])(None|True|False|tuple|dict|dictionary|str|int|float|bool|NoneType)(?![\w'])"
    r"|,\)|<class|Value error|discriminator|after validation|unicode"
    r"|\b(max_new_tokens|slo_s)\b|Input should be an instance"
)
"""Words of Python, and the engine's names of fields that the wire calls otherwise."""
NOT_OF_A_FIELD = (404, 409, 410, 429, 503)
"""Statuses of what is not there, which say so and not which field named it."""


def resolved(schema, defined):
    name = schema.get("$ref")
    return schema if name is None else defined[name.rpartition("/")[2]]


def branches(schema, defined):
    """The schemas that a union has, or the one schema."""
    schema = resolved(schema, defined)
    found = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [resolved(one, defined) for one in found]


def least(schema, defined):
    """A value that a schema allows, with what it requires alone."""
    schema = next(one for one in branches(schema, defined) if one.get("type") != "null")
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        parts = schema.get("properties", {})
        return {name: least(parts[name], defined) for name in schema.get("required", ())}
    if schema.get("type") == "array":
        return [least(schema.get("items", {}), defined)] * schema.get("minItems", 0)
    numbers = max(1, schema.get("minimum", 1))
    return {"string": "a", "integer": numbers, "number": 1.0, "boolean": True}.get(
        str(schema.get("type"))
    )


def bodies(schema):
    """Method, path, fields, and a body with a wrong one, of all that a schema has."""
    defined = schema["components"]["schemas"]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            for body in branches(content.get("application/json", {}).get("schema", {}), defined):
                base = least(body, defined)
                names = list(body.get("properties", {}))
                for name, field in body.get("properties", {}).items():
                    for value in WRONG:
                        yield method, path, names, {**base, name: value}
                    inner = [one.get("properties", {}) for one in branches(field, defined)]
                    for part in {part for one in inner for part in one}:
                        given = base[name] if isinstance(base.get(name), dict) else {}
                        for value in INNER:
                            yield method, path, names, {**base, name: {**given, part: value}}


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_errors_name_fields_as_they_were_sent_and_speak_of_json(tmp_path, share):
    """Each field has some of the wrong values, or all of them."""

    async def ask_all(served):
        asked, wrong = 0, []
        schema = schema_of(create_app(served.service), ())
        async with serving.client_of(served.service) as client:
            for method, path, fields, body in islice(bodies(schema), 0, None, share):
                reply = await send(
                    client,
                    method,
                    re.sub(r"{[^}]*}", "none", path.replace("{kind}", "weights")),
                    body,
                )
                asked += 1
                if reply.status_code < 400:
                    continue
                assert reply.status_code < 500, (path, body, reply.text)
                error = reply.json().get("error")
                # Those of SGLang's and Anthropic's APIs have no place for a field.
                is_openais = isinstance(error, dict) and "param" in error
                message, param = reply.text, ""
                if is_openais:
                    message, param = error["message"], error["param"] or ""
                named = [name for name in fields if name in message or param.startswith(name)]
                is_named = bool(named) or not is_openais or reply.status_code in NOT_OF_A_FIELD
                if PYTHON.search(message) or PYTHON.search(param) or not is_named:
                    wrong.append(f"{path} {body}: {message} ({param})")
        return asked, wrong

    with serving.on_a_port(data_dir=tmp_path) as served:
        asked, wrong = asyncio.run(ask_all(served))
    assert asked > 2000 / share
    assert not wrong, "\n".join(wrong)


async def send(client, method, path, body):
    headers = {"content-type": "application/json"}
    return await client.request(method, path, content=json.dumps(body), headers=headers)


@pytest.mark.parametrize(
    ("python", "wire"),
    [
        ("stop=('',); use a tuple of strings", 'stop=[""]; use a list of strings'),
        ("a=['b', None]; use None or True", 'a=["b",null]; use null or true'),
        ("x={'a': (1, 'b')} is no dict", "x={'a': [1,\"b\"]} is no object"),
        (
            "stop=('None',) is 'None', `None` is a name",
            "stop=[\"None\"] is 'None', `None` is a name",
        ),
        ("x=['a', 1j] is no list", "x=['a', 1j] is no list"),
        ("it is of type \"['a', None]\"", "it is of type \"['a', None]\""),
        ("unknown: (" + "\\'" * 1900, "unknown: (" + "\\'" * 1900),  # in linear time
        ("no JSON: (char 0) [1] it's", "no JSON: (char 0) [1] it's"),
    ],
)
def test_values_are_written_as_json(python, wire):
    assert in_json(python) == wire
