"""The text IR: a line per node, deterministic; `parse_graph` reads it back to an equal graph.

    graph @mlp(%x: bf16[T, 4096]) {
      frozen %up.weight: bf16[11008|4, 4096] = "model.layers.{layer}.mlp.up_proj.weight"
      %up: bf16[T, 11008|4] = linear(%x, %up.weight)  @mlp.up_proj
      %mul: bf16[T, 11008|4] = mul(%up) {scalar=0.5}
      return %mul
    }

A parameter's line starts with its role and ends with its name in the checkpoint. A node's line ends
with its attributes in braces and its module after `@`. If kernels group nodes, a comment has the
node's kernel. The grammar is in `pcg.ir.parser`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from pcg.errors import VerifyError
from pcg.ir.graph import Attribute, Graph, KernelGraph, Node, Parameter
from pcg.ir.layouts import WHOLE
from pcg.ir.types import State

NAME = re.compile(r"[A-Za-z0-9_.]+")
"""Names of values and graphs, and scopes that need no quotes."""

LINE_LENGTH = 100
INTEGERS = range(-(2**63), 2**63)
"""Integers that the checkpoint and every kernel can hold."""

ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


PARTS = {
    State.PARTITIONED: "dim",
    State.REPLICATED: "copy",
    State.PRE_REDUCE: "summand",
    State.ROUTED: "routed",
}
"""The word of a parameter's line for a rank's part of it: `dim -2 of 4`, `copy of 4`."""


def print_graph(graph: Graph) -> str:
    """Print a graph, without a final newline; raise VerifyError for an unprintable attribute."""
    lines = [_head(graph)]
    lines += [f"  {print_parameter(parameter)}" for parameter in graph.parameters]
    kernels = _kernels(graph)
    lines += [f"  {print_node(node)}{kernels.get(node.name, '')}" for node in graph.nodes]
    lines.append(f"  return {', '.join(f'%{name}' for name in graph.outputs)}".rstrip())
    return "\n".join([*lines, "}"])


def _kernels(graph: Graph) -> dict[str, str]:
    """Return the comment at the end of a node's line: its kernel, and its part of the kernel."""
    kernels = graph.kernels if isinstance(graph, KernelGraph) else ()
    return {
        name: f"  # kernel {number}" + f", part {place}" * (len(parts) > 1)
        for number, parts in enumerate(kernels, 1)
        for place, names in enumerate(parts, 1)
        for name in names
    }


def print_graphs(graphs: Iterable[Graph]) -> str:
    """Print several graphs as the text of a file, for `parse_graphs`."""
    return "\n\n".join(map(print_graph, graphs)) + "\n"


def print_parameter(parameter: Parameter) -> str:
    """Print a parameter's line, not indented."""
    line = f"{parameter.role} {parameter.value} = {quote(parameter.source)}"
    if parameter.transposed:
        line += " transposed"
    if parameter.rows:
        line += f" rows {parameter.rows[0]} {parameter.rows[1]}"
    if parameter.copies > 1:
        line += f" copies {parameter.copies}"
    if parameter.experts > 1:
        line += f" experts {parameter.experts}"
    if parameter.part == WHOLE:
        return line
    state, dim, sharers, part = parameter.part
    shared = f" by {sharers}" + (f" dim {part}" if part else "") if sharers > 1 else ""
    at = f" {dim}" if dim else ""
    return f"{line} {PARTS[state]}{at}{shared} of {parameter.degree}"


def print_node(node: Node) -> str:
    """Print a node's line, not indented; raise VerifyError for an unprintable attribute."""
    outputs = ", ".join(map(str, node.outputs))
    line = f"{outputs} = {node.op}({', '.join(f'%{name}' for name in node.inputs)})"
    if node.attributes:
        pairs = (f"{name}={print_attribute(value)}" for name, value in node.attributes)
        line += f" {{{', '.join(pairs)}}}"
    if node.scope:
        line += f"  @{scope_text(node.scope)}"
    return line


def print_attribute(value: Attribute) -> str:
    """Print an attribute's value so that it reads back exactly, with its kind.

    Raises:
        VerifyError: the value is nan, an integer of more than 64 bits, or of another kind.
    """
    if isinstance(value, bool):
        return str(value)
    if type(value) is int and value in INTEGERS:
        return str(value)
    if type(value) is float and not math.isnan(value):
        return repr(value)
    if type(value) is str:
        return quote(value)
    if type(value) is tuple and all(type(item) is int and item in INTEGERS for item in value):
        return str(value)
    raise VerifyError(
        f"{value!r} of type {type(value).__name__} is no attribute; use a bool, an int of 64 bits, "
        "a float but nan (which does not equal itself), a string, or a tuple of ints"
    )


def scope_text(scope: str) -> str:
    """Return a scope on one line, quoted unless it is a plain path: names may be untrusted."""
    return scope if NAME.fullmatch(scope) else quote(scope)


def quote(text: str) -> str:
    r"""Return a string in double quotes, on one line; unprintable characters become `\u{hex}`."""
    characters = (ESCAPES.get(c, c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text)
    return f'"{"".join(characters)}"'


def _head(graph: Graph) -> str:
    inputs = list(map(str, graph.inputs))
    line = f"graph @{graph.name}({', '.join(inputs)}) {{"
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"graph @{graph.name}(", *(f"    {value}," for value in inputs), ") {"])
