"""The self-test of an adapter: each of its tensors reaches the logits of the serving program.

A served adapter whose weights have no effect is a silent fault: a fused projection, a pass or a
table that leaves out a site answers as the base does. Trained weights may be zero, so the test
adds noise to the adapter's weights. It compares the logits of each module alone with those of the
base, and, for each tensor that is not a factor of a product, the logits with two draws of noise.

Over cached latents, decoding computes other products than prompts do, so the test also decodes a
token. The base fills the cache, so that the adapter only acts on the decoded token. A module that
expands latents is tested with noise in the rows of keys alone, and in those of values alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.ir.operators.attention import LatentAttention
from pcg.ir.program.program import ModelGraph
from pcg.peft.adapter import Adapter
from pcg.peft.registry import parameter_kind
from pcg.peft.weights import LowRankWeights, ModuleWeights

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


def self_tests(
    adapter: Adapter, model: ModelGraph, known: int, logits: Logits, decoded: Logits
) -> Iterator[Callable[[], None]]:
    """Return the parts of an adapter's self-test; each part runs one batch.

    A part raises an AdapterError that names the module whose weights have no effect.

    Args:
        known: the number of known tokens.
        logits: returns the logits of whole sequences.
        decoded: returns the logits of the last tokens of sequences of equal length, decoded after
            the base filled the cache.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = partial(_drawn, generator)
    whole = adapter.map(drawn)
    pairs = list(_pairs(whole, drawn))
    tests = [(pairs, logits, "this base")]
    expansions = _expansions(model)
    if expansions and not adapter.prompt_tokens:  # the base has no prompt of an adapter
        halves = list(_halves(whole, expansions))
        tests.append(([*pairs, *halves], decoded, "the tokens that this base decodes"))
    for each, compute, of in tests:
        for start in range(0, len(each), _PAIRS):
            yield partial(_check, adapter, each[start : start + _PAIRS], known, compute, of)


def _check(adapter: Adapter, pairs: Sequence[_Pair], known: int, logits: Logits, of: str) -> None:
    for count in _TOKENS:
        tokens = [known * (i + 1) // (count + 1) for i in range(count)]
        variants = list(dict.fromkeys(side for pair in pairs for side in (pair.before, pair.after)))
        rows = dict(zip(variants, logits([tokens] * len(variants), variants), strict=True))
        pairs = [pair for pair in pairs if torch.equal(rows[pair.before], rows[pair.after])]
        if not pairs:
            return
    raise AdapterError(
        f"the weights of {pairs[0].of} in adapter {adapter.name!r} do not reach the logits of "
        f"{of}, so that requests would be answered without them; please report this, and leave the "
        "module out of the adapter, or serve with --no-adapter-self-test"
    )


def _expansions(model: ModelGraph) -> Mapping[str, tuple[int, int]]:
    """Return the sizes of a head's keys and values by the module that computes them of latents."""
    expansions = {}
    for layer, block in enumerate(model.layers):
        graph = model.blocks[block]
        for node in graph.nodes:
            if node.op == LatentAttention.name:
                q, rest = (graph.types[node.inputs[i]].shape[-1] for i in (0, 2))
                source = graph.parameters_by_name[node.inputs[3]].source.format(layer=layer)
                sizes = int(q - rest), int(node.outputs[0].type.shape[-1])
                expansions[source.removesuffix(".weight")] = sizes
    return expansions


def _halves(whole: Adapter, expansions: Mapping[str, tuple[int, int]]) -> Iterator[_Pair]:
    """Yield pairs for the rows of keys and of values of each module that expands latents."""
    for path, sizes in expansions.items():
        weights = whole.weights.get(path)
        if isinstance(weights, LowRankWeights):
            for half, of in enumerate(("keys", "values")):
                b = weights.b.clone()
                b.unflatten(0, (-1, sum(sizes))).split(sizes, 1)[1 - half].zero_()
                changed = weights.map(partial(_replaced, weights.b, b))
                alone = dataclasses.replace(whole, weights={path: changed}, replaced={})
                yield _Pair(f"{path} for {of}", None, alone)


def _pairs(whole: Adapter, drawn: Callable[[Tensor], Tensor]) -> Iterator[_Pair]:
    is_alone = not whole.prompt_tokens  # each layer needs its part of a prompt
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
