"""Arithmetic on LoRA adapters: a new adapter from several, as peft's `add_weighted_adapter`.

With the products B A of scale s and the weight w of each adapter, at each module,

    linear     A = Σ √|w s| sign(w s) A_i,   B = Σ √|w s| B_i
    cat        A = [w s A_i; …],             B = [B_i, …]
    svd        B A = the nearest product of the rank to Σ w s B_i A_i

Before the sum, `magnitude_prune` and `ties` keep the fraction `density` of the largest entries of
each tensor, and `dare_linear` and `dare_ties` a random fraction, divided by `density`. `ties` and
`dare_ties` add, in each entry, only the tensors with the sign of the majority, and divide by their
number. They apply to A and to B, or with `_svd` to the products.

Source: `LoraModel.add_weighted_adapter` of peft 0.21.2; "TIES-Merging" (Yadav et al. 2023);
"Language Models are Super Mario" (Yu et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from pcg.errors import AdapterError, UnsupportedError
from pcg.ir.module_paths import is_embedding, module_name
from pcg.peft.adapter import Adapter
from pcg.peft.lora import LoraConfig, LoraWeights

Combination = Literal[
    "svd", "linear", "cat", "ties", "ties_svd", "dare_ties", "dare_linear", "dare_ties_svd",
    "dare_linear_svd", "magnitude_prune", "magnitude_prune_svd",
]  # fmt: skip


@dataclass(frozen=True)
class CombineArguments:
    """Arguments of `Executor.combine_adapters`, with peft's names and defaults.

    Attributes:
        name: the name of the new adapter.
        adapters: names of LoRA adapters.
        weights: the weight of each adapter; negative weights subtract.
        combination_type: the operation; a single adapter is always scaled by "linear".
        svd_rank: the rank of a result of svd; by default the largest rank of the adapters.
        svd_clamp: the quantile of the entries of a result of svd at which they are clamped.
        density: the fraction of entries that pruning keeps, from 0 to 1.
        majority_sign_method: how ties elects a sign: by "total" value, or "frequency" of signs.
        seed: the seed of random pruning.
        replace: replace an adapter of that name by the next version.
    """

    name: str
    adapters: Sequence[str]
    weights: Sequence[float]
    combination_type: Combination = "svd"
    svd_rank: int | None = field(default=None, kw_only=True)
    svd_clamp: float | None = field(default=None, kw_only=True)
    density: float | None = field(default=None, kw_only=True)
    majority_sign_method: Literal["total", "frequency"] = field(default="total", kw_only=True)
    seed: int = field(default=0, kw_only=True)
    replace: bool = field(default=False, kw_only=True)


def combined(
    arguments: CombineArguments, adapters: Sequence[Adapter], paths: Iterable[str]
) -> Adapter:
    """Return the combination of adapters, which are in host memory.

    Args:
        paths: of the base's modules; random numbers are drawn layer by layer in this order.
    Raises:
        AdapterError: an argument is out of its range, or the ranks do not go with the operation.
        UnsupportedError: an adapter is no plain LoRA on linear modules.
    """
    kind = _checked(arguments, adapters)
    largest = [max(recipe.r, *recipe.rank_pattern.values(), 0) for recipe in map(_recipe, adapters)]
    if kind == "cat":
        rank = sum(largest)
    elif kind.endswith("svd"):
        rank = arguments.svd_rank or max(largest)
    elif len(set(largest)) > 1:
        raise AdapterError(
            f"combination_type={kind!r} needs equal ranks, and the adapters have {largest}; use "
            f"{_by_products(kind)}, or cat"
        )
    else:
        rank = largest[0]
    generator = torch.Generator().manual_seed(arguments.seed)
    weights = {}
    for path in sorted(paths, key=_layers):
        pairs = zip(adapters, arguments.weights, strict=True)
        every = [
            (_lora(adapter, path), weight) for adapter, weight in pairs if path in adapter.weights
        ]
        if every:
            a, b = _combined_module(arguments, kind, rank, every, generator)
            pair = _padded(a, 0, rank), _padded(b, 1, rank)
            weights[path] = LoraWeights(*pair, 1.0, embeds=is_embedding(path))
    recipe = replace(
        _recipe(adapters[0]),
        r=rank,
        lora_alpha=rank,
        target_modules=tuple(sorted(map(module_name, weights))),
        use_rslora=False,
        rank_pattern={},
        alpha_pattern={},
        exclude_modules=None,
        layers_to_transform=None,
        layers_pattern=None,
    )
    return Adapter(
        arguments.name,
        recipe,
        weights,
        base_model_name=adapters[0].base_model_name,
        extra=adapters[0].extra,
    )


def _checked(arguments: CombineArguments, adapters: Sequence[Adapter]) -> str:
    """Return the operation; refuse arguments out of their range."""
    kind, density = arguments.combination_type, arguments.density
    if kind not in get_args(Combination):
        known = ", ".join(get_args(Combination))
        raise AdapterError(f"combination_type={kind!r}; use one of {known}")
    if not adapters or len(adapters) != len(arguments.weights):
        raise AdapterError(
            f"{len(adapters)} adapters and {len(arguments.weights)} weights; give a weight for each"
        )
    if not all(math.isfinite(weight) for weight in arguments.weights):
        raise AdapterError(f"weights={list(arguments.weights)}; use finite numbers")
    if arguments.majority_sign_method not in ("total", "frequency"):
        raise AdapterError(
            f"majority_sign_method={arguments.majority_sign_method!r}; use total or frequency"
        )
    if arguments.svd_clamp is not None and not 0 <= arguments.svd_clamp <= 1:
        raise AdapterError(f"svd_clamp={arguments.svd_clamp}; use a quantile from 0 to 1")
    if arguments.svd_rank is not None and arguments.svd_rank < 1:
        raise AdapterError(f"svd_rank={arguments.svd_rank}; use an int of at least 1")
    kind = kind if len(adapters) > 1 else "linear"
    is_pruned = kind not in ("svd", "linear", "cat")
    if is_pruned and (density is None or not 0 < density <= 1):
        raise AdapterError(f"density={density} with {kind}; use a number above 0, at most 1")
    return kind


def _layers(path: str) -> tuple[bool, bool, list[int]]:
    """Return the order of a path: embeddings, layers by their indices, and the head."""
    indices = [int(part) for part in path.split(".") if part.isdigit()]
    return not is_embedding(path), not indices, indices


def _recipe(adapter: Adapter) -> LoraConfig:
    recipe = adapter.recipe
    if isinstance(recipe, LoraConfig) and not (
        adapter.replaced or recipe.use_dora or recipe.lora_bias or recipe.target_parameters
    ):
        return recipe
    raise UnsupportedError(
        f"adapter {adapter.name!r} is {recipe.title}, or has biases, experts or modules_to_save; "
        "pcg combines LoRA on modules alone"
    )


def _by_products(kind: str) -> str:
    return "svd" if kind == "linear" else f"{kind}_svd"


def _lora(adapter: Adapter, path: str) -> LoraWeights:
    weights = adapter.weights[path]
    assert isinstance(weights, LoraWeights)  # of the recipe
    return weights


def _combined_module(
    arguments: CombineArguments,
    kind: str,
    rank: int,
    every: Sequence[tuple[LoraWeights, float]],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return A and B of a module from weights of adapters, and the weight of each."""
    if kind == "cat":
        a = torch.cat([weight * lora.scale * lora.a for lora, weight in every])
        return a, torch.cat([lora.b for lora, _ in every], 1)
    if kind.endswith("svd"):
        products = [lora.b @ lora.a * lora.scale for lora, _ in every]
        operation = kind.removesuffix("svd").removesuffix("_") or "linear"
        factors = [weight for _, weight in every]
        product = _sum(arguments, operation, products, factors, generator)
        u, s, vh = torch.linalg.svd(product, full_matrices=False)
        a, b = vh[:rank], u[:, :rank] * s[:rank]
        if arguments.svd_clamp is not None:
            bound = float(torch.cat([b.flatten(), a.flatten()]).quantile(arguments.svd_clamp))
            a, b = a.clamp(-bound, bound), b.clamp(-bound, bound)
        return a, b
    scaled = [weight * lora.scale for lora, weight in every]
    roots = [math.sqrt(abs(each)) for each in scaled]
    signed = [math.copysign(root, each) for root, each in zip(roots, scaled, strict=True)]
    if len({lora.rank for lora, _ in every}) > 1:
        raise AdapterError(
            f"rank_pattern gives a module several ranks; use {_by_products(kind)}, or cat"
        )
    a = _sum(arguments, kind, [lora.a for lora, _ in every], signed, generator)
    return a, _sum(arguments, kind, [lora.b for lora, _ in every], roots, generator)


def _sum(
    arguments: CombineArguments,
    operation: str,
    tensors: Sequence[Tensor],
    factors: Sequence[float],
    generator: torch.Generator,
) -> Tensor:
    """Return the weighted sum of tensors, pruned and without minorities as the operation says."""
    if operation != "linear":
        is_random = operation.startswith("dare")
        density = arguments.density or 1.0
        tensors = [_pruned(each, density, generator if is_random else None) for each in tensors]
    stack = torch.stack([*tensors])
    weighted = stack * torch.tensor([*factors]).view(-1, *[1] * tensors[0].dim())
    if not operation.endswith("ties"):
        return weighted.sum(0)
    signs = stack.sign()
    votes = (stack if arguments.majority_sign_method == "total" else signs).sum(0)
    elected = signs == torch.where(votes >= 0, 1, -1)
    return (weighted * elected).sum(0) / elected.sum(0).clamp(min=1)


def _pruned(tensor: Tensor, density: float, generator: torch.Generator | None) -> Tensor:
    """Return a tensor with the fraction `density` of its largest entries, or of random ones."""
    if density == 1:
        return tensor
    if generator is not None:
        return (
            tensor
            * torch.bernoulli(torch.full_like(tensor, density), generator=generator)
            / density
        )
    kept = tensor.abs().flatten().topk(int(density * tensor.numel())).indices
    mask = torch.zeros(tensor.numel(), dtype=tensor.dtype)
    mask[kept] = 1
    return tensor * mask.view(tensor.shape)


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor with zeros up to a size of a dim."""
    shape = [*tensor.shape]
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim).contiguous()
