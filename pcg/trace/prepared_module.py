"""Preparation of a module for export in place, and its restoration.

The module itself is changed, not a copy, so that hooks and methods with a reference to it, or to a
part of it, refer to the traced module.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from pcg.errors import UnsupportedError
from pcg.trace.layer_kinds import configs_of
from pcg.trace.markers import register_markers

_TRUE_DERIVATIVES = ("transformers.models.bloom.modeling_bloom.GeLUFunction",)
"""Functions whose backward is the derivative of their forward."""


@contextlib.contextmanager
def with_attention(
    model: nn.Module, implementation: str | None, *, experts: str | None = None
) -> Iterator[None]:
    """Prepare a model for inference, with other functions of transformers' registries.

    Args:
        model: a causal LM.
        implementation: the name of an attention; None keeps each module's own.
        experts: the name of a function of experts; the model's own by default.
    """
    register_markers()
    with contextlib.ExitStack() as undo:
        for config in configs_of(model):
            undo.callback(_restore, vars(config), dict(vars(config)))
            # The setter refuses implementations that the architecture does not declare.
            if implementation is not None:
                vars(config)["_attn_implementation_internal"] = implementation
            if experts is not None:
                vars(config)["_experts_implementation_internal"] = experts
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        model.eval()
        yield


_LAYER_INDICES = ("attn_layer_indices", "cross_attention_layers")
"""Fields with indices of layers that a forward reads: Bamba's with attention, Mllama's for images.
"""


@contextlib.contextmanager
def with_layers(model: nn.Module, path: str, chosen: Sequence[int]) -> Iterator[None]:
    """Keep only the `chosen` layers of the list at a module path."""
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    layers: Any = parent._modules[name]
    count = len(layers)
    with contextlib.ExitStack() as undo:
        undo.callback(parent._modules.__setitem__, name, layers)
        parent._modules[name] = nn.ModuleList(layers[index] for index in chosen)
        for module in parent.modules():
            if known := vars(module).get("layer_dic"):  # Zamba 2's, by the index of a layer
                undo.callback(vars(module).update, layer_dic=known)
                vars(module)["layer_dic"] = {
                    i: known[n] for i, n in enumerate(chosen) if n in known
                }
        configs = configs_of(model)
        for holder in (parent, *configs):
            undo.callback(_restore, vars(holder), dict(vars(holder)))
            for key, value in list(vars(holder).items()):
                if key in _LAYER_INDICES:
                    vars(holder)[key] = [i for i, index in enumerate(chosen) if index in value]
                elif isinstance(value, list | tuple) and len(value) == count:
                    vars(holder)[key] = type(value)(value[index] for index in chosen)
        for config in configs:
            # A table of per-layer inputs keeps the slices of all layers.
            has_inputs = getattr(config, "hidden_size_per_layer_input", None)
            if getattr(config, "num_hidden_layers", None) == count and not has_inputs:
                config.num_hidden_layers = len(chosen)
            if overrides := getattr(config, "_heterogeneity_spec", None):
                by_layer = overrides.per_layer_overrides
                places = {place: by_layer.get(index) for place, index in enumerate(chosen)}
                config.per_layer_config = {place: each for place, each in places.items() if each}
        yield


@contextlib.contextmanager
def with_all_logits(model: nn.Module) -> Iterator[None]:
    """Let a sequence classifier return logits for each token, not of a sequence's last alone."""
    from transformers.modeling_layers import GenericForSequenceClassification

    if not isinstance(model, GenericForSequenceClassification):
        yield
        return

    def forward(**inputs: Any) -> torch.Tensor:
        base = model.get_submodule(model.base_model_prefix)
        logits: torch.Tensor = model.score(base(**inputs).last_hidden_state)
        return logits

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    vars(model)["forward"] = forward
    try:
        yield
    finally:
        del vars(model)["forward"]


@contextlib.contextmanager
def with_frozen(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Replace a model's parameters by frozen ones, optionally in another dtype.

    Buffers are replaced by copies, which a forward may write.
    """
    frozen: dict[int, nn.Parameter] = {}

    def freeze(old: nn.Parameter) -> nn.Parameter:
        if id(old) not in frozen:
            data = old.detach()
            data = data.to(dtype) if dtype and old.is_floating_point() else data
            frozen[id(old)] = nn.Parameter(data, requires_grad=False)
        return frozen[id(old)]

    copies: dict[int, torch.Tensor] = {}

    def copied(buffer: torch.Tensor) -> torch.Tensor:
        return copies.setdefault(id(buffer), buffer.detach().clone())

    with contextlib.ExitStack() as undo:
        for module in model.modules():
            undo.callback(_restore, module._parameters, dict(module._parameters))
            undo.callback(_restore, module._buffers, dict(module._buffers))
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else copied(buffer)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = freeze(parameter)
        yield


@contextlib.contextmanager
def with_modules_of_their_own(model: nn.Module) -> Iterator[None]:
    """Give every module of a model a single path: copies replace shared modules elsewhere.

    A copy has the same parameters and buffers. torch.export identifies a module by its path.

    Raises:
        UnsupportedError: a shared module has a matrix; an adapter of it would be in all places.
    """
    paths: dict[int, str] = {}

    def separate(holder: nn.Module, path: str) -> None:
        for name, child in list(holder._modules.items()):
            if child is None:
                continue
            place = f"{path}.{name}" if path else name
            first = paths.setdefault(id(child), place)
            if first != place:
                if any(parameter.dim() > 1 for parameter in child.parameters()):
                    raise UnsupportedError(
                        f"{place} is the same module as {first}, so that they could not have "
                        "adapters of their own; give each place a module, which may share weights"
                    )
                child = _copied(child)
                holder._modules[name] = child
            separate(child, place)

    with contextlib.ExitStack() as undo:
        for module in model.modules():
            undo.callback(_restore, module._modules, dict(module._modules))
        separate(model, "")
        yield


def _copied(module: nn.Module) -> nn.Module:
    """Return a module with the same tensors, attributes and hooks, and its own bound methods."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__, _modules=dict(module._modules))
    for name, value in vars(module).items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            vars(copied)[name] = types.MethodType(value.__func__, copied)
    return copied


@contextlib.contextmanager
def without_custom_gradients(model: nn.Module) -> Iterator[None]:
    """Refuse changes of gradients that the forward's trace does not show.

    Raises:
        UnsupportedError: the model has backward hooks, calls a torch.autograd.Function, or hooks
            into the tensors that are saved for backward.
    """
    for path, module in model.named_modules():
        of_all = hooks._global_backward_hooks or hooks._global_backward_pre_hooks
        if of_all or module._backward_hooks or module._backward_pre_hooks:
            raise UnsupportedError(
                f"{path or type(model).__name__} has backward hooks, which a compiled program "
                "does not run; remove them"
            )
    original = vars(torch.autograd.Function)["apply"]
    thread = get_ident()

    @classmethod  # type: ignore[misc]
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        name = f"{cls.__module__}.{cls.__qualname__}"
        is_elsewhere = get_ident() != thread
        if is_elsewhere or name in _TRUE_DERIVATIVES or name.startswith("torch."):
            return original.__get__(None, cls)(*args, **kwargs)
        raise UnsupportedError(
            f"the model calls {name}, a torch.autograd.Function, whose backward cannot be traced; "
            "write it with PyTorch's operators"
        )

    saved = torch.autograd.graph.saved_tensors_hooks
    enter = saved.__enter__

    def refuse(self: Any) -> None:
        # PyTorch's own subclasses return their argument.
        is_own = type(self) is not saved and type(self).__module__.startswith("torch.")
        if is_own or get_ident() != thread:
            return enter(self)
        raise UnsupportedError(
            "the model uses saved_tensors_hooks, which may change gradients; a compiled program "
            "decides itself what it saves for backward"
        )

    torch.autograd.Function.apply = apply  # type: ignore[method-assign]
    saved.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
        saved.__enter__ = enter  # type: ignore[method-assign]


def _restore(holder: dict[str, Any], before: dict[str, Any]) -> None:
    holder.clear()
    holder.update(before)
