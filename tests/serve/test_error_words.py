"""Errors over HTTP: each field of each endpoint gets wrong values, and is named as it was sent."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pcg.serve.app import create_app
from pcg.serve.health import schema_of
from pcg.serve.http.errors import in_json
from tests.support import serving

WRONG: tuple[Any, ...] = (True, -1, 10**30, "", "\ud800", [""], [[]], {}, {"a": {}})
INNER: tuple[Any, ...] = (True, -1.5, "x", [""], {})
"""Values for fields, and for those of objects in them; most are wrong for any field."""
PYTHON = re.compile(
    r"(?<![\w'])(None|True|False|tuple|dict|dictionary|str|int|float|bool|NoneType)(?![\w'])"
    r"|,\)|<class|Value error|discriminator|after validation|unicode"
    r"|\b(max_new_tokens|slo_s)\b|Input should be an instance"
)
"""Words of Python, and the engine's names of fields that the wire calls otherwise."""
NOT_OF_A_FIELD = (404, 409, 410, 429, 503)
"""Statuses of what is not there, which say so and not which field named it."""


def resolved(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema.get("$ref")
    return schema if name is None else defined[name.rpartition("/")[2]]


def branches(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas that a union has, or the one schema."""
    schema = resolved(schema, defined)
    found = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [resolved(one, defined) for one in found]


def least(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> Any:
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


def bodies(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str], dict[str, Any]]]:
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


def test_errors_name_fields_as_they_were_sent_and_speak_of_json(tmp_path: Path) -> None:
    async def ask_all(served: serving.Served) -> tuple[int, list[str]]:
        asked, wrong = 0, []
        schema = schema_of(create_app(served.service), ())
        async with serving.client_of(served.service) as client:
            for method, path, fields, body in bodies(schema):
                reply = await ask(
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
    assert asked > 2000
    assert not wrong, "\n".join(wrong)


async def ask(
    client: httpx2.AsyncClient, method: str, path: str, body: dict[str, Any]
) -> httpx2.Response:
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
def test_values_are_written_as_json(python: str, wire: str) -> None:
    assert in_json(python) == wire
