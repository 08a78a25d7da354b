"""Edits of layers, attributes, positions, branches and caches, and of how tokens are mixed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from tests.support.edited_model import (
    LONGEST,
    Change,
    EditedModel,
    UnfitError,
    changed,
    edit,
    hidden_of,
    wrapped_method,
)
from tests.support.oracle import CACHE

# ------------------------------------------------------------------------------------------- layers


@edit(9)
def list_of_layers(m: EditedModel) -> None:
    """Another order, fewer layers, a layer twice, or a list of another class."""
    layers, kinds = list(m.layers), getattr(m.config, "layer_types", None)
    order, kind = list(range(len(layers))), m.kind(5)
    if kind == 0:
        m.draw.shuffle(order)
    elif kind == 1:
        order = m.some(order)
    elif kind < 4:
        place = m.pick(order)
        if kind == 3:
            layers.append(copy.deepcopy(layers[place]))
            kinds = [*kinds, kinds[place]] if kinds else kinds
        order.insert(m.pick(order), len(layers) - 1 if kind == 3 else place)

    class Reversed(nn.ModuleList):
        def __iter__(self) -> Any:
            return reversed(list(super().__iter__()))

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            return Reversed(list(found)[::-1]) if isinstance(index, slice) else found

    m.layers = (Reversed if kind == 4 else nn.ModuleList)(layers[i] for i in order)
    if m.chance(0.8):
        name = m.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        setattr(m.config, name, len(order))
        if kinds and m.chance(0.7):
            m.config.layer_types = [kinds[i] for i in order]
    if m.chance(0.4):
        for i, layer in enumerate(m.layers):
            for module in layer.modules():
                for name in {"layer_idx", "layer_id", "layer_number"} & vars(module).keys():
                    setattr(module, name, i)


@edit(2)
def shared_modules(m: EditedModel) -> None:
    """Layers share activations, parameters, an MLP, an attention or a linear module."""
    kind, first = m.kind(4), m.layers[0]
    part_of = (m.mlp_of, m.attention_of)[kind % 2]
    name = next(n for n, c in first.named_children() if c is part_of(first))
    for layer in list(m.layers)[1:]:
        if kind < 2:
            setattr(layer, name, part_of(first))
        elif kind == 2:
            for holder, own, _ in m.activations_of(layer):
                setattr(holder, own, m.activations_of(first)[0][2])
        else:
            for path, parameter in first.named_parameters():
                holder_path, _, own = path.rpartition(".")
                setattr(layer.get_submodule(holder_path), own, parameter)


@edit(4)
def layer_that_runs_otherwise(m: EditedModel) -> None:
    """A layer is skipped, runs twice or in a wrapper, or has a number that others have not."""
    kind, c, layers = m.kind(7), m.number(0.1, 0.9), list(m.layers)

    def twice(original: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        out = original(hidden, *args[1:], **kwargs)
        return original(out if isinstance(out, Tensor) else out[0], *args[1:], **kwargs)

    class Wrapped(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.attention_type = getattr(inner, "attention_type", None)
            if hasattr(inner, "layer_type"):
                self.layer_type = inner.layer_type

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return changed(self.inner(*args, **kwargs), lambda x: x * (1 + c))

    def scaled(module: Any) -> Any:
        return lambda original, *a, **k: changed(original(*a, **k), lambda x: x * module.own_scale)

    if kind == 0:
        wrapped_method(m.pick(layers), lambda _, *a, **k: hidden_of(a, k))
    elif kind == 1:
        wrapped_method(m.pick(layers), twice)
    elif kind == 2:
        chosen = {id(layer) for layer in m.some(layers)}
        m.layers = nn.ModuleList(Wrapped(x) if id(x) in chosen else x for x in layers)
    else:
        for i, layer in enumerate(layers):
            module, value = m.mlp_of(layer), torch.tensor(1 + c * i)
            if kind == 3:
                module.own_scale = 1 + c * i
            elif kind == 4:
                module.own_scale = value
            elif kind == 5:
                module.register_buffer("own_scale", value, persistent=m.chance(0.5))
            else:
                module.own_scale = nn.Parameter(value + 0.2 * m.vector(m.width()))
            wrapped_method(module, scaled(module))


# --------------------------------------------------------------------------- attributes and buffers


@edit(4)
def attribute_of_attention(m: EditedModel) -> None:
    """Attributes, some of which the forward reads."""
    n, c = m.threshold(), m.number(0.05, 0.6)
    values: dict[str, Any] = m.pick(
        (
            {"sliding_window": n},
            dict.fromkeys(("scaling", "scale_attn", "inv_norm_factor", "softmax_scale"), c),
            {"layer_idx": m.kind(3)},
            {"is_causal": False},
            {"attention_dropout": c},
            {"window": n, "window_size": n, "attention_type": "sliding_attention"},
            {"attn_logit_softcapping": m.number(1, 5)},
            {"softcap": 3.0, "s_aux": None, "sinks": None},
        )
    )
    for layer in m.some_layers():
        own = m.attention_of(layer)
        for name, value in values.items():
            if name != "attention_dropout" or not isinstance(getattr(own, name, c), nn.Module):
                setattr(own, name, value)
        if "window" in values:
            layer.attention_type, layer.is_sliding = "sliding_attention", True


@edit(4)
def config_changed_after_building(m: EditedModel) -> None:
    n = m.threshold()
    values: dict[str, Any] = {
        "sliding_window": n, "attention_dropout": 0.5, "rms_norm_eps": 0.5, "hidden_act": "relu",
        "output_attentions": True, "output_hidden_states": True, "return_dict": False,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "attention_bias": True,
        "is_causal": False, "tie_word_embeddings": True, "max_position_embeddings": 17,
        "vocab_size": 50, "use_sliding_window": True, "attention_chunk_size": n,
        "num_key_value_heads": 1, "rope_theta": 17.0, "logits_scaling": 3.0,
        "attention_multiplier": 0.7, "partial_rotary_factor": 0.3, "alibi": True,
        "layer_types": ["sliding_attention"] * len(m.layers), "scale_attn_weights": False,
        "is_decoder": False, "_attn_implementation": m.pick(("eager", "sdpa")), "its_own": n,
    }  # fmt: skip
    present = [name for name in values if hasattr(m.config, name)]
    name = m.pick(present if m.chance(0.8) else list(values))
    setattr(m.config, name, values[name])


@edit(2)
def attribute_that_nothing_reads(m: EditedModel) -> None:
    module, kind = m.pick((m.part(), m.model)), m.kind(4)
    if kind == 0:
        module.register_buffer("unread", m.pick((None, torch.arange(9))), persistent=m.chance(0.5))
    elif kind == 1:
        module.unread = nn.Parameter(torch.ones(3, 5))
    elif kind == 2:
        module.unread = nn.Linear(3, 5)
    else:
        module.window, module.note = 7, {"a": [1, 2, object()]}


@edit()
def buffer_that_is_written(m: EditedModel) -> None:
    """A count of calls: the module is no function of its inputs."""
    module = m.mlp_of(m.pick(list(m.layers)))
    module.register_buffer("calls", torch.zeros(()), persistent=m.chance(0.5))
    is_read = m.chance(0.5)

    def count(own: Any, _: Any, out: Tensor) -> Any:
        own.calls += 1
        return out * (1 + 0.3 * own.calls) if is_read else None

    module.register_forward_hook(count)


# ---------------------------------------------------------------------------------------- positions


@edit(4)
def rotary_tables(m: EditedModel) -> None:
    """Of the model, or of some attentions."""
    n, c, kind = m.threshold(), m.number(0.3, 2), m.kind(12)
    rotary = getattr(m.trunk, "rotary_emb", None)
    if rotary is None:
        raise UnfitError
    places: tuple[Change, ...] = (
        lambda p: p.clamp(max=n),
        lambda p: p % n,
        lambda p: p * 2 + 1,
        lambda p: p.float() * c,
        lambda p: torch.where(p < n, p, n + (p - n) // 2),
        lambda p: p.shape[1] - 1 - p,
    )
    tables = (
        lambda cos, sin: (cos * 0 + 1, sin * 0),
        lambda cos, sin: (cos, -sin),
        lambda cos, sin: (c * cos, c * sin),
    )

    def around(original: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(x, places[kind](position_ids), *args, **kwargs)

    def change(_: Any, args: Any, kwargs: Any) -> Any:
        made = tables[kind - 9](*kwargs["position_embeddings"])
        return args, {**kwargs, "position_embeddings": made}

    if kind < 6:
        wrapped_method(rotary, around)
    elif kind == 6:
        rotary.inv_freq = rotary.inv_freq * c
    elif kind == 7:
        rotary.attention_scaling = c
    elif kind == 8:
        rotary.register_forward_hook(
            lambda _, __, out: (out[0] * c, out[1]) if isinstance(out, tuple) else out
        )
    else:
        m.needs_plain_projections()
        for own in m.some(m.attentions):
            own.register_forward_pre_hook(change, with_kwargs=True)


@edit()
def function_of_the_position(m: EditedModel) -> None:
    n, kind, source = m.threshold(), m.kind(7), m.kind(3)
    table = nn.Embedding(LONGEST + 9, m.width())
    table.weight.data.copy_(0.3 * m.vector(*table.weight.shape))
    seen: dict[str, Tensor] = {}

    def keep(_: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("position_ids") is not None:
            seen["ids"] = kwargs["position_ids"]

    def change(x: Tensor) -> Tensor:
        if source == 0 and "ids" in seen:
            p = seen["ids"][..., None]
        elif source == 1:
            p = (torch.ones(x.shape[:2], dtype=torch.long).cumsum(1) - 1)[..., None]
        else:
            p = torch.arange(x.shape[1])[None, :, None]
        if kind == 0 and x.shape[-1] == m.width():
            return x + table(p[..., 0])
        changes = (
            lambda: x * (1 + 0.01 * p),
            lambda: torch.where(p < n, x, 0.5 * x),
            lambda: x * torch.log1p((p // n).float() + 1),
            lambda: torch.where(p == 0, torch.zeros_like(x), x),
            lambda: x + torch.sin(p * torch.arange(x.shape[-1])),
            lambda: x * (p + 1) / x.shape[1],
            lambda: torch.where(p == x.shape[1] - 1, 2 * x, x),
        )
        return changes[kind]()

    m.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    m.trunk.register_forward_pre_hook(keep, with_kwargs=True)
    m.site().register_forward_hook(lambda _, __, out: changed(out, change))


# ------------------------------------------------------------------------------------------- mixing


@edit()
def tokens_are_mixed(m: EditedModel) -> None:
    """By something that is no attention."""
    c, width = m.number(0.2, 0.8), m.width()
    conv = nn.Conv1d(width, width, 3, groups=width)
    conv.weight.data.copy_(0.3 * m.vector(*conv.weight.shape))

    def mean(x: Tensor) -> Tensor:
        t = x.shape[1]
        return torch.ones(t, t).tril() / torch.arange(1, t + 1)[:, None] @ x

    def pool(x: Tensor) -> Tensor:
        t = x.shape[1]
        hidden = torch.ones(t, t).triu(1).bool()
        return torch.zeros(t, t).masked_fill(hidden, -torch.inf).softmax(-1) @ x

    changes: tuple[Change, ...] = (
        lambda x: x + c * x.roll(1, 1),
        lambda x: x - c * x.mean(1, keepdim=True),
        lambda x: x + c * x.cumsum(1) / 10,
        lambda x: x + c * x[:, :1],
        lambda x: x + c * x[:, -1:],
        lambda x: x + c * functional.pad(x, (0, 0, 1, 0))[:, :-1],
        lambda x: x + c * x.flip(1),
        lambda x: x + c * functional.softmax(x, 1),
        lambda x: x + conv(functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2),
        lambda x: x + c * mean(x),
        lambda x: x + c * pool(x),
        lambda x: x / x.norm(dim=(1, 2), keepdim=True) * 5,
        lambda x: x + c * x.view(1, -1).flip(-1).view(x.shape),
    )
    change = m.pick(changes)
    m.part().register_forward_hook(lambda _, __, out: changed(out, change))


@edit()
def function_of_the_token_ids(m: EditedModel) -> None:
    n, table, seen = m.draw.randrange(3, 100), nn.Embedding(128, m.width()), {}
    changes: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        lambda ids, out: torch.where((ids == n)[..., None], 2 * out, out),
        lambda ids, out: out + table((ids * 7 + n) % 128),
        lambda ids, out: out + 0.01 * (ids[..., None].float() - n),
        lambda ids, out: out + table(ids.roll(1, 1)),
        lambda ids, out: out * (1 + (ids == n).float().mean()),
        lambda ids, out: out if bool((ids == n).any()) else 2 * out,
    )
    change, own = m.pick(changes), m.model.get_input_embeddings()
    own.register_forward_pre_hook(lambda _, args: seen.update(ids=args[0]))
    own.register_forward_hook(lambda _, __, out: change(seen["ids"], out))


@edit(2)
def second_attention(m: EditedModel) -> None:
    """Of another module or of the first one again, in a layer, in an MLP or behind the layers."""
    kind, c = m.kind(7), m.number(0.2, 0.9)

    def around(module: Any, second: Any) -> Any:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(kwargs)
            hidden = args[0] if args else given.pop("hidden_states")

            def attend(x: Tensor, own: Any = original) -> Tensor:
                return own(x, *args[1:], **given)[0]  # type: ignore[no-any-return]

            out, *rest = original(hidden, *args[1:], **given)
            changes = (
                lambda: out + c * attend(hidden, second),
                lambda: attend(out, second),
                lambda: torch.sigmoid(attend(hidden, second)) * out,
                lambda: out + c * attend(torch.tanh(hidden)),
                lambda: attend(out),
            )
            return (changes[kind](), *rest)

        return call

    kept: dict[str, Any] = {}

    def keep(_: Any, args: Any, kwargs: Any) -> None:
        kept.update(args=args[1:], kwargs={**kwargs})

    for own in m.some(m.attentions)[: 1 if kind > 4 else None]:
        second = m.perturbed(copy.deepcopy(own))
        if kind < 3:
            own.second_attention = second
        if kind < 5:
            wrapped_method(own, around(own, second))
            continue

        def add(_: Any, __: Any, out: Any, second: Any = second) -> Any:
            given = {k: v for k, v in kept["kwargs"].items() if k != "hidden_states"}
            return changed(out, lambda x: x + c * second(x, *kept["args"], **given)[0])

        own.register_forward_pre_hook(keep, with_kwargs=True)
        place = m.mlp_of(m.layers[-1]) if kind == 5 else m.norms_of(m.trunk)[-1][2]
        place.register_forward_hook(add)
        m.model.extra_attention = second


@edit(3)
def projections_of_attention(m: EditedModel) -> None:
    """Changes of queries, keys and values."""
    m.needs_plain_projections()
    kind, c = m.kind(9), m.number(0.3, 1.5)
    kept: dict[str, Tensor] = {}

    def keep(_: Any, __: Any, out: Tensor) -> None:
        kept["v"] = out

    m.model.register_forward_pre_hook(lambda _, __: kept.clear())
    hooks: dict[int, tuple[str, Callable[[Tensor], Any]]] = {
        2: ("v_proj", torch.tanh),
        3: ("q_proj", lambda out: functional.layer_norm(out, out.shape[-1:]) * c),
        4: ("k_proj", lambda out: kept.setdefault("k", out)),
        5: ("v_proj", lambda out: 0.5 * out + 0.5 * kept.setdefault("v", out)),
        6: ("k_proj", lambda out: out + c * kept["v"] if "v" in kept else None),
        7: ("q_proj", lambda out: out * (1 + 0.01 * torch.arange(out.shape[1])[:, None])),
    }
    for own in m.some(m.attentions):
        if kind == 0:
            own.k_proj, own.v_proj = own.v_proj, own.k_proj
        elif kind == 1:
            own.q_proj, own.o_proj = own.o_proj, own.q_proj
        elif kind == 8:
            own.o_proj.register_forward_pre_hook(lambda _, given: (torch.tanh(c * given[0]),))
        else:
            if kind == 6:
                own.v_proj.register_forward_hook(keep)
            name, change = hooks[kind]
            getattr(own, name).register_forward_hook(lambda _, __, out, f=change: f(out))
    m.unadapted |= {"q_proj", "k_proj", "v_proj", "o_proj"} if kind > 1 else set()


# ------------------------------------------------------------------------------ branches and caches


@edit(2)
def branch(m: EditedModel) -> None:
    n, change, module = m.threshold(), m.token_function(), m.part()
    conditions: tuple[Callable[[Tensor], bool], ...] = (
        lambda x: module.training,
        lambda x: torch.is_grad_enabled(),
        lambda x: x.requires_grad,
        lambda x: x.dtype == torch.float32,
        lambda x: x.shape[1] > n,
        lambda x: x.shape[1] == 1,
        lambda x: x.shape[0] > 1,
        lambda x: x.shape[1] % 2 == 0,
        lambda x: bool(x.sum() > 0),
        lambda x: torch.compiler.is_exporting(),
        lambda x: torch.compiler.is_compiling(),
        lambda x: type(x) is not Tensor,
        lambda x: torch.is_inference_mode_enabled(),
        lambda x: x.is_contiguous(),
        lambda x: x.grad_fn is None,
        lambda x: x.device.type == "cpu",
        lambda x: torch.jit.is_tracing(),
        lambda x: next(module.parameters()).requires_grad,
        lambda x: torch.is_autocast_enabled("cpu"),
        lambda x: x.numel() > n * x.shape[-1],
        lambda x: bool((x.shape[1] > n) & (x.shape[1] < 2 * n)),
    )
    condition = m.pick(conditions)
    module.register_forward_hook(
        lambda _, __, out: changed(out, lambda x: change(x) if condition(x) else x)
    )


@edit(2)
def branch_on_arguments(m: EditedModel) -> None:
    """Of the causal LM's, the trunk's, a layer's or the attention's forward."""
    change, layer = m.token_function(), m.pick(list(m.layers))
    name = m.pick(
        ("position_ids", "attention_mask", CACHE, "use_cache", "inputs_embeds",
         "labels", "logits_to_keep", "output_attentions", "cache_position", "hidden_states")
    )  # fmt: skip
    condition = m.pick(
        (
            lambda a, k: k.get(name) is None,
            lambda a, k: name in k,
            lambda a, k: len(a) > 0,
        )
    )

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return changed(out, change) if condition(args, kwargs) else out

    wrapped_method(m.pick((m.model, m.trunk, layer, m.attention_of(layer))), around)


@edit(2)
def cache(m: EditedModel) -> None:
    """The model always has one, or a module reads it."""
    c, layer = m.number(0.3, 0.9), m.pick(list(m.layers))

    class Scaling(transformers.DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            keys, values = super().update(c * keys, values, *args, **kwargs)
            return keys, c * values

    make = m.pick(
        (
            None,
            transformers.DynamicCache,
            Scaling,
            lambda: transformers.StaticCache(m.config, max_cache_len=400),
        )
    )

    def forced(original: Any, *args: Any, **kwargs: Any) -> Any:
        if make is not None:
            kwargs[CACHE] = make()
        return original(*args, **{**kwargs, "use_cache": True})

    def read(original: Any, *args: Any, **kwargs: Any) -> Any:
        past = kwargs.get(CACHE)
        out = original(*args, **kwargs)
        if kind == 0 or past is None:
            return changed(out, lambda x: c * x) if past is None else out
        if kind == 1:
            return changed(out, lambda x: x * (1 + 0.1 * past.get_seq_length()))
        if len(past.layers) > 0:
            first = past.layers[0].values.transpose(1, 2).flatten(2)
            return changed(out, lambda x: x + c * first.mean(-1, keepdim=True))
        return out

    kind = m.kind(3)
    if m.chance(0.5):
        wrapped_method(m.pick((layer, m.attention_of(layer))), read)
    else:
        kind = 3
    if kind == 3 or m.chance(0.5):
        wrapped_method(m.pick((m.model, m.trunk)), forced)
