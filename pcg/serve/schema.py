"""The schema of the API: what FastAPI knows of the routes, and the keys that they need."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI

_KEYS: dict[str, dict[str, str]] = {
    "basic": {"type": "http", "scheme": "basic"},
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
"""The ways to send a key, of which one is enough."""


def schema_of(app: FastAPI, public: Collection[str]) -> dict[str, Any]:
    """Return the schema of an application, as OpenAPI has it.

    Args:
        public: the paths that need no key.
    """
    schema = app.openapi()
    paths: dict[str, Any] = {
        path: {method: {**operation, "security": []} for method, operation in operations.items()}
        if path in public
        else operations
        for path, operations in schema["paths"].items()
    }
    components = {**schema.get("components", {}), "securitySchemes": _KEYS}
    security: list[dict[str, list[str]]] = [{name: []} for name in _KEYS]
    return {**schema, "paths": paths, "components": components, "security": security}
