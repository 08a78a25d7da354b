"""The optimizers of torch.optim that adapters are trained with: their options and their state.

All are supported but LBFGS, whose step evaluates the loss again by a closure, and SparseAdam, which
takes sparse gradients. Options, defaults and state are torch's own: a step on the meta device
makes the state's tensors without memory. An optimizer is elementwise if the update of a number
depends on the gradients of that number alone, so that ranks may each train a part of a tensor.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from pcg.errors import FinetuneError
from pcg.ir.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALAR_BYTES = 4
"""Bytes of a scalar of the state, such as the number of steps, which is in fp32."""

FIELDS = ("betas", "eps", "weight_decay")
"""Options that are fields of `FinetuneOptions`, as most optimizers take them."""

_CLASSES: Mapping[str, str] = {
    name.lower(): name
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam",
        "RAdam", "RMSprop", "Rprop", "SGD",
    )
}  # fmt: skip
OPTIMIZERS: tuple[str, ...] = tuple(_CLASSES)

_REFUSED = {
    "lbfgs": "LBFGS evaluates the loss again within a step, which a job's units cannot",
    "sparseadam": "SparseAdam takes sparse gradients, and an adapter's are dense",
}
_NOT_ELEMENTWISE = ("adafactor", "muon")
_NO_OPTIONS = ("params", "lr", "foreach", "fused", "maximize", "differentiable", "capturable")
"""The learning rate, which has a field and a schedule, and how a step is computed."""


def _torch_class(name: str) -> type[torch.optim.Optimizer]:
    from torch import optim  # takes seconds, and the command line needs names alone

    found: type[torch.optim.Optimizer] = getattr(optim, _CLASSES[name])
    return found


@functools.cache
def _defaults(name: str) -> Mapping[str, Any]:
    """Return the options of an optimizer with torch's defaults."""
    found: dict[str, Any] = {}
    for option, parameter in inspect.signature(_torch_class(name)).parameters.items():
        default = parameter.default
        if type(default) is int and parameter.annotation is not int:
            default = float(default)
        if option not in _NO_OPTIONS:
            found[option] = default
    if name == "adam":
        del found["decoupled_weight_decay"]  # that is AdamW
    return MappingProxyType(found)


@functools.cache
def _state(name: str, options: tuple[tuple[str, Any], ...], shape: Shape) -> Mapping[str, Tensor]:
    """Return the state of a parameter after a step, on the meta device but for CPU scalars."""
    import torch

    parameter = torch.empty(shape, device="meta")
    parameter.grad = torch.empty_like(parameter)
    optimizer = _torch_class(name)([parameter], **dict(options))
    # The state is made first; an update may then read numbers, which meta tensors do not have.
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    state = optimizer.state.get(parameter, {})
    return MappingProxyType({key: value for key, value in state.items() if value is not None})


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of torch.optim, with its options.

    Attributes:
        name: one of `OPTIMIZERS`.
        options: all of its options but the learning rate.
    """

    name: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any] | None = None) -> Self:
        """Return an optimizer by name, in any case, with torch's defaults where none are given.

        Raises:
            FinetuneError: an unknown name or option, or an option of a wrong type.
        """
        known = name.lower() if isinstance(name, str) else ""
        if known not in _CLASSES:
            reason = f"; {_REFUSED[known]}" if known in _REFUSED else ""
            raise FinetuneError(
                f"optimizer={name!r} is not among those that pcg trains with{reason}; use one of "
                f"{', '.join(OPTIMIZERS)}"
            )
        defaults = _defaults(known)
        options = dict(defaults)
        for option, value in (given or {}).items():
            if option not in defaults:
                close = difflib.get_close_matches(option, defaults, n=1)
                hint = f", did you mean {close[0]!r}?" if close else ";"
                raise FinetuneError(
                    f"optimizer {known!r} does not take {option!r}{hint} it takes "
                    f"{', '.join(defaults)}"
                )
            options[option] = _checked(known, option, value, defaults[option])
        return cls(known, MappingProxyType(options))

    @property
    def torch_class(self) -> type[torch.optim.Optimizer]:
        """The class in torch.optim."""
        return _torch_class(self.name)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names in `FIELDS` that it takes; Adafactor's eps is a pair, and not that field."""
        has_pair = isinstance(self.options.get("eps"), tuple)
        return tuple(n for n in FIELDS if n in self.options and not (n == "eps" and has_pair))

    @property
    def is_elementwise(self) -> bool:
        """True if ranks may each train a part of a tensor."""
        return self.name not in _NOT_ELEMENTWISE

    @property
    def takes_matrices_alone(self) -> bool:
        """True if it refuses parameters that are not matrices."""
        return self.name == "muon"

    @property
    def follows_schedule(self) -> bool:
        """True if the learning rate has an effect after the first step."""
        return self.name != "rprop"

    def check_parted(self, degree: int) -> None:
        """Raise a FinetuneError if ranks that hold parts of tensors cannot update them."""
        if degree > 1 and not self.is_elementwise:
            raise FinetuneError(
                f"optimizer {self.name!r} takes whole matrices, of which each of {degree} ranks "
                f"has a part; use an elementwise one, as adamw, or tp=1"
            )

    def state(self, shape: Shape) -> Mapping[str, Tensor]:
        """Return the state of a parameter after a step, by torch's key.

        The tensors are on the meta device; scalars that torch keeps on the CPU are there.
        """
        return _state(self.name, tuple(self.options.items()), tuple(shape))

    def state_bytes(self, shapes: Iterable[Shape], element_bytes: int) -> int:
        """Return the bytes of the state of parameters after a step, `element_bytes` a number."""
        state = [tensor.shape for shape in shapes for tensor in self.state(shape).values()]
        return sum(prod(shape) * element_bytes if shape else SCALAR_BYTES for shape in state)


def _checked(name: str, option: str, value: object, default: object) -> Any:
    """Return a value if it is of the default's type; torch checks its range."""
    if isinstance(default, tuple):
        value = tuple(value) if isinstance(value, tuple | list) else ()
        is_good = len(value) == len(default) and all(
            _is_number(v) or (v is None and d is None) for v, d in zip(value, default, strict=True)
        )
        expected = f"{len(default)} numbers"
    elif isinstance(default, bool):
        is_good, expected = isinstance(value, bool), "True or False"
    elif isinstance(default, int):
        is_good = isinstance(value, int) and not isinstance(value, bool) and value > 0
        expected = "an int above 0"
    elif default is None:
        is_good, expected = value is None or isinstance(value, str), "a word, or None"
    else:
        is_good, expected = _is_number(value), "a number"
    if not is_good:
        raise FinetuneError(
            f"optimizer {name!r} has {option}={value!r}; use {expected}, such as {default!r}"
        )
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
