"""A transformers model of true shapes without weights, as eager PyTorch and torch.compile run it.

The model is built on meta, then every tensor is replaced by an empty one on the CPU: under a
FakeTensorMode a fake one, so that the CPU's own operators are chosen and nothing is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_unflatten

from pcg.errors import TraceError, UnsupportedError
from pcg.trace.export import layer_kinds, parse_config, quiet, shorten

MASKLESS = "sdpa_maskless"
"""SDPA without a mask: `is_causal`, as transformers runs it eagerly over sequences of one length.

Where transformers is traced it makes a mask of its own, with which it repeats keys and values. An
attention of a name without mask function gets none.
"""

_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}


@dataclass(frozen=True)
class PeerModel:
    """A model, shortened to one layer of each kind and one more of the first.

    Attributes:
        model: as `wrap` made it.
        layers: of the model.
        schedule: for each layer of the whole model, the layer here that equals it.
    """

    model: nn.Module
    layers: Sequence[nn.Module]
    schedule: tuple[int, ...]


@dataclass(frozen=True)
class LayerCall:
    """How a model calls one of its layers.

    Attributes:
        layer: the module.
        arguments: leaves of its arguments.
        structure: that they are the leaves of.
        place: of the hidden states among the leaves.
    """

    layer: nn.Module
    arguments: tuple[Any, ...]
    structure: Any
    place: int

    @property
    def hidden(self) -> torch.Tensor:
        """What the layer before hands on."""
        return self.arguments[self.place]  # type: ignore[no-any-return]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The layer's parameters and buffers."""
        return {**dict(self.layer.named_parameters()), **dict(self.layer.named_buffers())}

    @property
    def shared(self) -> list[int]:
        """Places of the other tensors: positions, rotary tables, masks."""
        tensors = [i for i, a in enumerate(self.arguments) if isinstance(a, torch.Tensor)]
        return [place for place in tensors if place != self.place]

    def __call__(
        self,
        hidden: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """The layer's hidden states, of those before it."""
        leaves = list(self.arguments)
        leaves[self.place] = hidden
        for place, tensor in zip(self.shared, shared, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        named = dict(zip(self.parameters, parameters, strict=True))
        out = torch.func.functional_call(self.layer, named, args, kwargs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


def shortened_peer(
    config: Mapping[str, Any],
    dtype: str,
    wrap: Callable[[Any], Any],
    attention: str | None = None,
) -> PeerModel:
    """The model of a configuration with few layers.

    Args:
        config: the contents of a config.json.
        dtype: torch's name of the dtype.
        wrap: makes adapters of the model in place, on meta.
        attention: transformers' name of it, or `MASKLESS`; transformers' choice by default, also
            where the architecture does not take this one.
    """
    with quiet(), unset_fake_temporarily():
        parsed = parse_config({**config, **_NO_DROPOUT})
        full = _on_meta(parsed, dtype, attention)
        _, kinds = layer_kinds(full)
        schedule, _, shorter = shorten(parsed, kinds)
        if layer_kinds(_on_meta(shorter, dtype, attention))[1] != [
            kinds[schedule.index(place)] for place in sorted(set(schedule))
        ] + kinds[:1] * (len(kinds) > len(set(schedule))):
            schedule, shorter = tuple(range(len(kinds))), parsed
    return PeerModel(*peer_model(shorter, dtype, wrap, attention), schedule)


def peer_model(
    config: Any, dtype: str, wrap: Callable[[Any], Any], attention: str | None = None
) -> tuple[Any, Sequence[nn.Module]]:
    """A model of empty tensors, and its layers.

    Args:
        config: a transformers configuration, or the contents of a config.json.
        dtype: and all others: as for `shortened_peer`.
        wrap: makes adapters of the model in place.
        attention: transformers' name of it.
    """
    with quiet(), unset_fake_temporarily():
        parsed = parse_config({**config, **_NO_DROPOUT}) if isinstance(config, Mapping) else config
        model = _on_meta(parsed, dtype, attention)
        path, _ = layer_kinds(model)
        layers: Any = model.get_submodule(path)
        model = wrap(model)
    _empty(model)
    return model.eval(), tuple(layers)


def layer_calls(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any]
) -> list[LayerCall]:
    """Run a model of fake tensors, and note how it calls each of its layers.

    Raises:
        TraceError: a layer takes no hidden states that are known as such.
    """
    calls: list[LayerCall] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        leaves, structure = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if leaf is hidden]
        if not isinstance(hidden, torch.Tensor) or not places:
            raise TraceError(f"{type(layer).__name__} takes no hidden states by place or name")
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if any(type(leaf).__name__.endswith("Cache") for leaf in leaves):
            raise UnsupportedError(f"{type(layer).__name__} reads keys and values from a cache")
        calls.append(LayerCall(layer, tuple(leaves), structure, places[0]))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def without_layers(
    model: nn.Module, calls: Sequence[LayerCall]
) -> Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor], torch.Tensor]:
    """What a model makes of its last layer's hidden states, parameters and token ids: the loss."""
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]

    def loss(
        hidden: torch.Tensor, parameters: Sequence[torch.Tensor], ids: torch.Tensor
    ) -> torch.Tensor:
        def give(_: nn.Module, __: Any, out: Any) -> Any:
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        handle = calls[-1].layer.register_forward_hook(give)
        named = dict(zip(names, parameters, strict=True))
        arguments = {"input_ids": ids, "labels": ids, "use_cache": False}
        try:
            return torch.func.functional_call(model, named, (), arguments).loss  # type: ignore[no-any-return]
        finally:
            handle.remove()

    return loss


def _on_meta(config: Any, dtype: str, attention: str | None) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    with torch.device("meta"):
        if attention is not None:
            try:
                return AutoModelForCausalLM.from_config(
                    config, attn_implementation=attention, **options
                )
            except (ValueError, KeyError):
                pass  # it does not take this one
        return AutoModelForCausalLM.from_config(config, **options)


def _empty(model: nn.Module) -> None:
    """Replace every tensor of a model by an empty one on the CPU; tied weights stay tied."""
    made: dict[int, torch.Tensor] = {}

    def empty(old: torch.Tensor) -> torch.Tensor:
        if id(old) not in made:
            new = torch.empty(old.shape, dtype=old.dtype)
            is_parameter = isinstance(old, nn.Parameter)
            made[id(old)] = nn.Parameter(new, old.requires_grad) if is_parameter else new
        return made[id(old)]

    for module in model.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = empty(old)


