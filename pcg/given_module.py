"""A transformers model in memory as the compiler takes it: its configuration, and its logits.

The module itself is traced (`pcg.trace`); after its weights are loaded, the executor's logits are
compared with the module's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pcg.errors import LogitsError, TraceError, UnsupportedError
from pcg.source import ModelSource, resolve
from pcg.trace.model_config import check_module
from pcg.trace.prepared_module import with_attention

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor

VERIFIED_PARAMETERS = 2_000_000_000
"""Modules of at most so many parameters are verified by default: it takes a forward pass."""

_TOKENS = 24
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""Relative error of a token's logits that rounding explains, by the coarsest dtype."""


def source_of(model: Any) -> tuple[ModelSource, Any]:
    """A model's source, and what to trace: its configuration, or the module that was given.

    Raises:
        SourceError: the model cannot be found or read.
        UnsupportedError: the module is wrapped, or is no causal LM.
    """
    if not isinstance(model, nn.Module):
        source = resolve(model)
        return source, source.config
    check_module(model)
    config: dict[str, Any] = model.config.to_dict()  # type: ignore[union-attr,operator]
    # An architecture of the user's own may have no name.
    config["model_type"] = config.get("model_type") or type(model).__name__
    return resolve(config), model


def check_weights(model: nn.Module) -> None:
    """Refuse a module whose weights are elsewhere. UnsupportedError: names one."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedError(
                f"{name} is on the meta device, without a value; load the model whole "
                "(from_pretrained without device_map), or give its directory"
            )


@torch.no_grad()
def check_logits(executor: Executor, model: nn.Module) -> None:
    """Compare an executor's logits of a few tokens with those of the module it was compiled from.

    Raises:
        LogitsError: they differ by more than rounding.
    """
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    first = next(model.parameters())
    ids = (torch.arange(_TOKENS, device=first.device) * 7919 + 11) % vocabulary
    dtypes = [first.dtype, getattr(torch, executor.state.program.options.dtype or "float32")]
    allowed = max(_TOLERANCES[dtype] for dtype in dtypes)
    own = str(getattr(model.config, "_attn_implementation", None) or "eager")
    errors = []
    found: Tensor | None = None
    # SDPA leaves out what it cannot do, such as soft-capped scores; the compiled program does not.
    for implementation in dict.fromkeys((own, "eager")):
        with with_attention(model, implementation):
            expected = _logits(model, ids)
        if not expected.isfinite().any():
            raise LogitsError(
                f"{type(model).__name__} itself gives no finite logits on {_TOKENS} tokens; a "
                "weight may be NaN or too large. verify=False compiles it all the same"
            )
        if found is None:
            found = executor.logits(ids.tolist()).cpu().double()
        errors.append(_relative_error(found, expected))
        if errors[-1] <= allowed:
            return
    raise LogitsError(
        f"the compiled program is not the {type(model).__name__} that was given: its logits of "
        f"{_TOKENS} tokens are off by {min(errors):.1e} of their size, where {allowed:.0e} is "
        "rounding; a hook or a method of the module does what its traced graph does not show. "
        "verify=False compiles it all the same"
    )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    try:
        out = model(input_ids=ids[None])
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} itself fails on {_TOKENS} tokens: {error}"
        ) from error
    logits = out.logits if hasattr(out, "logits") else out if isinstance(out, Tensor) else out[0]
    return logits[0].cpu().double()


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a token's logits, by their spread around their mean."""
    if found.shape != expected.shape or not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    found, expected = found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((found - expected).norm(dim=-1) / spread.clamp_min(1e-9)).max())
