"""An adapter in memory: a recipe of any method, and its weights."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.ir.module_paths import WHOLE_MODEL, did_you_mean, is_module, parameter_of
from pcg.peft.method import Shape
from pcg.peft.prompt_encoder import made_by_encoder
from pcg.peft.recipe import CAUSAL_LM, Recipe
from pcg.peft.weights import AdapterWeight, Around, Draw, ModuleWeights
from pcg.units import shown

if TYPE_CHECKING:
    from pcg.ir.program.program import ModelGraph


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of any method.

    Attributes:
        name: the name that requests and jobs use.
        weights: the weights of each module, by its path.
        replaced: parameters by name that replace the base's: trained biases (`recipe.bias`), and
            those of `recipe.modules_to_save`.
        base_model_name: the base that it was trained for; empty if unknown.
        extra: notes of adapter_config.json, such as task_type, written back as they were read.
        shared: untrained tensors that all modules share, by name.
        chat_template: the text of the template that renders its chats; None for the model's.
        encoder: the parameters of the network that makes `weights` (`recipe.encoder`), by peft's
            names; empty for methods without a network, or an adapter from a file.
        version: a number that is unique in the process, also among changed copies of this adapter;
            caches use it as key.
    """

    name: str
    recipe: Recipe
    weights: Mapping[str, ModuleWeights]
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    base_model_name: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    encoder: Mapping[str, Tensor] = field(default_factory=dict)
    chat_template: str | None = None
    version: int = field(default_factory=itertools.count(1).__next__, init=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that training changes, in order."""
        bypasses = (tensor for weights in self.weights.values() for tensor in weights.tensors)
        # Files have any order.
        replaced = (self.replaced[name] for name in sorted(self.replaced))
        encoder = (self.encoder[name] for name in sorted(self.encoder))
        return (*bypasses, *replaced, *encoder)

    @property
    def prompt_tokens(self) -> int:
        return self.recipe.prompt_tokens

    @cached_property
    def rank(self) -> int:
        """The largest rank of its modules; 0 without LoRA."""
        return max((weights.rank for weights in self.weights.values()), default=0)

    @cached_property
    def size_bytes(self) -> int:
        """The size of all tensors; they change in place only."""
        return sum(tensor.nbytes for tensor in (*self.tensors, *self.shared.values()))

    def parameter(self, path: str) -> AdapterWeight | None:
        """Return the weight of a training program's parameter, by its source, or None."""
        module, _, kind = path.rpartition(".")
        if not module and kind in self.shared:
            return AdapterWeight(self.shared[kind])
        if path in self.replaced:
            return AdapterWeight(self.replaced[path])
        weights = self.weights.get(module)
        return None if weights is None else weights.parameters.get(kind)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(
            self,
            weights={path: weights.map(change) for path, weights in self.weights.items()},
            replaced={name: change(tensor) for name, tensor in self.replaced.items()},
            shared={name: change(tensor) for name, tensor in self.shared.items()},
            encoder={name: change(tensor) for name, tensor in self.encoder.items()},
        )


def new_adapter(
    name: str,
    recipe: Recipe,
    module_shapes: Mapping[str, Shape],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    output_layer: str | None = None,
    model_type: str | None = None,
    base_weights: Mapping[str, Tensor] | None = None,
) -> Adapter:
    """Return a fresh adapter, initialised as peft does.

    A module's weights depend on the seed and its path only, not on the other adapted modules.
    Parameters that replace the base's are missing: they start as the base's.

    Args:
        module_shapes: (out, in) of the base's modules, as `ModelGraph.module_shapes`.
        dtype: dtype of the weights, which are drawn in float32 and cast.
        output_layer: the path of the head, which "all-linear" leaves out.
        model_type: the base's; needed if the recipe names no targets.
        base_weights: [out, in] of the linear modules, by path; DoRA starts with their lengths.
    Raises:
        AdapterError: the recipe does not fit the model.
        UnsupportedError: an initialisation that needs the base's weights or data.
    """
    linear = tuple(filter(is_module, module_shapes))
    bypasses = recipe.bypasses(linear, output_layer, model_type)
    missing = min(bypasses.keys() - module_shapes.keys(), default=None)
    if missing is not None:
        what = "token embedding" if missing == WHOLE_MODEL else f"attention in {missing}"
        raise AdapterError(f"this base has no {what} for {recipe.method}; use LoRA")
    kind, shapes = recipe.weights, [module_shapes[path] for path in bypasses]
    shared = kind.fresh_shared(recipe, shapes)
    resolved = recipe.resolved(linear, output_layer, model_type)
    encoder: Mapping[str, Tensor] = {}
    weights: dict[str, ModuleWeights] = {}
    if recipe.encoder is not None:
        encoder = recipe.encoder.fresh(shapes, _seed(seed, WHOLE_MODEL))
        weights.update(made_by_encoder(resolved, encoder))
    else:
        for path, bypass in bypasses.items():
            shape, draw = module_shapes[path], Draw(_seed(seed, path))
            around = Around(partial(_base_weight, base_weights, path), shared, shape)
            weights[path] = kind.fresh(recipe, bypass, shape, draw, around)
    notes = {"task_type": CAUSAL_LM}
    fresh = Adapter(name, resolved, weights, extra=notes, shared=shared, encoder=encoder)
    return fresh.map(lambda tensor: tensor.to(dtype))


def _base_weight(weights: Mapping[str, Tensor] | None, path: str) -> Tensor:
    if weights is None:
        raise AdapterError("this recipe begins with the base's weights; give base_weights")
    weight = weights[path]
    return weight if weight.is_meta else weight.to(torch.get_default_device())


def _seed(seed: int, path: str) -> int:
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


_LONGEST_NAME = 255


def check_name(name: object) -> None:
    """Raise an error unless a name is usable in a message, a request and a folder.

    Raises:
        AdapterError: not a text, empty, too long, with unprintable characters, or a path that
            leaves the folder.
    """
    if (
        isinstance(name, str)
        and len(name) <= _LONGEST_NAME
        and name.isprintable()
        and name.strip() == name
        and "\\" not in name
        and not {"", ".", ".."} & set(name.split("/"))
    ):
        return
    raise AdapterError(
        f"{shown(name)} does not name an adapter; use 1 to {_LONGEST_NAME} characters, as in 'sql' "
        "or 'team/sql', without a part that is empty or of dots"
    )


def check_replaced(adapter: Adapter, base: ModelGraph) -> None:
    """Raise an error unless an adapter has the parameters that its recipe replaces in a model.

    Raises:
        AdapterError: a parameter is missing, or of another shape, or the base has none.
    """
    saved = adapter.recipe.modules_to_save
    names = f" and modules_to_save={list(saved)}" if saved else ""
    who = f"adapter {adapter.name!r}, whose recipe has bias={adapter.recipe.bias!r}{names},"
    wanted = adapter.recipe.replaced_in(base, adapter.weights)
    of_base = {name: parameter.type.features for name, (_, parameter) in wanted.items()}
    present = {name: tuple(tensor.shape) for name, tensor in adapter.replaced.items()}
    for name in [*of_base, *present]:
        shapes = [
            "none" if shape is None else str(list(shape))
            for shape in (present.get(name), of_base.get(name))
        ]
        if shapes[0] != shapes[1]:
            raise AdapterError(
                f"{who} has {shapes[0]} as {name}, and the base {shapes[1]}; it is an adapter for "
                "another base, or not all of it was saved"
            )
    if not adapter.tensors:
        raise AdapterError(f"{who} trains nothing of this base, which has no biases; use LoRA")


def check_finite(adapter: Adapter, where: object) -> None:
    """Raise an AdapterError if a weight, read from a place, is NaN or infinite; name its module."""
    named = [(path, t) for path, weights in adapter.weights.items() for t in weights.tensors]
    for name, tensor in (*named, *adapter.replaced.items(), *adapter.shared.items()):
        # Both are NaN if any entry is; this takes one pass, and no copy of the tensor.
        extremes = torch.stack(tensor.aminmax()) if tensor.numel() else tensor
        if not extremes.isfinite().all():
            raise AdapterError(
                f"{where}: the weights of {name} hold NaN or infinity in {tensor.dtype}; the run "
                "that trained them diverged: save an earlier checkpoint of it"
            )


def with_shared(adapter: Adapter, module_shapes: Mapping[str, Shape]) -> Adapter:
    """Return the adapter with shared tensors, redrawn if its file does not hold them.

    Raises:
        AdapterError: the file's are smaller than the modules.
    """
    shapes = [module_shapes[path] for path in adapter.weights]
    needed = adapter.recipe.weights.fresh_shared(adapter.recipe, shapes)
    for name, tensor in adapter.shared.items():
        if any(n > m for n, m in zip(needed[name].shape, tensor.shape, strict=True)):
            raise AdapterError(
                f"adapter {adapter.name!r} has {name} {list(tensor.shape)}, and this base needs "
                f"{list(needed[name].shape)}; it is an adapter for another base"
            )
    return replace(adapter, shared={**needed, **adapter.shared})


def check_fits(
    adapter: Adapter,
    module_shapes: Mapping[str, Shape],
    base_model_name: str = "",
    output_layer: str | None = None,
) -> None:
    """Raise an error for an adapter of another base; arguments are those of `new_adapter`.

    Raises:
        AdapterError: a module is not in the base or has another shape, or the recipe adapts a
            module that the adapter has no weights for.
    """
    base = f"the base {base_model_name!r}" if base_model_name else "this base"
    trained_for = f" (trained for {adapter.base_model_name!r})" if adapter.base_model_name else ""
    who, other = f"adapter {adapter.name!r}{trained_for}", "it is an adapter for another base"
    for path, weights in adapter.weights.items():
        if path not in module_shapes:
            parameter, experts = parameter_of(path) or (path, 1)
            counts = dict(filter(None, map(parameter_of, module_shapes)))
            if parameter in counts:
                raise AdapterError(
                    f"{who} has the ranks of {experts} experts at {parameter}, which has "
                    f"{counts[parameter]} in {base}; {other}, or its rank is another one"
                )
            raise AdapterError(
                f"{who} adapts {path}, which is no linear module of {base}"
                f"{did_you_mean(path, module_shapes)}; {other}"
            )
        sizes = zip(weights.module_shape, module_shapes[path], strict=True)
        if any(size_here not in (None, size) for size_here, size in sizes):
            raise AdapterError(
                f"{who} has {weights.shapes} for {path or 'the token embedding'}, which is "
                f"{list(module_shapes[path])} in {base}; {other}"
            )
    for name, tensor in adapter.replaced.items():
        path, _, kind = name.rpartition(".")
        out = module_shapes[path][0] if path in module_shapes else len(tensor)
        if kind == "bias" and tensor.shape != (out,):
            raise AdapterError(
                f"{who} has a bias {list(tensor.shape)} for {path}, which has {out} outputs in "
                f"{base}; {other}"
            )
    recipe = adapter.recipe
    if recipe.target_modules is None or (recipe.is_all_linear and output_layer is None):
        return
    linear = filter(is_module, module_shapes)
    expected = [path for path in linear if recipe.bypass(path, output_layer)]
    missing = [path for path in expected if path not in adapter.weights]
    if missing:
        raise AdapterError(
            f"{who} has no weights for {len(missing)} of the {len(expected)} modules that it "
            f"targets in {base}, such as {missing[0]}; {other}, or not all of it was saved"
        )
