"""The sampler of a request: its parameters, and what its tokens so far make of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.sampling.token_counts import TokenCounts


class Sampler:
    """Chooses the tokens of one request, with those of others in one batch; see `sample`.

    `commit` alone changes it. A step that failed, or was abandoned, is computed again with the same
    result, and a request that is preempted goes on where it was.

    Attributes:
        is_plain: True if nothing but its parameters changes the logits, so that no row of its is
            copied.
        counts: how often each token came; None without a penalty.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self.params = params
        self.is_greedy = params.greedy
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1.0:
            self.counts = TokenCounts(prompt_ids)
        self.is_plain = self.counts is None
        self._generator = None if self.is_greedy else make_generator(params.seed)
        self._uniform: float | None = None

    def uniform(self) -> float:
        """Return the next token's number u, in [0, 1); the same until a token is committed."""
        if self._uniform is None:
            drawn = torch.rand((), dtype=torch.float64, generator=self._generator)
            self._uniform = drawn.item()
        return self._uniform

    def commit(self, token: int) -> None:
        """Note that a token was chosen, and is the request's."""
        self._uniform = None
        if self.counts is not None:
            self.counts.add(token)


def make_generator(seed: int | None = None) -> torch.Generator:
    """Make a request's CPU generator; without a seed, from the system's entropy."""
    generator = torch.Generator(device="cpu")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
