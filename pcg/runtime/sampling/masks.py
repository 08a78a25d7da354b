"""Masks and biases: tokens that a row may not generate, and numbers added to its logits.

    a guide                      l = -inf for tokens with which the output could not follow it
    allowed_token_ids            l = -inf for all other tokens
    bad_words, min_tokens        l = -inf for the tokens that would end a word, or the output
    logit_bias                   l + b

Source: the order, and what the fields mean, is vLLM's (`v1/sample/sampler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pcg.kernels.uploads import uploaded, uploaded_list
from pcg.runtime.guided.grammar import Grammar
from pcg.runtime.guided.grammars import masks_of
from pcg.runtime.sampling.places import places, sent
from pcg.runtime.sampling.sampler import Sampler


def restrict(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Remove the tokens that each row may not generate from its logits [R, V], in place."""
    grammars = {row: each.grammar for row, each in enumerate(samplers) if each.grammar is not None}
    if grammars:
        _guide(logits, grammars)
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


def _guide(logits: Tensor, grammars: Mapping[int, Grammar]) -> None:
    ruled_out = uploaded(torch.from_numpy(masks_of(list(grammars.values()))), logits.device)
    if len(grammars) == len(logits):
        logits.masked_fill_(ruled_out, -math.inf)
        return
    rows = uploaded_list(list(grammars), torch.int64, logits.device)
    logits[rows] = logits[rows].masked_fill_(ruled_out, -math.inf)


def add_biases(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Add each row's biases to its logits [R, V], in place."""
    biases = [(row, each.bias) for row, each in enumerate(samplers) if each.bias is not None]
    if biases:
        at = places([(row, tokens) for row, (tokens, _) in biases], logits)
        logits[at] += sent(np.concatenate([values for _, (_, values) in biases]), logits)
