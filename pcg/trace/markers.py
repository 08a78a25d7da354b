"""Marker operators for attention, experts, recurrences and index lists in an exported graph.

transformers calls attention and experts through its own registries. Short convolutions and
recurrences are functions of a model's file, which `of_sequences` replaces. No marker is ever run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from pcg.errors import TraceError, UnsupportedError

IMPLEMENTATION = "pcg"
"""The name under which transformers' registries know the markers."""


def _marker(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Register an operator of namespace pcg; the function returns its result's shape."""
    name = f"pcg::{function.__name__.removeprefix('_')}"
    marker = torch.library.custom_op(name, function, mutates_args=())
    marker.register_fake(function)
    return marker


@_marker
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of q [1, H, T, D], k and v [1, K, T, D], to [1, T, H, D].

    `mask` is None or has [T, T] as its last dims; `window` is the argument of flash attention and
    needs a mask.
    """
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


@_marker
def _expert_linear(
    x: torch.Tensor,
    indices: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_transposed: bool,
) -> torch.Tensor:
    """Product of x [T, in] or [T, k, in] by the experts at `indices` [T, k]: [T, k, out].

    The weight is [E, out, in], or [E, in, out] if it is transposed.
    """
    return x.new_empty(*indices.shape, weight.shape[2 if is_transposed else 1])


@_marker
def _short_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Causal convolution of each channel of x [1, C, T] by weight [C, W]."""
    return torch.empty_like(x)


@_marker
def _recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
) -> torch.Tensor:
    """The operator of that name over q, k [1, T, G, K] and v [1, T, H, V], to v's shape."""
    return torch.empty_like(v)


@_marker
def _take(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """x[..., [index], ...]: an entry of a dim, copied."""
    return torch.empty_like(x.narrow(dim, index, 1))


own_attention: ContextVar[str] = ContextVar("own_attention", default="sdpa")
"""The attention implementation of the exported module, which the marker replaces."""

EVERY_TOKEN = object()
"""What an indexer chooses among as many tokens as sparse attention reads; see `short_positions`."""

_WITHOUT_EFFECT = {
    "cache_position", "dropout", "layer_idx", "logits_to_keep", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "return_dict", "target_dtype", "use_cache",
}  # fmt: skip
"""Options of an attention function that do not affect its result for a single sequence."""


def register_markers() -> None:
    """Register attention and experts with transformers."""
    from transformers import AttentionInterface
    from transformers.integrations import moe
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention_interface)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask_interface)
    experts = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
    if experts is not None:
        experts.register(IMPLEMENTATION, _experts_interface)


@contextlib.contextmanager
def of_attention(implementation: str) -> Iterator[None]:
    """Let the marker replace an attention implementation, within transformers' own code.

    A trace has a single sequence, so the search for packed sequences is skipped. The marker raises
    ValueError if a module would call a function other than transformers'. Other threads are not
    affected.
    """
    from transformers import AttentionInterface, masking_utils

    def checked(function: Any) -> None:
        if not is_of_transformers(function):
            name = getattr(function, "__qualname__", type(function).__name__)
            raise ValueError(f"its attention {name} is not a function of transformers")

    thread, lookup = get_ident(), AttentionInterface.get_interface
    find_packed = masking_utils.find_packed_sequence_indices
    by_vmap = masking_utils._vmap_expansion_sdpa

    def get_interface(self: Any, name: str, default: Any) -> Any:
        if name != IMPLEMENTATION:
            return lookup(self, name, default)
        checked(lookup(self, implementation, default))
        return _attention_interface

    def get_item(self: Any, name: str) -> Any:
        if name == IMPLEMENTATION:
            checked(None if implementation == "eager" else self[implementation])
        return super(AttentionInterface, self).__getitem__(name)

    def find_none(position_ids: torch.Tensor) -> Any:
        if get_ident() != thread:
            return find_packed(position_ids)
        _check_consecutive(position_ids)
        return None

    def broadcast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        if get_ident() != thread:
            return by_vmap(function)  # type: ignore[no-any-return]

        def mask(*indices: torch.Tensor) -> torch.Tensor:
            batch, _, queries, keys = (len(index) for index in indices)
            places = masking_utils._non_vmap_expansion_sdpa(*indices)
            return function(*places).expand(batch, -1, queries, keys)

        return mask

    before = own_attention.set(implementation)
    masking_utils._vmap_expansion_sdpa = broadcast  # tensors of vmap cannot be traced
    AttentionInterface.get_interface = get_interface
    AttentionInterface.__getitem__ = get_item
    masking_utils.find_packed_sequence_indices = find_none
    try:
        yield
    finally:
        AttentionInterface.get_interface = lookup
        del AttentionInterface.__getitem__
        masking_utils.find_packed_sequence_indices = find_packed
        masking_utils._vmap_expansion_sdpa = by_vmap
        own_attention.reset(before)


_CONSECUTIVE = (
    "add", "sub", "alias", "clone", "contiguous", "expand", "squeeze", "to", "_to_copy",
    "unsqueeze", "view", "reshape", "lift_fresh_copy", "detach",
)  # fmt: skip
"""Operators that keep positions consecutive; of two operands, one is a number."""


def _check_consecutive(position_ids: torch.Tensor) -> None:
    """Refuse traced positions that may have gaps, at which transformers splits sequences."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return
    slot = proxy_tensor.get_proxy_slot(position_ids, mode.tracer, None)
    node = None if slot is None else slot.proxy.node
    while node is not None and node.op == "call_function":
        target = node.target
        name = target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)
        name = name.removeprefix("aten::")
        if name == "arange":
            return
        nodes = [x for x in node.args if isinstance(x, Node)]
        tensors = [x for x in nodes if isinstance(x.meta.get("val"), torch.Tensor)]
        # select takes positions of one kind, as those of text beside those of an image.
        keeps = name in _CONSECUTIVE or (name == "select" and not _is_last(node))
        if not keeps or len(tensors) != 1:
            raise UnsupportedError(
                f"the model is given positions that are computed by {name}; where they do not go "
                "up by one, transformers begins another sequence, which pcg does not; change what "
                "is made of positions, as rotary tables, and leave position_ids as they are"
            )
        node = tensors[0]


def _is_last(select: Node) -> bool:
    """Return True if the node selects along the last dim."""
    operand, dim = select.args[0], select.args[1]
    return dim in (-1, operand.meta["val"].dim() - 1)  # type: ignore[union-attr]


def is_of_transformers(function: Any) -> bool:
    """Return whether a function's code is in a file of transformers."""
    import transformers

    code = getattr(function, "__code__", None)
    return code is not None and Path(transformers.__file__).parent in Path(code.co_filename).parents


def _mask_interface(**arguments: Any) -> torch.Tensor | None:
    """Return the mask of the module's own implementation; never None for a causal mask."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    implementation = own_attention.get()
    arguments["allow_is_causal_skip"] = False
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(f"its attention {implementation} is not a function of transformers")
    if implementation != "eager" and is_of_transformers(
        ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
    ):
        implementation = "sdpa"  # as a tensor, which flash and flex attention do not need
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation](**arguments)  # type: ignore[no-any-return]


def _attention_interface(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The marker with transformers' signature; options differ by architecture."""
    implementation = own_attention.get()
    if not options.pop("is_causal", getattr(module, "is_causal", True)):
        raise TraceError(f"{type(module).__name__} attends to later tokens; pcg needs a causal LM")
    if attention_mask is None and implementation == "eager":
        raise ValueError(f"{type(module).__name__} gives its attention no mask")
    window, softcap = (options.pop(name, None) or 0 for name in ("sliding_window", "softcap"))
    scaling, sinks = (options.pop(name, None) for name in ("scaling", "s_aux"))
    if softcap and implementation == "sdpa":
        raise ValueError("sdpa attention does not cap scores; use attn_implementation='eager'")
    for name, option in options.items():
        is_neutral = option is None or option is False or name in _WITHOUT_EFFECT
        is_neutral |= option is EVERY_TOKEN
        if not is_neutral or (name == "dropout" and option):
            raise ValueError(f"its attention is given {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # sdpa and eager attention only read the mask.
    read = int(window) if "flash" in implementation else None
    arguments = (attention_mask, sinks, scale, float(softcap), read)
    return torch.ops.pcg.attention(query, key, value, *arguments), None


# -------------------------------------------------------------------------------------- sequences


@contextlib.contextmanager
def of_sequences(model: nn.Module) -> Iterator[None]:
    """Replace transformers' functions of short convolutions and recurrences by markers.

    A model's file has its own copies of the functions. Other threads are not affected.
    """
    thread = get_ident()

    def replaced(function: Callable[..., Any], marker: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (marker if get_ident() == thread else function)(*args, **kwargs)

        return call

    with contextlib.ExitStack() as undo:
        for name in {type(module).__module__ for module in model.modules()}:
            module = sys.modules[name]
            for key, marker in _OF_SEQUENCES.items():
                function = vars(module).get(key)
                if function is not None and is_of_transformers(inspect.unwrap(function)):
                    setattr(module, key, replaced(function, marker))
                    undo.callback(setattr, module, key, function)
        yield


def _causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:
    from transformers.activations import ACT2FN

    _check_single("a short convolution", options)
    out = torch.ops.pcg.short_convolution(x.to(weight.dtype), weight, bias)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(x.dtype)  # type: ignore[no-any-return]


def _gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    _check_single("a gated delta rule", options)
    q, k, v, decay, strength = (x.float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * query.shape[-1] ** -0.5
    return torch.ops.pcg.recurrence(q, k, v, decay, strength).to(query.dtype), None


def _state_space(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Mamba-2's scan: the state decays by A dt and takes B (dt x)ᵀ, and C reads it."""
    _check_single("a state space", options)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    is_positive = options.get("dt_softplus", False)
    dt = torch.nn.functional.softplus(dt) if is_positive else dt
    least, most = options.get("dt_limit", (0.0, float("inf")))
    if most < float("inf"):
        dt = torch.clamp(dt, least, most)
    elif not is_positive or least > 0.0:
        dt = torch.clamp(dt, min=least)
    x, step = hidden_states.float(), dt.float()
    out = torch.ops.pcg.recurrence(
        C.float(), B.float(), x * step[..., None], A.float() * step, None
    )
    return out if D is None else out + D[..., None] * x  # type: ignore[no-any-return]


def _selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Mamba-1's scan of [1, channels, T]: each channel is a head with a value of one entry."""
    skip, gate, bias = (options.pop(name, None) for name in ("D", "z", "delta_bias"))
    _check_single("a selective scan", options)
    dt = dt.float() if bias is None else dt.float() + bias[:, None].float()
    dt = torch.nn.functional.softplus(dt) if options.get("delta_softplus") else dt
    x, step, q, k = (part.float().transpose(1, 2) for part in (hidden_states, dt, C, B))
    decay = step[..., None] * A.float()
    u = (x * step)[..., None]
    out = torch.ops.pcg.recurrence(q[:, :, None], k[:, :, None], u, decay, None)[..., 0]
    out = out if skip is None else out + skip * x
    out = out.transpose(1, 2)
    return out if gate is None else out * torch.nn.functional.silu(gate)  # type: ignore[no-any-return]


def _check_single(what: str, options: Mapping[str, Any]) -> None:
    """Refuse options of kernels that transformers' own functions do not have."""
    for name in ("cu_seqlens", "initial_state", "initial_states", "seq_idx", "z"):
        if options.get(name) is not None:
            raise UnsupportedError(f"{what} is given {name}, which pcg does not compute")


_OF_SEQUENCES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_convolution,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective_scan,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
}
"""Replacements of functions, by their names in transformers' model files."""


# -------------------------------------------------------------------------------------- registries


def _experts_interface(
    module: Any, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The experts' products by markers, and what lies between them; transformers' signature."""

    def multiplied(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        arguments = (getattr(module, name), bias, module.is_transposed)
        return torch.ops.pcg.expert_linear(x, indices, *arguments)  # type: ignore[no-any-return]

    if module.has_gate:
        inner = module._apply_gate(multiplied(hidden, "gate_up_proj"))
    else:
        inner = module.act_fn(multiplied(hidden, "up_proj"))
    outputs = multiplied(inner, "down_proj")
    if module.has_post_expert_norm:
        outputs = module.post_expert_norm(outputs)
    return (outputs * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


class NumbersOnMeta(TorchFunctionMode):
    """Replaces calls that convert numbers to tensors, which lose their data on the meta device.

    x[..., [i], :] becomes a single operator, and torch.tensor(number) becomes torch.full.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            x, entries = args
            lists = [position for position, entry in enumerate(entries) if _is_index_list(entry)]
            if len(lists) == 1 and all(_is_whole(e) for e in entries if not _is_index_list(e)):
                after = len(entries) - lists[0]
                dim = x.dim() - after if Ellipsis in entries[: lists[0]] else lists[0]
                (index,) = entries[lists[0]]
                return torch.ops.pcg.take(x, dim, index % x.shape[dim])
        if func is torch.tensor and args and type(args[0]) in (bool, int, float):
            return torch.full((), args[0], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_index_list(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 1 and isinstance(entry[0], int)


def _is_whole(entry: Any) -> bool:
    return entry is Ellipsis or (isinstance(entry, slice) and entry == slice(None))
