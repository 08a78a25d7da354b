"""The optimizers for adapters: their options, states and memory.

Supported are torch.optim, except LBFGS, which evaluates the loss again in a step, and SparseAdam,
which needs sparse gradients; and bitsandbytes' optimizers with blockwise quantized states of 8
bits. Options, defaults and states are those of the libraries: a step on the meta device creates the
tensors of a state without memory. An optimizer is elementwise if the update of a number depends
only on the gradients of that number, so that each rank can train a part of a tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from pcg.errors import FinetuneError
from pcg.ir.shapes import Shape
from pcg.units import is_finite

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    State = Mapping[str, Tensor | int]

FIELDS = ("betas", "eps", "weight_decay")
"""Options of most optimizers, which are also fields of `FinetuneOptions`."""

SHARED_KEYS = ("qmap1", "qmap2")
"""Entries with the same tensor in the states of all parameters: the values of 8-bit codes."""

_TORCH: Mapping[str, str] = {
    name.lower(): name
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam",
        "RAdam", "RMSprop", "Rprop", "SGD",
    )
}  # fmt: skip
_BITSANDBYTES: Mapping[str, str] = {
    name.lower(): name for name in ("Adam8bit", "AdamW8bit", "Lion8bit")
}
OPTIMIZERS: tuple[str, ...] = tuple(sorted({*_TORCH, *_BITSANDBYTES}))

_ALIASES: Mapping[str, tuple[str, bool]] = {
    "adamw_8bit": ("adamw8bit", False),
    "adamw_bnb_8bit": ("adamw8bit", False),
    "adamw_torch": ("adamw", False),
    "adamw_torch_fused": ("adamw", False),
    "lion_8bit": ("lion8bit", False),
    "paged_adamw": ("adamw", True),
    "paged_adamw_32bit": ("adamw", True),
    "paged_adamw_8bit": ("adamw8bit", True),
    "paged_lion_8bit": ("lion8bit", True),
}
"""Names in transformers: the optimizer, and True for states in host memory."""

_REFUSED = {
    "lbfgs": "LBFGS evaluates the loss again within a step, which a job's units cannot",
    "sparseadam": "SparseAdam takes sparse gradients, and an adapter's are dense",
    "adamw_torch_8bit": "adamw_torch_8bit is torchao's, and adamw8bit is bitsandbytes'",
}
_NOT_ELEMENTWISE = ("adafactor", "muon")
_NO_OPTIONS = ("params", "lr", "foreach", "fused", "maximize", "differentiable", "capturable")
"""Excluded options: the learning rate, which has its own field, and the implementation."""
_NO_OPTIONS_OF_8BIT = ("params", "lr", "amsgrad", "optim_bits", "args", "is_paged")
"""Excluded options of bitsandbytes: unused ones, and paging, which `is_offloaded` replaces."""
_DTYPES_OF_8BIT = ("float16", "bfloat16", "float32")

# On import, bitsandbytes warns about matrix-product kernels, which pcg does not use.
logging.getLogger("bitsandbytes").addHandler(logging.NullHandler())


def _class(name: str) -> type[torch.optim.Optimizer]:
    """Import an optimizer's class; lazy, as imports take seconds and the CLI needs only names."""
    found_class: type[torch.optim.Optimizer]
    if name in _TORCH:
        from torch import optim

        found_class = getattr(optim, _TORCH[name])
        return found_class
    try:
        from bitsandbytes import optim as optim_of_8bit
    except ImportError as error:
        raise FinetuneError(
            f"optimizer {name!r} is bitsandbytes', which is not installed: "
            "pip install 'pcg[bitsandbytes]'"
        ) from error
    found_class = getattr(optim_of_8bit, _BITSANDBYTES[name])
    return found_class


@functools.cache
def _defaults(name: str) -> Mapping[str, Any]:
    """Return the options of an optimizer with its library's defaults."""
    options: dict[str, Any] = {}
    without = _NO_OPTIONS if name in _TORCH else _NO_OPTIONS_OF_8BIT
    for option, parameter in inspect.signature(_class(name)).parameters.items():
        default = parameter.default
        is_count = parameter.annotation is int or option == "min_8bit_size"
        if type(default) is int and not is_count:
            default = float(default)
        if option not in without:
            options[option] = default
    if name == "adam":
        del options["decoupled_weight_decay"]  # makes Adam AdamW
    return MappingProxyType(options)


@functools.cache
def _state(
    name: str, options: tuple[tuple[str, Any], ...], shape: Shape, dtype: torch.dtype
) -> State:
    """Return the state of a parameter after a step: meta tensors, and scalars on the CPU."""
    import torch

    parameter = torch.empty(shape, dtype=dtype, device="meta")
    parameter.grad = torch.empty_like(parameter)
    optimizer = _class(name)([parameter], **dict(options))
    # The state is created first; the update may fail by reading values of meta tensors.
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    state = optimizer.state.get(parameter, {})
    return MappingProxyType({key: value for key, value in state.items() if value is not None})


@dataclass(frozen=True)
class StateMemory:
    """The bytes of the states of some parameters.

    Attributes:
        device_bytes: bytes on the device of the parameters; without offloading, including scalars
            that torch keeps on the CPU.
        host_bytes: bytes in host memory.
        update_bytes: the maximum of `host_bytes` on the device during an update.
    """

    device_bytes: int
    host_bytes: int = 0
    update_bytes: int = 0


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, with its options.

    Attributes:
        name: a name in `OPTIMIZERS`.
        options: all options except the learning rate.
        is_offloaded: True if states are in host memory, and on the device only during updates.
        ratio: the learning rate of LoRA's matrices B and of vectors, as a multiple of the rate.
    """

    name: str
    options: Mapping[str, Any]
    is_offloaded: bool = False
    ratio: float = 1.0

    @classmethod
    def of(
        cls, name: str, overrides: Mapping[str, Any] | None = None, is_offloaded: bool = False
    ) -> Self:
        """Return an optimizer by case-insensitive name; `overrides` replaces library defaults.

        Raises:
            FinetuneError: an unknown name or option, an option of a wrong type, or an optimizer of
                a package that is not installed.
        """
        if not isinstance(is_offloaded, bool):
            raise FinetuneError(f"offload_optimizer={is_offloaded!r}; use True or False")
        asked = name.lower() if isinstance(name, str) else ""
        known, is_paged = _ALIASES.get(asked, (asked, False))
        if known not in OPTIMIZERS:
            reason = f"; {_REFUSED[known]}" if known in _REFUSED else ""
            raise FinetuneError(
                f"optimizer={name!r} is not among those that pcg trains with{reason}; use one of "
                f"{', '.join(OPTIMIZERS)}"
            )
        defaults = _defaults(known)
        options = dict(defaults)
        for option, value in (overrides or {}).items():
            if option not in defaults:
                close = difflib.get_close_matches(option, defaults, n=1)
                hint = f", did you mean {close[0]!r}?" if close else ";"
                raise FinetuneError(
                    f"optimizer {known!r} does not take {option!r}{hint} it takes "
                    f"{', '.join(defaults)}"
                )
            options[option] = _checked(known, option, value, defaults[option])
        return cls(known, MappingProxyType(options), is_offloaded or is_paged)

    def with_ratio(self, ratio: float | None) -> Self:
        """Return the optimizer with a ratio of LoRA+; None for equal rates."""
        return self if ratio is None else dataclasses.replace(self, ratio=ratio)

    @property
    def torch_class(self) -> type[torch.optim.Optimizer]:
        """The class in torch.optim or bitsandbytes.optim."""
        return _class(self.name)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names in `FIELDS` that are options; not Adafactor's eps, which is a pair."""
        has_pair = isinstance(self.options.get("eps"), tuple)
        return tuple(n for n in FIELDS if n in self.options and not (n == "eps" and has_pair))

    @property
    def has_8bit_states(self) -> bool:
        """True if states of `min_8bit_size` numbers or more are quantized to 8 bits."""
        return self.name in _BITSANDBYTES

    @property
    def is_elementwise(self) -> bool:
        """True if each rank can train a part of a tensor."""
        return self.name not in _NOT_ELEMENTWISE and not self.has_8bit_states

    @property
    def takes_matrices_alone(self) -> bool:
        """True if the optimizer updates only matrices."""
        return self.name == "muon"

    @property
    def follows_schedule(self) -> bool:
        """True if the learning rate has an effect after the first step."""
        return self.name != "rprop"

    def check_parted(self, degree: int) -> None:
        """Raise a FinetuneError if ranks cannot update their parts of tensors."""
        if degree > 1 and not self.is_elementwise:
            takes = "quantizes blocks of" if self.has_8bit_states else "takes"
            raise FinetuneError(
                f"optimizer {self.name!r} {takes} whole matrices, of which each of {degree} ranks "
                f"has a part; use an elementwise optimizer, such as adamw, or tp=1"
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise a FinetuneError if the optimizer does not support a dtype."""
        dtype_name = str(dtype).removeprefix("torch.")
        if self.has_8bit_states and dtype_name not in _DTYPES_OF_8BIT:
            raise FinetuneError(
                f"optimizer {self.name!r} updates {', '.join(_DTYPES_OF_8BIT)}, and the adapter is "
                f"{dtype_name}; use adamw, or another one of torch"
            )

    def state(self, shape: Shape, dtype: torch.dtype) -> State:
        """Return the state of a parameter after a step, by the library's keys.

        Tensors are on the meta device, except scalars that torch keeps on the CPU.
        """
        self.check_dtype(dtype)
        return _state(self.name, tuple(self.options.items()), tuple(shape), dtype)

    def state_memory(self, shapes: Iterable[Shape], dtype: torch.dtype) -> StateMemory:
        """Return the bytes of the states of parameters after a step."""
        shared: dict[str, int] = {}
        on_device = on_host = in_update = 0
        for shape, count in Counter(map(tuple, shapes)).items():
            tensors = {k: v for k, v in self.state(shape, dtype).items() if not isinstance(v, int)}
            shared |= {key: v.nbytes for key, v in tensors.items() if key in SHARED_KEYS}
            states = [v for key, v in tensors.items() if key not in SHARED_KEYS]
            moved = sum(v.nbytes for v in states if v.ndim)
            on_device += count * sum(v.nbytes for v in states if not v.ndim and v.is_meta)
            on_host += count * (moved + sum(v.nbytes for v in states if not v.is_meta))
            in_update = max(in_update, moved)
        on_device += sum(shared.values())
        if self.is_offloaded:
            return StateMemory(on_device, on_host, in_update)
        return StateMemory(on_device + on_host)


def _checked(name: str, option: str, value: object, default: object) -> Any:
    """Return a value after a check of its type against the default; torch checks the range."""
    if isinstance(default, tuple):
        value = tuple(value) if isinstance(value, tuple | list) else ()
        is_good = len(value) == len(default) and all(
            is_finite(v) or (v is None and d is None) for v, d in zip(value, default, strict=True)
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
        is_good, expected = is_finite(value), "a number"
    if not is_good:
        raise FinetuneError(
            f"optimizer {name!r} has {option}={value!r}; use {expected}, such as {default!r}"
        )
    return value
