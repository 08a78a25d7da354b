"""Requests of samples as the engine takes them, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pcg.runtime.requests.request import Completion, RequestFields
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.serve.errors import ApiError
from pcg.serve.tinker.proto import SampledTokens, SampleResult, TopLogprobs, encode_sample
from pcg.serve.tinker.sampling.wire import SampleBody

_NO_LOGPROB = -99999.0
_LEAST = float(np.finfo(np.float32).min)


def fields_of(body: SampleBody, room: int) -> RequestFields:
    """Return the fields of the engine's request.

    Log-probabilities are the model's own, before temperature and filters, as forward_backward has
    them.

    Args:
        room: the most tokens that the prompt and its output may have together.
    """
    params, stop = body.sampling_params, body.sampling_params.stop
    new = params.max_tokens
    found: RequestFields = {
        "max_new_tokens": max(1, room - len(body.prompt)) if new is None else new,
        "temperature": params.temperature,
        "top_k": params.top_k if params.top_k > 0 else None,
        "top_p": params.top_p if params.top_p < 1 else None,
        "seed": params.seed,
        "n": body.num_samples,
        "logprobs": body.topk_sample_logprobs,
        "logprobs_mode": "raw_logprobs",
        "ignore_eos": stop == [],
    }
    if body.is_of_prompt():
        found["prompt_logprobs"] = body.topk_prompt_logprobs
        found["prompt_draws"] = body.prompt_alt_tokens_k
        if body.target_prompt_logprobs is not None:
            found["prompt_targets"] = body.target_prompt_logprobs.rows
    if isinstance(stop, str):
        found["stop"] = (stop,)
    elif stop and isinstance(stop[0], int):
        found["stop_token_ids"] = tuple(stop)
    elif stop:
        found["stop"] = tuple(stop)  # type: ignore[arg-type]
    return found


def encoded(body: SampleBody, completions: Sequence[Completion]) -> bytes:
    """Return the result of a request as its client reads it.

    Raises:
        ApiError: a continuation was given up.
    """
    if any(one.finish_reason not in ("stop", "length") for one in completions):
        raise ApiError(503, "The server gave the request up.")
    k = body.topk_sample_logprobs
    sequences = [
        SampledTokens(
            one.token_ids,
            [number(found.logprob) for found in one.logprobs or ()],
            one.finish_reason,
            _top(one.logprobs or (), k) if k else None,
        )
        for one in completions
    ]
    prompt: dict[str, Any] = {}
    of_prompt = completions[0].prompt_logprobs
    if of_prompt is not None:
        kept = _last(of_prompt, body.prompt_logprobs_last_n)
        if body.prompt_logprobs:
            prompt["prompt_logprobs"] = [
                np.nan if one is None else number(one.logprob) for one in kept
            ]
        if body.topk_prompt_logprobs:
            prompt["top_prompt"] = _top(kept, body.topk_prompt_logprobs)
        prompt |= _further(body, of_prompt)
    cached = completions[0].cached_tokens
    return encode_sample(SampleResult(sequences, cached_tokens=cached, **prompt))


def _further(body: SampleBody, found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
    """Return the log-probabilities of further tokens of the prompt's places, as far as asked."""
    targets, draws = body.target_prompt_logprobs, body.prompt_alt_tokens_k
    rows = [() if one is None else one.top for one in found[1:]]
    told: dict[str, Any] = {}
    if targets is not None:
        asked = zip(rows, targets.rows, strict=True)
        flat = [
            number(logprob)
            for row, ids in asked
            for _, logprob in row[len(row) - draws - len(ids) : len(row) - draws]
        ]
        array = np.array(flat, np.float32)
        told["target_prompt_logprobs"] = array
        starts, columns = targets.sparse_crow_indices, targets.sparse_col_indices
        if starts is None or columns is None:
            told["target_prompt_logprobs"] = array.reshape(targets.shape)
        else:
            told["target_cells"] = targets.shape, starts, columns
    if draws:
        drawn = [row[len(row) - draws :] for row in rows]
        tokens = np.array([[token for token, _ in row] for row in drawn], np.int64)
        logprobs = np.array([[number(x) for _, x in row] for row in drawn], np.float32)
        shape = len(rows), draws
        told["alternatives"] = tokens.reshape(shape), logprobs.reshape(shape)
    return told


def _last(
    found: Sequence[TokenLogprobs | None], count: int | None
) -> Sequence[TokenLogprobs | None]:
    """Return log-probabilities of which all but the last so many are none."""
    if count is None:
        return found
    return [*[None] * (len(found) - count), *found[-count:]]


def _top(found: Sequence[TokenLogprobs | None], k: int) -> TopLogprobs:
    """Return the likeliest tokens of some places as arrays, [places, k]."""
    tokens = np.zeros((len(found), k), np.int32)
    logprobs = np.full((len(found), k), _NO_LOGPROB, np.float32)
    for row, one in enumerate(found):
        for column, (token, logprob) in enumerate(() if one is None else one.top[:k]):
            tokens[row, column], logprobs[row, column] = token, number(logprob)
    return TopLogprobs(tokens, logprobs)


def number(logprob: float) -> float:
    """Return a log-probability as a float32 can hold it, without infinities."""
    return max(logprob, _LEAST)
