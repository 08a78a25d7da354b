"""Masks and biases: tokens that a row may not generate, and numbers added to its logits.

    a guide                      l = -inf for tokens with which the output could not follow it
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

from pcg.kernels.uploads import uploaded, uploaded_list
from pcg.runtime.guided.grammars import masks_of
from pcg.runtime.sampling.places import places, sent
from pcg.runtime.sampling.sampler import Sampler


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
    """Remove what each row's fields rule out from its logits [R, V], in place."""
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
