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
    counts = {row: one.counts for row, one in enumerate(samplers) if one.counts is not None}
    found = [(row, each.tokens) for row, each in counts.items()]
    if not sum(len(tokens) for _, tokens in found):
        return
    at = places(found, logits)
    params = [samplers[row].params for row in counts]
    sizes = [len(tokens) for _, tokens in found]

    def each(values: list[float]) -> Tensor:
        return sent(np.repeat(np.array(values, dtype=np.float32), sizes), logits)

    score, repetition = logits[at], each([p.repetition_penalty for p in params])
    score = torch.where(score < 0, score * repetition, score / repetition)
    generated = sent(np.concatenate([each.counts for each in counts.values()]), logits)
    score -= each([p.frequency_penalty for p in params]) * generated
    score -= each([p.presence_penalty for p in params]) * (generated > 0)
    logits[at] = score
