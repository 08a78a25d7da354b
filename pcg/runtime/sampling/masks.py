"""Masks and biases: tokens that a row may not generate, and numbers added to its logits.

    allowed_token_ids            l = -inf for all other tokens
    bad_words, min_tokens        l = -inf for the tokens that would end a word, or the output
    logit_bias                   l + b

Source: the order, and what the fields mean, is vLLM's (`v1/sample/sampler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pcg.kernels.uploads import uploaded_list
from pcg.runtime.sampling.places import places, sent
from pcg.runtime.sampling.sampler import Sampler


def restrict(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Remove the tokens that each row may not generate from its logits [R, V], in place."""
    allowed = [(row, each.allowed) for row, each in enumerate(samplers) if each.allowed is not None]
    if allowed:
        at = places(allowed, logits)
        rows = uploaded_list([row for row, _ in allowed], torch.int64, logits.device)
        kept = logits[at]
        logits.index_fill_(0, rows, -math.inf)
        logits[at] = kept
    found = [(row, each.forbidden()) for row, each in enumerate(samplers) if not each.is_plain]
    forbidden = [(row, np.array(tokens, dtype=np.int64)) for row, tokens in found if tokens]
    if forbidden:
        logits.index_put_(places(forbidden, logits), logits.new_full((), -math.inf))


def add_biases(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Add each row's biases to its logits [R, V], in place."""
    biases = [(row, each.bias) for row, each in enumerate(samplers) if each.bias is not None]
    if biases:
        at = places([(row, tokens) for row, (tokens, _) in biases], logits)
        logits[at] += sent(np.concatenate([values for _, (_, values) in biases]), logits)
