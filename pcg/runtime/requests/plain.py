"""Requests as numbers, texts and lists, which messages between processes hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams

_OWN = [
    field.name
    for field in dataclasses.fields(Request)
    if field.name not in ("prompt_ids", "params", "adapter")
]
_DEFAULTS = SamplingParams()
_NAMES = [field.name for field in dataclasses.fields(SamplingParams)]


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from the defaults."""
    return {
        name: value
        for name in _NAMES
        if (value := getattr(params, name)) != getattr(_DEFAULTS, name)
    }


def plain_fields(request: Request) -> dict[str, str | int | float | bool | None]:
    """Return the fields of a request beside its prompt, its parameters and its adapter."""
    own = {name: value for name in _OWN if (value := getattr(request, name)) is not None}
    if not request.params.echo:  # nothing else reads it
        own.pop("text", None)
    return own


def request_of_plain(
    prompt_ids: Sequence[int],
    params: Mapping[str, Any],
    adapter: ServedAdapter | None,
    own: Mapping[str, Any],
) -> Request:
    """Return the request that the functions above have made plain; errors as of `Request`."""
    return Request(tuple(prompt_ids), SamplingParams.of(params), adapter, **own)
