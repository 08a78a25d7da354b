"""Finds a recurrence before torch.export, which unrolls it for minutes and then asks a riddle.

A few layers run on two numbers of tokens without data. Where an operator runs more often on more
tokens, the module loops over them; a convolution or a Fourier transform mixes them at once. Neither
is an operator of a token-flat graph, where attention alone sees sequences.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from pcg.errors import UnsupportedError

_TOKENS = (5, 9)
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
            _refuse(module, f"mixes tokens by aten.{operator}")
        grown = count - fewer[module, operator]
        if grown > 0 and grown % (_TOKENS[1] - _TOKENS[0]) == 0:
            _refuse(module, f"runs aten.{operator} {count} times on {_TOKENS[1]} tokens, in a loop")


def _refuse(module: str, what: str) -> None:
    raise UnsupportedError(
        f"{module} {what}; pcg compiles models that mix tokens by attention alone, and no "
        "recurrent or convolutional ones, such as Mamba"
    )


class _Recorder(TorchDispatchMode):
    """Counts the operators that run, by the module that calls them.

    Attributes:
        counts: the count of each module and operator.
        calls: the modules whose forward runs, the innermost last.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, str]] = Counter()
        self.calls = [type(model).__name__]
        self._thread = get_ident()
        self._names = {
            module: f"{path} ({type(module).__name__})" for path, module in model.named_modules()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self.calls[-1], func.overloadpacket.__name__] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()  # there are no data to read
        return func(*args, **(kwargs or {}))

    # The hooks are the process's, and other threads may run modules, too.
    def enter(self, module: nn.Module, args: Any) -> None:
        if get_ident() != self._thread:
            return
        self.calls.append(self._names.get(module, self.calls[-1]))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == self._thread:
            self.calls.pop()


@contextlib.contextmanager
def _recorded(model: nn.Module) -> Iterator[Counter[tuple[str, str]]]:
    """Count the operators that a model runs, without data."""
    recorder = _Recorder(model)
    with contextlib.ExitStack() as undo:
        undo.callback(hooks.register_module_forward_pre_hook(recorder.enter).remove)
        leaving = hooks.register_module_forward_hook(recorder.leave, always_call=True)
        undo.callback(leaving.remove)
        undo.enter_context(torch.no_grad())
        if not any(parameter.is_meta for parameter in model.parameters()):
            undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        undo.enter_context(recorder)
        yield recorder.counts
