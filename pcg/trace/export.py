"""Build a Hugging Face causal LM on the meta device and export it, with few layers and no weights.

Attention and experts become one operator each through transformers' own registries
(`pcg.trace.markers`); architectures that keep an attention of their own are exported with it, and
`pcg.trace.score_attention` recognises it in the graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import nn

from pcg.errors import PcgError, TraceError, UnsupportedError
from pcg.trace.dry_runs import calls_of_layers, check_gradients, check_no_recurrence
from pcg.trace.layer_kinds import configs_of, layer_kinds, schedule_of
from pcg.trace.markers import (
    IMPLEMENTATION,
    NumbersOnMeta,
    of_attention,
    register_markers,
)
from pcg.trace.model_config import check_module, in_one_line, parse_config, positions_of
from pcg.trace.prepared_module import (
    with_attention,
    with_frozen,
    with_layers,
    with_modules_of_their_own,
    without_custom_gradients,
)


@dataclass(frozen=True)
class TraceFacts:
    """Facts of a traced model that its graph does not hold.

    Attributes:
        layers_path: module path of the list of layers, as `model.layers`.
        schedule: for each layer of the model, the traced layer that equals it.
        base_prefix: name of the base model within the causal LM, as `model`.
        attention: how transformers runs its attention by default: "sdpa" or "eager", through its
            registry, or "own-sdpa" or "own-eager", within the architecture's own module.
        positions: the number of positions that the model has or is trained for; None without bound.
    """

    layers_path: str
    schedule: tuple[int, ...]
    base_prefix: str
    attention: str
    positions: int | None


@dataclass(frozen=True)
class Exported(TraceFacts):
    """An exported model.

    Attributes:
        program: torch.export's result; input_ids and position_ids are [1, T].
        constants: values of the buffers that no checkpoint holds, by name.
        checkpoint_names: parameters and buffers that a checkpoint holds; tied ones map to the name
            that it holds.
    """

    program: torch.export.ExportedProgram
    constants: Mapping[str, torch.Tensor]
    checkpoint_names: Mapping[str, str]


_EXPORTING = Lock()
"""One thread exports at a time: torch's default dtype and modules' hooks are the process's."""


def export(
    model: Mapping[str, Any] | nn.Module, dtype: str | None = None, whole: bool = False
) -> Exported:
    """Export a causal LM; arguments as of `pcg.trace.trace`.

    Raises:
        TraceError: transformers cannot build or torch cannot export it; names the module.
    """
    with _EXPORTING, quiet():
        if isinstance(model, nn.Module):
            return _export_module(model, None if dtype is None else getattr(torch, dtype), whole)
        config = parse_config(model)
        config.dtype = getattr(torch, dtype) if dtype else config.dtype or torch.float32
        with _torch_dtype(config.dtype):
            return _first_way(
                config.model_type,
                lambda way: _export_with(way, _build(config, way), None, whole),
                (IMPLEMENTATION, "sdpa", "eager"),
            )


_BUILDING = "transformers says:"
"""Beginning of the reason why an architecture cannot be built."""


class _NotThisWay(Exception):
    """An attention implementation that an architecture does not take."""


_Way = TypeVar("_Way", str, str | None)


def _first_way(name: str, run: Callable[[_Way], Exported], ways: Iterable[_Way]) -> Exported:
    """The export by the first attention implementation that an architecture takes."""
    reasons: dict[str, str | None] = {}
    for implementation in ways:
        try:
            return run(implementation)
        except _NotThisWay as error:
            reasons.setdefault(str(error), implementation)
    # That an architecture does not have a fallback says nothing of the model.
    telling = {why: way for why, way in reasons.items() if not why.startswith(_BUILDING)}
    reasons = telling or dict(list(reasons.items())[:1])
    if len(reasons) == 1:
        raise TraceError(f"cannot trace {name}: {next(iter(reasons))}")
    each = [
        f"with {implementation or 'its own'} attention, {why}"
        for why, implementation in reasons.items()
    ]
    raise TraceError(f"cannot trace {name}: {'; '.join(each)}")


def _export_module(model: nn.Module, dtype: torch.dtype | None, whole: bool) -> Exported:
    check_module(model)
    names = {getattr(config, "_attn_implementation", None) for config in configs_of(model)}
    own = next(iter(names)) or "eager"

    # Modules of several attentions, or with their attention in a class, are traced as they are.
    ways = (IMPLEMENTATION, None) if len(names) == 1 else (None,)
    with with_frozen(model, dtype), without_custom_gradients(model):
        return _first_way(
            type(model).__name__, lambda way: _export_with(way, model, own, whole), ways
        )


def _export_with(
    implementation: str | None, model: nn.Module, own: str | None, whole: bool
) -> Exported:
    """Export a model by an attention implementation; `own` is the one that a module has."""
    path, kinds = layer_kinds(model)
    run = functools.partial(_run, model)
    is_given = own is not None
    if own is None:
        own = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    with contextlib.ExitStack() as prepared:
        prepared.enter_context(with_attention(model, implementation, experts=IMPLEMENTATION))
        prepared.enter_context(of_attention(own))
        prepared.enter_context(with_modules_of_their_own(model))
        if is_given and not whole:
            most = positions_of(model.config) or 2**20
            calls = calls_of_layers(model, path, len(kinds), most, run)
            kinds = list(zip(kinds, calls, strict=True))
        schedule, chosen = schedule_of(kinds)
        if whole:
            chosen = list(range(len(kinds)))
            schedule = tuple(chosen)
        prepared.enter_context(with_layers(model, path, chosen))
        check_no_recurrence(model, run)
        if is_given:
            check_gradients(model, run)
        constants = _constant_buffers(model)
        names = _checkpoint_names(model)
        program = _export(model)
    prefix = str(getattr(model, "base_model_prefix", ""))
    attention = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    if implementation != IMPLEMENTATION:
        attention = f"own-{attention}"
    elif all(node.target is not torch.ops.pcg.attention.default for node in program.graph.nodes):
        raise _NotThisWay("the model does not call it")
    facts = (path, schedule, prefix, attention, positions_of(model.config))
    return Exported(*facts, program, constants, names)


def _build(config: Any, implementation: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    register_markers()
    config = copy.deepcopy(config)
    config._experts_implementation = IMPLEMENTATION
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    except Exception as error:
        raise _NotThisWay(f"{_BUILDING} {in_one_line(error)}") from error
    return model.requires_grad_(False)  # type: ignore[no-any-return]


def _checkpoint_names(model: nn.Module) -> dict[str, str]:
    """Parameters and buffers that a checkpoint holds; tied ones map to the name that it holds."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    held: dict[int, str] = {}
    for name, parameter in parameters.items():
        if name not in tied:
            held.setdefault(id(parameter), name)
    names = {name: held.get(id(parameter), name) for name, parameter in parameters.items()}
    return names | {name: name for name in _persistent_buffers(model)}


def _persistent_buffers(model: nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


def _constant_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Values of the buffers that no checkpoint holds.

    Those on the meta device are made by the model's own initialisation.
    """
    values: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        before = dict(module._buffers)
        names = [
            name for name in module._non_persistent_buffers_set if before.get(name) is not None
        ]
        on_meta = [name for name in names if before[name].is_meta]
        for name in on_meta:
            old = before[name]
            fill = float("nan") if old.is_floating_point() else -1
            module._buffers[name] = torch.full_like(old, fill, device="cpu")
        if on_meta and hasattr(model, "_init_weights"):
            with torch.device("cpu"):
                model._init_weights(module)  # type: ignore[operator]
        for name in names:
            value = module._buffers[name]
            if name not in on_meta or not torch.isnan(value).any():
                values[f"{prefix}.{name}" if prefix else name] = value.detach().cpu().clone()
        module._buffers.update(before)
    return values


def _export(model: nn.Module) -> torch.export.ExportedProgram:
    inputs, options = arguments_of(model, 7)
    # A bound below the positions, where guards of some models lie.
    tokens = torch.export.Dim("T", min=2, max=max(8, (positions_of(model.config) or 2**20) - 1))
    shapes = {name: {1: tokens} for name in inputs}
    original = model.forward

    def forward(**given: torch.Tensor) -> Any:
        return original(**given, **options)

    def logits(_: nn.Module, __: Any, given: Mapping[str, torch.Tensor], out: Any) -> torch.Tensor:
        return _logits(model, out, given["input_ids"].shape[1])

    names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in inputs]
    forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    own = vars(model).get("forward")
    last = model.register_forward_hook(logits, with_kwargs=True)
    model.forward = forward
    try:
        # torch prints the graph of what it cannot trace.
        with NumbersOnMeta(), contextlib.redirect_stderr(io.StringIO()):
            return torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
    except PcgError:
        raise
    except Exception as error:
        raise _NotThisWay(_reason(error)) from error
    finally:
        last.remove()
        del model.forward
        if own is not None:
            model.forward = own


def arguments_of(model: nn.Module, tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, bool]]:
    """The inputs of a model's forward on a number of tokens, and its other arguments."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=next(model.parameters()).device)
    parameters = inspect.signature(model.forward).parameters
    taken = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        # Granite's forward hands its **kwargs to the base model.
        taken.update(inspect.signature(getattr(model, "base_model", model).forward).parameters)
    is_hidden = "input_ids" not in parameters  # behind *args and **kwargs
    inputs = {"input_ids": ids}
    if is_hidden or "position_ids" in taken:
        inputs["position_ids"] = ids.clone()
    return inputs, {"use_cache": False} if is_hidden or "use_cache" in taken else {}


def _run(model: nn.Module, tokens: int) -> None:
    inputs, options = arguments_of(model, tokens)
    model(**inputs, **options)


def _logits(model: nn.Module, out: Any, tokens: Any) -> torch.Tensor:
    """The logits that a model returns. UnsupportedError: there are none, or not of each token."""
    name = type(model).__name__
    logits = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
    if logits is None and type(out) in (tuple, list):
        logits = out[0]
    if not isinstance(logits, torch.Tensor):
        raise UnsupportedError(f"{name} returns no logits; give a causal LM, with its head")
    if logits.dim() != 3 or logits.shape[1] != tokens:
        raise UnsupportedError(
            f"{name} returns logits of shape {list(logits.shape)} for one sequence, and not a row "
            "for each token; give a causal LM"
        )
    return logits


def _reason(error: Exception) -> str:
    """Why torch.export fails, in a line."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "data-dependent" in line:
        line = "it branches on the values of tensors"
    elif "Constraints violated" in line or "specialized it to be a constant" in line:
        line = "what it computes changes with the number of tokens"
    elif "fake tensor in the exported program" in line:
        line = "it computes with tensors that cannot be traced, as of torch.autograd.grad"
    elif "'NoneType' object" in line:
        # No mask is made for the marked attention: the operator has the causal one in itself.
        line = "it reads the attention mask in code of its own"
    return line


@contextlib.contextmanager
def _torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence third parties' warnings, which are about training and generation settings."""
    loggers = [logging.getLogger(name) for name in ("transformers", "torch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
