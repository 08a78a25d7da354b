"""LoRA of experts that have a module each, as in adapters of transformers 4 and of other engines.

    base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight     [r, in]
    base_model.model.model.layers.0.block_sparse_moe.experts.3.w1.lora_A.weight

The base has the experts of a layer in parameters, gate and up in one of them with the ranks of
both. An expert or a part without weights has zeros:

    A[e] = [A_gate; A_up]      B[e] = diag(B_gate, B_up)

Source: `convert_peft_adapter_state_dict_for_transformers` of peft 0.21.2.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from pcg.errors import AdapterError
from pcg.formats.registry import EXPERT_PARTS
from pcg.ir.module_paths import parameter_of, parameter_path
from pcg.peft.adapter import Adapter
from pcg.peft.lora import SAVED_MODULES, LoraBypass, LoraConfig, LoraWeights
from pcg.peft.method import Shape
from pcg.peft.weights import ModuleWeights

_OF_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)")


def with_joined_experts(
    adapter: Adapter,
    module_shapes: Mapping[str, Shape],
    output_layer: str | None,
    model_type: str,
    renamings: Sequence[Sequence[str]] = (),
) -> Adapter:
    """Return an adapter with parameters of experts in place of a module for each expert.

    Args:
        module_shapes, output_layer, model_type: as for `new_adapter`.
        renamings: patterns of names in checkpoints, and their replacements in the base.
    Raises:
        AdapterError: the order of gate and up is unknown, or the weights do not fit the base.
    """
    recipe, paths = adapter.recipe, tuple(module_shapes)
    if not isinstance(recipe, LoraConfig):
        return adapter
    separate = {path for path in adapter.weights if _OF_EXPERT.fullmatch(path)}
    modules = (SAVED_MODULES,) if separate else ()
    if separate and isinstance(
        recipe.target_modules, str
    ):  # a pattern of paths that the base lacks
        recipe = dataclasses.replace(recipe, target_modules=tuple(adapter.weights))
    joined = recipe.for_model(paths, output_layer, model_type, *modules)
    if joined == recipe and not separate:
        return adapter
    if joined.use_rslora and separate:
        raise AdapterError(
            f"use_rslora gives {min(separate)} another scale than gate and up have together; save "
            "the adapter with use_rslora=False and its scale in lora_alpha"
        )
    weights: dict[str, ModuleWeights] = {}
    for path, each in adapter.weights.items():
        module = path if path in module_shapes else _renamed(path, renamings)
        router = parameter_path(f"{module}.weight", 1)
        weights[router if router in module_shapes else module] = each
    for path, shape in module_shapes.items():
        name, experts = parameter_of(path) or ("", 1)
        if experts > 1 and joined.adapts(name):
            of_parts = _taken(name, experts, weights)
            if of_parts:
                weights[path] = _joined(path, joined.bypass_at(path), shape, of_parts)
    rest = [path for path in weights if _OF_EXPERT.fullmatch(path)]
    if rest:
        raise AdapterError(
            f"{min(rest)} is none of the experts that pcg joins in a {model_type} model; name "
            "their parameters by target_parameters, as peft does, and save the weights of each"
        )
    return dataclasses.replace(adapter, recipe=_named(recipe, joined, weights), weights=weights)


def with_swapped_experts(adapter: Adapter, module_shapes: Mapping[str, Shape]) -> Adapter:
    """Return an adapter of a file with peft's swapped matrices in the base's dims.

    Args:
        module_shapes: as for `new_adapter`.
    """
    weights = {}
    for path, each in adapter.weights.items():
        swapped = parameter_path(*parameter, True) if (parameter := parameter_of(path)) else path
        if path != swapped and swapped in module_shapes and isinstance(each, LoraWeights):
            path, each = swapped, each.swapped()
        weights[path] = each
    return dataclasses.replace(adapter, weights=weights)


def _named(recipe: LoraConfig, joined: LoraConfig, paths: Iterable[str]) -> LoraConfig:
    """Return the joined recipe with an adapter's paths as targets.

    Dense layers, of which it has paths, may share the names of experts, of which it may have none.
    """
    parameters = [name for name, _ in filter(None, map(parameter_of, paths))]
    plain = [path for path in paths if parameter_of(path) is None and joined.bypass(path) is None]
    targets = joined.target_modules
    if isinstance(targets, tuple):
        targets = tuple(sorted({*targets, *plain}))
    adapted = tuple(
        name for name in joined.target_parameters or () if any(p.endswith(name) for p in parameters)
    )
    source = joined if any(name.endswith("gate_up_proj") for name in adapted) else recipe
    return dataclasses.replace(source, target_modules=targets, target_parameters=adapted or None)


def _taken(
    parameter: str, experts: int, weights: dict[str, ModuleWeights]
) -> list[list[ModuleWeights | None]]:
    """Take the weights of each expert's parts for a parameter; none of a layer without any."""
    module, _, name = parameter.rpartition(".")
    present = [
        parts
        for parts in EXPERT_PARTS.get(name, ())
        if any(
            f"{module}.{expert}.{part}" in weights for expert in range(experts) for part in parts
        )
    ]
    if len(present) > 1:
        raise AdapterError(f"experts of {module} have weights of two names, {present}; keep one")
    others = any(path.startswith(f"{module}.") for path in weights)
    if name not in EXPERT_PARTS or not (present or others):
        return []
    parts = present[0] if present else EXPERT_PARTS[name][0]
    return [
        [weights.pop(f"{module}.{expert}.{part}", None) for part in parts]
        for expert in range(experts)
    ]


def _renamed(path: str, renamings: Sequence[Sequence[str]]) -> str:
    """Return the base's name of a module by that in a checkpoint."""
    for pattern, replacement in renamings:
        path = re.sub(pattern, replacement, f"{path}.", count=1).removesuffix(".")
    return path


def _joined(
    path: str,
    bypass: LoraBypass,
    shape: Shape,
    of_experts: Sequence[Sequence[ModuleWeights | None]],
) -> LoraWeights:
    """Return the weights of a parameter from those of each expert's parts."""
    (out, in_), count = shape, len(of_experts[0])
    assert bypass.rank is not None
    rank, size = bypass.rank // bypass.experts // count, out // count
    present = [each for expert in of_experts for each in expert if each is not None]
    like = present[0].tensors[0] if present else torch.empty(0)
    a = like.new_zeros(bypass.experts, count, rank, in_)
    b = like.new_zeros(bypass.experts, count, size, count, rank)
    for expert, parts in enumerate(of_experts):
        for place, weights in enumerate(parts):
            if weights is None:
                continue
            expected = [(rank, in_), (size, rank)]
            fits = [tuple(tensor.shape) for tensor in weights.tensors] == expected
            if not fits or not isinstance(weights, LoraWeights):
                raise AdapterError(
                    f"expert {expert} of {path} has {weights.shapes}; the base and the rank of all "
                    f"experts want {', '.join(str(list(each)) for each in expected)}"
                )
            a[expert, place] = weights.a
            b[expert, place, :, place] = weights.b
    b = b.flatten(3).flatten(1, 2).permute(1, 2, 0)  # [out, r, E]
    return LoraWeights(a.flatten(0, 2), b.flatten(1), bypass.scale, experts=bypass.experts)
