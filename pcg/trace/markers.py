"""Operators that stand for attention, experts and index lists in an exported graph.

transformers calls the first two through its own registries; none of them is ever run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pcg.errors import TraceError, UnsupportedError

IMPLEMENTATION = "pcg"
"""The name under which transformers' registries know the markers."""


def _marker(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Register an operator of namespace pcg whose result has the shape that a function gives."""
    name = f"pcg::{function.__name__.removeprefix('_')}"
    marker = torch.library.custom_op(name, function, mutates_args=())
    marker.register_fake(function)
    return marker


@_marker
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Attention of q [1, H, T, D], k and v [1, K, T, D], to [1, T, H, D]."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


@_marker
def _experts(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """A mixture of gated experts, x [T, h] to [T, h]."""
    return torch.empty_like(x)


@_marker
def _take(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """x[..., [index], ...]: one entry of a dim, copied."""
    return torch.empty_like(x.narrow(dim, index, 1))


def register_markers() -> None:
    """Register attention and experts with transformers."""
    from transformers import AttentionInterface
    from transformers.integrations import moe
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention_interface)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, **__: None)
    experts = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
    if experts is not None:
        experts.register(IMPLEMENTATION, _experts_interface)


def _attention_interface(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The marker as transformers calls it; which options are given differs by architecture."""
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} is given an attention mask of the model's own")
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        raise TraceError(f"{type(module).__name__} attends to later tokens; pcg needs a causal LM")
    scaling = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window, softcap = (options.get(name) or 0 for name in ("sliding_window", "softcap"))
    arguments = (options.get("s_aux"), scale, int(window), float(softcap))
    return torch.ops.pcg.attention(query, key, value, *arguments), None


def _experts_interface(
    module: nn.Module, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    if getattr(module, "has_bias", False) or getattr(module, "is_transposed", False):
        raise UnsupportedError(
            f"cannot trace {type(module).__name__}: its experts have biases or transposed weights, "
            "for which there is no operator; pcg takes experts as Mixtral and Qwen3-MoE have them"
        )
    is_gated = getattr(module, "has_gate", True) and getattr(module, "is_concatenated", True)
    apply_gate = getattr(type(module), "_apply_gate", None)
    activations = (nn.SiLU, SiLUActivation)
    is_plain = apply_gate is moe._default_apply_gate and isinstance(module.act_fn, activations)
    if not (is_gated and is_plain) or getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(
            f"cannot trace {type(module).__name__}: pcg takes experts that are down(silu(gate) * "
            "up), without norms of their own, as Mixtral and Qwen3-MoE have them"
        )
    return torch.ops.pcg.experts(hidden, indices, weights, module.gate_up_proj, module.down_proj)  # type: ignore[no-any-return]


class NumbersOnMeta(TorchFunctionMode):
    """Replaces calls whose numbers would be tensors, which lose them on the meta device.

    x[..., [i], :] becomes one operator, and torch.tensor(number) becomes torch.full.
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
