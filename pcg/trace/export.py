"""Export of a Hugging Face causal LM from the meta device, with few layers and no weights.

Attention and experts become a single operator each through transformers' own registries
(`pcg.trace.markers`). Architectures with their own attention code are exported with it, and
`pcg.trace.score_attention` recognises it in the graph.

Dry runs of a few layers without data detect problems that torch.export would not name or not see:

- An operator that runs more often on more tokens is in a loop over them, which torch.export unrolls
  for minutes; a convolution or a Fourier transform mixes tokens. Neither fits a token-flat graph,
  in which only attention sees sequences.
- A module that calls other functions of PyTorch when gradients are computed is a different model in
  finetuning than in serving, and hooks of tensors run only then; a program has a single forward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any, TypeVar

import torch.fx.config
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pcg.errors import PcgError, TraceError, UnsupportedError
from pcg.ir.program.program import first_position
from pcg.source import COMPOSITE, COMPOSITES
from pcg.trace.layer_kinds import configs_of, layer_kinds, layer_of, schedule_of
from pcg.trace.markers import (
    IMPLEMENTATION,
    NumbersOnMeta,
    of_attention,
    of_sequences,
    register_markers,
)
from pcg.trace.model_config import (
    check_module,
    check_positions,
    class_of,
    in_one_line,
    parse_config,
    positions_of,
    renamings_of,
)
from pcg.trace.prepared_module import (
    with_all_logits,
    with_attention,
    with_frozen,
    with_layers,
    with_modules_of_their_own,
    without_custom_gradients,
)
from pcg.trace.replaced_methods import of_classes

# ----------------------------------------------------------------------------------------- dry runs


_TOKENS = (5, 9)
_MANY = 4099
"""Tokens of a run that compares layers: beyond the lengths at which models branch."""
_SMALL = 16
"""Maximum number of entries of a constant tensor whose values are compared."""
_MIXES = ("conv", "_conv", "mkldnn_conv", "fft", "_fft")
"""Prefixes of the names of operators that mix tokens."""


def check_no_recurrence(model: nn.Module, run: Callable[[int], object]) -> None:
    """Refuse a model that mixes tokens other than by attention.

    Args:
        model: a causal LM with few layers.
        run: runs its forward on a number of tokens.
    Raises:
        UnsupportedError: names the module and the operator.
    """
    counts: list[Counter[tuple[str, str]]] = []
    for tokens in _TOKENS:
        # A run that fails counts up to the failure; torch.export reports its reason.
        with _recorded(model) as recorder, contextlib.suppress(Exception):
            run(tokens)
        counts.append(recorder)
    fewer, more = counts
    for (module, operator), count in more.items():
        if operator.startswith(_MIXES):
            raise UnsupportedError(f"{module} mixes tokens by aten.{operator}")
        grown = count - fewer[module, operator]
        if grown > 0 and grown % (_TOKENS[1] - _TOKENS[0]) == 0:
            raise UnsupportedError(
                f"{module} runs aten.{operator} {count} times on {_TOKENS[1]} tokens, in a loop"
            )


_OF_GRADIENTS = {
    torch.Tensor.register_hook: "Tensor.register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "Tensor.register_post_accumulate_grad_hook",
    torch.Tensor.grad_fn.__get__: "Tensor.grad_fn",  # type: ignore[union-attr]
    torch.Tensor.retain_grad: "Tensor.retain_grad",
}
"""Functions that change or read gradients, which the forward's trace does not show."""


def check_gradients(model: nn.Module, run: Callable[[int], object]) -> None:
    """Refuse a model with another forward when gradients are computed, or with gradient hooks.

    Args:
        model: a causal LM with few layers.
        run: runs its forward on a number of tokens.
    Raises:
        UnsupportedError: names the module and the function.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    runs: list[list[tuple[str, Hashable]]] = []
    for with_gradients in (False, True):
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.set_grad_enabled(with_gradients))
            undo.enter_context(_without_data(model))
            for table in tables if with_gradients else ():
                table.requires_grad_(True)
                undo.callback(table.requires_grad_, False)
            # torch.export reports the reason of a failing run.
            undo.enter_context(contextlib.suppress(_EndedEarly))
            functions = undo.enter_context(_Functions(model))
            try:
                run(_TOKENS[0])
            except PcgError:
                raise
            except Exception as error:
                raise _EndedEarly from error
        runs.append(functions.calls)
    for without, beside in itertools.zip_longest(*runs, fillvalue=("the model", None)):
        if without != beside:
            raise UnsupportedError(
                f"{beside[0]} computes something else where gradients are computed, as by a branch "
                "on requires_grad or torch.is_grad_enabled(); pcg has one forward for serving and "
                "finetuning"
            )


def calls_of_layers(
    model: nn.Module, path: str, count: int, most: int, run: Callable[[int], object]
) -> list[Hashable]:
    """Return the calls of each layer, on few tokens and on many.

    Layers of equal modules may still differ: an attention function may know the layers by their
    index, or read a list of the configuration. All layers count as different if the model cannot
    run without data.

    Args:
        model: a causal LM with all its layers.
        path: module path of the list of `count` layers.
        most: the number of positions of the model.
        run: runs its forward on a number of tokens.
    """
    calls: list[list[Hashable]] = [[] for _ in range(count)]
    for tokens in (_TOKENS[0], min(_MANY, most)):
        functions = _Functions(model)
        try:
            with torch.no_grad(), _without_data(model), functions:
                run(tokens)
        except Exception:
            return list(range(count))
        for module, call in functions.calls:
            place, _, inner = module.removeprefix(f"{path}.").partition(".")
            place = place.partition(" ")[0]
            if module.startswith(f"{path}.") and place.isdecimal():
                calls[int(place)].append((inner, call))
    return list(map(tuple, calls))


class _EndedEarly(Exception):
    """A run that cannot complete without data."""


class _Functions(TorchFunctionMode):
    """Records the functions of PyTorch that a model's modules call, with their numbers.

    Attributes:
        calls: the module and the function of each call, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[tuple[str, Hashable]] = []
        self._modules = _Modules(model)
        self._is_inference = torch.is_inference_mode_enabled()
        self._held = {id(x) for x in itertools.chain(model.parameters(), model.buffers())}

    def __enter__(self) -> _Functions:
        self._modules.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call,no-any-return]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._modules.__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        module = self._modules.innermost
        used = _OF_GRADIENTS.get(func)
        if torch.is_inference_mode_enabled() and not self._is_inference:
            used = "torch.inference_mode"
        if used is not None:
            raise UnsupportedError(
                f"{module} uses {used}; a compiled program computes its gradients "
                "itself and has no hooks in them"
            )
        # torch.no_grad() restores the previous mode.
        if func is not torch._C._set_grad_enabled:
            arguments = tuple(map(self._described, (*args, *(kwargs or {}).values())))
            self.calls.append((module, (getattr(func, "__qualname__", str(func)), arguments)))
        return func(*args, **(kwargs or {}))

    def _described(self, x: Any) -> Hashable:
        """Return an argument's description, equal for the same call on other activations."""
        if x is None or isinstance(x, bool | int | float | str | torch.dtype):
            return x
        if isinstance(x, list | tuple):
            return tuple(map(self._described, x))
        if isinstance(x, slice):
            return tuple(map(self._described, (x.start, x.stop, x.step)))
        is_known = isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) and not x.is_meta
        if is_known and id(x) not in self._held and x.numel() <= _SMALL:
            return tuple(x.detach().flatten().tolist())
        return type(x).__name__


class _Modules:
    """Tracks the modules whose forward is running, `running`, innermost last."""

    def __init__(self, model: nn.Module) -> None:
        self.running = [type(model).__name__]
        self._thread = get_ident()
        self._names = {
            module: f"{path} ({type(module).__name__})" for path, module in model.named_modules()
        }

    @property
    def innermost(self) -> str:
        return self.running[-1]

    def __enter__(self) -> _Modules:
        self._entering = hooks.register_module_forward_pre_hook(self._enter)
        self._leaving = hooks.register_module_forward_hook(self._leave, always_call=True)
        return self

    def __exit__(self, *raised: object) -> None:
        self._leaving.remove()
        self._entering.remove()

    # The hooks are global, and other threads may also run modules.
    def _enter(self, module: nn.Module, args: Any) -> None:
        if get_ident() == self._thread:
            self.running.append(self._names.get(module, self.running[-1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == self._thread:
            self.running.pop()


class _Recorder(TorchDispatchMode):
    """Counts operators by their module, in `counts`."""

    def __init__(self, modules: _Modules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, str]] = Counter()
        self._modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self._modules.innermost, func.overloadpacket.__name__] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()  # a tensor without data
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _recorded(model: nn.Module) -> Iterator[Counter[tuple[str, str]]]:
    with contextlib.ExitStack() as undo:
        modules = undo.enter_context(_Modules(model))
        undo.enter_context(torch.no_grad())
        undo.enter_context(_without_data(model))
        yield undo.enter_context(_Recorder(modules)).counts


def _without_data(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    if any(parameter.is_meta for parameter in model.parameters()):
        return contextlib.nullcontext()
    return FakeTensorMode(allow_non_fake_inputs=True)


# ------------------------------------------------------------------------------------------- export


@dataclass(frozen=True)
class TraceFacts:
    """Properties of a traced model that its graph does not hold.

    Attributes:
        layers_path: module path of the list of layers, such as `model.layers`.
        schedule: for each layer of the model, the equal traced layer.
        base_prefix: name of the base model within the causal LM, such as `model`.
        renamings: patterns in a checkpoint's names, and their replacements in the model's.
        attention: the default attention of transformers: "sdpa" or "eager", through its registry,
            or "own-sdpa" or "own-eager", within the architecture's own module.
        positions: the number of positions of the model, or of its training; None if unbounded.
    """

    layers_path: str
    schedule: tuple[int, ...]
    base_prefix: str
    renamings: tuple[tuple[str, str], ...]
    attention: str
    positions: int | None


@dataclass(frozen=True)
class Exported(TraceFacts):
    """An exported model.

    Attributes:
        program: torch.export's result; input_ids and position_ids are [1, T].
        constants: values of the buffers that no checkpoint holds, by name.
        checkpoint_names: parameters and buffers of a checkpoint; tied tensors map to the stored
            name.
    """

    program: torch.export.ExportedProgram
    constants: Mapping[str, torch.Tensor]
    checkpoint_names: Mapping[str, str]


_EXPORTING = Lock()
"""Lock of exports: torch's default dtype and modules' hooks are global."""


def export(
    model: Mapping[str, Any] | nn.Module, dtype: str | None = None, whole: bool = False
) -> Exported:
    """Export a causal LM; see `pcg.trace.trace` for the arguments.

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
"""Prefix of the reason why an architecture cannot be built."""


class _NotThisWay(Exception):
    """An attention implementation that the architecture refuses."""


_Way = TypeVar("_Way", str, str | None)


def _first_way(name: str, run: Callable[[_Way], Exported], ways: Iterable[_Way]) -> Exported:
    """Return the export by the first attention implementation that the architecture supports."""
    reasons: dict[str, str | None] = {}
    for implementation in ways:
        try:
            return run(implementation)
        except _NotThisWay as error:
            reasons.setdefault(str(error), implementation)
    # A missing fallback implementation is no property of the model.
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
    implementation = next(iter(names)) or "eager"

    # Modules with several attentions, or attention in a class, are traced unchanged.
    ways = (IMPLEMENTATION, None) if len(names) == 1 else (None,)
    with with_frozen(model, dtype), without_custom_gradients(model):
        return _first_way(
            type(model).__name__, lambda way: _export_with(way, model, implementation, whole), ways
        )


def _export_with(
    implementation: str | None, model: nn.Module, model_implementation: str | None, whole: bool
) -> Exported:
    """Export a model by an attention implementation; `model_implementation` is a module's own."""
    check_positions(model)
    path, kinds = layer_kinds(model)
    run = functools.partial(_run, model)
    is_given = model_implementation is not None
    if model_implementation is None:
        model_implementation = _usual_attention(model)
    with contextlib.ExitStack() as prepared:
        prepared.enter_context(with_attention(model, implementation, experts=IMPLEMENTATION))
        prepared.enter_context(of_attention(model_implementation))
        prepared.enter_context(of_sequences(model))
        prepared.enter_context(of_classes(model))
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
        prepared.enter_context(with_all_logits(model))
        check_no_recurrence(model, run)
        if is_given:
            check_gradients(model, run)
        constants = _constant_buffers(model)
        names = _checkpoint_names(model, path, chosen)
        program = _export(model)
    prefix = str(getattr(model, "base_model_prefix", ""))
    attention = _usual_attention(model)
    if implementation != IMPLEMENTATION:
        attention = f"own-{attention}"
    elif all(node.target is not torch.ops.pcg.attention.default for node in program.graph.nodes):
        raise _NotThisWay("the model does not call it")
    facts = (path, schedule, prefix, renamings_of(model), attention, positions_of(model.config))
    return Exported(*facts, program, constants, names)


def _usual_attention(model: nn.Module) -> str:
    """Return the attention with which transformers computes a model as it was trained."""
    # transformers 5.17 has SDPA for Gemma 2, too, which leaves out the cap of its scores.
    is_capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not is_capped else "eager"


def _build(config: Any, implementation: str) -> nn.Module:
    register_markers()
    config = copy.deepcopy(config)
    config._experts_implementation = IMPLEMENTATION
    try:
        with torch.device("meta"):
            kind = class_of(config)
            model: nn.Module = kind._from_config(config, attn_implementation=implementation)
    except Exception as error:
        raise _NotThisWay(f"{_BUILDING} {in_one_line(error)}") from error
    if path := COMPOSITES.get(getattr(config, COMPOSITE, "")):
        _place_at(path, model)
    return model.requires_grad_(False)


class _Composite(nn.Module):
    """The base model of a composite checkpoint, which holds that of the language model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (language_model,) = self.children()
        return language_model(*args, **kwargs)


def _place_at(path: str, model: Any) -> None:
    """Give a language model the module paths, and so the adapters, of a composite checkpoint."""
    outer, _, inner = path.partition(".")
    composite = _Composite()
    # Mllama's prefix is that of its checkpoints.
    base = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
    composite.add_module(inner, getattr(model, base))
    delattr(model, base)
    model.add_module(outer, composite)
    model.base_model_prefix = outer


def _checkpoint_names(model: nn.Module, path: str, chosen: Sequence[int]) -> dict[str, str]:
    """Return parameters and buffers of a checkpoint; tied tensors map to the stored name.

    `chosen` has the index in the whole model of each layer at the path.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    held: dict[int, str] = {}
    for name, parameter in parameters.items():
        if name not in tied:
            held.setdefault(id(parameter), name)
    names = {name: held.get(id(parameter), name) for name, parameter in parameters.items()}
    for name, stored in names.items():
        place, owner = layer_of(name, path), layer_of(stored, path)
        if place is not None and owner is not None and owner[0] != place[0]:
            names[name] = f"{path}.{chosen[owner[0]]}.{owner[1]}"
            if parameters.get(names[name], parameters[name]) is not parameters[name]:
                raise UnsupportedError(f"{stored} is shared by layers, and {names[name]} is not")
    return names | {name: name for name in _persistent_buffers(model)}


def _persistent_buffers(model: nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


def _constant_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return values of the buffers that no checkpoint holds.

    The model's own initialisation computes those on the meta device.
    """
    values: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as undo:
        on_meta: set[str] = set()
        for prefix, module in model.named_modules():
            undo.callback(module._buffers.update, dict(module._buffers))
            for name in module._non_persistent_buffers_set:
                old = module._buffers.get(name)
                if old is not None and old.is_meta:
                    fill = float("nan") if old.is_floating_point() else -1
                    module._buffers[name] = torch.full_like(old, fill, device="cpu")
                    on_meta.add(prefix)
        # A module may also initialise the buffers of those within it.
        holders = {parent for path in on_meta for parent in _parents(path)}
        modules = dict(model.named_modules())
        for prefix, module in reversed(modules.items()):
            owners = (modules[path] for path in reversed([*_parents(prefix)]) if path in modules)
            owner = next((each for each in owners if hasattr(each, "_init_weights")), None)
            if prefix in holders and owner is not None:
                with torch.device("cpu"):
                    owner._init_weights(module)
        for prefix, module in model.named_modules():
            for name in module._non_persistent_buffers_set:
                value = module._buffers[name]
                if value is not None and not (prefix in on_meta and torch.isnan(value).any()):
                    values[f"{prefix}.{name}" if prefix else name] = value.detach().cpu().clone()
    return values


def _parents(path: str) -> Iterator[str]:
    """Yield a module's path, and those of the modules around it."""
    parts = path.split(".")
    yield from (".".join(parts[:count]) for count in range(len(parts) + 1))


def _export(model: nn.Module) -> torch.export.ExportedProgram:
    inputs, options = arguments_of(model, 7)
    # A bound below the positions, as some models have guards there.
    tokens = torch.export.Dim("T", min=2, max=max(8, (positions_of(model.config) or 2**20) - 1))
    shapes = {name: {1: tokens} for name in inputs}
    config: Any = model.config
    original, first = model.forward, first_position(config.to_dict())

    def forward(**inputs: torch.Tensor) -> Any:
        if first:
            inputs["position_ids"] = inputs["position_ids"] + first
        return original(**inputs, **options)

    def logits(_: nn.Module, __: Any, inputs: Mapping[str, torch.Tensor], out: Any) -> torch.Tensor:
        return _logits(model, out, inputs["input_ids"].shape[1])

    names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in inputs]
    forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    own_forward = vars(model).get("forward")
    validates = Distribution._validate_args  # branches on the values of its numbers
    Distribution.set_default_validate_args(False)
    no_stacks = getattr(torch.fx.config, "do_not_emit_stack_traces", False)  # not in torch 2.11
    torch.fx.config.do_not_emit_stack_traces = True  # of each node: a tenth of the time
    last = model.register_forward_hook(logits, with_kwargs=True)
    model.forward = forward
    try:
        # torch prints the graph of code that it cannot trace.
        with NumbersOnMeta(), _short_rope(model), contextlib.redirect_stderr(io.StringIO()):
            return torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
    except PcgError:
        raise
    except Exception as error:
        raise _NotThisWay(_reason(error)) from error
    finally:
        torch.fx.config.do_not_emit_stack_traces = no_stacks
        Distribution.set_default_validate_args(validates)
        last.remove()
        del model.forward
        if own_forward is not None:
            model.forward = own_forward


@contextlib.contextmanager
def _short_rope(model: nn.Module) -> Iterator[None]:
    """Let LongRoPE keep its short factors, as it does up to `positions_of`."""
    types: dict[Any, Any] = {
        module: kind
        for module in model.modules()
        if (kind := vars(module).get("rope_type")) and "longrope" in str(kind)
    }
    try:
        for module, kind in types.items():
            is_single = isinstance(kind, str)
            module.rope_type = "default" if is_single else dict.fromkeys(kind, "default")
        yield
    finally:
        for module, kind in types.items():
            module.rope_type = kind


def arguments_of(model: nn.Module, tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, bool]]:
    """Return the inputs of a model's forward on a number of tokens, and its other arguments."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=next(model.parameters()).device)
    parameters = inspect.signature(model.forward).parameters
    taken = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        # Granite's forward passes its **kwargs to the base model.
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
    """Return a model's logits; UnsupportedError if it has none, or not for each token."""
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
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "data-dependent" in line:
        line = "it branches on the values of tensors"
    elif "Constraints violated" in line or "specialized it to be a constant" in line:
        line = "what it computes changes with the number of tokens"
    elif "fake tensor in the exported program" in line:
        line = "it computes with tensors that cannot be traced, as of torch.autograd.grad"
    elif "'NoneType' object" in line:
        # The marked attention gets no mask: the operator includes the causal mask.
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
    """Silence third parties' warnings, which concern training and generation settings."""
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
