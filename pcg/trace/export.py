"""Build a Hugging Face causal LM on the meta device and export it, with few layers and no weights.

transformers is imported here and nowhere else. Attention and experts become one operator each
through transformers' own registries; architectures that keep an attention of their own are exported
with it, and `pcg.trace.score_attention` recognises it in the graph.

Long because all that asks transformers and torch.export something is here, in short functions.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pcg.errors import PcgError, TraceError, UnsupportedError

_IMPLEMENTATION = "pcg"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""`dynamic_rope_update` in transformers' modeling_rope_utils.py handles these by length."""


@torch.library.custom_op("pcg::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """q [1, H, T, D], k and v [1, K, T, D] to [1, T, H, D]; a marker, never run."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


@_attention.register_fake
def _(q, k, v, sinks, scale, window, softcap):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


@torch.library.custom_op("pcg::experts", mutates_args=())
def _experts(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """A mixture of gated experts, x [T, h] to [T, h]; a marker, never run."""
    return torch.empty_like(x)


@_experts.register_fake
def _(x, indices, weights, gate_up, down):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@torch.library.custom_op("pcg::take", mutates_args=())
def _take(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """x[..., [index], ...]: one entry of a dim, copied."""
    return x.narrow(dim, index, 1).clone()


@_take.register_fake
def _(x, dim, index):  # type: ignore[no-untyped-def]
    return torch.empty_like(x.narrow(dim, index, 1))


def _attention_interface(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if not getattr(module, "is_causal", True):
        raise TraceError(f"{type(module).__name__} attends to later tokens; pcg needs a causal LM")
    arguments = (s_aux, scale, int(sliding_window or 0), float(softcap or 0.0))
    return torch.ops.pcg.attention(query, key, value, *arguments), None


def _experts_interface(
    module: nn.Module, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    if getattr(module, "has_bias", False) or getattr(module, "is_transposed", False):
        raise UnsupportedError(
            f"{type(module).__name__}: experts with biases or a transposed layout"
        )
    return torch.ops.pcg.experts(hidden, indices, weights, module.gate_up_proj, module.down_proj)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Attributes:
        program: torch.export's result; input_ids and position_ids are [1, T].
        layers_path: module path of the list of layers, as `model.layers`.
        schedule: for each layer of the model, the exported layer that equals it.
        constants: values of the buffers that no checkpoint holds, by name.
        checkpoint_names: parameters and buffers that a checkpoint holds; tied ones map to the name
            that it holds.
        base_prefix: name of the base model within the causal LM, as `model`.
        config: the model's configuration.
        attention: how transformers runs its attention by default: "sdpa" or "eager", through its
            registry, or "own-sdpa" or "own-eager", within the architecture's own module.
    """

    program: torch.export.ExportedProgram
    layers_path: str
    schedule: tuple[int, ...]
    constants: Mapping[str, torch.Tensor]
    checkpoint_names: Mapping[str, str]
    base_prefix: str
    config: Any
    attention: str


def export(config: Mapping[str, Any], dtype: str | None = None, whole: bool = False) -> Exported:
    """Export a causal LM from its configuration.

    Args:
        config: the contents of a config.json.
        dtype: torch's name of the dtype to compute in; the configuration's own by default.
        whole: export every layer instead of one of each kind (and one more).
    Raises:
        TraceError: transformers cannot build or torch cannot export it; names the module.
    """
    with quiet():
        parsed = parse_config(config)
        dtype = dtype or str(parsed.dtype or torch.float32).removeprefix("torch.")
        parsed.dtype = getattr(torch, dtype)
        with _torch_dtype(dtype):
            errors = []
            for implementation in (_IMPLEMENTATION, "sdpa", "eager"):
                try:
                    return _export_with(implementation, parsed, whole)
                except _NotThisWay as error:
                    errors.append(f"with {implementation} attention, {error}")
    raise TraceError(f"cannot trace a causal LM of type {parsed.model_type}: {'; '.join(errors)}")


class _NotThisWay(Exception):
    """An attention implementation that an architecture does not take."""


def _export_with(implementation: str, config: Any, whole: bool) -> Exported:
    full = _build(config, implementation)
    path, kinds = layer_kinds(full)
    model, schedule = full, tuple(range(len(kinds)))
    if not whole:
        shorter, chosen, shortened_config = _shorten(config, kinds)
        candidate = _build(shortened_config, implementation)
        if layer_kinds(candidate)[1] == [kinds[index] for index in chosen]:
            model, schedule = candidate, shorter
    constants = _constant_buffers(model)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    held = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names = {name: tied.get(name, name) for name in [*held, *_persistent_buffers(model)]}
    program = _export(model)
    if implementation == _IMPLEMENTATION and not _has_marker(program):
        raise _NotThisWay("the model does not call it")
    prefix = str(getattr(model, "base_model_prefix", ""))
    kind = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    attention = kind if implementation == _IMPLEMENTATION else f"own-{kind}"
    return Exported(program, path, schedule, constants, names, prefix, config, attention)


def _has_marker(program: torch.export.ExportedProgram) -> bool:
    return any(node.target is torch.ops.pcg.attention.default for node in program.graph.nodes)


def parse_config(config: Mapping[str, Any]) -> Any:
    """The transformers configuration of the contents of a config.json.

    Raises:
        TraceError: transformers does not know or refuses it.
        UnsupportedError: pcg does not compile such a model; says why.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    fields = dict(config)
    model_type = str(fields.pop("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in fields:
            raise UnsupportedError(
                f"model_type {model_type!r} comes with code of its own (auto_map), which pcg does "
                "not run; use a model that transformers implements"
            )
        raise TraceError(f"transformers knows no model_type {model_type!r}; is it up to date?")
    try:
        parsed = AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        raise TraceError(
            f"transformers refuses the configuration of this {model_type}: {error}"
        ) from error
    _check_supported(parsed)
    return parsed


def _check_supported(config: Any) -> None:
    """Refuse by name what would trace to another model than the configuration means."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{kind} is an encoder-decoder; pcg compiles decoder-only causal LMs"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedError(f"{kind} is no causal LM in transformers; pcg compiles causal LMs")
    text = config.get_text_config()
    if text is not config:
        raise UnsupportedError(
            f"{kind} is more than a language model; pcg compiles its text_config alone, a "
            f"{text.model_type}"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise UnsupportedError(
            f"this {kind} is quantized (quantization_config={quantization}); use a checkpoint with "
            "unquantized weights"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"this {kind} has rope_type={rope_type!r}, whose frequencies change with the "
                "length of the sequence; pcg does rope types that are a function of the position"
            )


def _rope_types(parameters: object) -> set[str]:
    """The rope types that a configuration names, for all layers or for each type of layer."""
    if not isinstance(parameters, Mapping):
        return set()
    own = parameters.get("rope_type")
    found = {str(own)} if own else set()
    return found.union(*map(_rope_types, parameters.values()))


def _build(config: Any, implementation: str) -> nn.Module:
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_IMPLEMENTATION, _attention_interface)
    AttentionMaskInterface.register(_IMPLEMENTATION, lambda *_, **__: None)
    _register_experts()
    config = copy.deepcopy(config)
    config._experts_implementation = _IMPLEMENTATION
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    except (ValueError, KeyError) as error:
        raise _NotThisWay(f"transformers says: {error}") from error
    model.config._experts_implementation = _IMPLEMENTATION
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def _register_experts() -> None:
    from transformers.integrations import moe

    interface = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
    if interface is not None:
        interface.register(_IMPLEMENTATION, _experts_interface)


def layer_kinds(model: nn.Module) -> tuple[str, list[object]]:
    """Path of the list of layers, and for each layer a value equal for layers of one kind."""
    count = model.config.num_hidden_layers  # type: ignore[union-attr]
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path, [fingerprint(layer) for layer in module]
    raise TraceError(f"{type(model).__name__} has no list of its {count} layers")


def fingerprint(layer: nn.Module) -> object:
    """Classes, constants and tensor shapes of all modules of a layer, but not its index."""
    rows = []
    for name, module in layer.named_modules():
        constants = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str)
            and key not in ("layer_idx", "layer_id", "layer_number")
        )
        tensors = [
            (key, tuple(value.shape), value.dtype)
            for key, value in [*module._parameters.items(), *module._buffers.items()]
            if value is not None
        ]
        rows.append((name, type(module).__name__, tuple(constants), tuple(tensors)))
    return tuple(rows)


def _shorten(config: Any, kinds: list[object]) -> tuple[tuple[int, ...], list[int], Any]:
    """The schedule over, the indices of, and the configuration with a few layers.

    They are one layer of each kind in order of appearance, then one of the first kind again, which
    lets the fold see that a block's output is the next one's input.
    """
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    chosen = sorted(first.values())
    slot = {kinds[index]: position for position, index in enumerate(chosen)}
    schedule = tuple(slot[kind] for kind in kinds)
    if len(kinds) > len(chosen):
        chosen.append(chosen[0])
    shortened = copy.deepcopy(config)
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == len(kinds):
            setattr(shortened, key, [value[index] for index in chosen])
    shortened.num_hidden_layers = len(chosen)
    return schedule, chosen, shortened


def _persistent_buffers(model: nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


def _constant_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Values of the buffers that no checkpoint holds, made by the model's own initialisation."""
    values: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        names = [
            name
            for name in module._non_persistent_buffers_set
            if module._buffers.get(name) is not None
        ]
        if not names:
            continue
        meta = dict(module._buffers)
        for name in names:
            old = module._buffers[name]
            fill = float("nan") if old.is_floating_point() else -1
            module._buffers[name] = torch.full_like(old, fill, device="cpu")
        with torch.device("cpu"):
            model._init_weights(module)  # type: ignore[operator]
        for name in names:
            value = module._buffers[name]
            if not torch.isnan(value).any():
                values[f"{prefix}.{name}" if prefix else name] = value.clone()
        module._buffers.update(meta)
    return values


def _export(model: nn.Module) -> torch.export.ExportedProgram:
    ids = torch.zeros(1, 7, dtype=torch.long, device="meta")
    inputs: dict[str, object] = {"input_ids": ids}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = ids.clone()
    tokens = torch.export.Dim("T", min=2, max=_most_tokens(model))
    shapes: dict[str, object] = {name: {1: tokens} for name in inputs}
    inputs["use_cache"], shapes["use_cache"] = False, None
    try:
        with _NumbersOnMeta():
            return torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
    except PcgError:
        raise
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _NotThisWay(f"torch.export cannot trace {type(model).__name__}: {line}") from error


class _NumbersOnMeta(TorchFunctionMode):
    """Calls whose numbers would be tensors, which lose them on the meta device.

    x[..., [i], :] is one operator, and torch.tensor(number) is torch.full.
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


def _most_tokens(model: nn.Module) -> int:
    """A bound below the positions, where guards of some models lie (MPT's max_seq_len)."""
    positions = getattr(model.config, "max_position_embeddings", None)
    positions = positions or getattr(model.config, "max_seq_len", None) or 2**20
    return max(8, int(positions) - 1)


@contextlib.contextmanager
def _torch_dtype(name: str) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the third parties' warnings, which are about training and generation settings."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
