"""Checks a completion against the logits of transformers and peft, run on its own tokens alone.

The next token's distribution is made of their logits by transformers' own processors where it has
them, and by plain formulas else; the token is then the likeliest, or the one at the request's
random number. Where rounding could decide between two tokens, either is right.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from pcg.runtime.requests.request import Completion, Request
from pcg.runtime.sampling.sampling_params import SamplingParams

TIE = 3e-4
"""Difference of logits, and of cumulative probabilities, that rounding explains."""
CLOSE = 1e-4


@torch.no_grad()
def states_and_logits(model: Any, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the last hidden states and the logits of some tokens, without virtual ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model(torch.tensor([list(ids)]), output_hidden_states=True)
    return out.hidden_states[-1][0, -len(ids) :], out.logits[0, -len(ids) :].float()


def check_completion(
    model: Any, request: Request, found: Completion, ends: Sequence[int], choice: int
) -> None:
    """Raise an AssertionError unless this is what the model alone gives.

    Args:
        ends: the model's own end-of-sequence tokens.
        choice: the continuation's place among those that are computed, whose seed is so much later.
    """
    prompt, params, tokens = list(request.prompt_ids), request.params, list(found.token_ids)
    states, logits = states_and_logits(model, [*prompt, *tokens])
    if request.pooling is not None:
        own = states[-1] if request.pooling == "last" else states.mean(0)
        own = torch.nn.functional.normalize(own, dim=0) if request.normalize else own
        assert found.embedding is not None
        torch.testing.assert_close(found.embedding, own.float(), rtol=CLOSE, atol=CLOSE)
        return
    own_ends = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
    seed = None if params.seed is None else (params.seed + choice) % 2**63
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for place, token in enumerate(tokens):
        row = _changed(logits[len(prompt) - 1 + place], params, prompt, tokens[:place], own_ends)
        uniform = torch.rand((), dtype=torch.float64, generator=generator).item()
        _check_token(row, token, params, uniform if seed is not None else None, place)
        assert token not in own_ends or place == len(tokens) - 1
    _check_logprobs(logits, prompt, tokens, params, found)
    _check_end(found, params, tokens, own_ends)


def _check_end(
    found: Completion, params: SamplingParams, tokens: list[int], ends: set[int]
) -> None:
    assert len(tokens) <= params.max_new_tokens
    if found.finish_reason == "length":
        assert len(tokens) == params.max_new_tokens
    if found.finish_reason == "stop" and not (params.stop or params.guide):
        assert tokens[-1] in ends
    if found.finish_reason == "stop":
        assert len(tokens) > params.min_tokens or not (ends or params.stop)
    if not params.include_stop_str_in_output and found.finish_reason == "stop":
        behind = found.text if not params.echo else ""
        assert params.min_tokens or not any(text in behind for text in params.stop)


def _check_logprobs(
    logits: Tensor, prompt: list[int], tokens: list[int], params: SamplingParams, found: Completion
) -> None:
    rows = logits.log_softmax(dim=-1)
    if params.logprobs is not None:
        assert found.logprobs is not None
        own = found.logprobs[-len(tokens) :] if tokens else ()
        for place, (one, token) in enumerate(zip(own, tokens, strict=True)):
            _check_one(one, rows[len(prompt) - 1 + place], token, params.logprobs)
    if params.of_prompt is not None:
        assert found.prompt_logprobs is not None
        assert len(found.prompt_logprobs) == len(prompt)
        assert found.prompt_logprobs[0] is None
        for place, one in enumerate(found.prompt_logprobs[1:]):
            _check_one(one, rows[place], prompt[place + 1], params.of_prompt)


def _check_one(one: Any, row: Tensor, token: int, most: int) -> None:
    assert one.token_id == token
    assert math.isclose(one.logprob, float(row[token]), abs_tol=CLOSE, rel_tol=CLOSE)
    assert len(one.top) == most
    likeliest = row.topk(most) if most else None
    for place, (which, logprob) in enumerate(one.top):
        assert likeliest is not None
        assert math.isclose(logprob, float(likeliest.values[place]), abs_tol=CLOSE, rel_tol=CLOSE)
        assert math.isclose(logprob, float(row[which]), abs_tol=CLOSE, rel_tol=CLOSE)


def _changed(
    row: Tensor, params: SamplingParams, prompt: list[int], tokens: list[int], ends: set[int]
) -> Tensor:
    """Return the logits [vocabulary] as the request's fields change them."""
    row = row.clone()
    if params.allowed_token_ids is not None:
        kept = torch.zeros_like(row, dtype=torch.bool)
        kept[list(params.allowed_token_ids)] = True
        row[~kept] = -math.inf
    for word in params.bad_words:
        before = list(word[:-1])
        if not before or tokens[-len(before) :] == before:
            row[word[-1]] = -math.inf
    if len(tokens) < params.min_tokens:
        row[list(ends)] = -math.inf
    for token, bias in params.logit_bias.items():
        row[token] += bias
    ids = torch.tensor([prompt + tokens])
    if params.repetition_penalty != 1.0:
        penalty = logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        row = penalty(ids, row[None])[0]
    for token in set(tokens):
        row[token] -= params.frequency_penalty * tokens.count(token) + params.presence_penalty
    return row


def _check_token(
    row: Tensor, token: int, params: SamplingParams, uniform: float | None, place: int
) -> None:
    if params.guide is not None:
        return  # what its guide allows is the guide's own check
    if params.temperature == 0.0:
        best, own = float(row.max()), float(row[token])
        assert own >= best - TIE * max(1.0, abs(best)), (place, token, int(row.argmax()))
        return
    rows = row[None]
    ids = torch.zeros(1, 1, dtype=torch.long)
    rows = logits_process.TemperatureLogitsWarper(params.temperature)(ids, rows)
    if params.top_k is not None:
        rows = logits_process.TopKLogitsWarper(min(params.top_k, len(row)))(ids, rows)
    if params.top_p is not None and params.top_p < 1.0:
        rows = logits_process.TopPLogitsWarper(params.top_p)(ids, rows)
    if params.min_p is not None:
        rows = logits_process.MinPLogitsWarper(params.min_p)(ids, rows)
    if uniform is None:
        assert rows[0, token] > -math.inf
        return
    cumulative = rows[0].double().softmax(dim=-1).cumsum(dim=-1)
    above = float(cumulative[token])
    below = above - float(rows[0].double().softmax(dim=-1)[token])
    assert below - TIE <= uniform <= above + TIE, (place, token, below, uniform, above)
