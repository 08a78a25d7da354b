"""Requests as numbers, texts and lists, which messages between processes hold."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import msgspec

from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import VersionName
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams

_OWN = [
    field.name
    for field in dataclasses.fields(Request)
    if field.name not in ("prompt_ids", "params", "adapter")
]
_DEFAULTS = SamplingParams()
_NAMES = [field.name for field in dataclasses.fields(SamplingParams)]


class PlainRequest(msgspec.Struct, array_like=True, frozen=True):
    """The fields of a request.

    Attributes:
        params: the fields of `SamplingParams` that differ from the defaults.
        own: further fields of `Request`.
    """

    prompt_ids: tuple[int, ...]
    params: dict[str, Any]
    adapter: VersionName | None
    own: dict[str, str | int | float | bool | None]

    @classmethod
    def of(cls, request: Request, adapter: VersionName | None) -> Self:
        """Return the fields of a request; `adapter` is the version that answers it."""
        params = {
            name: value
            for name in _NAMES
            if (value := getattr(request.params, name)) != getattr(_DEFAULTS, name)
        }
        own = {name: value for name in _OWN if (value := getattr(request, name)) is not None}
        if not request.params.echo:  # nothing else reads it
            own.pop("text", None)
        return cls(request.prompt_ids, params, adapter, own)

    def request(self, adapter: ServedAdapter | None) -> Request:
        """Return the request again; errors as of `Request`."""
        return Request(self.prompt_ids, SamplingParams.of(self.params), adapter, **self.own)  # type: ignore[arg-type]
