"""The self-test of an adapter: each of its tensors reaches the logits of the serving program.

A served adapter whose weights have no effect is a silent fault: a fused projection, a pass or a
table that leaves out a site answers as the base does. Trained weights may be zero, so the test
adds noise to the adapter's weights. It compares the logits of each module alone with those of the
base, and, for each tensor that is not a factor of a product, the logits with two draws of noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.peft.adapter import Adapter
from pcg.peft.registry import parameter_kind
from pcg.peft.weights import ModuleWeights

Logits: TypeAlias = Callable[[Sequence[Sequence[int]], Sequence[Adapter | None]], list[Tensor]]

_PAIRS = 16
"""The number of tests that run in a batch."""
_TOKENS = (2, 64)
"""Tokens of a test; the larger number is tried for pairs without an effect at the smaller."""


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Two variants whose logits differ if the weights `of` a module have an effect."""

    of: str
    before: Adapter | None
    after: Adapter


def self_tests(adapter: Adapter, known: int, logits: Logits) -> Iterator[Callable[[], None]]:
    """Return the parts of an adapter's self-test; each part runs one batch.

    A part raises an AdapterError that names the module whose weights have no effect.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = list(_pairs(adapter, partial(_drawn, generator)))
    for start in range(0, len(pairs), _PAIRS):
        yield partial(_check, adapter, pairs[start : start + _PAIRS], known, logits)


def _check(adapter: Adapter, pairs: Sequence[_Pair], known: int, logits: Logits) -> None:
    for count in _TOKENS:
        tokens = [known * (i + 1) // (count + 1) for i in range(count)]
        variants = list(dict.fromkeys(side for pair in pairs for side in (pair.before, pair.after)))
        rows = dict(zip(variants, logits([tokens] * len(variants), variants), strict=True))
        pairs = [pair for pair in pairs if torch.equal(rows[pair.before], rows[pair.after])]
        if not pairs:
            return
    raise AdapterError(
        f"the weights of {pairs[0].of} in adapter {adapter.name!r} do not reach the logits of this "
        "base, so that requests would be answered without them; please report this, and leave the "
        "module out of the adapter, or serve with --no-adapter-self-test"
    )


def _pairs(adapter: Adapter, drawn: Callable[[Tensor], Tensor]) -> Iterator[_Pair]:
    whole = adapter.map(drawn)
    is_alone = not adapter.prompt_tokens  # each layer needs its part of a prompt
    for path, weights in whole.weights.items():
        others = {} if is_alone else whole.weights
        alone = dataclasses.replace(whole, weights={**others, path: weights}, replaced={})
        if is_alone:
            yield _Pair(path, None, alone)
        for other in _redrawn(weights, drawn):
            yield _Pair(
                path or "the token embedding",
                alone,
                dataclasses.replace(alone, weights={**others, path: other}),
            )
    for name, tensor in whole.replaced.items():
        before, after = (
            dataclasses.replace(whole, weights={}, replaced={name: value})
            for value in (tensor, drawn(tensor))
        )
        yield _Pair(name, before, after)


def _redrawn(weights: ModuleWeights, drawn: Callable[[Tensor], Tensor]) -> Iterator[ModuleWeights]:
    """Yield the weights with new noise in one tensor, for each tensor that is not a factor."""
    factors = [
        each.weight for kind, each in weights.parameters.items() if parameter_kind(kind).is_factor
    ]
    for tensor in weights.tensors:
        if not any(tensor is factor for factor in factors):
            yield weights.map(partial(_replaced, tensor, drawn(tensor)))


def _replaced(old: Tensor, new: Tensor, tensor: Tensor) -> Tensor:
    return new if tensor is old else tensor


def _drawn(generator: torch.Generator, tensor: Tensor) -> Tensor:
    """Return the tensor plus noise of its root mean square, or of an initial matrix if larger."""
    noise = torch.randn(tensor.shape, generator=generator)
    size = max(float(tensor.square().mean().sqrt()), tensor.shape[-1] ** -0.5)
    sum_: Tensor = tensor + (size * noise).to(tensor.dtype)
    return sum_
