"""Losses as graphs: functions of tensors as plain data, which are checked and run on data.

A graph is the node-for-node trace of a function by `torch.fx`, as Tinker's clients send it: names,
numbers and text, without code.

    nodes        placeholders in the order of the inputs, calls of functions and methods, an output
    operators    the functions listed in this file; others do not run
    arguments    numbers, and lists; {"ref": NODE}, {"tuple": […]}, {"dict": {…}},
                 {"slice": [a, b, c]}, {"ellipsis": true}, {"float": "inf"}, {"device": "cpu"} and
                 {"dtype": "float32"}
    output       a scalar loss, and metrics by names such as `custom/kl:mean`

No listed operator changes its arguments, draws random numbers, reads memory outside its arguments,
or creates Python objects other than numbers and tensors. The size of a result is known before the
computation: from the shapes of the arguments for elementwise operators, by torch's `meta` device
for other operators.

A datum's loss is differentiated before the next datum's loss is computed, so that values of only a
single datum are in memory. With the loss C and its gradient g at the log-probabilities l, the
result is

    C + Σ g (l - stop_gradient(l)),

which has C's value and C's gradient.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as functional
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.units import shown

Function: TypeAlias = Callable[..., Any]
NUMBERS = (int, float)
"""The types of numbers; a bool is an int."""
_MOST_POWER = 64
_META = torch.device("meta")


@dataclass(frozen=True)
class Operator:
    """A function that a graph may call.

    Attributes:
        function: the implementation.
        is_elementwise: True if a result is at most as large as the arguments' broadcast shape.
        of_numbers: True if the arguments are numbers, not tensors.
        makes: True if the operator creates a tensor without a tensor argument.
    """

    function: Function
    is_elementwise: bool = False
    of_numbers: bool = False
    makes: bool = False

    def planned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return an upper bound of the result's size. Bad arguments raise torch's errors."""
        if self.of_numbers or self is ATTRIBUTE:
            return 0
        if self.is_elementwise:
            if any(
                isinstance(argument, str | tuple | list) for argument in args
            ):  # Python would repeat it
                raise TypeError("it takes tensors and numbers")
            return math.prod(
                torch.broadcast_shapes(*(tensor.shape for tensor in _tensors(args, kwargs)))
            )
        if self.function is index and isinstance(args[0], tuple):
            return 0
        if self.function is index and isinstance(args[1], Tensor) and args[1].dtype is torch.bool:
            return int(max(args[0].numel(), args[1].numel()))  # the size depends on the mask
        with torch.no_grad():
            arguments = [_on_meta(argument) for argument in args]
            named = {name: _on_meta(value) for name, value in kwargs.items()}
            if self.makes:
                named["device"] = _META
            results = _tensors((self.function(*arguments, **named),), {})
            return sum(value.numel() for value in results)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device=_META)
    if isinstance(value, tuple):
        return tuple(map(_on_meta, value))
    return list(map(_on_meta, value)) if isinstance(value, list) else value


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value, {})


def index(x: Any, at: Any) -> Any:
    """Return x[at], for a tensor or a shape."""
    if isinstance(x, Tensor):
        return x[at]
    if isinstance(x, tuple) and isinstance(at, int | slice):
        return x[at]
    raise TypeError("it takes an item of a tensor, or of a result that has several")


def attribute(x: Any, name: str) -> Any:
    """Return an attribute: a shape, a dtype, or a part of a named tuple."""
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
    dtype_found = to if dtype is None else dtype
    if isinstance(dtype_found, Tensor):
        dtype_found = dtype_found.dtype
    if not isinstance(dtype_found, torch.dtype):
        raise TypeError("it takes a dtype, or a tensor that has one")
    return x.to(dtype_found)


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> Any:
    if not 0 < chunks <= _MOST_POWER:
        raise ValueError(f"1 to {_MOST_POWER} chunks")
    return torch.chunk(x, chunks, dim)


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
"""The operator list for each module name that torch.fx writes."""
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
        name: Operator(getattr(Tensor, name), item.is_elementwise)
        for name, item in _TORCH.items()
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
    """Return a function by qualified name, such as `torch.exp`; None for an unknown name."""
    if target == "getattr":
        return ATTRIBUTE
    module, _, name = target.rpartition(".")
    name = name.removeprefix("special_") if module == "torch._C._special" else name
    return _FUNCTIONS.get(_MODULES.get(module, ""), {}).get(_ALIASES.get(name, name))


def method_of(target: str) -> Operator | None:
    """Return a tensor method by name; None for an unknown name."""
    return _METHODS.get(target)


LOGPROBS = "logprobs"
"""The first input: the log-probabilities of a datum's targets."""
MOST_NODES = 256
_MOST_INPUTS = 16
_MOST_METRICS = 64
_MOST_VALUES = 4096
"""Limit of numbers, texts and references in all arguments."""
_MOST_DEPTH = 8
_LARGEST = 2**53
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_FLOATS = ("inf", "-inf", "nan")
_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("bool", "bfloat16", "float16", "float32", "float64", "int32", "int64")
}
_KEYWORD_NAMES = """
    alpha approximate beta correction decimals delta descending device dim dim0 dim1 dims dtype
    end equal_nan eps exponent fill_value index inplace input keepdim largest log_target margin mask
    max min mode nan negative_slope neginf p pos_weight posinf reduce reduction rounding_mode rtol
    atol shifts size size_average sorted stable start step target threshold unbiased value weight
    other _stacklevel
"""
_KEYWORDS = frozenset(_KEYWORD_NAMES.split())
"""The allowed keyword arguments; none of them writes to tensors or names memory."""
_WORD_NAMES = """
    none mean sum batchmean constant floor tanh fro cpu shape ndim dtype device T values indices
"""
_WORDS = frozenset(_WORD_NAMES.split())
"""The allowed texts in arguments. Rounding by `trunc` is excluded: dividing the smallest int by -1
with it ends the process (torch 2.13)."""


@dataclass(frozen=True)
class LossInput:
    """An input of a loss.

    Attributes:
        name: `logprobs`, or the name of an array in each datum.
    """

    name: str
    rank: int


@dataclass(frozen=True)
class LossNode:
    """A node: a function or a method, and its arguments as plain data."""

    op: str
    name: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class LossGraph:
    """The loss of a datum; losses of several data are added."""

    name: str
    inputs: list[LossInput]
    nodes: list[LossNode]

    @property
    def calls(self) -> list[LossNode]:
        """The nodes between the placeholders and the output."""
        return self.nodes[len(self.inputs) : -1]

    @property
    def output(self) -> tuple[str, Mapping[str, str]]:
        """The name of the loss's node, and the names of the metrics' nodes by metric."""
        (returned,) = self.nodes[-1].args
        loss, metrics = returned["tuple"] if isinstance(returned, dict) else returned
        return loss["ref"], {name: item["ref"] for name, item in metrics["dict"].items()}

    def check(self) -> None:
        """Check that the graph may run. FinetuneError: names a refused node and the reason."""
        try:
            self._check_inputs()
            self._check_nodes()
            self._check_output()
        except _Refused as error:
            raise FinetuneError(f"loss {shown(self.name)}: {error}") from None

    def _check_inputs(self) -> None:
        names = [input.name for input in self.inputs]
        if not 0 < len(names) <= _MOST_INPUTS or names[0] != LOGPROBS or not self.inputs[0].rank:
            raise _Refused(
                f"it has 1 to {_MOST_INPUTS} inputs, the first of which is {LOGPROBS} of rank 1 or "
                f"2; not {shown(names)}"
            )
        for needed in self.inputs:
            if not _INPUT.fullmatch(needed.name) or needed.rank not in (0, 1, 2):
                raise _Refused(
                    f"input {shown(needed.name)} has rank {needed.rank}; use a small name, and "
                    "rank 0, 1 or 2"
                )
        if len(set(names)) < len(names):
            raise _Refused(f"inputs have names of their own, unlike {shown(names)}")

    def _check_nodes(self) -> None:
        if not len(self.inputs) < len(self.nodes) <= MOST_NODES:
            raise _Refused(
                f"it has {len(self.nodes)} nodes; use an input each, an output, and {MOST_NODES} "
                "at most"
            )
        known: set[str] = set()
        count = 0
        for place, node in enumerate(self.nodes):
            if not _NAME.fullmatch(node.name) or node.name in known:
                raise _Refused(f"node {place} is called {shown(node.name)}; names are words, once")
            if place < len(self.inputs):
                self._check_placeholder(node, self.inputs[place].name)
            elif place + 1 < len(self.nodes):
                _check_call(node)
            elif node.op != "output":
                raise _Refused(f"its last node is {shown(node.op)}, and has to be the output")
            if place + 1 < len(self.nodes):  # `_check_output` checks the output's arguments
                for value in _plain([*node.args, *node.kwargs.values()], node.name):
                    count += 1
                    _check_value(value, node.name, known)
            known.add(node.name)
        if count > _MOST_VALUES:
            raise _Refused(f"its arguments have {count} values; use at most {_MOST_VALUES}")

    def _check_placeholder(self, node: LossNode, name: str) -> None:
        if node.op != "placeholder" or node.target != name or node.args or node.kwargs:
            raise _Refused(
                f"node {shown(node.name)} has to be the placeholder of the input {name!r}"
            )

    def _check_output(self) -> None:
        known = {node.name for node in self.nodes[:-1]}
        try:
            loss, metrics = self.output
            named = [loss, *metrics.values()]
            is_known = all(isinstance(item, str) and item in known for item in named)
        except (KeyError, TypeError, ValueError):
            is_known = False
        if not is_known:
            raise _Refused("its output has to be (loss, metrics), both of nodes")
        for name in metrics:
            if not _METRIC.fullmatch(name) or len(metrics) > _MOST_METRICS:
                raise _Refused(
                    f"metric {shown(name)} is one of {len(metrics)}; use at most {_MOST_METRICS} "
                    "with names such as custom/kl:mean or custom/kl:sum"
                )


class _Refused(Exception):
    """A violated rule."""


def _check_call(node: LossNode) -> None:
    if node.op not in ("call_function", "call_method"):
        raise _Refused(
            f"node {shown(node.name)} is {shown(node.op)}; a loss calls functions and methods of "
            "tensors alone"
        )
    is_method = node.op == "call_method"
    if (method_of if is_method else function_of)(node.target) is None:
        raise _Refused(
            f"{shown(node.target)} is no {'method' if is_method else 'function'} that custom "
            "losses call here; see docs/serving.md#tinker"
        )
    if not node.args:
        raise _Refused(f"{shown(node.target)} has no arguments; give them in their places")
    for name in node.kwargs:
        if name not in _KEYWORDS or (name == "inplace" and node.kwargs[name] is not False):
            raise _Refused(f"{shown(node.target)} has the argument {shown(name)}; leave it out")


def _plain(arguments: Any, name: str, depth: int = 0) -> Iterator[Any]:
    """Yield the leaves of arguments: numbers, texts, and objects with a single key."""
    if depth > _MOST_DEPTH:
        raise _Refused(f"the arguments of {shown(name)} are nested more than {_MOST_DEPTH} times")
    if isinstance(arguments, dict):
        if len(arguments) != 1:
            raise _Refused(f"{shown(name)} has the argument {shown(arguments)}; one key is known")
        ((kind, inner),) = arguments.items()
        if kind == "tuple" or (kind == "slice" and isinstance(inner, list) and len(inner) == 3):
            yield from _plain(inner if isinstance(inner, list) else [arguments], name, depth + 1)
        else:
            yield arguments
    elif isinstance(arguments, list):
        for part in arguments:
            yield from _plain(part, name, depth + 1)
    else:
        yield arguments


def _check_value(value: Any, name: str, known: set[str]) -> None:
    fits = value is None
    if isinstance(value, str):
        fits = value in _WORDS
    elif isinstance(value, NUMBERS):
        fits = abs(value) <= _LARGEST
    elif isinstance(value, dict):
        ((kind, inner),) = value.items()
        fits = isinstance(inner, str | bool) and (
            (kind == "ref" and inner in known)
            or (kind == "float" and inner in _FLOATS)
            or (kind == "dtype" and inner in _DTYPES)
            or (kind == "device" and inner == "cpu")
            or (kind == "ellipsis" and inner is True)
        )
    if not fits:
        raise _Refused(
            f"{shown(name)} has the argument {shown(value)}; use numbers, references to nodes "
            "before it, slices and dtypes"
        )


def decoded(argument: Any, values: Mapping[str, Any]) -> Any:
    """Decode an argument of a checked graph."""
    if isinstance(argument, list):
        return [decoded(part, values) for part in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, inner),) = argument.items()
    if kind == "ref":
        return values[inner]
    if kind == "tuple":
        return tuple(decoded(part, values) for part in inner)
    if kind == "slice":
        return slice(*(decoded(part, values) for part in inner))
    if kind == "float":
        return float(inner)
    return _DTYPES[inner] if kind == "dtype" else (... if kind == "ellipsis" else None)


def keywords(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Decode keyword arguments without the device."""
    return {name: decoded(value, values) for name, value in arguments.items() if name != "device"}


MOST_NUMBERS = 2**23
"""Limit of numbers in all results for a datum."""
MOST_OF_CALL = 2**28
"""Limit of numbers in all results for a call's data."""
MOST_RUNS = 2**18
"""Limit of node runs for a call's data."""
_MOST_RESULTS = 64
_MOST_DIMS = 8
_BAD = (
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of torch and Python for bad arguments."""


class GraphLoss:
    """A graph as a loss function of the data's log-probabilities, for trainers.

    Attributes:
        metrics: the metrics of the latest call, by name.
    """

    def __init__(self, graph: LossGraph, data: Sequence[Mapping[str, Tensor]]) -> None:
        """Bind a graph to the arrays of each datum.

        Raises:
            FinetuneError: the graph may not run, needs too many node runs, or reads an array that a
                datum lacks or has with another rank.
        """
        graph.check()
        runs = len(graph.nodes) * len(data)
        if runs > MOST_RUNS:
            raise FinetuneError(
                f"loss {shown(graph.name)} of {len(graph.nodes)} nodes for {len(data)} data are "
                f"{runs} runs; at most {MOST_RUNS} are of one call: send less data at a time"
            )
        self.metrics: dict[str, float] = {}
        self._graph = graph
        self._loss, self._metrics = graph.output
        self._inputs = [self._inputs_of(datum, f"data[{i}]") for i, datum in enumerate(data)]
        self._left = 0

    def _inputs_of(self, datum: Mapping[str, Tensor], place: str) -> list[Tensor]:
        inputs = []
        for needed in self._graph.inputs[1:]:
            if needed.name not in datum:
                raise self._refused(place, f"it has no {needed.name!r}, which the loss reads")
            value = datum[needed.name]
            if not needed.rank and value.numel() == 1:
                value = value.reshape(())
            if value.dim() != needed.rank:
                raise self._refused(
                    place,
                    f"{needed.name!r} has rank {value.dim()}, and was declared of {needed.rank}",
                )
            inputs.append(value)
        return inputs

    def __call__(self, logprobs: Sequence[Tensor]) -> Tensor:
        """Return the sum of the losses. FinetuneError: names a node that cannot be computed."""
        self._left = MOST_OF_CALL
        sums = dict.fromkeys(self._metrics, 0.0)
        total = torch.zeros(())
        for index, (leaf, inputs) in enumerate(zip(logprobs, self._inputs, strict=True)):
            place = f"data[{index}]"
            x = leaf.detach().requires_grad_()
            values = self._run(x, inputs, place)
            loss = self._scalar(values[self._loss], "its loss", place)
            if not loss.requires_grad:
                raise self._refused(place, "its loss does not depend on the log-probabilities")
            slope = self._slope(loss, x, place)
            if not (loss.isfinite() and slope.isfinite().all()):
                raise self._refused(place, "its loss, or the gradient of it, is not finite")
            total = total + loss.detach() + (slope * (leaf - leaf.detach())).sum()
            for name, node in self._metrics.items():
                sums[name] += float(self._scalar(values[node], name, place).detach())
        count = len(logprobs)
        self.metrics = {
            name: value / count if name.endswith(":mean") else value for name, value in sums.items()
        }
        return total

    def _slope(self, loss: Tensor, logprobs: Tensor, place: str) -> Tensor:
        try:
            (slope,) = torch.autograd.grad(loss, logprobs, materialize_grads=True)
        except RuntimeError as error:  # the loss has no derivative, for example of integers
            said = str(error).partition("\n")[0][:200]
            raise self._refused(place, f"it cannot be differentiated: {said}") from None
        return slope

    def _run(self, logprobs: Tensor, inputs: Sequence[Tensor], place: str) -> dict[str, Any]:
        """Return the results of all nodes, by name."""
        graph = self._graph
        if logprobs.dim() != graph.inputs[0].rank:
            rank = graph.inputs[0].rank
            raise self._refused(
                place,
                f"its targets have rank {logprobs.dim()}, and logprobs was declared of {rank}",
            )
        named = zip(graph.nodes, (logprobs, *inputs), strict=False)
        values: dict[str, Any] = {node.name: value for node, value in named}
        most = min(MOST_NUMBERS, self._left)
        used = 0
        for node in graph.calls:
            used += self._call(node, values, most - used, place)
        self._left -= used
        return values

    def _call(self, node: LossNode, values: dict[str, Any], left: int, place: str) -> int:
        """Compute a node; return the size of its result."""
        operator = (method_of if node.op == "call_method" else function_of)(node.target)
        assert operator is not None
        try:
            args = [decoded(argument, values) for argument in node.args]
            kwargs = keywords(node.kwargs, values)
            planned = operator.planned(args, kwargs)
            if planned > left:
                raise self._refused(
                    place,
                    f"{node.target!r} makes {shown(planned)} numbers, and {left} are left of the "
                    f"{MOST_NUMBERS} for a datum and {MOST_OF_CALL} for a call",
                )
            result = operator.function(*args, **kwargs)
            numbers = _numbers_of(result)
        except _BAD as error:
            said = str(error).partition("\n")[0][:200]
            raise self._refused(place, f"{node.target!r} cannot be computed: {said}") from None
        values[node.name] = result
        return max(planned, numbers)

    def _scalar(self, value: Any, what: str, place: str) -> Tensor:
        if not isinstance(value, Tensor) or value.dim() or value.is_complex():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise self._refused(place, f"{what} is {shape}; return a scalar tensor")
        return value

    def _refused(self, place: str, said: str) -> FinetuneError:
        return FinetuneError(f"loss {shown(self._graph.name)}, {place}: {said}")


def _numbers_of(result: Any) -> int:
    """Count the numbers of a result. TypeError, ValueError: a result that losses may not have."""
    if isinstance(result, Tensor):
        if result.dim() > _MOST_DIMS:
            raise ValueError(f"its result has {result.dim()} dims; use {_MOST_DIMS} at most")
        return result.numel()
    if isinstance(result, tuple):
        if len(result) > _MOST_RESULTS:
            raise ValueError(f"it has {len(result)} results")
        return sum(map(_numbers_of, result))
    if isinstance(result, NUMBERS):
        if abs(result) > _LARGEST and result not in (float("inf"), float("-inf")):
            raise ValueError("its result is too large")
        return 0
    if isinstance(result, torch.dtype | torch.device):
        return 0
    raise TypeError(f"its result is a {type(result).__name__}")
