"""The version that answers a request, as replies have it in `system_fingerprint`."""

from __future__ import annotations

from typing import cast

from pcg.peft.adapter import Adapter
from pcg.runtime.requests.request import Request
from pcg.serve.adapters.catalog import ServedModel
from pcg.serve.service import Service


def version_of(service: Service, model: ServedModel, request: Request) -> str:
    """Return the version of an adapter, as sql@3; of the base its name."""
    if request.adapter is None:
        return model.name
    version = service.executor.state.versions.of(cast("Adapter", request.adapter))
    return model.name if version is None else f"{model.name}@{version.number}"
