"""A transformers model in memory as the compiler's input: its configuration, and its logits.

The module itself is traced (`pcg.trace`). After its weights are loaded, the executor's logits are
compared with the module's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pcg.errors import LogitsError, TraceError, UnsupportedError
from pcg.ir.program.program import CLASSIFIER, routed_layers
from pcg.source import ModelSource, resolve
from pcg.trace.export import arguments_of
from pcg.trace.model_config import check_classifier, check_module, with_labels
from pcg.trace.prepared_module import with_all_logits, with_attention

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor

VERIFIED_PARAMETERS = 2_000_000_000
"""Maximum number of parameters of modules that are verified by default; it takes a forward pass."""

_TOKENS, _DECODED, _FAR_TOKENS = 24, 3, 2048
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""Relative error of a token's logits that rounding explains, by the coarsest dtype."""


def source_of(model: Any, labels: Sequence[str] = ()) -> tuple[ModelSource, Any]:
    """Return a model's source, and the object to trace: its configuration, or the module.

    Args:
        labels: the labels of a sequence classifier over the layers of a checkpoint.
    Raises:
        SourceError: the model cannot be found or read.
        UnsupportedError: the module is wrapped, or is no causal LM, or labels do not fit.
    """
    if not isinstance(model, nn.Module):
        source = resolve(model)
        return labelled(source, source.config, labels)
    check_module(model)
    config: dict[str, Any] = model.config.to_dict()  # type: ignore[union-attr,operator]
    generation = getattr(model, "generation_config", None)
    if getattr(generation, "eos_token_id", None) is not None:
        config["eos_token_id"] = generation.eos_token_id  # type: ignore[union-attr]
    # A user's own architecture may have no name.
    config["model_type"] = config.get("model_type") or type(model).__name__
    if type(model).__name__.endswith(CLASSIFIER):
        check_classifier(model.config)
        config["architectures"] = [type(model).__name__]  # the file may name a causal LM
    return labelled(resolve(config), model, labels)


def labelled(source: ModelSource, to_trace: Any, labels: Sequence[str]) -> tuple[ModelSource, Any]:
    """Return a source as that of a classifier with the labels, if there are any."""
    if not labels:
        return source, to_trace
    if to_trace is not source.config:
        raise UnsupportedError(
            "labels are for checkpoints; give AutoModelForSequenceClassification.from_pretrained"
            "(…, num_labels=…) instead of this model in memory"
        )
    config = with_labels(source.config, labels)
    return replace(source, config=config), config


def check_weights(model: nn.Module) -> None:
    """Refuse a module with weights on the meta device; UnsupportedError names a weight."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedError(
                f"{name} is on the meta device, without a value; load the model whole "
                "(from_pretrained without device_map), or give its directory"
            )


@torch.no_grad()
def check_logits(executor: Executor, model: nn.Module) -> None:
    """Compare an executor with its module, which runs its own attention.

    Compares logits of one token, of a few and of fewer than a window, where transformers passes no
    mask to the module's code, and then greedily decoded tokens. A module that makes a mask of
    numbers itself is also compared far from the first token.

    In 16 bits, rounding may choose other experts for some tokens, so the median token counts there.

    Raises:
        LogitsError: they differ by more than rounding.
    """
    name = type(model).__name__
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    first = next(model.parameters())
    ids = ((torch.arange(_TOKENS) * 7919 + 11) % vocabulary).tolist()
    ids = [t if t != executor.program.padding else (t + 1) % vocabulary for t in ids]
    dtypes = [first.dtype, getattr(torch, executor.state.program.options.dtype or "float32")]
    allowed = max(_TOLERANCES[dtype] for dtype in dtypes)

    is_rounded = min(dtype.itemsize for dtype in dtypes) < 4
    has_experts = is_rounded and bool(routed_layers(executor.state.program.base)[0])
    of_tokens = torch.median if has_experts else torch.max
    masks = _OwnMasks()

    def expected(tokens: list[int]) -> Tensor:
        with with_attention(model, None), with_all_logits(model), masks:
            logits = _logits(model, torch.tensor(tokens, device=first.device))
        if not logits.isfinite().any():
            raise LogitsError(
                f"{name} itself gives no finite logits on {len(tokens)} tokens; a weight may be "
                "NaN or too large. verify=False compiles it all the same"
            )
        return logits

    attentions = [
        node
        for block in executor.state.program.serving.model.blocks
        for node in block.nodes
        if node.op == "attention"
    ]
    seen = (node.get(name) for node in attentions for name in ("window", "chunk"))
    windows = {size for size in seen if isinstance(size, int)}
    shorter = sorted(window - 1 for window in windows if 2 < window <= _TOKENS)
    for tokens in (ids, ids[:1], *(ids[:count] for count in shorter)):
        logits = expected(tokens)
        error = _relative_error(executor.logits(tokens).cpu().double(), logits, of_tokens)
        if error > allowed:
            raise _is_another(
                name, f"logits of {len(tokens)} tokens are off by {error:.1e} of their size"
            )
    # The trace always has a mask, and the module may make one where it is given none.
    if masks.are_numbers and not any(node.get("alibi") for node in attentions):
        far = min(executor.state.max_positions or _FAR_TOKENS, _FAR_TOKENS)
        tokens = (ids * -(-far // _TOKENS))[:far]
        error = _relative_error(executor.logits(tokens).cpu().double(), expected(tokens), of_tokens)
        if error > allowed:
            raise _is_another(name, f"logits of {far} tokens are off by {error:.1e} of their size")
    if logits.shape[-1] != vocabulary:
        return  # a decoded token may have no embedding, and labels have none
    try:
        (output,) = executor.generate([ids], max_new_tokens=_DECODED, ignore_eos=True)
    except UnsupportedError:  # no attention, or no kernel of its size; an engine reports it
        return
    rows = expected([*ids, *output.token_ids])[_TOKENS - 1 : -1]
    chosen = rows.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    # Rounding decides between nearly equal logits.
    short = float(of_tokens((rows.max(-1).values - chosen) / _spread(rows)))
    if short > allowed:
        raise _is_another(name, f"greedy tokens have logits {short:.1e} below the best")


class _OwnMasks(TorchFunctionMode):
    """Notes whether PyTorch's attention is given a mask of numbers.

    Attributes:
        are_numbers: True if a mask was in floating point, which transformers' SDPA masks are not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.are_numbers = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            self.are_numbers |= mask is not None and mask.is_floating_point()
        return func(*args, **kwargs)


def _is_another(name: str, how: str) -> LogitsError:
    return LogitsError(
        f"the compiled program is not the {name} that was given: its {how}, more than rounding; a "
        "hook or a method of the module does what its traced graph does not show. verify=False "
        "compiles it all the same"
    )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    try:
        # As in the trace: a cache is the module's own matter.
        out = model(input_ids=ids[None], **arguments_of(model, len(ids))[1])
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} itself fails on {len(ids)} tokens: {error}"
        ) from error
    logits = out.logits if hasattr(out, "logits") else out if isinstance(out, Tensor) else out[0]
    return logits[0].cpu().double()


def _relative_error(
    actual: Tensor, expected: Tensor, of_tokens: Callable[[Tensor], Tensor]
) -> float:
    """Return the error of tokens' logits, relative to their spread around their mean."""
    if actual.shape != expected.shape or not torch.equal(actual.isfinite(), expected.isfinite()):
        return float("inf")
    actual, expected = actual.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)
    return float(of_tokens((actual - expected).norm(dim=-1) / _spread(expected)))


def _spread(logits: Tensor) -> Tensor:
    spread: Tensor = (logits - logits.mean(-1, keepdim=True)).norm(dim=-1)
    return spread.clamp_min(1e-9)
