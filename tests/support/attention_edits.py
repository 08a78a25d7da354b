"""Edits of masks, biases and scales of scores, and of how they reach an attention.

A rule is a function of the head, the query's and the key's position. It reaches the scores through
a registered attention function, a patched modeling file, the mask among a module's arguments,
transformers' functions of masks, a buffer, or an attention written out in the module.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.edited_model import (
    LONGEST,
    EditedModel,
    UnfitError,
    edit,
    hidden_of,
    wrapped_method,
)

Positions = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of heads [H, 1, 1], queries [Q, 1] and keys [K]."""
LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Rule:
    """A change of scores.

    Attributes:
        visible: keys that a query sees under the causal mask; None for all.
        later: keys behind the query that it sees all the same; None for none.
        bias: added to the scores.
        scale: a factor on the scores.
    """

    visible: Positions | None = None
    later: Positions | None = None
    bias: Positions | None = None
    scale: Positions | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores [B, H, Q, K] with the rule and the causal mask."""
        place = _places(scores)
        if self.scale is not None:
            scores = scores * self.scale(*place)
        if self.bias is not None:
            scores = scores + self.bias(*place)
        return scores.masked_fill(~self.allowed(scores), LEAST)

    def allowed(self, scores: Tensor, is_causal: bool = True) -> Tensor:
        """The keys that may be seen, [1, H or 1, Q, K], bool."""
        h, q, k = _places(scores)
        seen = k <= q if is_causal else torch.ones_like(k <= q)
        if self.visible is not None:
            seen = seen & self.visible(h, q, k)
        if self.later is not None:
            seen = seen | self.later(h, q, k)
        return seen.reshape(1, -1, *scores.shape[-2:])

    def masked(self, mask: Tensor | None, tokens: int) -> Tensor:
        """A mask, or None for the causal one, with the rule's visible keys and its bias."""
        if mask is None:
            mask = Rule()(torch.zeros(1, 1, tokens, tokens))
        zeros = torch.zeros(1, 1, tokens, tokens)
        allowed = self.allowed(zeros, is_causal=False)
        if mask.dtype == torch.bool and self.bias is None:
            return mask & allowed
        if mask.dtype == torch.bool:
            mask = zeros.masked_fill(~mask, LEAST)
        bias = zeros if self.bias is None else self.bias(*_places(zeros))
        added = mask[..., :tokens, :tokens] + (bias + zeros).masked_fill(~allowed, LEAST)
        return added.clamp_min(LEAST)

    def needs_one_head(self) -> None:
        """Raise UnfitError where heads differ, or where a scale is no part of a mask."""
        made = self(torch.ones(1, 3, 40, 40))
        if self.scale is not None or not bool((made == made[:, :1]).all()):
            raise UnfitError


def _places(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads, queries, keys = scores.shape[-3:]
    return torch.arange(heads)[:, None, None], torch.arange(queries)[:, None], torch.arange(keys)


def supported_rule(m: EditedModel) -> Rule:
    """A causal mask with a window or a linear bias, written in one of many ways."""
    n, c = m.threshold(), m.number(0.02, 0.3)
    # Windows, some of whose numbers are not the window's.
    windows: tuple[Positions, ...] = (
        lambda h, q, k: (q - k) * (q - k) < n * n,
        lambda h, q, k: (q - k).float() / n < 1,
        lambda h, q, k: (q - k).clamp(min=0).float().sqrt() < math.sqrt(n - 0.5),
        lambda h, q, k: torch.relu(q - k - n + 1) == 0,
        lambda h, q, k: (q - k).clamp(max=n) != n,
        lambda h, q, k: ((q - k).clamp(min=0) >> n.bit_length()) == 0,
        lambda h, q, k: torch.exp((k - q).float() / n) > math.exp(-1 + 0.5 / n),
        lambda h, q, k: (torch.ones_like(q - k).cumsum(-1) - 1 - k) + q - k < n,
        lambda h, q, k: ((q - k) * 17 + 198) * 5 + 35 < (n * 17 + 198) * 5 + 34,
        lambda h, q, k: torch.isin(q - k, torch.arange(n)) | (k > q),
    )
    if m.chance(0.2):
        return Rule(visible=m.pick(windows))
    return m.pick(
        (
            Rule(visible=lambda h, q, k: q - k < n),
            Rule(visible=lambda h, q, k: k > q - n),
            Rule(bias=lambda h, q, k: -c * (q - k)),
            Rule(bias=lambda h, q, k: c * k * 2.0 ** -(h + 1)),
            Rule(bias=lambda h, q, k: torch.sin(c * q) + 0 * k),
            Rule(scale=lambda h, q, k: torch.full_like(q, 1, dtype=torch.float32) * c * 5),
            Rule(visible=lambda h, q, k: q - k < n, bias=lambda h, q, k: -c * (q - k)),
        )
    )


def other_rule(m: EditedModel) -> Rule:
    """A rule that turns at a position, a distance or a chunk, or that no kernel has."""
    n, w, c = m.threshold(), m.threshold(), m.number(0.02, 0.3)
    s, step = m.draw.randint(1, 5), m.draw.randint(2, 4)
    visible: tuple[Positions, ...] = (
        lambda h, q, k: q // n == k // n,
        lambda h, q, k: (k < s) | (q - k < n),
        lambda h, q, k: (q - k < n) | ((q - k) % step == 0),
        lambda h, q, k: q - k < n * (1 + h),
        lambda h, q, k: (q < w) | (q - k < n),
        lambda h, q, k: (2 * k >= q) | (q < n),
        lambda h, q, k: (k != n) | (q == k),
        lambda h, q, k: (q - k < n) | (q - k > n + w),
        lambda h, q, k: ((q - k) & (q - k - 1) == 0) | (q < n),
        lambda h, q, k: q - k < n + q // 2,
        lambda h, q, k: ((k * 7919) % 311 < 200) | (q - k < s),
        lambda h, q, k: (k + n >= q.shape[0]) | (q == k),
        lambda h, q, k: (q - k) * (q - k) != n,
        lambda h, q, k: torch.sin((q - k).float() / n) < 0.8,
        lambda h, q, k: ((q - k) * 6 + 92) * 6 + 94 != (n * 6 + 92) * 6 + 94,
        lambda h, q, k: (q - k) % 64 + (q - k) // 64 * 1000 != n % 64 + n // 64 * 1000,
    )
    bias: tuple[Positions, ...] = (
        lambda h, q, k: -c * (q - k).clamp(max=n),
        lambda h, q, k: -c * torch.log1p((q - k).clamp(min=0).float()),
        lambda h, q, k: -3.0 * (q - k >= n).float(),
        lambda h, q, k: -1e4 * (q - k >= n).float(),
        lambda h, q, k: (k == n).float() * 3 + 0 * q,
        lambda h, q, k: torch.where(q < n, 0.0, -c * (q - k)),
        lambda h, q, k: -c * (q - k) / q.shape[0],
        lambda h, q, k: -c * (q - k) * (1.0 if q.shape[0] > n else 2.0),
        lambda h, q, k: -1e-4 * c * ((q - k) * (q - k)).float(),
    )
    scale: tuple[Positions, ...] = (
        lambda h, q, k: (q + 1).clamp(min=n).float().log() / math.log(max(n, 2)),
        lambda h, q, k: torch.where(k < n, 1.0, 0.3),
        lambda h, q, k: torch.where(q - k < n, 1.0, 0.5),
        lambda h, q, k: 0.5 + 0.3 * h.float(),
        lambda h, q, k: torch.full_like(q, 1) * math.log(q.shape[0] + 2),
    )
    later: tuple[Positions, ...] = (
        lambda h, q, k: (k < n) & (q < n),
        lambda h, q, k: k - q == n,
        lambda h, q, k: (q >= n) & (k == q + 1),
    )
    kind = m.kind(9)
    if kind < 4:
        return Rule(visible=m.pick(visible))
    if kind < 6:
        return Rule(bias=m.pick(bias))
    if kind < 7:
        return Rule(scale=m.pick(scale))
    if kind < 8:
        return Rule(visible=m.pick(visible), bias=m.pick(bias), scale=m.pick(scale))
    return Rule(later=m.pick(later))


def drawn_rule(m: EditedModel) -> Rule:
    return supported_rule(m) if m.chance(0.6) else other_rule(m)


# -------------------------------------------------------------------------- attention functions

Weights = Callable[[Any, Tensor, Tensor], Tensor]
"""Weights of attention from the module, its scores [B, H, Q, K] and its keys."""


def attention_function(weights_of: Weights, reads_mask: bool = False) -> Callable[..., Any]:
    """An attention as transformers calls it."""

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
        times = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.transpose(-1, -2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if attention_mask is not None and reads_mask:
            if attention_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attention_mask, LEAST)
            else:
                scores = scores + attention_mask
        out = weights_of(module, scores, key) @ value
        return out.transpose(1, 2).contiguous(), None

    return mine


def ruled_attention(m: EditedModel, rule: Rule) -> Callable[..., Any]:
    """An attention that has the rule in some layers."""
    chosen = {id(own) for own in m.some(m.attentions)}

    def weights(module: Any, scores: Tensor, _: Tensor) -> Tensor:
        return (rule if id(module) in chosen else Rule())(scores).softmax(-1)

    return attention_function(weights, reads_mask=m.chance(0.5))


def use(m: EditedModel, name: str, function: Callable[..., Any]) -> None:
    """Register an attention function and let the model use it."""
    m.needs_interface()
    m.register(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, name, function)
    if "flash" in name:
        m.config._attn_implementation_internal = name
    elif m.chance(0.5):
        m.model.set_attn_implementation(name)
    else:
        m.config._attn_implementation = name


@edit(6)
def custom_attention_function(m: EditedModel) -> None:
    """Of its own name, of one with "flash" in it, or over transformers' own."""
    name = m.pick(("mine", "sdpa_mine", "flash_attention_2_windowed", "sdpa", "eager"))
    use(m, name, ruled_attention(m, drawn_rule(m)))


@edit(2)
def patched_function(m: EditedModel) -> None:
    """A function of PyTorch or of the modeling file, patched as papers' repositories do."""
    home = sys.modules[type(m.model).__module__]
    c, n, rule = m.number(0.5, 2), m.threshold(), drawn_rule(m)
    written = ruled_attention(m, rule)

    def masked(original: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kwargs: Any) -> Any:
        scores = q.new_zeros(1, q.shape[1], q.shape[2], k.shape[2])
        kwargs = {key: kwargs[key] for key in kwargs.keys() & {"scale", "enable_gqa"}}
        return original(q, k, v, attn_mask=rule(scores), **kwargs)

    def late(original: Any, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k = original(q, *args, **kwargs)
        return q * torch.where(torch.arange(q.shape[2])[:, None] < n, 1.0, c), k

    patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (functional, "scaled_dot_product_attention", lambda o, q, *a, **k: o(c * q, *a, **k)),
        (functional, "scaled_dot_product_attention", masked),
        (functional, "softmax", lambda original, x, *a, **k: original(c * x, *a, **k)),
        (home, "apply_rotary_pos_emb", late),
        (home, "apply_rotary_pos_emb", lambda _, q, k, *__, **___: (q, c * k)),
        (home, "repeat_kv", lambda original, x, n: c * original(x, n)),
        (home, "eager_attention_forward", lambda _, *a, **k: written(*a, **k)),
    )
    holder, name, around = m.pick(patches)
    if not hasattr(holder, name):
        raise UnfitError
    original = getattr(holder, name)
    m.set(holder, name, lambda *args, **kwargs: around(original, *args, **kwargs))
    if name == "eager_attention_forward":
        m.needs_interface()
        m.config._attn_implementation = "eager"


@edit(2)
def window_by_layer(m: EditedModel) -> None:
    """Each layer has a window, which it knows in one of several ways."""
    windows, kind, calls = [m.threshold() for _ in m.layers], m.kind(6), [0]
    by_id = {id(own): n for own, n in zip(m.attentions, windows, strict=True)}
    m.model.register_forward_pre_hook(lambda _, __: calls.__setitem__(0, 0))
    for own, n in zip(m.attentions, windows, strict=True):
        if kind == 5:
            own.register_buffer("own_window", torch.tensor(n), persistent=m.chance(0.5))
        else:
            own.own_window = torch.tensor(n) if kind == 4 else n

    def counted(_: Any) -> int:
        calls[0] += 1
        return windows[(calls[0] - 1) % len(windows)]

    window_of = (
        lambda module: by_id[id(module)],
        lambda module: windows[module.layer_idx],
        counted,
        *[lambda module: module.own_window] * 3,
    )[kind]

    def rule_of(n: Any) -> Rule:
        return Rule(visible=lambda _, query, key: query - key < n)

    def by_hook(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        mask = rule_of(window_of(module)).masked(None, hidden.shape[1])
        return args, {**kwargs, "attention_mask": mask}

    if m.chance(0.5):
        use(m, "by_layer", attention_function(
            lambda module, scores, _: rule_of(window_of(module))(scores).softmax(-1)
        ))  # fmt: skip
    else:
        for own in m.attentions:
            own.register_forward_pre_hook(by_hook, with_kwargs=True)


@edit()
def keywords_for_attention(m: EditedModel) -> None:
    """Keywords that transformers' attention functions read or ignore."""
    n, c = m.threshold(), m.number(0.5, 3)
    name, value = m.pick(
        (("sliding_window", n), ("softcap", c), ("is_causal", False), ("s_aux", None),
         ("attention_sink", True), ("position_bias", None), ("use_cache", True))
    )  # fmt: skip
    for layer in m.some_layers():
        (layer if m.chance(0.4) else m.attention_of(layer)).register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, name: value}), with_kwargs=True
        )


@edit()
def configuration_of_one_layer(m: EditedModel) -> None:
    """One attention has a copy of the configuration, with another implementation."""
    m.needs_interface()
    name = m.pick(("eager", "sdpa", "of_one_layer", "flash_attention_of_one_layer"))
    if "layer" in name:
        function = ruled_attention(m, drawn_rule(m))
        m.register(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, name, function)
    own = m.pick(m.attentions)
    own.config = copy.deepcopy(m.config)
    own.config._attn_implementation_internal = name


@edit()
def another_kind_of_attention(m: EditedModel) -> None:
    """Attention that is no softmax over keys, or a softmax with a change."""
    c, n = m.number(0.2, 2), m.threshold()

    def hidden(scores: Tensor) -> Tensor:
        return Rule()(scores)

    def top(scores: Tensor) -> Tensor:
        kept = hidden(scores).topk(min(n, scores.shape[-1]), -1).values[..., -1:]
        return hidden(scores).masked_fill(hidden(scores) < kept, LEAST).softmax(-1)

    def gated(module: Any, scores: Tensor, key: Tensor) -> Tensor:
        gate = torch.sigmoid(key.mean(-1)).cumsum(-1)
        return (hidden(scores) + 0.1 * (gate[..., None, :] - gate[..., :, None])).softmax(-1)

    kinds: tuple[Weights, ...] = (
        lambda _, s, __: torch.sigmoid(s) * Rule().allowed(s),
        lambda _, s, __: torch.relu(s) * Rule().allowed(s),
        lambda _, s, __: hidden(s).softmax(-1) * c,
        lambda _, s, __: hidden(s).exp() / (hidden(s).exp().sum(-1, keepdim=True) + c),
        lambda _, s, __: hidden(c * torch.tanh(s / c)).softmax(-1),
        lambda _, s, __: hidden(s).softmax(-1) - 0.01 * c,
        lambda _, s, __: torch.cat([hidden(s), s[..., :1] * 0 + c], -1).softmax(-1)[..., :-1],
        lambda _, s, __: hidden(s).softmax(-2),
        lambda _, s, __: hidden(s).masked_fill(s < -0.3 * c, LEAST).softmax(-1),
        lambda _, s, __: hidden(s.clamp(max=0.3 * c)).softmax(-1),
        lambda _, s, __: top(s),
        gated,
    )
    use(m, "another", attention_function(m.pick(kinds)))


@edit(2)
def attention_written_out(m: EditedModel) -> None:
    m.needs_plain_projections()
    home = sys.modules[type(m.attentions[0]).__module__]
    rotary, rule, kind = home.apply_rotary_pos_emb, drawn_rule(m), m.kind(5)
    sdpa = functional.scaled_dot_product_attention

    def forward(self: Any, hidden: Tensor, **kwargs: Any) -> Any:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (linear(hidden).view(shape).transpose(1, 2) for linear in projections)
        q, k = rotary(q, k, *kwargs["position_embeddings"])
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        zeros = q.new_zeros(1, *q.shape[1:3], q.shape[2])
        if kind == 0:
            out = sdpa(q, k, v, rule(zeros), scale=self.scaling)
        elif kind == 1:
            out = sdpa(q, k, v, rule.allowed(zeros), scale=self.scaling)
        elif kind == 2:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scaling
            out = torch.einsum("bhqk,bhkd->bhqd", rule(scores).softmax(-1), v)
        elif kind == 3:
            scores = rule(q @ k.transpose(2, 3) / self.head_dim**0.5)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            out = (weights / weights.sum(-1, keepdim=True)) @ v
        else:
            weights = rule((q * self.scaling) @ k.transpose(2, 3)).float().softmax(-1)
            out = torch.bmm(functional.dropout(weights, 0.1, training=False)[0], v[0])[None]
        return self.o_proj(out.transpose(1, 2).reshape(*hidden.shape[:-1], -1)), None

    for own in m.some(m.attentions):

        def around(_: Any, *args: Any, _own: Any = own, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            return forward(_own, hidden, **kwargs)

        wrapped_method(own, around)


@edit(families=("gptj",))
def own_method_of_attention(m: EditedModel) -> None:
    rule = drawn_rule(m)

    def _attn(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        weights = rule(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return weights @ v, weights

    for own in m.some(m.attentions):
        own._attn = _attn


# -------------------------------------------------------------------------- masks as arguments


@edit(4)
def mask_of_an_attention(m: EditedModel) -> None:
    """A mask from a hook of the attention or of the layer, from a wrapper, or from a buffer."""
    rule, kind = drawn_rule(m), m.kind(4)
    rule.needs_one_head()
    table = rule(torch.zeros(1, 1, LONGEST + 9, LONGEST + 9))

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        tokens = hidden_of(args, kwargs).shape[1]
        # The blocks of some architectures take their mask by place.
        place = next((i for i, x in enumerate(args) if torch.is_tensor(x) and x.dim() == 4), None)
        mask = kwargs.get("attention_mask") if place is None else args[place]
        if kind == 3:
            own = module.pattern[..., :tokens, :tokens]
            is_bool = mask is not None and mask.dtype == torch.bool
            made = mask & (own > LEAST / 2) if is_bool else own
        else:
            made = rule.masked(mask, tokens)
        if place is None:
            return args, {**kwargs, "attention_mask": made}
        return (*args[:place], made, *args[place + 1 :]), kwargs

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(None, args, kwargs)
        return original(*args, **kwargs)

    for layer in m.some_layers():
        module = layer if kind == 1 else m.attention_of(layer)
        if kind == 2:
            wrapped_method(module, around)
            continue
        if kind == 3:
            module.register_buffer("pattern", table, persistent=m.chance(0.5))
        module.register_forward_pre_hook(change, with_kwargs=True)


@edit(3)
def arguments_of_the_model(m: EditedModel) -> None:
    """A mask [1, 1, T, T], a mask of padding [1, T], or positions."""
    n, w, rule, is_bool = m.threshold(), m.draw.randint(1, 9), drawn_rule(m), m.chance(0.5)
    name, kind = m.pick(("mask", "padding", "positions")), m.kind(5)
    if name == "mask":
        rule.needs_one_head()
    if name == "positions" and "position_ids" not in inspect.signature(m.trunk.forward).parameters:
        raise UnfitError

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        place = torch.arange(ids.shape[1])[None]
        zeros = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        if name == "mask":
            kwargs["attention_mask"] = rule.allowed(zeros) if is_bool else rule(zeros)
        elif name == "padding":
            middle = (place >= n) & (place < n + w)
            hidden = (middle, place < 0, place % (n + 1) == n, (ids == 7) & (place > 0), middle)
            kwargs["attention_mask"] = (~hidden[kind]).long()
        else:
            turned = torch.where(place < n, place, place - n)
            made = (place % n, place.clamp(max=n), place + n % 50, place // 2, turned)
            kwargs["position_ids"] = made[kind]
        return original(*args, **kwargs)

    wrapped_method(m.model if name == "mask" else m.pick((m.model, m.trunk)), around)


@edit(3)
def functions_of_masks(m: EditedModel) -> None:
    """The function of masks of an implementation, or of the modeling file, with a rule."""
    home = sys.modules[type(m.model).__module__]
    names = [name for name in vars(home) if name.startswith("create_") and "causal" in name]
    rule, kind = drawn_rule(m), m.kind(3)
    rule.needs_one_head()
    visible, later, zero = rule.visible, rule.later, torch.zeros((), dtype=torch.long)
    if kind < 2 and rule.bias is not None:
        raise UnfitError
    if kind == 0:
        mapping = AttentionMaskInterface._global_mapping
        original = mapping.get(m.config._attn_implementation)
        if original is None:
            raise UnfitError

        def mine(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **{**kwargs, "allow_is_causal_skip": False})
            return None if made is None else rule.masked(made, made.shape[-1])

        m.register(mapping, m.config._attn_implementation, mine)
        return
    for name in m.some(names):
        stock = getattr(home, name)

        def made(*args: Any, _stock: Any = stock, **kwargs: Any) -> Any:
            if kind == 2:  # a tensor of its own
                tokens = kwargs["inputs_embeds"].shape[1]
                return rule(torch.zeros(1, 1, tokens, tokens))
            if later is not None:
                kwargs["or_mask_function"] = lambda b, _, q, k: later(zero, q, k)
            elif visible is not None:
                kwargs["and_mask_function"] = lambda b, _, q, k: visible(zero, q, k)
            return _stock(*args, **kwargs)

        m.set(home, name, made)
