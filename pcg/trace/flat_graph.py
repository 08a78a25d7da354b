"""The token-flat graph under construction, and its correspondence to traced tensors.

An exported activation has a batch dim of size 1 and a token dim of symbolic size, anywhere among
its dims. Its tags name each dim `b`, `t` or `d`; the flat value has the token dim first and then
the `d` dims in order. A transpose of heads and tokens is thus no operator, a view is a reshape of
feature dims, and broadcasting is checked dim by dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from pcg.errors import TraceError, TypeCheckError
from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Attribute, Parameter, Value
from pcg.ir.graph import Node as IrNode
from pcg.ir.types import TORCH_NAMES, tensor

_DTYPES = {getattr(torch, name): short for short, name in TORCH_NAMES.items()}


@dataclass(frozen=True)
class FlatValue:
    """A traced tensor in the flat graph.

    Attributes:
        name: the flat value's name; empty for an empty slice.
        tags: the tag of each traced dim.
        shape: the traced sizes; None for the token dim.
        rows: rows of each token in the token dim, as of heads that the model reshapes to [T rows,
            d]; above 1, they are the first feature dim of the flat value.
    """

    name: str
    tags: str
    shape: tuple[int | None, ...]
    rows: int = 1

    @property
    def features(self) -> tuple[int, ...]:
        """Return the sizes of the `d` dims; TypeCheckError if a size is the number of tokens."""
        sizes = [s for s, tag in zip(self.shape, self.tags, strict=True) if tag == "d"]
        if None in sizes:
            raise TypeCheckError("it has as many features as there are tokens")
        return (*(() if self.rows == 1 else (self.rows,)), *sizes)

    def feature_dim(self, dim: int) -> int:
        """Return the index from the end, in the flat value, of a traced dim."""
        return -self.tags[dim % len(self.tags) :].count("d")

    def named(self, name: str) -> FlatValue:
        return replace(self, name=name)


@dataclass(frozen=True)
class Unwritten(FlatValue):
    """A new tensor without content, parts of which are written one after another.

    Attributes:
        parts: the first and the end of each written range of a feature dim, the dim, and the flat
            value there.
    """

    parts: tuple[tuple[int, int, int, str], ...] = ()


class _TraceBuilder(Builder):
    """Keeps values that the model computes twice, as eager PyTorch saves them twice for backward.

    Values that depend only on positions and constants are merged. The first rewrite of `raise`
    merges the rest.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.activations = {"input_ids"}

    def see(self, name: str, *shape: int) -> None:
        """Reshape a parameter that no node reads yet."""
        parameter, type_ = self.parameters[name], self.types[name].with_shape(shape)
        self.parameters[name] = replace(parameter, value=Value(name, type_))
        self.types[name] = type_

    def equal_node(
        self,
        op: str,
        inputs: Sequence[str],
        attributes: tuple[tuple[str, Attribute], ...],
        scope: str,
    ) -> tuple[str, ...] | None:
        if self.activations.isdisjoint(inputs):
            return super().equal_node(op, inputs, attributes, scope)
        return None

    def append(self, node: IrNode) -> tuple[str, ...]:
        names = super().append(node)
        if not self.activations.isdisjoint(node.inputs):
            self.activations.update(names)
        return names


class FlatGraph:
    """The flat graph, to which rules add nodes.

    Attributes:
        values: the flat value of each traced node.
        constants: the values of the graph's constants.
        scope: the module path of the current node.
    """

    def __init__(self) -> None:
        self.builder = _TraceBuilder("model")
        self.values: dict[Node, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.scope = ""

    def value(self, argument: Any) -> Any:
        """Return the value of a traced argument; arguments other than nodes stay."""
        return self.values[argument] if isinstance(argument, Node) else argument

    def tensor(self, argument: Any, *, is_new: bool = False) -> FlatValue:
        """Return the value of a traced tensor; `is_new` if it may have no content yet."""
        value = self.value(argument)
        if not isinstance(value, FlatValue):
            raise TypeCheckError(f"{argument} is no tensor")
        if isinstance(value, Unwritten) and not is_new:
            raise TypeCheckError(f"{argument} is read before all of it is written")
        return value

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.builder.add(op, inputs, scope=self.scope, **attributes)

    def add_many(self, op: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        return self.builder.add_many(op, inputs, scope=self.scope, **attributes)

    def carries_gradient(self, name: str) -> bool:
        """Return whether backward may go through a value: a float that depends on the tokens."""
        return name in self.builder.activations and self.builder.types[name].is_float

    def reshape(self, name: str, features: tuple[int, ...]) -> str:
        type_ = self.builder.types[name]
        if type_.features == features:
            return name
        return self.add("reshape", name, shape=(-1,) * type_.is_token_wise + features)

    def reshaped(
        self, name: str, tags: str, shape: tuple[int | None, ...], rows: int = 1
    ) -> FlatValue:
        """View a flat value as a traced tensor of another shape."""
        value = FlatValue(name, tags, shape, rows)
        return value.named(self.reshape(name, value.features))

    def cast(self, name: str, dtype: str) -> str:
        is_cast = self.builder.types[name].dtype == dtype
        return name if is_cast else self.add("cast", name, dtype=dtype)

    def constant(self, name: str, value: torch.Tensor) -> FlatValue:
        """Add a tensor computed from the configuration, for the program to keep."""
        shape = tuple(value.shape)
        lies = FlatValue("", "d" * len(shape), shape)
        for known, data in self.constants.items():
            if data.dtype == value.dtype and torch.equal(data, value):
                return lies.named(known)
        unique = self.builder.fresh(name)
        type_ = tensor(dtype_of(value), *shape)
        self.builder.parameter(Parameter(Value(unique, type_), "constant", unique))
        self.constants[unique] = value
        return lies.named(unique)

    def data(self, value: FlatValue) -> torch.Tensor | None:
        """Return the data of a constant; None for values of tokens or weights."""
        return self.constants.get(value.name)


def argument(node: Node, index: int, default: Any = None, name: str = "") -> Any:
    """Return a node's argument by its index or its name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def traced_shape(node: Node) -> tuple[int | None, ...]:
    """Return the traced shape of a node's value, None for the token dim."""
    return tuple(s if isinstance(s, int) else None for s in node.meta["val"].shape)


def dtype_of(value: torch.Tensor) -> str:
    """Return the IR's name of a tensor's dtype; raises TypeCheckError."""
    if value.dtype not in _DTYPES:
        raise TypeCheckError(f"dtype {value.dtype} is not supported")
    return _DTYPES[value.dtype]


def scope_of(node: Node) -> str:
    """Return the module path of a traced node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def refusal(node: Node, why: str) -> TraceError:
    """Return the error for a traced node without an equivalent in the flat graph."""
    return TraceError(f"cannot trace {node.target} in {scope_of(node) or 'the model'}: {why}")
