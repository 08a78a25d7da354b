"""Stand-ins for FlashInfer, flash-attention, flash-linear-attention and causal-conv1d.

Attention is computed by SDPA, recurrences token by token, convolutions by conv1d.

They hold what pcg calls, bind arguments to the libraries' own names and order of parameters, check
them as the documentation says they have to be, and compute in fp32 on the CPU.
Source: flashinfer/prefill.py of 0.6, flash_attn/flash_attn_interface.py of 2.7,
flash-attention's hopper/flash_attn_interface.py, fla/ops/{gated_delta_rule,kda,simple_gla} of 0.5,
whose definitions are naive.py, and causal_conv1d_interface.py and csrc/causal_conv1d.cpp of
causal-conv1d 1.7.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def _seen(queries: int, keys: int, left: int) -> Tensor:
    """What each query sees: the last one all keys, from `left` before its own on."""
    own = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    return (key <= own) if left < 0 else (key <= own) & (key >= own - left)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> Tensor:
    """[n, H, D] of [n, H, D] and [m, K, D]."""
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    mask = _seen(q.shape[2], k.shape[2], left)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _signature(required: str, optional: str) -> Signature:
    """A signature of parameters by position or name; those that are optional are None."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [Parameter(name, kind) for name in required.split()]
    parameters += [Parameter(name, kind, default=None) for name in optional.split()]
    return Signature(parameters)


def _bound(signature: Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    found = signature.bind(*args, **kwargs)
    found.apply_defaults()
    return found.arguments


WRAPPER = _signature(
    "float_workspace_buffer",
    "kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
    "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs",
)
PLAN = _signature(
    "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads "
    "head_dim_qk page_size",
    "head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction "
    "sm_scale window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type "
    "o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len "
    "max_item_len_ptr seq_lens seq_lens_q block_tables max_token_per_sequence max_sequence_kv "
    "fixed_split_size disable_split_kv",
)
RUN = _signature(
    "q paged_kv_cache",
    "q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks kv_cache_sf",
)
FORWARD = _signature(
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal",
    "window_size_left window_size_right softcap alibi_slopes return_softmax block_table leftpad_k "
    "seqused_k",
)
BACKWARD = _signature(
    "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "deterministic",
    "rng_state",
)
FORWARD_3 = _signature(
    "q k v",
    "k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
    "seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left "
    "window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata num_splits "
    "pack_gqa sm_margin",
)
BACKWARD_3 = _signature(
    "dout q k v out softmax_lse",
    "cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q max_seqlen_k dq dk dv softmax_scale "
    "is_causal window_size_left window_size_right softcap deterministic sm_margin",
)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _bound(WRAPPER, args, kwargs)
        assert given["float_workspace_buffer"].dtype == torch.uint8
        assert given["kv_layout"] == "HND"
        self.given: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = _bound(PLAN, args, kwargs)
        queries, pages, indices, last = list(given.values())[:4]
        assert all(one.dtype == torch.int32 for one in (queries, pages, indices, last))
        assert all(one.device.type == "cpu" for one in (queries, pages, last))
        assert len(queries) == len(pages) == len(last) + 1
        assert len(indices) == pages[-1]
        assert ((last >= 1) & (last <= given["page_size"])).all()
        assert given["causal"]
        assert given["num_qo_heads"] % given["num_kv_heads"] == 0
        assert given["sm_scale"] is not None
        self.given = given

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        given, planned = _bound(RUN, args, kwargs), self.given
        queries, pages, indices, last = list(planned.values())[:4]
        q, (keys, values), size = given["q"], given["paged_kv_cache"], planned["page_size"]
        assert q.shape == (queries[-1], planned["num_qo_heads"], planned["head_dim_qk"])
        assert q.dtype == planned["q_data_type"]
        assert keys.shape[1:] == (planned["num_kv_heads"], size, planned["head_dim_qk"])
        assert keys.stride() == values.stride()
        out = torch.empty_like(q) if given["out"] is None else given["out"]
        for i in range(len(queries) - 1):
            own = indices[pages[i] : pages[i + 1]]
            count = (len(own) - 1) * size + last[i]
            k, v = (x[own].transpose(1, 2).flatten(0, 1)[:count] for x in (keys, values))
            part = slice(queries[i], queries[i + 1])
            found = _attend(q[part], k, v, planned["sm_scale"], planned["window_left"])
            out[part] = found.to(out.dtype)
        return out


def _sequences(given: dict[str, Any]) -> list[slice]:
    """The sequences of a call of flash-attention, whose arguments are checked."""
    ends = given["cu_seqlens_q"]
    assert torch.equal(ends, given["cu_seqlens_k"])
    assert ends.dtype == torch.int32
    assert given["max_seqlen_q"] == given["max_seqlen_k"] == ends.diff().max()
    assert given["causal"]
    assert given["dropout_p"] == 0.0
    assert given["window_size_right"] == (-1 if given["window_size_left"] < 0 else 0)
    assert not given["softcap"]
    assert given["alibi_slopes"] is None
    return [slice(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def _flash_attn_varlen_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return _forward(_bound(FORWARD, args, kwargs))


def _flash_attn_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return _forward(_bound(FORWARD_3, args, kwargs) | {"dropout_p": 0.0, "alibi_slopes": None})


def _forward(given: dict[str, Any]) -> tuple[Tensor, ...]:
    q, k, v = given["q"], given["k"], given["v"]
    scale, left = given["softmax_scale"], given["window_size_left"]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for part in _sequences(given):
        out[part] = _attend(q[part], k[part], v[part], scale, left).to(q.dtype)
        every = k[part].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = scale * torch.einsum("nhd,mhd->hnm", q[part].float(), every)
        seen = _seen(len(every), len(every), left)
        lse[:, part] = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    return out, lse, q.new_empty(0), q.new_empty(0)


def _flash_attn_varlen_backward(*args: Any, **kwargs: Any) -> Tensor:
    return _backward(_bound(BACKWARD, args, kwargs))


def _flash_attn_backward(*args: Any, **kwargs: Any) -> Tensor:
    given = _bound(BACKWARD_3, args, kwargs)
    others = {"causal": given["is_causal"], "dropout_p": 0.0, "alibi_slopes": None}
    return _backward(given | others)


def _backward(given: dict[str, Any]) -> Tensor:
    inputs, lse = [given[name] for name in ("q", "k", "v")], given["softmax_lse"]
    assert lse.shape == inputs[0].shape[1::-1]
    assert lse.is_contiguous()
    assert given["deterministic"]
    for part in _sequences(given):
        with torch.inference_mode(False), torch.enable_grad():
            own = [x[part].float().clone().requires_grad_() for x in inputs]
            found = _attend(*own, given["softmax_scale"], given["window_size_left"])
            gradients = torch.autograd.grad(found, own, given["dout"][part].float().clone())
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            given[name][part] = gradient.to(given[name].dtype)
    return lse


CHUNK_GATED_DELTA_RULE = _signature(
    "q k v g beta",
    "scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
    "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
)
CHUNK_KDA = _signature(
    "q k v g beta",
    "scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute "
    "return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu cp_context",
)
CHUNK_SIMPLE_GLA = _signature(
    "q k v",
    "g g_gamma scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu",
)


def _recur(signature: Signature, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = _bound(signature, args, kwargs)
    q, k, v, g = (given.pop(name) for name in ("q", "k", "v", "g"))
    beta, state, scale = given.pop("beta", None), given.pop("initial_state"), given.pop("scale")
    assert given.pop("output_final_state")
    assert not any(value is not None for value in given.values()), given
    n, tokens, heads, size = k.shape
    assert q.dtype is k.dtype is v.dtype is not torch.float32
    assert g.dtype is state.dtype is torch.float32
    assert q.shape == k.shape
    assert v.shape[:3] == g.shape[:3] == (n, tokens, heads)
    assert (g.shape[3:] == (size,)) == (signature is CHUNK_KDA)
    assert (beta is None) == (signature is CHUNK_SIMPLE_GLA)
    assert state.shape == (n, heads, size, v.shape[-1])
    outs = []
    for i in range(tokens):
        key, value = k[:, i].float().unsqueeze(-1), v[:, i].float().unsqueeze(-2)
        state = state * g[:, i].exp().reshape(n, heads, -1, 1)
        if beta is not None:
            seen = (state * key).sum(-2, keepdim=True)
            value = (value - seen) * beta[:, i, :, None, None]
        state = state + key * value
        outs.append((state * scale * q[:, i].float().unsqueeze(-1)).sum(-2))
    return torch.stack(outs, 1).to(q.dtype), state


CAUSAL_CONV1D = _signature(
    "x weight",
    "bias seq_idx initial_states return_final_states final_states_out activation",
)


def causal_conv1d_fn(*args: Any, **kwargs: Any) -> Tensor:
    given = _bound(CAUSAL_CONV1D, args, kwargs)
    x, weight, bias = (given.pop(name) for name in ("x", "weight", "bias"))
    assert not any(value is not None for value in given.values()), given
    floats = (torch.float32, torch.float16, torch.bfloat16)
    assert x.dtype in floats
    assert weight.dtype in floats
    (_, channels, _), width = x.shape, weight.shape[1]
    assert weight.shape == (channels, width)
    assert 2 <= width <= 4
    if bias is not None:
        assert bias.dtype is weight.dtype
        assert bias.shape == (channels,)
    if x.stride(2) != 1 and x.stride(1) != 1:
        x = x.contiguous()
    if x.stride(1) == 1 and x.stride(2) > 1:  # rows of channels
        assert channels % 8 == x.stride(0) % 8 == x.stride(2) % 8 == 0
    out = F.conv1d(
        F.pad(x.float(), (width - 1, 0)),
        weight.float()[:, None],
        None if bias is None else bias.float(),
        groups=channels,
    )
    return torch.empty_like(x).copy_(out)


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Have all libraries; returns how often each function was called."""
    calls: dict[str, int] = {}

    def counted(name: str, run: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return run(*args, **kwargs)

        return called

    wrapper = type(
        "BatchPrefillWithPagedKVCacheWrapper",
        (BatchPrefillWithPagedKVCacheWrapper,),
        {
            name: counted(name, getattr(BatchPrefillWithPagedKVCacheWrapper, name))
            for name in ("plan", "run")
        },
    )
    flashinfer, flash_attn = ModuleType("flashinfer"), ModuleType("flash_attn")
    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(flashinfer)["BatchPrefillWithPagedKVCacheWrapper"] = wrapper
    for run in (_flash_attn_varlen_forward, _flash_attn_varlen_backward):
        vars(interface)[run.__name__] = counted(run.__name__, run)
    vars(flash_attn)["flash_attn_interface"] = interface
    third = ModuleType("flash_attn_interface")
    for run in (_flash_attn_forward, _flash_attn_backward):
        vars(third)[run.__name__] = counted(run.__name__, run)
    convolution = ModuleType("causal_conv1d")
    vars(convolution)["causal_conv1d_fn"] = counted("causal_conv1d_fn", causal_conv1d_fn)
    modules = [flashinfer, flash_attn, interface, third, convolution]
    modules.append(ModuleType("flashinfer_jit_cache"))
    for name, function, signature in (
        ("gated_delta_rule", "chunk_gated_delta_rule", CHUNK_GATED_DELTA_RULE),
        ("kda", "chunk_kda", CHUNK_KDA),
        ("simple_gla", "chunk_simple_gla", CHUNK_SIMPLE_GLA),
    ):
        modules.append(ModuleType(f"fla.ops.{name}"))
        vars(modules[-1])[function] = counted(function, partial(_recur, signature))
    for module in (*modules, ModuleType("fla"), ModuleType("fla.ops")):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls
