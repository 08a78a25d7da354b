"""The operators of losses that come as graphs: listed functions, and how large results get.

What is not listed does not run. Nothing listed changes its arguments, draws random numbers, reads
memory that no value has, or makes Python objects but numbers and tensors. How many numbers a result
has is known before it is made: that of elementwise operators by the shapes of their arguments, that
of others by torch's own `meta` device, which computes shapes alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as functional
from torch import Tensor

Function: TypeAlias = Callable[..., Any]
NUMBERS = (int, float)
"""The types of values that are no tensors; a bool is an int."""
_MOST_POWER = 64
_META = torch.device("meta")


@dataclass(frozen=True)
class Operator:
    """A function that a graph may call.

    Attributes:
        function: what runs.
        is_elementwise: a result has the shape that all arguments broadcast to, or less.
        of_numbers: it takes numbers, and no tensors.
        makes: it makes a tensor of no other one.
    """

    function: Function
    is_elementwise: bool = False
    of_numbers: bool = False
    makes: bool = False

    def planned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return a bound of the numbers of its result; raises what torch does of bad arguments."""
        if self.of_numbers or self is ATTRIBUTE:
            return 0
        if self.is_elementwise:
            if any(isinstance(one, str | tuple | list) for one in args):  # Python would repeat it
                raise TypeError("it takes tensors and numbers")
            return math.prod(torch.broadcast_shapes(*(one.shape for one in _tensors(args, kwargs))))
        if self.function is index and isinstance(args[0], tuple):
            return 0
        if self.function is index and isinstance(args[1], Tensor) and args[1].dtype is torch.bool:
            return int(max(args[0].numel(), args[1].numel()))  # its rows are known only by the mask
        with torch.no_grad():
            given = [_on_meta(one) for one in args]
            named = {name: _on_meta(one) for name, one in kwargs.items()}
            if self.makes:
                named["device"] = _META
            made = _tensors((self.function(*given, **named),), {})
            return sum(one.numel() for one in made)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device=_META)
    if isinstance(value, tuple):
        return tuple(map(_on_meta, value))
    return list(map(_on_meta, value)) if isinstance(value, list) else value


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from _tensors(one, {})


def index(x: Any, at: Any) -> Any:
    """Return x[at]: of a tensor, or of the numbers of a shape."""
    if isinstance(x, Tensor):
        return x[at]
    if isinstance(x, tuple) and isinstance(at, int | slice):
        return x[at]
    raise TypeError("it takes an item of a tensor, or of a result that has several")


def attribute(x: Any, name: str) -> Any:
    """Return an attribute: a shape, a dtype, or one of several results."""
    if isinstance(x, Tensor) and name in ("shape", "ndim", "dtype", "device", "T"):
        return getattr(x, name)
    if isinstance(x, tuple) and name in ("values", "indices"):
        return getattr(x, name)
    raise TypeError(f"{name!r} is no attribute that a loss reads; use shape, ndim or dtype")


def _power(x: Any, y: Any) -> Any:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return x**y
    if abs(y) > _MOST_POWER:
        raise ValueError(f"a power of at most {_MOST_POWER} of a number")
    return x**y


def _cast(x: Tensor, to: Any = None, *, dtype: Any = None) -> Tensor:
    found = to if dtype is None else dtype
    if isinstance(found, Tensor):
        found = found.dtype
    if not isinstance(found, torch.dtype):
        raise TypeError("it takes a dtype, or a tensor that has one")
    return x.to(found)


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> Any:
    if not 0 < chunks <= _MOST_POWER:
        raise ValueError(f"1 to {_MOST_POWER} chunks")
    return torch.chunk(x, chunks, dim)


# ---------------------------------------------------------------------------------------- the lists

_OPERATORS = "add sub mul truediv floordiv mod neg pos abs lt le gt ge eq ne and_ or_ xor invert"
_MATH = "sqrt exp expm1 log log1p log2 log10 floor ceil fabs"
_ELEMENTWISE = """
    abs absolute exp expm1 exp2 log log1p log2 log10 neg negative positive sqrt rsqrt square
    reciprocal sigmoid tanh relu sin cos tan sinh cosh asin acos atan erf erfc sign sgn floor ceil
    round trunc frac isfinite isnan isinf nan_to_num logit detach clone logical_not lgamma
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow minimum
    maximum fmin fmax clamp clip clamp_min clamp_max where lerp atan2 logaddexp logaddexp2 hypot
    xlogy eq ne lt le gt ge less less_equal greater greater_equal not_equal logical_and logical_or
    logical_xor masked_fill addcmul addcdiv isclose zeros_like ones_like full_like
"""
_METHODS_ALONE = "float double half bfloat16 long int bool contiguous dim size numel ndimension"
_OF_FUNCTIONAL = """
    logsigmoid softplus relu relu6 silu gelu elu leaky_relu hardtanh tanh sigmoid mse_loss l1_loss
    smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
"""
_OTHERS = """
    sum mean prod std var logsumexp amax amin max min argmax argmin any all norm median nansum
    nanmean count_nonzero cumsum logcumsumexp cummax cummin softmax log_softmax sort argsort
    topk flip roll dot reshape flatten squeeze unsqueeze transpose t permute movedim
    broadcast_to narrow select index_select gather cat concat stack tril triu tile
"""
_OTHER_METHODS = "view expand expand_as view_as reshape_as repeat new_zeros new_ones new_full"
_OTHER_FUNCTIONAL = "softmax log_softmax normalize pad"
_MAKERS = "zeros ones full arange"

_MODULES = {
    "torch": "torch",
    "torch.functional": "torch",
    "torch.special": "torch",
    "torch._C._special": "torch",
    "torch.nn.functional": "functional",
    "torch._C._nn": "functional",
    "operator": "operator",
    "math": "math",
}
"""The lists of the modules by whose names torch.fx knows functions."""
_ALIASES = {"log_sigmoid": "logsigmoid", "expit": "sigmoid"}


def _listed(module: Any, names: str, **kind: bool) -> dict[str, Operator]:
    return {name: Operator(getattr(module, name), **kind) for name in names.split()}


_TORCH: Mapping[str, Operator] = (
    _listed(torch, _ELEMENTWISE, is_elementwise=True)
    | _listed(torch, _OTHERS)
    | _listed(torch, _MAKERS, makes=True)
    | {"chunk": Operator(_chunk)}
)
_METHODS: Mapping[str, Operator] = (
    {
        name: Operator(getattr(Tensor, name), one.is_elementwise)
        for name, one in _TORCH.items()
        if hasattr(Tensor, name)
    }
    | _listed(Tensor, _METHODS_ALONE, is_elementwise=True)
    | _listed(Tensor, _OTHER_METHODS)
    | {
        "chunk": Operator(_chunk),
        "to": Operator(_cast, is_elementwise=True),
        "type_as": Operator(_cast, is_elementwise=True),
    }
)
_PYTHON: Mapping[str, Operator] = _listed(operator, _OPERATORS, is_elementwise=True) | {
    "pow": Operator(_power, is_elementwise=True),
    "getitem": Operator(index),
}
_FUNCTIONS: Mapping[str, Mapping[str, Operator]] = {
    "torch": _TORCH,
    "functional": _listed(functional, _OF_FUNCTIONAL, is_elementwise=True)
    | _listed(functional, _OTHER_FUNCTIONAL),
    "operator": _PYTHON,
    "math": _listed(math, _MATH, of_numbers=True),
}
ATTRIBUTE = Operator(attribute)


def function_of(target: str) -> Operator | None:
    """Return the function of a qualified name, as `torch.exp` or `operator.mul`; None without."""
    if target == "getattr":
        return ATTRIBUTE
    module, _, name = target.rpartition(".")
    name = name.removeprefix("special_") if module == "torch._C._special" else name
    return _FUNCTIONS.get(_MODULES.get(module, ""), {}).get(_ALIASES.get(name, name))


def method_of(target: str) -> Operator | None:
    """Return the method of tensors of a name; None without."""
    return _METHODS.get(target)
