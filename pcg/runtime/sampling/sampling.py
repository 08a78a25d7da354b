"""Sampling: from a step's logits to its next tokens, each row by its own request's parameters.

The steps of a row, each in a file of its own; a step that no row asks for does nothing:

    masks         guides, allowed_token_ids, bad_words, min_tokens; logit_bias
    penalties     repetition, frequency, presence
    filters       temperature, top-k, top-p, min-p; T = 0 takes the argmax instead
    drawing       the first token whose cumulative probability exceeds u, u ~ U[0, 1)

Nothing here waits for the device: where no token can be drawn, the result is `UNDRAWN`, and the
engine fails that row's request alone.

All randomness is one number u a token, drawn on the CPU from the request's own generator: a
request's tokens depend neither on the rest of the batch nor on the device, and its random state is
a few bytes that move with it.

Shapes: R rows, V vocabulary, S rows that are sampled.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pcg.errors import GenerationError
from pcg.kernels.uploads import uploaded_list
from pcg.runtime.sampling.drawing import PYTORCH, Drawing
from pcg.runtime.sampling.masks import add_biases, guided, restrict
from pcg.runtime.sampling.penalties import penalize
from pcg.runtime.sampling.sampler import Sampler

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
    if not all(sampler.is_plain for sampler in samplers):
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
    """Return the logits whose log-probabilities each row's request asks for, [R, V].

    They are the raw ones, or those that `sample` draws from, with -inf for what cannot be drawn; a
    greedy row has its masks, biases and penalties then, and no filter. `drawing` is as in `sample`.
    """
    rows = [
        row for row, one in enumerate(samplers) if one.params.logprobs_mode == "processed_logprobs"
    ]
    if not rows:
        return logits
    every_row = len(rows) == len(samplers)
    chosen = uploaded_list(rows, torch.int64, logits.device)
    own = [samplers[row] for row in rows]
    changed = _changed(logits if every_row else logits[chosen], own)
    drawn = [row for row, one in enumerate(own) if not one.is_greedy]
    if drawn:
        places = uploaded_list(drawn, torch.int64, logits.device)
        keep = (drawing or PYTORCH).keep
        changed[places] = keep(changed[places], [own[row].params for row in drawn])
    if every_row:
        return changed
    found = logits.to(torch.float32, copy=True)
    found[chosen] = changed
    return found


def _changed(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return a copy of logits in fp32, with the masks, biases and penalties of their rows."""
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
    """Return the error of a request after whose tokens none could be drawn."""
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
    """Draw each row's token from its distribution at one uniform number; returns [S] int64."""
    numbers = [sampler.uniform() for sampler in samplers]
    uniform = uploaded_list(numbers, torch.float64, logits_SV.device)
    params = [sampler.params for sampler in samplers]
    drawn_S, are_drawn_S = drawing.draw(logits_SV, params, uniform)
    return drawn_S.masked_fill_(~are_drawn_S, UNDRAWN)
