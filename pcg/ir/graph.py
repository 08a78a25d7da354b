"""The parallel computation graph: values, nodes and graphs.

A graph is in static single assignment form: its nodes are in order, a node names its inputs, and
each value is defined once, as an input, a parameter or a node's output. Everything is frozen; a
pass returns a new graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from pcg.ir.layouts import WHOLE, Layout
from pcg.ir.types import TensorType

Attribute: TypeAlias = bool | int | float | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor by name."""

    name: str
    type: TensorType

    def __str__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor that the graph holds.

    Attributes:
        role: `frozen` (a weight of the base model, in its checkpoint), `constant` (computed from
            the config, in the program), `adapter` (a bypass network's, trainable).
        source: the tensor's name in the checkpoint, with `{layer}` for the layer's index.
        transposed: the checkpoint holds [in, out] where the graph has [out, in].
        part: the layout of a rank's part; the value's type is that of the part.
        degree: number of ranks.
        rows: range of the source's rows, its last dim but one, or a vector's entries; None for all.
        copies: number of consecutive ranks that hold the same part of the first dim; an unsharded
            value repeats each row of the source this many times.
        experts: number of experts that share the value's ranks, of LoRA on experts.
    """

    value: Value
    role: str
    source: str
    transposed: bool = False
    part: Layout = WHOLE
    degree: int = 1
    rows: tuple[int, int] | None = None
    copies: int = 1
    experts: int = 1

    @property
    def name(self) -> str:
        return self.value.name

    @property
    def type(self) -> TensorType:
        return self.value.type


@dataclass(frozen=True, slots=True)
class Node:
    """An application of an operator.

    Attributes:
        op: the operator's name in the table `pcg.ir.operators`.
        attributes: the operator's constants.
        scope: path of the node's module, within its layer.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()
    scope: str = ""

    @property
    def output(self) -> Value:
        """The first output; most operators have no other."""
        return self.outputs[0]

    @property
    def name(self) -> str:
        """The name of the first output, which also names the node."""
        return self.outputs[0].name

    def attribute(self, name: str) -> Attribute:
        return dict(self.attributes)[name]

    def get(self, name: str, default: Attribute | None = None) -> Attribute | None:
        return dict(self.attributes).get(name, default)

    def changed(self, *, attributes: Mapping[str, Attribute], **fields: object) -> Node:
        """Replace fields, and add attributes."""
        pairs = tuple(sorted({**dict(self.attributes), **attributes}.items()))
        return dataclasses.replace(self, attributes=pairs, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Graph:
    """A straight-line program over tensors, in static single assignment form."""

    name: str
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        types = {value.name: value.type for value in self.inputs}
        types.update({parameter.name: parameter.type for parameter in self.parameters})
        types.update({value.name: value.type for node in self.nodes for value in node.outputs})
        return types

    def types_of(self, node: Node) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
        inputs = tuple(self.types[name] for name in node.inputs)
        return inputs, tuple(value.type for value in node.outputs)

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that computes a value; inputs and parameters have none."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read a value, in order; outputs of the graph are not consumers."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    @cached_property
    def parameters_by_name(self) -> Mapping[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def replace(self, **changes: object) -> Graph:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def without_dead_code(self) -> Graph:
        """Drop nodes and parameters that no output needs; inputs stay."""
        live = set(self.outputs)
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if any(value.name in live for value in node.outputs):
                kept.append(node)
                live.update(node.inputs)
        parameters = tuple(p for p in self.parameters if p.name in live)
        return self.replace(parameters=parameters, nodes=tuple(reversed(kept)))

    def renamed(self, names: Mapping[str, str]) -> Graph:
        """Rename values; a name without an entry in the mapping stays."""

        def value(old: Value) -> Value:
            return Value(names.get(old.name, old.name), old.type)

        return Graph(
            self.name,
            tuple(map(value, self.inputs)),
            tuple(dataclasses.replace(p, value=value(p.value)) for p in self.parameters),
            tuple(
                dataclasses.replace(
                    node,
                    inputs=tuple(names.get(name, name) for name in node.inputs),
                    outputs=tuple(map(value, node.outputs)),
                )
                for node in self.nodes
            ),
            tuple(names.get(name, name) for name in self.outputs),
        )


@dataclass(frozen=True)
class KernelGraph(Graph):
    """A graph with groups of nodes for single kernels; every other node runs separately."""

    kernels: tuple[tuple[tuple[str, ...], ...], ...]
    """The parts of each kernel, side by side in it; each part by the names of its nodes."""
