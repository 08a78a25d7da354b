"""Sampling: from a step's logits to its next tokens, each row by its own request's parameters.

The steps of a row, in transformers' order:

    repetition penalty   l < 0: l * penalty, else l / penalty, for tokens already in the sequence
    temperature          l / T; T = 0 takes the argmax here
    top-k                keep l >= the k-th largest
    top-p                keep the smallest set of most likely tokens whose probability reaches p
    min-p                keep p >= min_p * max p
    draw                 the first token whose cumulative probability exceeds u, u ~ U[0, 1)

Nothing here waits for the device: where no token can be drawn, the result is `UNDRAWN`, and the
engine fails that row's request alone.

All randomness is one number u a token, drawn on the CPU from the request's own generator: a
request's tokens depend neither on the rest of the batch nor on the device, and its random state is
a few bytes that move with it.

Shapes: R rows, V vocabulary, S rows that are sampled.
Source: transformers `generation/logits_process.py`, which the tests compare against.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pcg.errors import GenerationError
from pcg.kernels.uploads import uploaded_list
from pcg.runtime.sampling.sampling_params import SamplingParams

UNDRAWN = -1
"""The result where no token could be drawn."""
_LEAST_TEMPERATURE = 1e-30
"""The least temperature that fp32 divides by; the likeliest token has all probability there."""


def make_generator(seed: int | None = None) -> torch.Generator:
    """Make a request's CPU generator; without a seed, from the system's entropy."""
    generator = torch.Generator(device="cpu")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


@dataclass(frozen=True)
class Drawing:
    """A program's kernels that choose tokens.

    Attributes:
        greedy: returns each row's most likely token, [R, V] to [R]; of equal ones the first.
        draw: returns the tokens [R] drawn from logits [R, V] at temperatures [R] and numbers u [R],
            and True for each that could be drawn, [R].
    """

    greedy: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None] | None = None,
    history: Sequence[Sequence[int]] | None = None,
    drawing: Drawing | None = None,
) -> Tensor:
    """Choose the next token of every row.

    Args:
        logits: [R, V], of each row's last position. Not changed.
        generators: the CPU generator of each row, which a sampled row advances by one number; None
            for a greedy row.
        history: the tokens of each row's prompt and output so far; read only for rows with a
            repetition penalty.
        drawing: the device's kernels; PyTorch's operators by default.
    Returns:
        [R], int64, on the device of `logits`; `UNDRAWN` where a sampled row's logits hold NaN or no
        finite number, and where a greedy row's largest is not finite.
    Raises:
        GenerationError: the arguments disagree about R, or a generator or history that is needed is
            missing.
    """
    _check_rows(logits, params, generators, history)
    logits = _penalize(logits, params, history)
    rows = [row for row, p in enumerate(params) if not p.greedy]
    greedy = _PYTORCH.greedy if drawing is None else drawing.greedy
    if not rows:
        return only_finite(logits, greedy(logits))
    sampled_params = [params[row] for row in rows]
    every_row = len(rows) == len(params)
    chosen = _indices(rows, logits)
    sampled_SV = _filter(logits if every_row else logits[chosen], sampled_params)
    drawn_S = _draw(sampled_SV, rows, generators, drawing or _PYTORCH)
    if every_row:
        return drawn_S
    tokens = only_finite(logits, greedy(logits))
    tokens[chosen] = drawn_S
    return tokens


def only_finite(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the tokens [R] with `UNDRAWN` where a token's own logit is not finite."""
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens.masked_fill(~chosen.isfinite(), UNDRAWN)


def undrawn_error(adapter: str | None) -> GenerationError:
    """Return the error of a request after whose tokens none could be drawn."""
    cause = "the base's weights" if adapter is None else f"the weights of adapter {adapter!r}"
    return GenerationError(
        "the logits hold NaN or no finite number, so no token can be drawn; check the request's "
        f"parameters, {cause} and the dtype of the run"
    )


def _indices(rows: Sequence[int], like: Tensor) -> Tensor:
    return uploaded_list(rows, torch.int64, like.device)


def _penalize(
    logits: Tensor, params: Sequence[SamplingParams], history: Sequence[Sequence[int]] | None
) -> Tensor:
    """Apply repetition penalties, to a copy if there are any."""
    rows = [row for row, p in enumerate(params) if p.repetition_penalty != 1.0]
    if not rows:
        return logits
    assert history is not None  # _check_rows
    logits = logits.float().clone()
    vocab = logits.shape[-1]
    for row in rows:
        seen = sorted({token for token in history[row] if 0 <= token < vocab})
        ids = _indices(seen, logits)
        score, penalty = logits[row, ids], params[row].repetition_penalty
        logits[row, ids] = torch.where(score < 0, score * penalty, score / penalty)
    return logits


def _filter(logits_SV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, top-k, top-p and min-p; other tokens become -inf. [S, V] fp32."""
    device = logits_SV.device

    def column(values: Sequence[float]) -> Tensor:
        return uploaded_list(values, torch.float32, device)[:, None]

    # The largest logit becomes 0, so that no temperature, however small, divides to infinity.
    logits_SV = logits_SV.float()
    logits_SV = logits_SV - logits_SV.amax(dim=-1, keepdim=True)
    logits_SV = logits_SV / column([max(p.temperature, _LEAST_TEMPERATURE) for p in params])

    vocab = logits_SV.shape[-1]
    top_k = {row: p.top_k for row, p in enumerate(params) if p.top_k and p.top_k < vocab}
    if top_k:
        rows = _indices(list(top_k), logits_SV)
        part = logits_SV[rows]
        largest = part.topk(max(top_k.values()), dim=-1).values
        kth = largest.gather(1, _indices([k - 1 for k in top_k.values()], part)[:, None])
        logits_SV[rows] = part.masked_fill(part < kth, -math.inf)

    top_p = {row: p.top_p for row, p in enumerate(params) if p.top_p is not None and p.top_p < 1.0}
    if top_p:
        rows = _indices(list(top_p), logits_SV)
        part = logits_SV[rows]
        ascending, order = part.sort(dim=-1, stable=True)
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - column(list(top_p.values()))
        removed[:, -1] = False
        removed = removed.scatter(1, order, removed)
        logits_SV[rows] = part.masked_fill(removed, -math.inf)

    min_p = {row: p.min_p for row, p in enumerate(params) if p.min_p}
    if min_p:
        rows = _indices(list(min_p), logits_SV)
        part = logits_SV[rows]
        # p / max p = exp(l - max l), and max l is 0.
        logits_SV[rows] = part.masked_fill(part.exp() < column(list(min_p.values())), -math.inf)
    return logits_SV


def _draw(
    logits_SV: Tensor,
    rows: Sequence[int],
    generators: Sequence[torch.Generator | None] | None,
    drawing: Drawing,
) -> Tensor:
    """Draw each row's token from its distribution at one uniform number; returns [S] int64."""
    assert generators is not None  # _check_rows
    numbers = [
        torch.rand((), dtype=torch.float64, generator=generators[row]).item() for row in rows
    ]
    uniform = uploaded_list(numbers, torch.float64, logits_SV.device)
    # The filters have divided by the temperatures.
    drawn_S, are_drawn_S = drawing.draw(logits_SV, torch.ones_like(logits_SV[:, 0]), uniform)
    return drawn_S.masked_fill_(~are_drawn_S, UNDRAWN)


def _invert(logits: Tensor, temperatures: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw as `Drawing.draw` does, by PyTorch's operators."""
    # fp64, as in fp32 tokens below its rounding would be lost in a large vocabulary.
    cumulative = (logits / temperatures[:, None]).softmax(dim=-1).double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, uniform[:, None] * total, right=True).squeeze(1)
    # Rounding can put the point on the total itself, past the last token with a probability.
    drawn = torch.where(drawn < logits.shape[-1], drawn, logits.argmax(dim=-1))
    return drawn, total.isfinite().squeeze(1)


_PYTORCH = Drawing(partial(torch.argmax, dim=-1), _invert)


def _check_rows(
    logits: Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None] | None,
    history: Sequence[Sequence[int]] | None,
) -> None:
    if logits.ndim != 2:
        raise GenerationError(f"logits have shape {tuple(logits.shape)}; expected [rows, vocab]")
    for name, given in (("params", params), ("generators", generators), ("history", history)):
        if given is not None and len(given) != logits.shape[0]:
            raise GenerationError(f"{len(given)} {name} for {logits.shape[0]} rows of logits")
    for row, p in enumerate(params):
        if not p.greedy and (generators is None or generators[row] is None):
            raise GenerationError(
                f"row {row} has temperature={p.temperature} and no generator; give it its own, "
                "make_generator(params.seed)"
            )
        if p.repetition_penalty != 1.0 and history is None:
            raise GenerationError(
                f"row {row} has repetition_penalty={p.repetition_penalty} and no history; pass the "
                "tokens of its prompt and output"
            )
