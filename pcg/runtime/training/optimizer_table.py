"""The optimizers of torch.optim that an adapter can be trained with: options, and what they keep.

All but LBFGS, whose step evaluates the loss again by a closure, and SparseAdam, which takes sparse
gradients. Of a parameter of some shape an optimizer keeps, in its dtype where nothing else is said,

    scalar    one number in fp32, such as the count of steps
    whole     as many as the parameter has
    rows      [n, 1], and columns [1, m], of a matrix [n, m]
    vector    [n], of what is no matrix

and some of it with an option alone, as SGD's momentum. An optimizer is elementwise where a number's
update depends on that number's gradients alone, so that ranks may each train a part of a tensor.

Source: `step` and `_init_group` of each class in torch.optim 2.13, which tests compare with.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, Self

from pcg.errors import FinetuneError
from pcg.ir.shapes import Shape

SCALAR_BYTES = 4
"""Of a scalar of the state."""

FIELDS = ("betas", "eps", "weight_decay")
"""Options that finetuning has of its own, as most optimizers take them."""


def _scalar(shape: Shape) -> Shape | None:
    return ()


def _whole(shape: Shape) -> Shape | None:
    return shape


def _rows(shape: Shape) -> Shape | None:
    return (*shape[:-1], 1) if len(shape) > 1 else None


def _columns(shape: Shape) -> Shape | None:
    return (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None


def _vector(shape: Shape) -> Shape | None:
    return None if len(shape) > 1 else shape


@dataclass(frozen=True)
class _Kind:
    """An optimizer's class.

    Attributes:
        torch_name: of the class in torch.optim.
        defaults: what it takes beside the learning rate, with torch's defaults.
        state: what it keeps of a parameter, by torch's key.
        optional: key -> the option that it is kept with alone.
        is_elementwise: as in the module's head.
        takes_matrices_alone: refuses a bias or another vector.
        follows_schedule: whether the learning rate counts after the first step, too.
    """

    torch_name: str
    defaults: Mapping[str, Any]
    state: Mapping[str, Callable[[Shape], Shape | None]]
    optional: Mapping[str, str] = field(default_factory=dict)
    is_elementwise: bool = True
    takes_matrices_alone: bool = False
    follows_schedule: bool = True


_BETAS = (0.9, 0.999)
_ADAM = {"betas": _BETAS, "eps": 1e-8, "weight_decay": 0.0}
_MOMENTS = {"step": _scalar, "exp_avg": _whole, "exp_avg_sq": _whole}

_KINDS: Mapping[str, _Kind] = {
    "adadelta": _Kind(
        "Adadelta",
        {"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
        {"step": _scalar, "square_avg": _whole, "acc_delta": _whole},
    ),
    "adafactor": _Kind(
        "Adafactor",
        {"beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0},
        {"step": _scalar, "row_var": _rows, "col_var": _columns, "variance": _vector},
        is_elementwise=False,
    ),
    "adagrad": _Kind(
        "Adagrad",
        {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
        {"step": _scalar, "sum": _whole},
    ),
    "adam": _Kind(
        "Adam",
        {**_ADAM, "amsgrad": False},
        {**_MOMENTS, "max_exp_avg_sq": _whole},
        {"max_exp_avg_sq": "amsgrad"},
    ),
    "adamax": _Kind("Adamax", _ADAM, {"step": _scalar, "exp_avg": _whole, "exp_inf": _whole}),
    "adamw": _Kind(
        "AdamW",
        {**_ADAM, "weight_decay": 0.01, "amsgrad": False},
        {**_MOMENTS, "max_exp_avg_sq": _whole},
        {"max_exp_avg_sq": "amsgrad"},
    ),
    "asgd": _Kind(
        "ASGD",
        {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0},
        {"step": _scalar, "eta": _scalar, "mu": _scalar, "ax": _whole},
    ),
    "muon": _Kind(
        "Muon",
        {
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": (3.4445, -4.775, 2.0315),
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": None,
        },
        {"momentum_buffer": _whole},
        is_elementwise=False,
        takes_matrices_alone=True,
    ),
    "nadam": _Kind(
        "NAdam",
        {**_ADAM, "momentum_decay": 0.004, "decoupled_weight_decay": False},
        {**_MOMENTS, "mu_product": _scalar},
    ),
    "radam": _Kind("RAdam", {**_ADAM, "decoupled_weight_decay": False}, _MOMENTS),
    "rmsprop": _Kind(
        "RMSprop",
        {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
        {"step": _scalar, "square_avg": _whole, "momentum_buffer": _whole, "grad_avg": _whole},
        {"momentum_buffer": "momentum", "grad_avg": "centered"},
    ),
    "rprop": _Kind(
        "Rprop",
        {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
        {"step": _scalar, "prev": _whole, "step_size": _whole},
        follows_schedule=False,
    ),
    "sgd": _Kind(
        "SGD",
        {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        {"momentum_buffer": _whole},
        {"momentum_buffer": "momentum"},
    ),
}

OPTIMIZERS: tuple[str, ...] = tuple(_KINDS)

_REFUSED = {
    "lbfgs": "LBFGS evaluates the loss again within a step, which a job's units cannot",
    "sparseadam": "SparseAdam takes sparse gradients, and an adapter's are dense",
}


@dataclass(frozen=True)
class Optimizer:
    """One of them, with its options.

    Attributes:
        name: one of `OPTIMIZERS`.
        options: all that it takes beside the learning rate.
    """

    name: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any] | None = None) -> Self:
        """An optimizer by name, with torch's defaults for what is not given.

        Args:
            name: one of `OPTIMIZERS`; capitals do not matter.
            given: some of its options.
        Raises:
            FinetuneError: another name, an option that it does not take, or one of another type.
        """
        known = name.lower() if isinstance(name, str) else ""
        if known not in _KINDS:
            reason = f"; {_REFUSED[known]}" if known in _REFUSED else ""
            raise FinetuneError(
                f"optimizer={name!r} is not among those that pcg trains with{reason}; use one of "
                f"{', '.join(OPTIMIZERS)}"
            )
        defaults = _KINDS[known].defaults
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

    @classmethod
    def default(cls) -> Self:
        """AdamW, as finetuning takes it where none is named."""
        return cls.of("adamw")

    @property
    def torch_name(self) -> str:
        """Of the class in torch.optim."""
        return self._kind.torch_name

    @property
    def fields(self) -> tuple[str, ...]:
        """Those of `FIELDS` that it takes; Adafactor's eps is another, a pair."""
        defaults = self._kind.defaults
        pairs = ("eps",) if isinstance(defaults.get("eps"), tuple) else ()
        return tuple(name for name in FIELDS if name in defaults and name not in pairs)

    @property
    def is_elementwise(self) -> bool:
        """Whether ranks may each train a part of a tensor."""
        return self._kind.is_elementwise

    @property
    def takes_matrices_alone(self) -> bool:
        return self._kind.takes_matrices_alone

    @property
    def follows_schedule(self) -> bool:
        """Whether the learning rate counts after the first step, too."""
        return self._kind.follows_schedule

    def check_parted(self, degree: int) -> None:
        """FinetuneError: ranks that have parts of tensors cannot update them."""
        if degree > 1 and not self.is_elementwise:
            raise FinetuneError(
                f"optimizer {self.name!r} takes whole matrices, of which each of {degree} ranks "
                f"has a part; use an elementwise one, as adamw, or tp=1"
            )

    def state(self, shape: Shape) -> dict[str, Shape]:
        """What it keeps of a parameter after a step: shapes by torch's key, () of a scalar."""
        kind, found = self._kind, {}
        for key, form in kind.state.items():
            kept = form(shape)
            if kept is not None and self.options.get(kind.optional.get(key, ""), True):
                found[key] = kept
        return found

    def state_bytes(self, shapes: Iterable[Shape], element_bytes: int) -> int:
        """Bytes that it keeps of parameters after a step.

        Args:
            shapes: of the parameters.
            element_bytes: of one of their numbers.
        """
        kept = [found for shape in shapes for found in self.state(shape).values()]
        return sum(prod(shape) * element_bytes if shape else SCALAR_BYTES for shape in kept)

    @property
    def _kind(self) -> _Kind:
        return _KINDS[self.name]


def _checked(name: str, option: str, value: object, default: object) -> Any:
    """The value, if it is of the default's type; its range is torch's to check."""
    if isinstance(default, tuple):
        entries = tuple(value) if isinstance(value, tuple | list) else ()
        is_good = len(entries) == len(default) and all(
            _is_number(v) or (v is None and d is None)
            for v, d in zip(entries, default, strict=True)
        )
        value = entries
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
