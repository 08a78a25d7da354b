"""Prompts become requests: text is encoded, and adapters are found by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pcg.errors import GenerationError
from pcg.runtime.engine.request import Request, RequestFields
from pcg.runtime.model.sampling_params import SamplingFields, SamplingParams
from pcg.runtime.model.state import ModelState


def make_requests(
    state: ModelState,
    prompts: Sequence[str | Sequence[int]],
    adapter: str | Sequence[str | None] | None,
    sampling: Mapping[str, Any],
) -> list[Request]:
    """Make a request of each prompt.

    Args:
        state: the model.
        prompts: texts, or lists of token ids.
        adapter: one name for all, a name for each prompt, or None for the base.
        sampling: the fields of `SamplingParams`; a list gives each prompt its own.
    Raises:
        GenerationError: an empty prompt, text without a tokenizer, or bad options.
        AdapterError: there is no adapter of that name.
    """
    adapters = state.adapters_of(len(prompts), adapter)
    return [
        Request(
            tuple(_encode(state, prompt, index)),
            SamplingParams.of(sampling, index, len(prompts)),
            adapters[index],
        )
        for index, prompt in enumerate(prompts)
    ]


def make_request(
    state: ModelState,
    prompt: str | Sequence[int],
    adapter: str | None,
    fields: RequestFields,
) -> Request:
    """Make a request of one prompt; see `Executor.request`."""
    own = {name: value for name, value in fields.items() if name in _OWN}
    sampling = {name: value for name, value in fields.items() if name not in own}
    (request,) = make_requests(state, [prompt], adapter, sampling)
    return dataclasses.replace(request, **own)  # type: ignore[arg-type]


_OWN = RequestFields.__annotations__.keys() - SamplingFields.__annotations__.keys()


def _encode(state: ModelState, prompt: str | Sequence[int], index: int) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    if state.tokenizer is None:
        raise GenerationError(
            "the model came without a tokenizer.json; put one into its directory, or give "
            "prompts as lists of token ids"
        )
    if not prompt:
        raise GenerationError(f"prompt {index} is empty; give at least one character")
    return state.tokenizer.encode(prompt)
