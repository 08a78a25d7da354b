"""Requests as plain values for other processes, and as texts that ranks compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from pcg.peft.adapter import Adapter
from pcg.ranks.agreement import described, fields_of, tensor_digest, tokens_digest
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import VersionName
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.text.tokenizer import Tokenizer

_TOLD_OTHERWISE = ("prompt_ids", "params", "adapter", "text")


def request_facts(requests: Sequence[Request]) -> Mapping[str, str]:
    """Return requests as texts: prompts, adapters, each field and parameter."""
    fields = [
        fields_of(request, _TOLD_OTHERWISE) | fields_of(request.params) for request in requests
    ]
    names = fields[0] if fields else ()
    return {
        **sequence_facts([r.prompt_ids for r in requests], [r.adapter for r in requests]),
        **{name: described(_one([each[name] for each in fields])) for name in names},
    }


def sequence_facts(
    sequences: Sequence[Sequence[int]], adapters: Sequence[ServedAdapter | None]
) -> Mapping[str, str]:
    """Return sequences of token ids, and their adapters, as texts."""
    return {
        "the number of prompts": str(len(sequences)),
        "the lengths of prompts": described([len(ids) for ids in sequences]),
        "the prompts": tokens_digest(sequences),
        "the adapters": described(_one([None if a is None else a.name for a in adapters])),
    }


def adapter_facts(adapter: Adapter) -> Mapping[str, str]:
    """Return an adapter's facts as texts."""
    named = {
        **{f"weights of {path}": each.tensors for path, each in adapter.weights.items()},
        **{name: (tensor,) for name, tensor in adapter.replaced.items()},
        **{f"weights of {name}": (each,) for name, each in adapter.shared.items()},
        **{f"weights of {name}": (each,) for name, each in adapter.encoder.items()},
    }
    digests = {key: " ".join(map(tensor_digest, tensors)) for key, tensors in named.items()}
    return {"the recipe": described(adapter.recipe), **digests}


def tokenizer_facts(tokenizer: Tokenizer | None) -> Mapping[str, str]:
    """Return a tokenizer's facts as texts; empty without a tokenizer."""
    if tokenizer is None:
        return {}
    template = tokenizer.chat_template
    return {
        "the tokenizer": tokenizer.backend.to_str(),
        "special tokens": described(tokenizer.special_tokens),
        "end tokens": described(tokenizer.eos_ids),
        "the chat template": described(None if template is None else template.sources),
    }


def option_facts(options: Any, leave: Sequence[str] = ()) -> Mapping[str, str]:
    """Return the fields of a dataclass as texts, except the fields in `leave`."""
    return {name: described(value) for name, value in fields_of(options, leave).items()}


def _one(values: Sequence[object]) -> object:
    """Return the common value, or all values if they differ, as text."""
    return values[0] if values and all(each == values[0] for each in values) else list(values)


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
        further = {name: value for name in _OWN if (value := getattr(request, name)) is not None}
        if not request.params.echo:  # only `echo` reads the text
            further.pop("text", None)
        return cls(request.prompt_ids, params, adapter, further)

    def request(self, adapter: ServedAdapter | None) -> Request:
        """Return the request; raises the errors of `Request`."""
        return Request(self.prompt_ids, SamplingParams.of(self.params), adapter, **self.own)  # type: ignore[arg-type]
