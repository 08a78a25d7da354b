"""A transformers + peft model of true shapes without weights, as a whole and by layers.

The model is built on meta, then every tensor is replaced by an empty tensor on the CPU. Under a
FakeTensorMode these are fake: torch selects the CPU's operators and computes nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_unflatten

from pcg.errors import TraceError, UnsupportedError
from pcg.trace.export import quiet
from pcg.trace.layer_kinds import fingerprint, layer_kinds
from pcg.trace.model_config import parse_config

MASKLESS = "sdpa_maskless"
"""SDPA without a mask: `is_causal`, as transformers runs it eagerly over sequences of one length.

When traced, transformers builds a mask, and repeats keys and values for it. An attention name
without a registered mask function gets no mask.
"""

UNPADDED = {"pad_token_id": None}
"""Config fields without padding, as some models search token ids for the padding id."""


@dataclass(frozen=True)
class LayerCall:
    """A model's call of a layer.

    Attributes:
        layer: the module.
        arguments: the leaves of its arguments; tensors are detached.
        structure: the tree of the leaves.
        place: the index of the hidden states among the leaves.
        carries: True if the hidden states need a gradient.
        kind: a key, equal for equal layers.
    """

    layer: nn.Module
    arguments: tuple[Any, ...]
    structure: Any
    place: int
    carries: bool
    kind: Hashable

    @property
    def hidden(self) -> Tensor:
        """The hidden states of the previous layer."""
        return self.arguments[self.place].clone().requires_grad_(self.carries)  # type: ignore[no-any-return]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The layer's parameters and buffers."""
        return tensors_of(self.layer)

    @property
    def shared(self) -> list[int]:
        """The indices of the other tensors: positions, rotary tables, masks."""
        tensors = [i for i, a in enumerate(self.arguments) if isinstance(a, Tensor)]
        return [place for place in tensors if place != self.place]

    def run(
        self, hidden: Sequence[Tensor], parameters: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> Tensor:
        """Return the layer's output hidden states."""
        leaves = list(self.arguments)
        (leaves[self.place],) = hidden
        for place, tensor in zip(self.shared, shared, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        named = dict(zip(self.parameters, parameters, strict=True))
        out = torch.func.functional_call(self.layer, named, args, kwargs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


def peer_model(
    source: Mapping[str, Any] | nn.Module,
    dtype: str,
    wrap: Callable[[Any], Any],
    attention: str | None = None,
) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """Return a model of empty tensors, and its layers.

    Args:
        source: the contents of a config.json, or a module, which is copied without its data.
        dtype: torch's name of the dtype.
        wrap: adds adapters to the model in place, on meta.
        attention: transformers' name of an attention, or `MASKLESS`. transformers chooses by
            default, and if the architecture lacks this attention; a module keeps its own.
    """
    with quiet(), unset_fake_temporarily():
        if isinstance(source, nn.Module):
            model = _copied_to_meta(source, getattr(torch, dtype))
        else:
            model = _on_meta(parse_config(source), dtype, attention)
        layers: Any = model.get_submodule(layer_kinds(model)[0])
        model = wrap(model)
    _empty(model)
    return model.eval(), tuple(layers)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Return the loss of next-token prediction; ids: [B, S]."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


def layer_calls(
    model: nn.Module, layers: Sequence[nn.Module], ids: Tensor
) -> tuple[list[LayerCall], Any]:
    """Return the calls of the layers of a model of fake tensors, and the last layer's output.

    Raises:
        TraceError: a layer takes no hidden states by place or name.
        UnsupportedError: a layer takes a cache, or modules before the layers are trained.
    """
    calls: list[LayerCall] = []
    last: list[Any] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        leaves, structure = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if leaf is hidden]
        if not isinstance(hidden, Tensor) or not places:
            raise TraceError(f"{type(layer).__name__} takes no hidden states by place or name")
        if any(type(leaf).__name__.endswith("Cache") for leaf in leaves):
            raise UnsupportedError(f"{type(layer).__name__} reads keys and values from a cache")
        others = [_identity(leaf) for i, leaf in enumerate(leaves) if i != places[0]]
        trained = [parameter.requires_grad for parameter in layer.parameters()]
        kind = (fingerprint(layer), hidden.requires_grad, *trained, *others)
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        carries = hidden.requires_grad
        calls.append(LayerCall(layer, tuple(leaves), structure, places[0], carries, kind))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    handles.append(layers[-1].register_forward_hook(lambda _, __, out: last.append(out)))
    try:
        loss_of(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    if calls[0].carries:
        raise UnsupportedError("what comes before the layers is trained, too")
    return calls, last[0]


def without_layers(
    model: nn.Module, layers: Sequence[nn.Module], last: Any
) -> tuple[Callable[..., Tensor], Tensor]:
    """Return the loss of a model without its layers, and hidden states as the layers' output.

    Args:
        model: a model of fake tensors.
        layers: its layers.
        last: the output of the last layer.
    Returns:
        A function of [hidden states], the model's tensors and [token ids]; and hidden states.
    """
    names = list(tensors_of(model))

    def loss(
        hidden_states: Sequence[Tensor], parameters: Sequence[Tensor], ids: Sequence[Tensor]
    ) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        arguments = {"input_ids": ids[0], "labels": ids[0], "use_cache": False}
        out = (hidden_states[0], *last[1:]) if isinstance(last, tuple) else hidden_states[0]
        with _standing_in(model, layers, out):
            return torch.func.functional_call(model, named, (), arguments).loss  # type: ignore[no-any-return]

    hidden = last[0] if isinstance(last, tuple) else last
    return loss, hidden.detach().requires_grad_(hidden.requires_grad)


@contextlib.contextmanager
def _standing_in(model: Any, layers: Sequence[nn.Module], out: Any) -> Iterator[None]:
    """Replace every layer's output by `out`, and disable masks."""
    config = model.config
    attention = config._attn_implementation_internal  # the public setter refuses unregistered names
    config._attn_implementation_internal = MASKLESS
    for layer in layers:
        layer.forward = lambda *_, **__: out
    try:
        yield
    finally:
        config._attn_implementation_internal = attention
        for layer in layers:
            del layer.forward


def _identity(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.untyped_storage()._cdata, leaf.shape
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__


def _on_meta(config: Any, dtype: str, attention: str | None) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    with torch.device("meta"):
        if attention is not None:
            with contextlib.suppress(ValueError, KeyError):  # the architecture lacks this attention
                return AutoModelForCausalLM.from_config(
                    copy.deepcopy(config), attn_implementation=attention, **options
                )
        return AutoModelForCausalLM.from_config(config, **options)


def _copied_to_meta(module: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy of a module without data, with its own classes and hooks."""
    copies: dict[int, Any] = {}
    for old in tensors_of(module).values():
        new = torch.empty_like(old, device="meta")
        is_parameter = isinstance(old, nn.Parameter)
        copies[id(old)] = nn.Parameter(new, old.requires_grad) if is_parameter else new
    return copy.deepcopy(module, copies).to(dtype)


def _empty(model: nn.Module) -> None:
    """Replace every tensor of a model by an empty one on the CPU; tied weights stay tied."""
    copies: dict[int, Tensor] = {}

    def empty(old: Tensor) -> Tensor:
        if id(old) not in copies:
            new = torch.empty(old.shape, dtype=old.dtype)
            is_parameter = isinstance(old, nn.Parameter)
            copies[id(old)] = nn.Parameter(new, old.requires_grad) if is_parameter else new
        return copies[id(old)]

    for module in model.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = empty(old)
        if isinstance(module, nn.RNNBase):  # also holds its parameters in a list
            module._init_flat_weights()
