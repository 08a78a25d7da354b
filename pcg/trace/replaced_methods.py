"""Methods of transformers' classes, rewritten with markers or without branches on values.

Each stands for the method of its class, whose module it takes first, within an export.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pcg.trace.markers import EVERY_TOKEN, is_of_transformers


@contextlib.contextmanager
def of_classes(model: nn.Module) -> Iterator[None]:
    """Replace methods of a model's modules by those of this file."""
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            for name, method in _METHODS.get(type(module).__name__, {}).items():
                function = inspect.unwrap(getattr(type(module), name))
                if is_of_transformers(function) and name not in vars(module):
                    options = {"config": model.config} if method is _language_adapter else {}
                    vars(module)[name] = functools.partial(method, module, **options)
                    undo.callback(vars(module).pop, name)
        yield


# ----------------------------------------------------------------------------------------- experts


def _llama4_experts(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Llama 4's experts, of which each takes a token by its score."""
    rows, experts = hidden.reshape(-1, module.hidden_dim), module.experts
    logits = torch.nn.functional.linear(rows, module.router.weight)
    values, indices = torch.topk(logits, module.top_k, dim=-1)
    taken = rows.unsqueeze(1) * torch.sigmoid(values.float()).to(values.dtype).unsqueeze(-1)
    gate_up = experts.gate_up_proj.transpose(1, 2)
    inner = torch.ops.pcg.expert_linear(taken, indices, gate_up, None, False)
    gate, up = inner.chunk(2, dim=-1)
    inner = up * experts.act_fn(gate)
    down = experts.down_proj.transpose(1, 2)
    out = torch.ops.pcg.expert_linear(inner, indices, down, None, False)
    return module.shared_expert(rows) + out.sum(dim=1), None


def _dbrx_experts(
    module: Any, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    mlp, rows = module.mlp, hidden.reshape(-1, module.hidden_size)
    w1, v1, w2 = (
        weight.view(module.num_experts, module.ffn_hidden_size, module.hidden_size)
        for weight in (mlp.w1, mlp.v1, mlp.w2)
    )
    gate, up = (torch.ops.pcg.expert_linear(rows, indices, w, None, False) for w in (w1, v1))
    inner = mlp.activation_fn(gate) * up
    out = torch.ops.pcg.expert_linear(inner, indices, w2, None, True)
    return (out * weights.unsqueeze(-1)).sum(dim=1).view(hidden.shape)  # type: ignore[no-any-return]


_Routes = tuple[torch.Tensor, torch.Tensor]
"""The experts of each token, and their weights, [T, k]."""


def _jetmoe_routes(router: Any, rows: torch.Tensor) -> _Routes:
    logits, indices = router.layer(rows).float().topk(router.top_k, dim=-1)
    return indices, torch.softmax(logits, dim=-1).type_as(rows)


def _jetmoe_product(experts: Any, rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.pcg.expert_linear(rows, indices, experts.weight, None, False)
    return product


def _jetmoe_sum(module: Any, rows: torch.Tensor, routes: _Routes) -> torch.Tensor:
    out = _jetmoe_product(module.output_linear, rows, routes[0]) * routes[1].unsqueeze(-1)
    return out.sum(dim=1) + module.bias  # type: ignore[no-any-return]


def _jetmoe_experts(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.reshape(-1, module.input_size)
    routes = _jetmoe_routes(module.router, rows)
    gate, up = _jetmoe_product(module.input_linear, rows, routes[0]).chunk(2, dim=-1)
    return _jetmoe_sum(module, module.activation(gate) * up, routes).view(hidden.shape)


def _jetmoe_queries(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, None, _Routes]:
    rows = hidden.reshape(-1, module.input_size)
    routes = _jetmoe_routes(module.router, rows)
    queries = _jetmoe_product(module.input_linear, rows, routes[0])
    return queries.view(*hidden.shape[:2], module.top_k, module.hidden_size), None, routes


def _jetmoe_outputs(module: Any, heads: torch.Tensor, routes: _Routes) -> torch.Tensor:
    sizes = heads.shape[:2]
    rows = heads.reshape(-1, module.top_k, module.hidden_size)
    return _jetmoe_sum(module, rows, routes).view(*sizes, module.input_size)


# --------------------------------------------------------------------------------------- attention


def _language_adapter(
    module: Any, lang_ids: torch.Tensor, hidden: torch.Tensor, *, config: Any
) -> torch.Tensor:
    """X-MOD's adapter of the default language."""
    residual = hidden
    if module.adapter_layer_norm is not None:
        hidden = module.adapter_layer_norm(hidden)
    elif module.adapter_reuse_layer_norm:
        hidden = module.LayerNorm(hidden)
    if module.ln_before_adapter:
        residual = hidden
    return module.adapter_modules[config.default_language](hidden) + residual  # type: ignore[no-any-return]


def _doge_attention(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Doge's attention, whose scores have a bias of each key: one more entry of the key."""
    size = module.head_dim
    shape = (*hidden_states.shape[:-1], -1, size)
    q = module.q_norm(module.q_proj(hidden_states).view(shape))
    k = module.k_norm(module.k_proj(hidden_states).view(shape))
    values = module.v_proj(hidden_states)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    q, k = rotate(q, k, *position_embeddings, unsqueeze_dim=2)
    bias = torch.exp(module.A * torch.nn.functional.softplus(module.dt_proj(values))).unsqueeze(-1)
    # Kernels know heads of multiples of 16.
    none = torch.zeros_like(k[..., : -(size + 1) % 16])
    ones = torch.ones_like(q[..., :1]) / module.scaling
    q = torch.cat((q, ones, torch.zeros_like(q[..., : none.shape[-1]])), dim=-1)
    k = torch.cat((k, bias.to(k.dtype), none), dim=-1)
    heads = (x.transpose(1, 2) for x in (q, k, values.view(shape)))
    arguments = (attention_mask, None, module.scaling, 0.0, None)
    out = torch.ops.pcg.attention(*heads, *arguments)
    return module.o_proj(out.flatten(2)), None


def _phimoe_rotary(
    module: Any, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Phi-3.5-MoE's LongRoPE with its short factors and their scale, up to `short_positions`."""
    rope = module.config.rope_parameters
    if "short_factor" not in rope:
        return type(module).forward(module, x, position_ids)  # type: ignore[no-any-return]
    frequencies, _ = module.rope_init_fn(module.config)
    angles = position_ids[..., None].float() * frequencies.to(device=x.device, dtype=torch.float)
    angles, scale = torch.cat((angles, angles), dim=-1), rope["short_mscale"]
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


# ------------------------------------------------------------------------------------- recurrences


def _block_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Product of rows [T, n, in] by n blocks of a weight: experts that each token takes."""
    tokens, count, _ = rows.shape
    blocks = torch.zeros((tokens, 1), dtype=torch.long, device=rows.device)
    blocks = blocks + torch.arange(count, device=rows.device)
    return torch.ops.pcg.expert_linear(rows, blocks, weight, bias, False)  # type: ignore[no-any-return]


def _lightning_attention(module: Any, hidden_states: torch.Tensor, **_: Any) -> Any:
    """MiniMax's linear attention, whose heads each have a constant decay."""
    hidden = hidden_states
    heads, size = module.num_attention_heads, module.head_dim
    qkv = module.act_fn(module.qkv_proj(hidden))
    q, k, v = qkv.reshape(*hidden.shape[:2], heads, 3 * size).float().split(size, dim=-1)
    decay = torch.zeros((*hidden.shape[:2], 1), device=hidden.device) - module.slope_rate.view(-1)
    out = torch.ops.pcg.recurrence(q, k, v, decay, None).to(hidden.dtype)
    out = torch.sigmoid(module.output_gate(hidden)) * module.norm(out.flatten(2))
    return module.out_proj(out), None


def _griffin_block(
    module: Any, hidden: torch.Tensor, position_ids: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    x, taps = module.linear_x(hidden).transpose(1, 2), module.conv_1d
    x = torch.ops.pcg.short_convolution(x, taps.weight.squeeze(1), taps.bias)
    x = module.rg_lru(x.transpose(1, 2), position_ids)
    return module.linear_out(x * module.act_fn(module.linear_y(hidden))), None


def _real_gated_unit(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """RecurrentGemma's recurrence: each channel is a head with a state of one number."""
    rows = x.reshape(-1, module.num_attention_heads, module.block_width)

    def gate(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(_block_product(rows, weight.transpose(1, 2), bias).reshape(x.shape))

    entering = gate(module.input_gate_weight, module.input_gate_bias)
    decay = gate(module.recurrent_gate_weight, module.recurrent_gate_bias)
    decay = -8.0 * decay * torch.nn.functional.softplus(module.recurrent_param)
    rest = 1 - torch.exp(2 * decay)
    # A square root whose derivative is at most 1000, as transformers' SqrtBoundDerivative.
    line = rest * torch.rsqrt(torch.clamp(4 * rest, min=1e-6)).detach()
    root = line + (torch.sqrt(rest) - line).detach()
    root = torch.where(position_ids[:, :, None] == 0, torch.ones_like(root), root)
    u = x * entering * root.type(x.dtype)
    ones = torch.ones((*x.shape[:2], 1, 1), device=x.device)
    states = torch.ops.pcg.recurrence(ones, ones, u.float()[..., None], decay.float(), None)
    return states[..., 0].to(x.dtype)  # type: ignore[no-any-return]


def _delayed(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """x [1, C, T] of so many tokens before; zeros before the first token."""
    sizes = (torch.ones, 1), (torch.zeros, tokens)
    taps = [make(x.shape[1], size, dtype=x.dtype, device=x.device) for make, size in sizes]
    return torch.ops.pcg.short_convolution(x, torch.cat(taps, dim=1), None)  # type: ignore[no-any-return]


def _convolved_attention(
    module: Any, hidden_states: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zaya's queries, keys and values, two convolutions over tokens and a delay of a token."""
    heads, size = (*hidden_states.shape[:2], -1, module.head_dim), module.head_dim
    queries, keys = module.q_proj(hidden_states), module.k_proj(hidden_states)
    x = torch.cat([queries, keys], dim=-1).transpose(1, 2)
    depthwise, grouped = module.conv_qk_depthwise, module.conv_qk_grouped
    x = torch.ops.pcg.short_convolution(x, depthwise.weight.squeeze(1), None)
    # Before the first token are zeros, of which the first convolution makes its bias.
    taps = range(module.grouped_kernel_size - 1, -1, -1)
    parts = [(_delayed(x, tap) if tap else x).transpose(1, 2) + depthwise.bias for tap in taps]
    rows = torch.stack(parts, dim=-1).reshape(-1, grouped.groups, size * len(parts))
    weight = grouped.weight.view(grouped.groups, size, size * len(parts))
    x = _block_product(rows, weight, None).reshape(*heads[:2], -1) + grouped.bias
    times = module.num_key_value_groups
    of_keys = keys.view(heads).repeat_interleave(times, dim=2)
    residual = (queries.view(heads) + of_keys) * 0.5
    q = x[..., : queries.shape[-1]].view(heads) + residual
    residual = residual.view(*heads[:2], -1, times, size).mean(dim=-2)
    k = x[..., queries.shape[-1] :].view(heads) + residual
    late = module.v_proj_delayed
    bias = 0.0 if late.bias is None else late.bias
    delayed = _delayed((late(hidden_states) - bias).transpose(1, 2), 1).transpose(1, 2) + bias
    v = torch.cat([module.v_proj_current(hidden_states), delayed], dim=-1).view(heads)
    return q, k, v


def _heads_of_mamba(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Zamba's Mamba-1, whose heads have projections of their own; each channel is a head."""
    sizes, heads, taps = hidden_states.shape[:2], module.n_mamba_heads, module.conv1d
    x, gate = module.in_proj(hidden_states).view(*sizes, -1, 2).unbind(-1)
    x = torch.ops.pcg.short_convolution(x.transpose(1, 2), taps.weight.squeeze(1), taps.bias)
    x = module.act(x).transpose(1, 2)
    rows = x.reshape(-1, heads, module.mamba_head_dim)
    states = module.ssm_state_size
    of_rows = _block_product(rows, module.x_proj_weight, None)
    dt, k, q = of_rows.split([module.time_step_rank, states, states], dim=-1)
    dt = _block_product(dt, module.dt_proj_weight, None)
    dt = torch.nn.functional.softplus(dt.float() + module.dt_proj_bias.float())
    rows, q, k = (part.float() for part in (rows, q, k))
    decay = dt.unsqueeze(-1) * -torch.exp(module.A_log.float())
    k, q = (part.reshape(*sizes, heads, states) for part in (k, q))
    u = (rows * dt).reshape(*sizes, -1, 1)
    decay = decay.reshape(*sizes, -1, states)
    out = torch.ops.pcg.recurrence(q, k, u, decay, None).reshape(rows.shape)
    out = (out + module.D.float() * rows).reshape(x.shape)
    out = out * torch.nn.functional.silu(gate)
    return module.out_proj(out.to(hidden_states.dtype))  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- table


def _indexer(module: nn.Module, *args: Any, **kwargs: Any) -> object:
    return EVERY_TOKEN


_INDEXERS = (
    "AXK2Indexer", "DeepseekV32Indexer", "Dots3NoteTextIndexer", "GlmMoeDsaIndexer", "HYV4Indexer",
    "MiniMaxM3VLIndexer",
)  # fmt: skip
_METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    **{name: {"forward": _indexer} for name in _INDEXERS},
    "DbrxExperts": {"forward": _dbrx_experts},
    "DogeAttention": {"forward": _doge_attention},
    "JetMoeMoA": {"map": _jetmoe_queries, "reduce": _jetmoe_outputs},
    "JetMoeMoE": {"forward": _jetmoe_experts},
    "Llama4TextMoe": {"forward": _llama4_experts},
    "MiniMaxLightningAttention": {"forward": _lightning_attention},
    "PhimoeRotaryEmbedding": {"forward": _phimoe_rotary},
    "RecurrentGemmaRecurrentBlock": {"forward": _griffin_block},
    "RecurrentGemmaRglru": {"forward": _real_gated_unit},
    "XmodOutput": {"lang_adapter": _language_adapter},
    "ZambaMambaMixer": {"forward": _heads_of_mamba},
    "ZayaCCAProjection": {"forward": _convolved_attention},
}
"""Replacements of methods, by the names of transformers' classes."""
