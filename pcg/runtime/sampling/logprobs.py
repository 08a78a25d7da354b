"""Logprobs: log-probabilities of tokens, and of the likeliest tokens at each position.

    logprob of token t = l_t - log Σ exp l         l: the raw logits, in fp32

Raw: before temperature, penalties, biases and masks, as in OpenAI's API and by default in vLLM. A
request may ask for log-probabilities of the logits that its tokens are drawn from
(`pcg.runtime.sampling.sampling.scored`).

The k likeliest of V tokens are among the k blocks of 64 tokens with the largest maxima: a block
with a lower maximum than k others has none of them. Finding them takes a quarter of the time of a
top-k of all tokens. Only `Logprobs.read` waits for the device.

Cells are further tokens at a position of a prompt: tokens that the request names, and tokens drawn
from

    softmax(l / temperature)         l: the raw logits, in fp64; the likeliest token at 0

with replacement, by uniform numbers that depend on the request's seed and the position, so that a
repeated computation draws the same tokens.

Shapes: R rows, V vocabulary, k maximum number of likeliest tokens, m maximum number of cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pcg.errors import GenerationError
from pcg.kernels.devices import downloaded, uploaded_list
from pcg.runtime.sampling.sampling_params import SamplingParams

_BLOCK = 64
"""Tokens per block; the fastest of 16 to 128 for 16 rows of 32,000."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token at its position.

    Attributes:
        top: the likeliest tokens and their log-probabilities, in descending order, equal values by
            id; the token itself may be missing. Then the tokens of `prompt_targets` and
            `prompt_draws`.
        rank: 1 + the number of likelier tokens.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    @property
    def is_number(self) -> bool:
        """False if the model's logits had NaN."""
        return not math.isnan(self.logprob)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities, on the device or sent to the host.

    Attributes:
        tokens: [R], int64.
        chosen: log-probabilities of `tokens`, [R], fp32.
        ranks: the numbers of likelier tokens, [R], int64.
        top_ids, top: each row's likeliest tokens and log-probabilities, [R, k], int64 and fp32.
        cell_ids, cells: each row's further tokens and log-probabilities, [R, m], int64 and fp32;
            below 0, and 0, for empty cells. None without cells.
    """

    tokens: Tensor
    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor
    cell_ids: Tensor | None = None
    cells: Tensor | None = None

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        columns = (self.tokens, self.chosen, self.ranks, self.top_ids, self.top)
        if self.cell_ids is None or self.cells is None:
            return columns
        return (*columns, self.cell_ids, self.cells)

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Return the concatenated rows of parts with equal k and m."""
        return cls(*map(torch.cat, zip(*(part._columns for part in parts), strict=True)))

    def sent(self) -> Logprobs:
        """Start the copy to the host, and return the values on the host; see `downloaded`."""
        return Logprobs(*map(downloaded, self._columns))

    def read_cells(self, counts: Sequence[int], cells: Sequence[int]) -> list[TokenLogprobs]:
        """Return the rows on the host, with `counts` likeliest and `cells` further tokens."""
        tokens = self.read(counts)
        if self.cell_ids is None or self.cells is None:
            return tokens
        rows = zip(tokens, self.cell_ids.tolist(), self.cells.tolist(), cells, strict=True)
        return [
            replace(token, top=(*token.top, *zip(ids[:count], values[:count], strict=True)))
            for token, ids, values, count in rows
        ]

    def read(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Return the rows on the host, each with its count of likeliest tokens."""
        tokens, chosen = self.tokens.tolist(), self.chosen.tolist()
        top_ids, top, ranks = self.top_ids.tolist(), self.top.tolist(), self.ranks.tolist()
        return [
            TokenLogprobs(
                token, logprob, 1 + rank, tuple(zip(ids[:count], values[:count], strict=True))
            )
            for token, logprob, rank, ids, values, count in zip(
                tokens, chosen, ranks, top_ids, top, counts, strict=True
            )
        ]


def not_a_number(adapter: str | None) -> GenerationError:
    """Return the error for a request with NaN in its logits."""
    cause = "the base's weights" if adapter is None else f"the weights of adapter {adapter!r}"
    return GenerationError(
        "the logits hold NaN, so tokens have no log-probability; check the request's parameters, "
        f"{cause} and the dtype of the run"
    )


def logprobs_of(logits: Tensor, tokens: Tensor, most: int, cells: Tensor | None = None) -> Logprobs:
    """Return the log-probabilities of a token in each row, and of the likeliest tokens.

    Args:
        logits: [R, V], in any dtype.
        tokens: [R], int64; below 0 for no token, with a meaningless log-probability.
        most: the number of likeliest tokens of each row, at most V.
        cells: further tokens of each row, [R, m], int64; below 0 for none.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.clamp(min=0)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1)
    top_ids = _likeliest(logprobs, min(most, logits.shape[-1]))
    columns = tokens, chosen.squeeze(1), ranks, top_ids, logprobs.gather(1, top_ids)
    if cells is None:
        return Logprobs(*columns)
    of_cells = logprobs.gather(1, cells.clamp(min=0)).where(cells >= 0, 0.0)
    return Logprobs(*columns, cells, of_cells)


def _likeliest(values: Tensor, count: int) -> Tensor:
    rows, vocabulary = values.shape
    blocks = vocabulary // _BLOCK
    if not count or blocks <= 2 * count:
        return _in_order(values, values.topk(count, dim=-1).indices)
    whole = values[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
    best = whole.amax(dim=-1).topk(count, dim=-1).indices
    within = torch.arange(_BLOCK, device=values.device)
    places = (best[:, :, None] * _BLOCK + within).flatten(1)
    rest = torch.arange(blocks * _BLOCK, vocabulary, device=values.device)
    places = torch.cat([places, rest.expand(rows, -1)], dim=1)
    best_places = values.gather(1, places).topk(count, dim=-1).indices
    return _in_order(values, places.gather(1, best_places))


def _in_order(values: Tensor, places: Tensor) -> Tensor:
    """Return places [R, n] of values [R, V] by descending value; equal values by place."""
    places = places.sort(dim=-1).values
    order = values.gather(1, places).argsort(dim=-1, descending=True, stable=True)
    return places.gather(1, order)


_NONE = -1


class PromptCells:
    """The cells of prompts' rows.

    Attributes:
        counts: the number of cells of each row; empty without cells.
    """

    def __init__(self, parts: Sequence[tuple[SamplingParams, range]]) -> None:
        """Set the rows.

        Args:
            parts: for each request, its parameters and the positions of its rows, from 1.
        """
        self._rows = [(params, place) for params, places in parts for place in places]
        counts = [
            len(_targets(params, place)) + params.prompt_draws for params, place in self._rows
        ]
        self._width = max(counts, default=0)
        self.counts = counts if self._width else []

    def of(self, logits: Tensor, start: int) -> Tensor | None:
        """Return the tokens of rows' cells, [R, m], below 0 for empty cells; None without cells.

        Args:
            logits: logits of the rows from `start` on, [R, V].
        """
        if not self._width:
            return None
        rows = self._rows[start : start + len(logits)]
        listed = []
        for params, place in rows:
            targets = _targets(params, place)
            listed += [*targets, *[_NONE] * (self._width - len(targets))]
        cells = uploaded_list(listed, torch.int64, logits.device).view(len(rows), self._width)
        for row, (params, place) in enumerate(rows):
            if params.prompt_draws:
                first = len(_targets(params, place))
                drawn = _draw(logits[row], params, place)
                cells[row, first : first + params.prompt_draws] = drawn
        return cells


def _targets(params: SamplingParams, place: int) -> tuple[int, ...]:
    return params.prompt_targets[place - 1] if params.prompt_targets else ()


def _draw(logits: Tensor, params: SamplingParams, place: int) -> Tensor:
    if params.greedy:
        return logits.argmax().expand(params.prompt_draws)
    key = None if params.seed is None else [params.seed, place]
    uniform = np.random.default_rng(key).random(params.prompt_draws)
    exact = logits.to(torch.float64)  # no temperature underflows to 0
    shares = ((exact - exact.max()) / params.temperature).softmax(dim=-1).cumsum(dim=-1)
    at = torch.from_numpy(uniform).to(logits.device) * shares[-1]
    return torch.searchsorted(shares, at, right=True).clamp(max=len(logits) - 1)
