"""Runs of a few layers without data, which find what torch.export would not name or not see.

Where an operator runs more often on more tokens, the module loops over them, which torch.export
unrolls for minutes; a convolution or a Fourier transform mixes them at once. Neither is an operator
of a token-flat graph, where attention alone sees sequences.

A module that calls other functions of PyTorch where gradients are computed is another model in
finetuning than in serving, and hooks of tensors run there alone; a program has one forward.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pcg.errors import PcgError, UnsupportedError

_TOKENS = (5, 9)
_MANY = 4099
"""Tokens of a run in which layers are compared: beyond where branches on the length begin."""
_SMALL = 16
"""Entries of a constant tensor whose values are compared."""
_MIXES = ("conv", "_conv", "mkldnn_conv", "fft", "_fft")
"""Beginnings of the names of operators that mix tokens."""


def check_no_recurrence(model: nn.Module, run: Callable[[int], object]) -> None:
    """Refuse a model that mixes tokens otherwise than by attention.

    Args:
        model: a causal LM with few layers.
        run: runs its forward on a number of tokens.
    Raises:
        UnsupportedError: names the module and the operator.
    """
    counts: list[Counter[tuple[str, str]]] = []
    for tokens in _TOKENS:
        # A run that ends early counts up to there; torch.export says why, in its own words.
        with _recorded(model) as found, contextlib.suppress(Exception):
            run(tokens)
        counts.append(found)
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
"""Functions that change or read gradients, which leave no trace in the forward."""


def check_gradients(model: nn.Module, run: Callable[[int], object]) -> None:
    """Refuse a model whose forward is another where gradients are computed, or hooks into them.

    Args:
        model: a causal LM with few layers.
        run: runs its forward on a number of tokens.
    Raises:
        UnsupportedError: names the module and the function.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    found: list[list[tuple[str, Hashable]]] = []
    for with_gradients in (False, True):
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.set_grad_enabled(with_gradients))
            undo.enter_context(_without_data(model))
            for table in tables if with_gradients else ():
                table.requires_grad_(True)
                undo.callback(table.requires_grad_, False)
            # torch.export says why a run ends early, in its own words.
            undo.enter_context(contextlib.suppress(_EndedEarly))
            functions = undo.enter_context(_Functions(model))
            try:
                run(_TOKENS[0])
            except PcgError:
                raise
            except Exception as error:
                raise _EndedEarly from error
        found.append(functions.calls)
    for without, beside in itertools.zip_longest(*found, fillvalue=("the model", None)):
        if without != beside:
            raise UnsupportedError(
                f"{beside[0]} computes something else where gradients are computed, as by a branch "
                "on requires_grad or torch.is_grad_enabled(); pcg has one forward for serving and "
                "finetuning"
            )


def calls_of_layers(
    model: nn.Module, path: str, count: int, most: int, run: Callable[[int], object]
) -> list[Hashable]:
    """Return what each layer calls, on few tokens and on many.

    Layers that look alike may be told apart by what a module does not hold: an attention function
    that knows the layers by their index, a list of the configuration. No two layers are alike where
    the model cannot run without data.

    Args:
        model: a causal LM with all its layers.
        path: module path of the list of layers.
        count: the number of layers.
        most: the number of positions that the model has.
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
    """A run that does not come to its end without data."""


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
        # torch.no_grad() puts the mode of before back.
        if func is not torch._C._set_grad_enabled:
            given = tuple(map(self._described, (*args, *(kwargs or {}).values())))
            self.calls.append((module, (getattr(func, "__qualname__", str(func)), given)))
        return func(*args, **(kwargs or {}))

    def _described(self, x: Any) -> Hashable:
        """An argument that is equal for calls that compute the same of other activations."""
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
    """Follows which module's forward runs.

    Attributes:
        running: the modules whose forward runs, the innermost last.
    """

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

    # The hooks are the process's, and other threads may run modules, too.
    def _enter(self, module: nn.Module, args: Any) -> None:
        if get_ident() == self._thread:
            self.running.append(self._names.get(module, self.running[-1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == self._thread:
            self.running.pop()


class _Recorder(TorchDispatchMode):
    """Counts the operators that run, by the module that calls them.

    Attributes:
        counts: the count of each module and operator.
    """

    def __init__(self, modules: _Modules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, str]] = Counter()
        self._modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self._modules.innermost, func.overloadpacket.__name__] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()  # there are no data to read
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _recorded(model: nn.Module) -> Iterator[Counter[tuple[str, str]]]:
    """Count the operators that a model runs, without data."""
    with contextlib.ExitStack() as undo:
        modules = undo.enter_context(_Modules(model))
        undo.enter_context(torch.no_grad())
        undo.enter_context(_without_data(model))
        yield undo.enter_context(_Recorder(modules)).counts


def _without_data(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    if any(parameter.is_meta for parameter in model.parameters()):
        return contextlib.nullcontext()
    return FakeTensorMode(allow_non_fake_inputs=True)
