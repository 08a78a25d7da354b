"""Edits of layers, attributes, positions, branches and caches, and of how tokens are mixed."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from tests.support.edited_model import (
    LONGEST,
    EditedModel,
    UnfitError,
    changed,
    edit,
    wrapped_method,
)

# ------------------------------------------------------------------------------------------- layers


def _count(m: EditedModel, count: int, kinds: list[Any] | None = None) -> None:
    """Let the configuration have so many layers."""
    names = m.config.attribute_map
    setattr(m.config, names.get("num_hidden_layers", "num_hidden_layers"), count)
    if kinds is not None and getattr(m.config, "layer_types", None):
        m.config.layer_types = kinds


def _numbered(m: EditedModel) -> None:
    for i, layer in enumerate(m.layers):
        for module in layer.modules():
            for name in ("layer_idx", "layer_id", "layer_number"):
                if hasattr(module, name):
                    setattr(module, name, i)


@edit("layers", 3)
def layers_in_another_order(m: EditedModel) -> None:
    order = list(range(len(m.layers)))
    m.draw.shuffle(order)
    layers = list(m.layers)
    m.layers = nn.ModuleList(layers[i] for i in order)
    kinds = getattr(m.config, "layer_types", None)
    if kinds and m.chance(0.3):
        m.config.layer_types = [kinds[i] for i in order]
    if m.chance(0.3):
        _numbered(m)


@edit("layers", 3)
def layers_removed(m: EditedModel) -> None:
    layers = list(m.layers)
    kept = m.some(range(len(layers)))
    kinds = getattr(m.config, "layer_types", None)
    m.layers = nn.ModuleList(layers[i] for i in kept)
    if m.chance(0.7):
        _count(m, len(kept), [kinds[i] for i in kept] if kinds and m.chance(0.6) else None)
    if m.chance(0.3):
        _numbered(m)


@edit("layers", 3)
def layers_duplicated(m: EditedModel) -> None:
    layers = list(m.layers)
    place, kind = m.kind(len(layers)), m.kind(3)
    again = copy.deepcopy(layers[place]) if kind else layers[place]
    where = m.draw.randint(0, len(layers))
    kinds = list(getattr(m.config, "layer_types", None) or [])
    layers.insert(where, again)
    m.layers = nn.ModuleList(layers)
    if kinds:
        kinds.insert(where, kinds[place])
    if m.chance(0.8):
        _count(m, len(layers), kinds)
    if m.chance(0.5):
        _numbered(m)


@edit("layers", 2)
def layers_shared(m: EditedModel) -> None:
    kind, first = m.kind(5), m.layers[0]
    for layer in list(m.layers)[1:]:
        if kind == 0:
            for holder, name, _ in m.activations_of(layer):
                setattr(holder, name, m.activations_of(first)[0][2])
        elif kind == 1:
            for path, parameter in first.named_parameters():
                holder_path, _, name = path.rpartition(".")
                setattr(layer.get_submodule(holder_path), name, parameter)
        elif kind == 2:
            name = next(n for n, c in layer.named_children() if c is m.mlp_of(layer))
            setattr(layer, name, m.mlp_of(first))
        elif kind == 3:
            name = next(n for n, c in layer.named_children() if c is m.attention_of(layer))
            setattr(layer, name, m.attention_of(first))
        else:
            _, name, linear = m.linear_of(first)
            for holder, own, child in [
                (h, n, c) for h in layer.modules() for n, c in h._modules.items() if n == name
            ]:
                if child.weight.shape == linear.weight.shape:
                    holder._modules[own] = linear


@edit("layers", 2)
def layers_run_otherwise(m: EditedModel) -> None:
    """Fewer are run than there are, some are skipped, or their list is of another class."""
    kind, c = m.kind(5), m.number(0.1, 0.9)
    layers = list(m.layers)
    if kind == 0 and len(layers) > 2:
        _count(m, len(layers) - 1)
    elif kind == 1:

        class Reversed(nn.ModuleList):
            def __iter__(self) -> Any:
                return reversed(list(super().__iter__()))

            def __getitem__(self, index: Any) -> Any:
                found = super().__getitem__(index)
                return Reversed(list(found)[::-1]) if isinstance(index, slice) else found

        m.layers = Reversed(layers)
    elif kind == 2:
        layer = m.pick(layers)
        wrapped_method(layer, lambda original, *a, **k: a[0] if a else k["hidden_states"])
    elif kind == 3:
        layer = m.pick(layers)

        def twice(original: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            out = original(hidden, *args[1:], **kwargs)
            return original(out if isinstance(out, Tensor) else out[0], *args[1:], **kwargs)

        wrapped_method(layer, twice)
    else:

        class Wrapped(nn.Module):
            def __init__(self, inner: Any) -> None:
                super().__init__()
                self.inner = inner
                self.attention_type = getattr(inner, "attention_type", None)
                if hasattr(inner, "layer_type"):
                    self.layer_type = inner.layer_type

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return changed(self.inner(*args, **kwargs), lambda x: x * (1 + c))

        chosen = {id(layer) for layer in m.some(layers)}
        m.layers = nn.ModuleList(Wrapped(x) if id(x) in chosen else x for x in layers)


@edit("layers", 3)
def value_by_the_index_of_the_layer(m: EditedModel) -> None:
    """A number, a tensor, a buffer or a parameter that differs between layers."""
    kind, c = m.kind(6), m.number(0.1, 0.5)

    def around(module: Any) -> Any:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            return changed(original(*args, **kwargs), lambda x: x * module.own_scale)

        return call

    for i, layer in enumerate(m.layers):
        module = m.mlp_of(layer)
        value = torch.tensor(1 + c * i)
        if kind == 0:
            module.own_scale = 1 + c * i
        elif kind == 1:
            module.own_scale = value
        elif kind < 4:
            module.register_buffer("own_scale", value, persistent=kind == 2)
        elif kind == 4:
            module.own_scale = nn.Parameter(value)
        else:
            module.own_scale = nn.Parameter(value + 0.2 * m.vector(m.width()))
        wrapped_method(module, around(module))


# --------------------------------------------------------------------------- attributes and buffers


@edit("attributes", 4)
def attribute_of_attention(m: EditedModel) -> None:
    """Some of which the forward reads."""
    n, c = m.threshold(), m.number(0.05, 0.6)
    layers = m.some_layers()
    kind = m.kind(12)
    for layer in layers:
        own = m.attention_of(layer)
        if kind < 3:
            own.sliding_window = n
        elif kind < 5:
            for name in ("scaling", "scale_attn", "inv_norm_factor", "softmax_scale"):
                if hasattr(own, name):
                    setattr(own, name, c)
        elif kind == 5:
            own.layer_idx = m.kind(3)
        elif kind == 6:
            own.is_causal = False
        elif kind == 7:
            is_module = isinstance(getattr(own, "attention_dropout", None), nn.Module)
            own.attention_dropout = nn.Dropout(c) if is_module else c
        elif kind == 8:
            own.window, own.window_size, own.attention_type = n, n, "sliding_attention"
        elif kind == 9:
            layer.attention_type = m.pick(("sliding_attention", "full_attention"))
            layer.is_sliding = True
        elif kind == 10:
            own.attn_logit_softcapping = m.number(1, 5)
        else:
            own.num_heads = m.config.num_attention_heads
            own.softcap, own.s_aux, own.sinks = 3.0, None, None


@edit("attributes", 4)
def config_changed_after_building(m: EditedModel) -> None:
    n = m.threshold()
    values: dict[str, Any] = {
        "sliding_window": n,
        "attention_dropout": 0.5,
        "rms_norm_eps": 0.5,
        "layer_norm_eps": 0.5,
        "hidden_act": "relu",
        "use_cache": m.chance(0.5),
        "output_attentions": True,
        "output_hidden_states": True,
        "return_dict": False,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 2.0,
        "attention_bias": True,
        "is_causal": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": 17,
        "vocab_size": 50,
        "use_sliding_window": True,
        "attention_chunk_size": n,
        "initializer_range": 1.0,
        "num_key_value_heads": 1,
        "rope_theta": 17.0,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.7,
        "partial_rotary_factor": 0.3,
        "layer_types": ["sliding_attention"] * len(m.layers),
        "pretraining_tp": 2,
        "alibi": True,
        "scale_attn_weights": False,
        "window_size": n,
        "bos_token_id": 5,
        "is_decoder": False,
        "_attn_implementation": m.pick(("eager", "sdpa")),
        "some_name_of_its_own": n,
    }
    present = [name for name in values if hasattr(m.config, name)]
    name = m.pick(present if m.chance(0.8) else list(values))
    if name == "_attn_implementation":
        m.config._attn_implementation = values[name]
    else:
        setattr(m.config, name, values[name])


@edit("attributes", 2)
def attribute_that_nothing_reads(m: EditedModel) -> None:
    n = m.threshold()
    layer = m.pick(list(m.layers))
    module = m.pick((layer, m.mlp_of(layer), m.attention_of(layer), m.model))
    kind = m.kind(5)
    if kind == 0:
        module.register_buffer("unread", torch.arange(n), persistent=m.chance(0.5))
    elif kind == 1:
        module.unread = nn.Parameter(torch.ones(3, n))
    elif kind == 2:
        module.unread = nn.Linear(3, n)
    elif kind == 3:
        module.window, module.note = n, {"a": [1, 2, object()]}
    else:
        module.register_buffer("unread", None)


@edit("attributes")
def buffer_that_is_written(m: EditedModel) -> None:
    """A count, or a running mean: the module is no function of its inputs."""
    module = m.mlp_of(m.pick(list(m.layers)))
    module.register_buffer("calls", torch.zeros(()), persistent=m.chance(0.5))
    is_read = m.chance(0.5)

    def count(own: Any, _: Any, out: Tensor) -> Any:
        own.calls += 1
        return out * (1 + 0.3 * own.calls) if is_read else None

    module.register_forward_hook(count)


# ---------------------------------------------------------------------------------------- positions


@edit("positions", 3)
def rotary_tables(m: EditedModel) -> None:
    n, c, kind = m.threshold(), m.number(0.3, 2), m.kind(9)
    rotary = getattr(m.trunk, "rotary_emb", None)
    if rotary is None:
        raise UnfitError

    def around(original: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kind == 3:
            position_ids = position_ids.clamp(max=n)
        elif kind == 4:
            position_ids = position_ids % n
        elif kind == 5:
            position_ids = position_ids * 2 + 1
        elif kind == 6:
            position_ids = position_ids.float() * c
        elif kind == 7:
            position_ids = torch.where(position_ids < n, position_ids, n + (position_ids - n) // 2)
        elif kind == 8:
            position_ids = position_ids.shape[1] - 1 - position_ids
        return original(x, position_ids, *args, **kwargs)

    if kind == 0 and hasattr(rotary, "inv_freq"):
        rotary.inv_freq = rotary.inv_freq * c
    elif kind == 1:
        rotary.attention_scaling = c
    elif kind == 2:
        rotary.register_forward_hook(
            lambda _, __, out: (out[0] * c, out[1]) if isinstance(out, tuple) else out
        )
    else:
        wrapped_method(rotary, around)


@edit("positions", 2)
def rotary_in_some_layers(m: EditedModel) -> None:
    kind, c = m.kind(4), m.number(0.5, 2)
    if not m.has_plain_projections:
        raise UnfitError

    def change(_: Any, args: Any, kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        made = (
            (cos * 0 + 1, sin * 0),
            (cos, -sin),
            (c * cos, c * sin),
            (sin, cos),
        )[kind]
        return args, {**kwargs, "position_embeddings": made}

    for layer in m.some_layers():
        m.attention_of(layer).register_forward_pre_hook(change, with_kwargs=True)


@edit("positions")
def function_of_the_position(m: EditedModel) -> None:
    """Something at each token that depends on its place."""
    n, kind, source = m.threshold(), m.kind(8), m.kind(3)
    table = nn.Embedding(LONGEST + 9, m.width())
    table.weight.data.copy_(0.3 * m.vector(table.weight.numel()).view(table.weight.shape))
    seen: dict[str, Tensor] = {}

    def keep(_: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("position_ids") is not None:
            seen["ids"] = kwargs["position_ids"]

    def places(x: Tensor) -> Tensor:
        if source == 0 and "ids" in seen:
            return seen["ids"]
        if source == 1:
            return torch.ones(x.shape[:2], dtype=torch.long).cumsum(1) - 1
        return torch.arange(x.shape[1])[None]

    def change(x: Tensor) -> Tensor:
        p = places(x)[..., None]
        if kind == 0:
            return x * (1 + 0.01 * p)
        if kind == 1:
            return torch.where(p < n, x, 0.5 * x)
        if kind == 2:
            return x * torch.log1p((p // n).float() + 1)
        if kind == 3 and x.shape[-1] == m.width():
            return x + table(p[..., 0])
        if kind == 4:
            return torch.where(p == 0, torch.zeros_like(x), x)
        if kind == 5:
            return x + torch.sin(p * torch.arange(x.shape[-1]))
        if kind == 6:
            return x * (p + 1) / x.shape[1]
        return torch.where(p == x.shape[1] - 1, 2 * x, x)

    m.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    m.trunk.register_forward_pre_hook(keep, with_kwargs=True)
    m.site().register_forward_hook(lambda _, __, out: changed(out, change))


@edit("mixing")
def tokens_are_mixed(m: EditedModel) -> None:
    """By something that is no attention."""
    kind, c = m.kind(14), m.number(0.2, 0.8)
    width = m.width()
    conv = nn.Conv1d(width, width, 3, groups=width)
    conv.weight.data.copy_(0.3 * m.vector(conv.weight.numel()).view(conv.weight.shape))

    def triangular(x: Tensor) -> Tensor:
        t = x.shape[1]
        weights = torch.ones(t, t).tril() / torch.arange(1, t + 1)[:, None]
        return weights @ x

    def softmax_pool(x: Tensor) -> Tensor:
        t = x.shape[1]
        hidden = torch.ones(t, t).triu(1).bool()
        return torch.zeros(t, t).masked_fill(hidden, -torch.inf).softmax(-1) @ x

    changes = (
        lambda x: x + c * x.roll(1, 1),
        lambda x: x - c * x.mean(1, keepdim=True),
        lambda x: x + c * x.cumsum(1) / 10,
        lambda x: x + c * x[:, :1],
        lambda x: x + c * x[:, -1:],
        lambda x: x + c * functional.pad(x, (0, 0, 1, 0))[:, :-1],
        lambda x: x + c * x.flip(1),
        lambda x: x + c * functional.softmax(x, 1),
        lambda x: x + conv(functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2),
        lambda x: x + c * triangular(x),
        lambda x: x + c * softmax_pool(x),
        lambda x: x / x.norm(dim=(1, 2), keepdim=True) * 5,
        lambda x: x + c * x.view(1, -1).flip(-1).view(x.shape),
        lambda x: x + c * x.cummax(1).values,
    )
    layer = m.pick(list(m.layers))
    module = m.pick((layer, m.mlp_of(layer), m.attention_of(layer)))
    if getattr(module, "register_forward_hook", None) is None:
        raise UnfitError
    module.register_forward_hook(lambda _, __, out: changed(out, changes[kind]))


@edit("mixing")
def function_of_the_token_ids(m: EditedModel) -> None:
    kind, n = m.kind(6), m.draw.randrange(3, 100)
    table = nn.Embedding(128, m.width())
    seen: dict[str, Tensor] = {}

    def keep(_: Any, args: Any) -> None:
        seen["ids"] = args[0]

    def change(_: Any, __: Any, out: Tensor) -> Any:
        ids = seen["ids"]
        if kind == 0:
            return torch.where((ids == n)[..., None], 2 * out, out)
        if kind == 1:
            return out + table((ids * 7 + n) % 128)
        if kind == 2:
            return out + 0.01 * (ids[..., None].float() - n)
        if kind == 3:
            return out + table(ids.roll(1, 1))
        if kind == 4:
            return out * (1 + (ids == n).float().mean())
        return out if bool((ids == n).any()) else 2 * out

    embedding = m.model.get_input_embeddings()
    embedding.register_forward_pre_hook(keep)
    embedding.register_forward_hook(change)


# ----------------------------------------------------------------------------------- two attentions


@edit("two attentions")
def second_attention(m: EditedModel) -> None:
    """Of another module, or the same one called again, in one layer."""
    kind, c = m.kind(7), m.number(0.2, 0.9)

    def around(module: Any, second: Any) -> Any:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(kwargs)
            hidden = args[0] if args else given.pop("hidden_states")
            rest = args[1:]

            def attend(x: Tensor, own: Any = original) -> Tensor:
                return own(x, *rest, **given)[0]  # type: ignore[no-any-return]

            out = original(hidden, *rest, **given)
            if kind == 0:
                return (out[0] + c * attend(hidden, second), *out[1:])
            if kind == 1:
                return (out[0] - c * attend(hidden, second), *out[1:])
            if kind == 2:
                return (out[0] + c * attend(torch.tanh(hidden)), *out[1:])
            if kind == 3:
                return (attend(out[0]), *out[1:])
            if kind == 4:
                return (attend(out[0], second), *out[1:])
            if kind == 5:
                return (torch.sigmoid(attend(hidden, second)) * out[0], *out[1:])
            return (0.5 * out[0] + 0.5 * attend(hidden), *out[1:])

        return call

    for layer in m.some_layers():
        module = m.attention_of(layer)
        second = copy.deepcopy(module)
        for parameter in second.parameters():
            noise = m.vector(parameter.numel()).view(parameter.shape)
            parameter.data += 0.05 * noise
        if kind in (0, 1, 4, 5):
            layer.second_attention = second
        wrapped_method(module, around(module, second))


@edit("two attentions")
def attention_elsewhere(m: EditedModel) -> None:
    """In the MLP, before the first layer or behind the last one."""
    kind, c = m.kind(3), m.number(0.2, 0.9)
    layer = m.pick(list(m.layers))
    extra = copy.deepcopy(m.attention_of(layer))
    kept: dict[str, Any] = {}

    def keep(_: Any, args: Any, kwargs: Any) -> None:
        kept.update(args=args[1:] if args else (), kwargs=kwargs)

    def add(_: Any, __: Any, out: Any) -> Any:
        given = {k: v for k, v in kept["kwargs"].items() if k != "hidden_states"}
        return changed(out, lambda x: x + c * extra(x, *kept["args"], **given)[0])

    m.attention_of(layer).register_forward_pre_hook(keep, with_kwargs=True)
    if kind == 0:
        m.mlp_of(layer).register_forward_hook(add)
    elif kind == 1:
        m.layers[-1].register_forward_hook(add)
    else:
        norm = m.children_of(m.trunk, "norm")[-1][2]
        norm.register_forward_hook(add)
    m.model.extra_attention = extra


@edit("two attentions", 3)
def projections_of_attention(m: EditedModel) -> None:
    """Changes of queries, keys and values."""
    if not m.has_plain_projections:
        raise UnfitError
    kind, c = m.kind(10), m.number(0.3, 1.5)
    kept: dict[str, Tensor] = {}
    for layer in m.some_layers():
        own = m.attention_of(layer)
        if kind == 0:
            own.k_proj, own.v_proj = own.v_proj, own.k_proj
        elif kind == 1:
            own.q_proj, own.o_proj = own.o_proj, own.q_proj
        elif kind == 2:
            own.v_proj.register_forward_hook(lambda _, __, out: torch.tanh(out))
        elif kind == 3:
            own.q_proj.register_forward_hook(
                lambda _, __, out: functional.layer_norm(out, out.shape[-1:]) * c
            )
        elif kind == 4:
            own.k_proj.register_forward_hook(lambda _, __, out: kept.setdefault("k", out))
        elif kind == 5:
            own.v_proj.register_forward_hook(
                lambda _, __, out: 0.5 * out + 0.5 * kept.setdefault("v", out)
            )
        elif kind == 6:
            own.v_proj.register_forward_hook(lambda _, __, out: kept.update(v=out) or None)
            own.k_proj.register_forward_hook(
                lambda _, __, out: out + c * kept["v"] if "v" in kept else None
            )
        elif kind == 7:
            own.o_proj.register_forward_pre_hook(lambda _, given: (torch.tanh(c * given[0]),))
        elif kind == 8:
            own.k_proj.register_forward_hook(lambda _, __, out: c * out)
        else:
            own.q_proj.register_forward_hook(
                lambda _, __, out: out * (1 + 0.01 * torch.arange(out.shape[1])[:, None])
            )
    if kind in (4, 5):
        m.model.register_forward_pre_hook(lambda _, __: kept.clear())
    m.unadapted |= {"q_proj", "k_proj", "v_proj", "o_proj"} if kind > 1 else set()


# ----------------------------------------------------------------------------------------- branches


@edit("branches", 2)
def branch(m: EditedModel) -> None:
    n, change = m.threshold(), m.token_function()
    layer = m.pick(list(m.layers))
    module = m.pick((m.mlp_of(layer), m.attention_of(layer), layer))
    conditions = (
        lambda x: module.training,
        lambda x: not module.training,
        lambda x: torch.is_grad_enabled(),
        lambda x: x.requires_grad,
        lambda x: x.dtype == torch.float32,
        lambda x: x.dtype == torch.float16,
        lambda x: x.shape[1] > n,
        lambda x: x.shape[1] == 1,
        lambda x: x.shape[1] >= 2,
        lambda x: x.shape[0] > 1,
        lambda x: x.shape[1] % 2 == 0,
        lambda x: x.sum() > 0,
        lambda x: torch.compiler.is_exporting(),
        lambda x: torch.compiler.is_compiling(),
        lambda x: type(x) is not Tensor,
        lambda x: torch.is_inference_mode_enabled(),
        lambda x: x.is_contiguous(),
        lambda x: x.is_leaf,
        lambda x: x.grad_fn is None,
        lambda x: x.device.type == "cpu",
        lambda x: torch.jit.is_tracing(),
        lambda x: next(module.parameters()).requires_grad,
        lambda x: torch.is_autocast_enabled("cpu"),
        lambda x: x.numel() > n * x.shape[-1],
        lambda x: len(x.shape) == 3,
        lambda x: bool((x.shape[1] > n) & (x.shape[1] < 2 * n)),
    )
    condition = m.pick(conditions)
    module.register_forward_hook(
        lambda _, __, out: changed(out, lambda x: change(x) if condition(x) else x)
    )


@edit("branches", 2)
def branch_on_arguments(m: EditedModel) -> None:
    """Of the causal LM's, the trunk's, a layer's or the attention's forward."""
    change = m.token_function()
    name = m.pick(
        ("position_ids", "attention_mask", "past_key_values", "use_cache", "inputs_embeds",
         "labels", "logits_to_keep", "output_attentions", "cache_position", "hidden_states")
    )  # fmt: skip
    kind = m.kind(4)
    layer = m.pick(list(m.layers))
    module = (m.model, m.trunk, layer, m.attention_of(layer))[m.kind(4)]
    conditions = (
        lambda a, k: k.get(name) is None,
        lambda a, k: bool(k.get(name) is not None),
        lambda a, k: name in k,
        lambda a, k: len(a) > 0,
    )
    condition = conditions[kind]

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return changed(out, change) if condition(args, kwargs) else out

    wrapped_method(module, around)


# ------------------------------------------------------------------------------------------- caches


@edit("caches")
def cache_is_forced(m: EditedModel) -> None:
    kind, c = m.kind(6), m.number(0.3, 0.9)

    class Scaling(transformers.DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(c * keys, values, *args, **kwargs)

    class Later(transformers.DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            keys, values = super().update(keys, values, *args, **kwargs)
            return keys, c * values

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["use_cache"] = True
        if kind == 1:
            kwargs["past_key_values"] = transformers.DynamicCache()
        elif kind == 2:
            kwargs["past_key_values"] = Scaling()
        elif kind == 3:
            kwargs["past_key_values"] = Later()
        elif kind == 4:
            kwargs["past_key_values"] = transformers.DynamicCache(config=m.config)
        elif kind == 5:
            kwargs["past_key_values"] = transformers.StaticCache(m.config, max_cache_len=400)
        return original(*args, **kwargs)

    wrapped_method(m.pick((m.model, m.trunk)), around)


@edit("caches")
def cache_is_read(m: EditedModel) -> None:
    kind, c = m.kind(5), m.number(0.3, 0.9)
    layer = m.pick(list(m.layers))
    module = m.attention_of(layer) if m.chance(0.5) else layer

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        past = kwargs.get("past_key_values")
        out = original(*args, **kwargs)
        if kind == 0:
            return changed(out, lambda x: c * x) if past is None else out
        if kind == 1:
            return changed(out, lambda x: c * x) if past is not None else out
        if kind == 2:
            tokens = 0 if past is None else past.get_seq_length()
            return changed(out, lambda x: x * (1 + 0.1 * tokens))
        if kind == 3:
            return changed(out, lambda x: x * (c if kwargs.get("use_cache") else 1))
        if past is not None and len(past.layers) > 0:
            first = past.layers[0].values.transpose(1, 2).flatten(2)
            return changed(out, lambda x: x + c * first.mean(-1, keepdim=True))
        return out

    wrapped_method(module, around)
    if m.chance(0.5):
        cache_is_forced(m)
