"""Sampling: from a step's logits to its next tokens, each row by its own request's parameters.

A row goes through these steps; a step that no row needs is skipped:

    masks         guides, allowed_token_ids, bad_words, min_tokens; logit_bias
    penalties     repetition, frequency, presence
    filters       temperature, top-k, top-p, min-p; T = 0 takes the argmax instead
    drawing       the first token with a cumulative probability above u, u ~ U[0, 1)

    a guide                   l = -inf for tokens that it does not allow next
    allowed_token_ids         l = -inf for all other tokens
    bad_words, min_tokens     l = -inf for the tokens that would end a word, or the output
    logit_bias                l + b
    repetition                l < 0: l · r, else l / r     tokens of the prompt and of the output
    frequency                 l - f · (times generated)    tokens of the output
    presence                  l - p                        tokens of the output

Nothing here waits for the device: if no token can be drawn, the result is `UNDRAWN`, and the engine
fails only that row's request. All randomness is one number u a token, drawn on the CPU from the
request's own generator: a request's tokens depend neither on the rest of the batch nor on the
device, and its random state is a few bytes that move with it.

Source: transformers `RepetitionPenaltyLogitsProcessor`; OpenAI's reference of chat completions; the
order and the meaning of the fields are vLLM's (`v1/sample/sampler.py`, `apply_penalties`).

Shapes: R rows, V vocabulary, S sampled rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.errors import GenerationError
from pcg.kernels.devices import uploaded, uploaded_list
from pcg.runtime.sampling.drawing import PYTORCH, Drawing
from pcg.runtime.sampling.grammars import masks_of
from pcg.runtime.sampling.sampler import Sampler

Found = Sequence[tuple[int, NDArray[np.int64]]]
"""Rows, and the tokens of each."""


def places(pairs: Found, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows [K] and the tokens [K] that index the logits [R, V]."""
    rows = np.repeat([row for row, _ in pairs], [len(tokens) for _, tokens in pairs])
    tokens = np.concatenate([tokens for _, tokens in pairs])
    return sent(rows, logits), sent(tokens, logits)


def sent(values: NDArray[np.generic], logits: Tensor) -> Tensor:
    """Copy an array to the device of the logits."""
    return uploaded(torch.from_numpy(values), logits.device)


def guided(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return a copy of the logits [R, V] in fp32, without tokens that rows' guides rule out."""
    grammars = {row: each.grammar for row, each in enumerate(samplers) if each.grammar is not None}
    if not grammars:
        return logits.to(torch.float32, copy=True)
    ruled_out = uploaded(torch.from_numpy(masks_of(list(grammars.values()))), logits.device)
    nothing = torch.full((), -math.inf, device=logits.device)
    if len(grammars) == len(logits):
        return torch.where(ruled_out, nothing, logits.float())
    logits = logits.to(torch.float32, copy=True)
    rows = uploaded_list(list(grammars), torch.int64, logits.device)
    logits[rows] = torch.where(ruled_out, nothing, logits[rows])
    return logits


def restrict(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Remove the tokens that each row's fields forbid from its logits [R, V], in place."""
    vocabulary = logits.shape[-1]
    masked = [
        (row, each.ruled_out.mask(vocabulary))
        for row, each in enumerate(samplers)
        if each.ruled_out is not None
    ]
    if masked:
        rows = uploaded_list([row for row, _ in masked], torch.int64, logits.device)
        mask = torch.from_numpy(np.stack([mask for _, mask in masked]))
        logits[rows] = logits[rows].masked_fill(uploaded(mask, logits.device), -math.inf)
    allowed = [(row, each.allowed) for row, each in enumerate(samplers) if each.allowed is not None]
    if allowed:
        at = places(allowed, logits)
        rows = uploaded_list([row for row, _ in allowed], torch.int64, logits.device)
        kept = logits[at]
        logits.index_fill_(0, rows, -math.inf)
        logits[at] = kept
    ruled_out = [(row, each.forbidden()) for row, each in enumerate(samplers) if not each.is_plain]
    forbidden = [(row, np.array(tokens, dtype=np.int64)) for row, tokens in ruled_out if tokens]
    if forbidden:
        logits.index_put_(places(forbidden, logits), logits.new_full((), -math.inf))


def add_biases(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Add each row's biases to its logits [R, V], in place."""
    biases = [(row, each.bias) for row, each in enumerate(samplers) if each.bias is not None]
    if biases:
        at = places([(row, tokens) for row, (tokens, _) in biases], logits)
        logits[at] += sent(np.concatenate([values for _, (_, values) in biases]), logits)


def penalize(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Apply each row's penalties to its logits [R, V], in place."""
    counts = {
        row: sampler.counts for row, sampler in enumerate(samplers) if sampler.counts is not None
    }
    rows_and_tokens = [(row, each.tokens) for row, each in counts.items()]
    if not sum(len(tokens) for _, tokens in rows_and_tokens):
        return
    at = places(rows_and_tokens, logits)
    params = [samplers[row].params for row in counts]
    sizes = [len(tokens) for _, tokens in rows_and_tokens]

    def each(values: list[float]) -> Tensor:
        return sent(np.repeat(np.array(values, dtype=np.float32), sizes), logits)

    score, repetition = logits[at], each([p.repetition_penalty for p in params])
    score = torch.where(score < 0, score * repetition, score / repetition)
    generated = sent(np.concatenate([each.counts for each in counts.values()]), logits)
    score -= each([p.frequency_penalty for p in params]) * generated
    score -= each([p.presence_penalty for p in params]) * (generated > 0)
    logits[at] = score


UNDRAWN = -1
"""The result where no token could be drawn."""


def sample(logits: Tensor, samplers: Sequence[Sampler], drawing: Drawing | None = None) -> Tensor:
    """Choose the next token of every row.

    Args:
        logits: [R, V], of each row's last position. Not changed.
        samplers: the sampler of each row. Not changed: the caller commits the tokens that it keeps.
        drawing: the device's kernels; PyTorch's operators by default.
    Returns:
        [R], int64, on the device of `logits`; `UNDRAWN` where a sampled row's logits hold NaN or no
        finite number, and where a greedy row's largest is not finite.
    Raises:
        GenerationError: the arguments disagree about R.
    """
    if logits.ndim != 2:
        raise GenerationError(f"logits have shape {tuple(logits.shape)}; expected [rows, vocab]")
    if len(samplers) != logits.shape[0]:
        raise GenerationError(f"{len(samplers)} samplers for {logits.shape[0]} rows of logits")
    if [sampler for sampler in samplers if not sampler.is_plain]:
        logits = _changed(logits, samplers)
    drawing = drawing or PYTORCH
    rows = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    if not rows:
        return only_finite(logits, drawing.greedy(logits))
    every_row = len(rows) == len(samplers)
    chosen = uploaded_list(rows, torch.int64, logits.device)
    drawn_S = _draw(
        logits if every_row else logits[chosen], [samplers[row] for row in rows], drawing
    )
    if every_row:
        return drawn_S
    tokens = only_finite(logits, drawing.greedy(logits))
    tokens[chosen] = drawn_S
    return tokens


def scored(logits: Tensor, samplers: Sequence[Sampler], drawing: Drawing | None = None) -> Tensor:
    """Return the logits for each row's requested log-probabilities, [R, V].

    They are the raw logits, or those that `sample` draws from, with -inf for tokens that cannot be
    drawn; a greedy row then has its masks, biases and penalties, and no filter.
    """
    rows = [row for row, s in enumerate(samplers) if s.params.logprobs_mode == "processed_logprobs"]
    if not rows:
        return logits
    every_row = len(rows) == len(samplers)
    chosen = uploaded_list(rows, torch.int64, logits.device)
    processed = [samplers[row] for row in rows]
    changed = _changed(logits if every_row else logits[chosen], processed)
    drawn = [row for row, s in enumerate(processed) if not s.is_greedy]
    if drawn:
        places = uploaded_list(drawn, torch.int64, logits.device)
        keep = (drawing or PYTORCH).keep
        changed[places] = keep(changed[places], [processed[row].params for row in drawn])
    if every_row:
        return changed
    result = logits.to(torch.float32, copy=True)
    result[chosen] = changed
    return result


def _changed(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    logits = guided(logits, samplers)
    restrict(logits, samplers)
    add_biases(logits, samplers)
    penalize(logits, samplers)
    return logits


def only_finite(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the tokens [R] with `UNDRAWN` where a token's own logit is not finite."""
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens.masked_fill(~chosen.isfinite(), UNDRAWN)


def undrawn_error(sampler: Sampler | None, adapter: str | None) -> GenerationError:
    """Return the error of a request without a token to draw."""
    grammar = None if sampler is None else sampler.grammar
    if grammar is not None and grammar.error is not None:
        return GenerationError(str(grammar.error))
    if sampler is not None and (sampler.restricts or grammar is not None):
        return GenerationError(
            "no token is left to draw: the request's guide, allowed_token_ids, bad_words and "
            "min_tokens rule out all that have a finite logit"
        )
    cause = "the base's weights" if adapter is None else f"the weights of adapter {adapter!r}"
    return GenerationError(
        "the logits hold NaN or no finite number, so no token can be drawn; check the request's "
        f"parameters, {cause} and the dtype of the run"
    )


def _draw(logits_SV: Tensor, samplers: Sequence[Sampler], drawing: Drawing) -> Tensor:
    """Draw each row's token from its distribution at one uniform number; return [S] int64."""
    numbers = [sampler.uniform() for sampler in samplers]
    uniform = uploaded_list(numbers, torch.float64, logits_SV.device)
    params = [sampler.params for sampler in samplers]
    drawn_S, are_drawn_S = drawing.draw(logits_SV, params, uniform)
    return drawn_S.masked_fill_(~are_drawn_S, UNDRAWN)
