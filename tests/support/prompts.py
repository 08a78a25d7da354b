"""Prompts and tolerances of the comparisons with transformers and peft."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.families import VOCABULARY

TOLERANCE = 1e-5


LENGTHS = (13, 7, 13, 1, 9)
"""Of the prompts: some longer than every window, one of a single token."""


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
