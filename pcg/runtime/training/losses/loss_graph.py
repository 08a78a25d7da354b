"""Losses that come as graphs: functions of tensors as plain data, and the rules for them.

A graph is what `torch.fx` traces of a function, node for node, as Tinker's clients send it: names,
numbers and texts alone, of which nothing is code.

    nodes        placeholders in the order of the inputs, calls of functions and methods, an output
    operators    those of `graph_operators.py`
    arguments    numbers, and lists; {"ref": NODE}, {"tuple": […]}, {"dict": {…}},
                 {"slice": [a, b, c]}, {"ellipsis": true}, {"float": "inf"}, {"device": "cpu"} and
                 {"dtype": "float32"}
    output       a scalar loss, and metrics by names such as `custom/kl:mean`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pcg.errors import FinetuneError
from pcg.runtime.training.losses.graph_operators import NUMBERS, function_of, method_of
from pcg.units import shown

LOGPROBS = "logprobs"
"""The first input: the log-probabilities of a datum's targets."""
MOST_NODES = 256
_MOST_INPUTS = 16
_MOST_METRICS = 64
_MOST_VALUES = 4096
"""The most numbers, texts and references of all arguments."""
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
"""The names by which arguments may be given; none of them writes, or names memory."""
_WORD_NAMES = """
    none mean sum batchmean constant floor tanh fro cpu shape ndim dtype device T values indices
"""
_WORDS = frozenset(_WORD_NAMES.split())
"""The texts that may be arguments. Rounding by `trunc` is not among them: with it the least int,
divided by -1, ends the process (torch 2.13)."""


@dataclass(frozen=True)
class LossInput:
    """An input of a loss.

    Attributes:
        name: `logprobs`, or the name of an array that each datum has.
        rank: its dimensions: 0, 1 or 2.
    """

    name: str
    rank: int


@dataclass(frozen=True)
class LossNode:
    """A node: a function or a method, and its arguments as plain data.

    Attributes:
        op: placeholder, call_function, call_method or output.
        target: the name of what is called.
    """

    op: str
    name: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class LossGraph:
    """A loss of one datum; those of several are added."""

    name: str
    inputs: list[LossInput]
    nodes: list[LossNode]

    @property
    def calls(self) -> list[LossNode]:
        """The nodes that compute."""
        return self.nodes[len(self.inputs) : -1]

    @property
    def output(self) -> tuple[str, Mapping[str, str]]:
        """The names of the nodes of the loss, and of the metrics by their names."""
        (given,) = self.nodes[-1].args
        loss, metrics = given["tuple"] if isinstance(given, dict) else given
        return loss["ref"], {name: one["ref"] for name, one in metrics["dict"].items()}

    def check(self) -> None:
        """Check that it may run. FinetuneError: names the node that may not, and why."""
        try:
            self._check_inputs()
            self._check_nodes()
            self._check_output()
        except _Refused as error:
            raise FinetuneError(f"loss {shown(self.name)}: {error}") from None

    def _check_inputs(self) -> None:
        names = [one.name for one in self.inputs]
        if not 0 < len(names) <= _MOST_INPUTS or names[0] != LOGPROBS or not self.inputs[0].rank:
            raise _Refused(
                f"it has 1 to {_MOST_INPUTS} inputs, the first of which is {LOGPROBS} of rank 1 or "
                f"2; not {shown(names)}"
            )
        for one in self.inputs:
            if not _INPUT.fullmatch(one.name) or one.rank not in (0, 1, 2):
                raise _Refused(
                    f"input {shown(one.name)} has rank {one.rank}; use a small name, and rank 0, 1 "
                    "or 2"
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
            if place + 1 < len(self.nodes):  # the output's are checked alone
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
            is_known = all(isinstance(one, str) and one in known for one in named)
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
    """A rule that a graph breaks."""


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
            "losses call here; docs/tinker.md lists them"
        )
    if not node.args:
        raise _Refused(f"{shown(node.target)} has no arguments; give them in their places")
    for name in node.kwargs:
        if name not in _KEYWORDS or (name == "inplace" and node.kwargs[name] is not False):
            raise _Refused(f"{shown(node.target)} has the argument {shown(name)}; leave it out")


def _plain(given: Any, name: str, depth: int = 0) -> Iterator[Any]:
    """Yield what stands in arguments: numbers, texts, and objects of one key."""
    if depth > _MOST_DEPTH:
        raise _Refused(f"the arguments of {shown(name)} are nested more than {_MOST_DEPTH} times")
    if isinstance(given, dict):
        if len(given) != 1:
            raise _Refused(f"{shown(name)} has the argument {shown(given)}; one key is known")
        ((kind, inner),) = given.items()
        if kind == "tuple" or (kind == "slice" and isinstance(inner, list) and len(inner) == 3):
            yield from _plain(inner if isinstance(inner, list) else [given], name, depth + 1)
        else:
            yield given
    elif isinstance(given, list):
        for one in given:
            yield from _plain(one, name, depth + 1)
    else:
        yield given


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


def decoded(given: Any, values: Mapping[str, Any]) -> Any:
    """Return an argument of a graph that was checked.

    Args:
        values: the results of nodes by their names.
    """
    if isinstance(given, list):
        return [decoded(one, values) for one in given]
    if not isinstance(given, dict):
        return given
    ((kind, inner),) = given.items()
    if kind == "ref":
        return values[inner]
    if kind == "tuple":
        return tuple(decoded(one, values) for one in inner)
    if kind == "slice":
        return slice(*(decoded(one, values) for one in inner))
    if kind == "float":
        return float(inner)
    return _DTYPES[inner] if kind == "dtype" else (... if kind == "ellipsis" else None)


def keywords(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that have names; there is one device, which needs none."""
    return {name: decoded(one, values) for name, one in given.items() if name != "device"}
