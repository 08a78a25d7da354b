"""Penalties of tokens that a request has already.

    repetition   l < 0: l · r, else l / r        tokens of the prompt and of the output
    frequency    l - f · (times generated)       tokens of the output
    presence     l - p                           tokens of the output

Source: transformers `RepetitionPenaltyLogitsProcessor`; OpenAI's reference of chat completions for
the other two, as in vLLM `apply_penalties`, whose order this is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pcg.runtime.sampling.places import places, sent
from pcg.runtime.sampling.sampler import Sampler


def penalize(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Apply each row's penalties to its logits [R, V], in place."""
    rows = [row for row, sampler in enumerate(samplers) if sampler.counts is not None]
    counts = [samplers[row].counts for row in rows]
    found = [(row, each.tokens) for row, each in zip(rows, counts, strict=True) if each is not None]
    if not sum(len(tokens) for _, tokens in found):
        return
    at = places(found, logits)
    params = [samplers[row].params for row in rows]
    sizes = [len(tokens) for _, tokens in found]

    def each(values: list[float]) -> Tensor:
        return sent(np.repeat(np.array(values, dtype=np.float32), sizes), logits)

    score, repetition = logits[at], each([p.repetition_penalty for p in params])
    logits[at] = torch.where(score < 0, score * repetition, score / repetition)
