"""The functions of bypass networks other than LoRA's products, on any device.

Shapes and what an adapter's weight is: `torch_ops`, through which emitted programs call these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def dropout(batch: Any, x: Tensor, p: float, key: int) -> Tensor:
    """x · mask / (1 - p), the mask drawn anew for each step, layer and key; x where not training.

    Args:
        batch: its `generator(key)` is None where the batch is not trained on.
        x: [T, n].
        p: probability that an element is dropped.
        key: of the dropout in its layer.
    """
    generator = batch.generator(key)
    if generator is None:
        return x
    if p == 1.0:
        return torch.zeros_like(x)
    mask = torch.empty_like(x).bernoulli_(1.0 - p, generator=generator)
    return mask.div_(1.0 - p).mul_(x)
