"""Edits of what a token attends to: masks, biases and scales of scores, and how they get there.

A rule is a function of the head, the query's and the key's position. It reaches the scores by one
of PyTorch's or transformers' ways: an attention function registered under a name, a patched
modeling file, the mask that a module is given, transformers' functions of masks, a buffer, or an
attention written out in the module.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.edited_model import (
    LONGEST,
    EditedModel,
    UnfitError,
    edit,
    wrapped_method,
)
from tests.support.score_rules import LEAST, Rule, drawn_rule

# -------------------------------------------------------------------------- attention functions


def repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def attention_function(m: EditedModel, rule: Rule) -> Callable[..., Any]:
    """An attention as transformers calls it, in some layers with a rule."""
    layers = {id(m.attention_of(layer)) for layer in m.some_layers()}
    reads_mask, plain = m.chance(0.5), Rule()

    def mine(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        key, value = (repeated(x, query.shape[1]) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.transpose(-1, -2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = (rule if id(module) in layers else plain)(scores)
        if attention_mask is not None and reads_mask:
            if attention_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attention_mask, LEAST)
            else:
                scores = scores + attention_mask
        weights = scores.softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    return mine


def _use(m: EditedModel, name: str) -> None:
    if not m.has_interface:
        raise UnfitError
    if m.chance(0.5):
        m.model.set_attn_implementation(name)
    else:
        m.config._attn_implementation = name


def _registered(m: EditedModel, name: str, function: Callable[..., Any]) -> None:
    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    before = dict(mapping)
    m.undo.callback(lambda: (mapping.clear(), mapping.update(before)))
    AttentionInterface.register(name, function)


@edit("attention functions", 2)
def custom_attention_function(m: EditedModel) -> None:
    name = m.pick(("mine", "my_attention", "windowed", "pcg_attention", "sdpa_mine"))
    _registered(m, name, attention_function(m, drawn_rule(m)))
    _use(m, name)


@edit("attention functions", 2)
def custom_attention_function_named_flash(m: EditedModel) -> None:
    name = m.pick(("my_flash_attention", "flash_attention_mine", "flash_attention_2_windowed"))
    _registered(m, name, attention_function(m, drawn_rule(m)))
    if not m.has_interface:
        raise UnfitError
    m.config._attn_implementation_internal = name


@edit("attention functions", 2)
def registered_over_sdpa(m: EditedModel) -> None:
    function = attention_function(m, drawn_rule(m))
    if not m.has_interface:
        raise UnfitError
    if m.chance(0.5):
        _registered(m, "sdpa", function)
    else:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = function
        m.undo.callback(ALL_ATTENTION_FUNCTIONS._local_mapping.pop, "sdpa", None)
    _use(m, "sdpa")


@edit("attention functions", 2)
def eager_attention_of_the_file(m: EditedModel) -> None:
    """Monkeypatched, as papers' repositories do."""
    home = sys.modules[type(m.model).__module__]
    if not hasattr(home, "eager_attention_forward") or not m.has_interface:
        raise UnfitError
    original = home.eager_attention_forward
    function = attention_function(m, drawn_rule(m))
    scale = m.number(0.3, 2)

    def scaled(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(module, scale * query, *args, **kwargs)

    m.set(home, "eager_attention_forward", scaled if m.chance(0.3) else function)
    _use(m, m.pick(("eager", "eager", "eager", "sdpa")))


def _windows_by_layer(m: EditedModel, windows: list[int]) -> Callable[[Any], Any]:
    """Let each attention have a window; returns the function that finds a module's."""
    kind, count = m.kind(8), [0]
    modules = [m.attention_of(layer) for layer in m.layers]
    by_id = {id(module): n for module, n in zip(modules, windows, strict=True)}
    m.model.register_forward_pre_hook(lambda _, __: count.__setitem__(0, 0))
    m.config.windows = windows
    for module, n in zip(modules, windows, strict=True):
        if kind == 6:
            module.register_buffer("own_window", torch.tensor(n), persistent=m.chance(0.5))
        elif kind > 3:
            module.own_window = torch.tensor(n) if kind == 5 else n

    def counted(_: Any) -> int:
        count[0] += 1
        return windows[(count[0] - 1) % len(windows)]

    finders = (
        lambda module: by_id[id(module)],
        lambda module: windows[module.layer_idx],
        counted,
        lambda module: m.config.windows[module.layer_idx],
    )
    return finders[kind] if kind < 4 else lambda module: module.own_window


def _window(n: Any) -> Rule:
    return Rule(visible=lambda _, query, key: query - key < n)


@edit("attention functions", 2)
def rule_by_layer(m: EditedModel) -> None:
    """Each layer has a window of its own, which it knows by one of many ways."""
    windows, carrier = [m.threshold() for _ in m.layers], m.kind(5)
    window_of = _windows_by_layer(m, windows)
    modules = [m.attention_of(layer) for layer in m.layers]

    def masked(n: Any, hidden: Tensor, kwargs: Any) -> Any:
        mask = _window(n)(torch.zeros(1, 1, hidden.shape[1], hidden.shape[1]))
        return {**kwargs, "attention_mask": mask}

    def by_hook(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return args, masked(window_of(module), hidden, kwargs)

    def mine(
        module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, scaling: Any = None, **__: Any
    ) -> Any:
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        scores = q @ k.transpose(-1, -2) * (scaling or q.shape[-1] ** -0.5)
        weights = _window(window_of(module))(scores).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    if carrier < 2:
        for module, n in zip(modules, windows, strict=True):
            # Functions of one code that differ in what code and closure do not show.
            def before(_: Any, args: Any, kwargs: Any, *, width: int = n) -> Any:
                hidden = args[0] if args else kwargs["hidden_states"]
                return args, masked(width, hidden, kwargs)

            module.register_forward_pre_hook(by_hook if carrier else before, with_kwargs=True)
    elif carrier == 2:
        original = type(modules[0]).forward

        def forward(self: Any, hidden: Any = None, *args: Any, **kwargs: Any) -> Any:
            hidden = kwargs.pop("hidden_states") if hidden is None else hidden
            return original(self, hidden, *args, **masked(window_of(self), hidden, kwargs))

        m.set(type(modules[0]), "forward", forward)
    else:
        _registered(m, "by_layer", mine)
        _use(m, "by_layer")


@edit("attention functions")
def keywords_for_attention(m: EditedModel) -> None:
    """Keywords that transformers hands on, and that its functions read or ignore."""
    n, c = m.threshold(), m.number(0.5, 3)
    name, value = m.draw.choice(
        (("sliding_window", n), ("softcap", c), ("is_causal", False), ("s_aux", None),
         ("attention_sink", True), ("position_bias", None), ("use_cache", True))
    )  # fmt: skip
    m.drawn.append(name)

    def change(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, name: value}

    for layer in m.some_layers():
        (layer if m.chance(0.4) else m.attention_of(layer)).register_forward_pre_hook(
            change, with_kwargs=True
        )


@edit("attention functions")
def configuration_of_a_layers_own(m: EditedModel) -> None:
    """One attention has a copy of the configuration, with another implementation."""
    if not m.has_interface:
        raise UnfitError
    name = m.pick(("eager", "sdpa", "of_one_layer", "flash_attention_of_one_layer"))
    if "layer" in name:
        _registered(m, name, attention_function(m, drawn_rule(m)))
    own = m.attention_of(m.pick(list(m.layers)))
    own.config = copy.deepcopy(m.config)
    own.config._attn_implementation_internal = name


@edit("attention functions", 2)
def patched_function(m: EditedModel) -> None:
    """Of PyTorch or of the modeling file."""
    home = sys.modules[type(m.model).__module__]
    kind, c, n = m.kind(7), m.number(0.5, 2), m.threshold()
    rule = drawn_rule(m)

    def patch(holder: Any, name: str, around: Callable[..., Any]) -> None:
        if not hasattr(holder, name):
            raise UnfitError
        original = getattr(holder, name)
        m.set(holder, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    def attend(original: Any, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(c * q, k, *args, **kwargs)

    def masked(original: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kwargs: Any) -> Any:
        scores = q.new_zeros(1, q.shape[1], q.shape[2], k.shape[2])
        kwargs = {key: kwargs[key] for key in kwargs.keys() & {"scale", "enable_gqa"}}
        return original(q, k, v, attn_mask=rule(scores), **kwargs)

    def late(original: Any, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k = original(q, *args, **kwargs)
        place = torch.arange(q.shape[2])[:, None]
        return q * torch.where(place < n, 1.0, c), k

    if kind == 0:
        patch(functional, "scaled_dot_product_attention", attend)
    elif kind == 1:
        patch(functional, "scaled_dot_product_attention", masked)
    elif kind == 2:
        patch(functional, "softmax", lambda original, x, *a, **k: original(c * x, *a, **k))
    elif kind == 3:
        patch(home, "apply_rotary_pos_emb", late)
    elif kind == 4:
        patch(home, "repeat_kv", lambda original, x, n: c * original(x, n))
    elif kind == 5:
        patch(home, "apply_rotary_pos_emb", lambda _, q, k, *__, **___: (q, c * k))
    else:
        if not hasattr(home, "ALL_ATTENTION_FUNCTIONS"):
            raise UnfitError
        function = attention_function(m, rule)

        class Functions:
            def get_interface(self, *_: Any) -> Any:
                return function

        m.set(home, "ALL_ATTENTION_FUNCTIONS", Functions())


@edit("attention functions")
def function_that_calls_the_stock_one(m: EditedModel) -> None:
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    name, rule = m.pick(("wrapping", "my_flash_attention_3")), drawn_rule(m)
    q_scale, out_scale, kind = m.number(0.3, 2), m.number(0.3, 2), m.kind(4)

    def mine(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        if kind == 0:
            query = query * q_scale
        if kind == 1:
            shape = (*query.shape[:3], key.shape[2])
            mask = Rule(visible=rule.visible).allowed(query.new_zeros(shape))
        out, _ = stock(module, query, key, value, mask, **kwargs)
        return (out_scale * out if kind == 2 else out), None

    _registered(m, name, mine)
    _use(m, name)


# --------------------------------------------------------------------------- masks that are given


def _with_rule(rule: Rule, mask: Tensor | None, tokens: int, heads: int) -> Tensor:
    """The mask that a module is given, with a rule; all but bool ones are added to scores."""
    if mask is None:
        mask = Rule()(torch.zeros(1, 1, tokens, tokens))
    if mask.dtype == torch.bool:
        return mask & rule.allowed(torch.zeros(1, heads, tokens, tokens), is_causal=False)
    mask = mask[..., :tokens, :tokens]
    addend = rule.addend(torch.zeros(1, heads, *mask.shape[-2:]))
    return torch.maximum(mask + addend, torch.full_like(addend, LEAST))


def _needs_heads(rule: Rule) -> bool:
    made = rule.addend(torch.zeros(1, 3, 40, 40))
    return not bool((made == made[:, :1]).all())


@edit("masks that are given", 2)
def mask_in_a_hook(m: EditedModel) -> None:
    """Of the attention, or of the layer, before it is called."""
    drawn, by_argument = drawn_rule(m), m.chance(0.4)
    heads = m.config.num_attention_heads if _needs_heads(drawn) else 1

    def change(_: Any, args: Any, kwargs: Any) -> Any:
        ids = kwargs.get("position_ids")
        rule = replace(drawn, at=ids[0]) if by_argument and ids is not None else drawn
        args, kwargs = list(args), dict(kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        # The blocks of some architectures are given their mask by place.
        place = next(
            (i for i, x in enumerate(args) if isinstance(x, Tensor) and x.dim() == 4), None
        )
        mask = kwargs.get("attention_mask") if place is None else args[place]
        mask = _with_rule(rule, mask, hidden.shape[1], heads)
        if place is None:
            kwargs["attention_mask"] = mask
        else:
            args[place] = mask
        return tuple(args), kwargs

    for layer in m.some_layers():
        module = layer if m.chance(0.3) else m.attention_of(layer)
        module.register_forward_pre_hook(change, with_kwargs=True)


@edit("masks that are given")
def mask_in_a_wrapped_forward(m: EditedModel) -> None:
    rule = drawn_rule(m)
    heads = m.config.num_attention_heads if _needs_heads(rule) else 1

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        mask = kwargs.get("attention_mask")
        kwargs["attention_mask"] = _with_rule(rule, mask, hidden.shape[1], heads)
        return original(*args, **kwargs)

    for layer in m.some_layers():
        wrapped_method(m.attention_of(layer), around)


@edit("masks that are given")
def mask_given_to_the_model(m: EditedModel) -> None:
    """A mask [1, 1, T, T] that the causal LM's forward makes."""
    rule = drawn_rule(m)
    is_bool = m.chance(0.5)

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        zeros = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        mask = rule.allowed(zeros) if is_bool else rule(zeros)
        return original(*args, **{**kwargs, "attention_mask": mask})

    if _needs_heads(rule):
        raise UnfitError
    wrapped_method(m.model, around)


@edit("masks that are given")
def padding_given_to_the_model(m: EditedModel) -> None:
    """A mask [1, T] that hides some keys."""
    n, w, kind = m.threshold(), m.draw.randint(1, 9), m.kind(4)

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        place = torch.arange(ids.shape[1])[None]
        hidden = (
            (place >= n) & (place < n + w),
            place < 0,
            (place % (n + 1)) == n,
            (ids == 7) & (place > 0),
        )[kind]
        return original(*args, **{**kwargs, "attention_mask": (~hidden).long()})

    wrapped_method(m.pick((m.model, m.trunk)), around)


@edit("masks that are given")
def positions_given_to_the_model(m: EditedModel) -> None:
    """transformers finds packed sequences where they begin again."""
    n, kind = m.threshold(), m.kind(6)

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        place = torch.arange(ids.shape[1])[None]
        given = (
            place % n,
            place.clamp(max=n),
            place + n % 50,
            place // 2,
            torch.where(place < n, place, place - n),
            place * 0,
        )[kind]
        return original(*args, **{**kwargs, "position_ids": given})

    if "position_ids" not in inspect.signature(m.trunk.forward).parameters:
        raise UnfitError
    wrapped_method(m.pick((m.model, m.trunk)), around)


@edit("masks that are given")
def mask_from_a_buffer(m: EditedModel) -> None:
    rule = drawn_rule(m)
    heads = m.config.num_attention_heads if _needs_heads(rule) else 1
    size = m.pick((LONGEST + 9, 520))
    table = rule(torch.zeros(1, heads, size, size))
    persistent = m.chance(0.5)

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        tokens, mask = hidden.shape[1], kwargs.get("attention_mask")
        own = module.pattern[..., :tokens, :tokens]
        if mask is not None and mask.dtype == torch.bool:
            own = mask & (own > LEAST / 2)
        return args, {**kwargs, "attention_mask": own}

    for layer in m.some_layers():
        module = m.attention_of(layer)
        module.register_buffer("pattern", table, persistent=persistent)
        module.register_forward_pre_hook(change, with_kwargs=True)


@edit("masks that are given")
def function_of_transformers_masks(m: EditedModel) -> None:
    """or_mask_function and and_mask_function of create_causal_mask."""
    home = sys.modules[type(m.model).__module__]
    names = [name for name in vars(home) if name.startswith("create_") and "causal" in name]
    if not names:
        raise UnfitError
    rule = drawn_rule(m)
    if rule.bias is not None or rule.scale is not None or _needs_heads(rule):
        raise UnfitError
    h = torch.zeros((), dtype=torch.long)
    if rule.later is not None:
        later = rule.later
        keywords = {"or_mask_function": lambda b, _, q, k: later(h, q, k)}
    else:
        assert rule.visible is not None
        visible = rule.visible
        keywords = {"and_mask_function": lambda b, _, q, k: visible(h, q, k)}
    for name in m.some(names):
        original = getattr(home, name)

        def made(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            return _original(*args, **{**kwargs, **keywords})

        m.set(home, name, made)


@edit("masks that are given")
def replaced_mask_interface(m: EditedModel) -> None:
    """The function of masks that belongs to the attention's name."""
    name = m.config._attn_implementation
    mapping = AttentionMaskInterface._global_mapping
    if name not in mapping:
        raise UnfitError
    before, rule = dict(mapping), drawn_rule(m)
    original = mapping[name]
    if rule.bias is not None or rule.scale is not None or _needs_heads(rule):
        raise UnfitError
    m.undo.callback(lambda: (mapping.clear(), mapping.update(before)))

    def mine(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **{**kwargs, "allow_is_causal_skip": False})
        if made is None:
            return None
        allowed = rule.allowed(made, is_causal=False)
        return made & allowed if made.dtype == torch.bool else made.masked_fill(~allowed, LEAST)

    AttentionMaskInterface.register(name, mine)


@edit("masks that are given")
def replaced_causal_mask(m: EditedModel) -> None:
    """The modeling file's create_causal_mask makes a tensor of its own."""
    home = sys.modules[type(m.model).__module__]
    if not hasattr(home, "create_causal_mask"):
        raise UnfitError
    rule = drawn_rule(m)
    if _needs_heads(rule):
        raise UnfitError
    is_bool = m.chance(0.3) and m.config._attn_implementation == "sdpa" and m.has_interface

    def mine(*_: Any, inputs_embeds: Tensor, **__: Any) -> Tensor:
        tokens = inputs_embeds.shape[1]
        zeros = inputs_embeds.new_zeros(1, 1, tokens, tokens)
        return rule.allowed(zeros) if is_bool else rule(zeros)

    m.set(home, "create_causal_mask", mine)


# ------------------------------------------------------------------- attention that is written out


@edit("written attention", 2)
def attention_written_out(m: EditedModel) -> None:
    if not m.has_plain_projections:
        raise UnfitError
    home = sys.modules[type(m.attention_of(m.layers[0])).__module__]
    rotary, rule = home.apply_rotary_pos_emb, drawn_rule(m)
    kind, order = m.kind(6), m.chance(0.5)

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (linear(hidden_states).view(shape).transpose(1, 2) for linear in projections)
        q, k = rotary(q, k, *kwargs["position_embeddings"])
        heads, tokens = q.shape[1], q.shape[2]
        k, v = repeated(k, heads), repeated(v, heads)
        zeros = q.new_zeros(1, heads, tokens, tokens)
        if kind == 0:
            mask = rule(zeros)
            out = functional.scaled_dot_product_attention(q, k, v, mask, scale=self.scaling)
        elif kind == 1:
            allowed = rule.allowed(zeros)
            out = functional.scaled_dot_product_attention(q, k, v, allowed, scale=self.scaling)
        elif kind == 2:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scaling
            out = torch.einsum("bhqk,bhkd->bhqd", rule(scores).softmax(-1), v)
        elif kind == 3:
            scores = rule((q * self.scaling) @ k.transpose(2, 3))
            weights = scores.float().softmax(-1).to(v.dtype)
            out = functional.dropout(weights, 0.1, training=False) @ v
        elif kind == 4:
            scores = rule(q @ k.transpose(2, 3) / self.head_dim**0.5)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            out = (weights / weights.sum(-1, keepdim=True)) @ v
        else:
            scores = rule(
                torch.baddbmm(zeros[0], q[0], k[0].transpose(1, 2), beta=0, alpha=self.scaling)[
                    None
                ]
            )
            out = torch.bmm(scores.softmax(-1)[0], v[0])[None]
        merged = out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(merged), None

    def around(module: Any) -> Any:
        def call(_: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(kwargs)
            hidden = args[0] if args else given.pop("hidden_states")
            return forward(module, hidden, **given)

        return call

    own = [layer for layer in m.layers if hasattr(m.attention_of(layer), "q_proj")]
    for layer in m.some(own if order else own[:1]):
        wrapped_method(m.attention_of(layer), around(m.attention_of(layer)))


@edit("written attention", families=("gptj",))
def own_method_of_attention(m: EditedModel) -> None:
    """GPT-J's `_attn`."""
    attention = m.attention_of(m.layers[0])
    if not hasattr(attention, "_attn"):
        raise UnfitError
    rule = drawn_rule(m)
    for layer in m.some_layers():
        own = m.attention_of(layer)

        def _attn(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
            weights = rule(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
            return weights @ v, weights

        own._attn = _attn


@edit("written attention")
def another_kind_of_attention(m: EditedModel) -> None:
    """Attention that is no softmax over keys, or that has something beside it."""
    if not m.has_interface:
        raise UnfitError
    kind, c, n = m.kind(13), m.number(0.2, 2), m.threshold()

    def mine(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: Any = None, **_: Any
    ) -> Any:
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        scores = q @ k.transpose(-1, -2) * (scaling or q.shape[-1] ** -0.5)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        hidden = scores.masked_fill(~causal, LEAST)
        if kind == 0:
            weights = torch.sigmoid(scores) * causal
        elif kind == 1:
            weights = torch.relu(scores) * causal
        elif kind == 2:
            weights = hidden.softmax(-1) * c
        elif kind == 3:
            total = hidden.exp().sum(-1, keepdim=True) + c
            weights = hidden.exp() / total
        elif kind == 4:
            weights = (c * torch.tanh(scores / c)).masked_fill(~causal, LEAST).softmax(-1)
        elif kind == 5:
            weights = hidden.softmax(-1)
            weights = weights - weights.mean(-1, keepdim=True) * c
        elif kind == 6:
            weights = hidden.softmax(-1).masked_fill(torch.eye(len(causal), dtype=torch.bool), 0)
        elif kind == 7:
            weights = torch.cat([hidden, torch.full_like(hidden[..., :1], c)], -1).softmax(-1)[
                ..., :-1
            ]
        elif kind == 8:
            weights = hidden.softmax(-2)
        elif kind == 9:
            weights = hidden.masked_fill(scores < -0.3 * c, LEAST).softmax(-1)
        elif kind == 10:
            weights = hidden.clamp(max=0.3 * c).softmax(-1)
        elif kind == 11:
            gate = torch.sigmoid(k.mean(-1)).cumsum(-1)
            weights = (hidden + 0.1 * (gate[..., None, :] - gate[..., :, None])).softmax(-1)
        else:
            kept = hidden.topk(min(n, hidden.shape[-1]), -1).values[..., -1:]
            weights = hidden.masked_fill(hidden < kept, LEAST).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    _registered(m, "another", mine)
    _use(m, "another")
