"""Emit graphs as Python functions, to be read as well as run.

A function takes the layer's weights `w`, its adapters' weights `a`, the `batch` (for attention) and
the graph's inputs, and returns the graph's outputs. Nodes of one module stand together under the
module's path. In training functions a value is deleted after its last use. Each statement is a node
in PyTorch, or the launch of a kernel that runs several; a collective with others to run beside it
is one statement that begins it, and one that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pcg.codegen.group_kernel import GroupKernel
from pcg.codegen.lines import WIDTH, statement, wrapped
from pcg.codegen.program_functions import Function
from pcg.errors import CodegenError
from pcg.ir.analysis.dataflow import collective_of, waits
from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.printer import scope_text
from pcg.ir.program.program import python_name

Item: TypeAlias = Node | GroupKernel
"""A node, or the launch of the kernel of several."""


def emit_function(function: Function, items: Sequence[Item] | None = None) -> str:
    """The source of one function of nodes and launches, in their order; by default the graph's."""
    graph, given = function.graph, function.given
    expressions = _expressions(graph)
    packed = {value for values in given.values() for value in values}
    inputs = [expressions[v.name] for v in graph.inputs if v.name not in packed]
    lines = [f"def {function.name}({', '.join(['w', 'a', 'batch', *given, *inputs])}):"]
    lines += [f'    """{function.doc}', ""]
    lines += [f"    {value.name}: {value.type}" for value in graph.inputs]
    lines += [f"    -> {output}: {graph.types[output]}" for output in graph.outputs]
    lines.append('    """')
    for holder, values in given.items():
        if values:
            lines += wrapped([f"{python_name(n)}," for n in values], "(", f") = {holder}")
            lines.append(f"    {holder}.clear()")
    items = graph.nodes if items is None else items
    waited = waits(items)
    last_use = _last_uses(graph, items, waited) if function.free else {}
    scope = None
    for index, item in enumerate(items):
        lines += _waiting(items, waited, index, expressions)
        if item.scope != scope:
            scope = item.scope
            lines.append(f"    # {scope_text(scope) if scope else 'layer'}")
        if isinstance(item, GroupKernel):
            lines += _launch(item, expressions)
        elif index in waited:
            lines += _beginning(item, expressions)
        else:
            lines += _statement(
                item, expressions, function.yields_products and _is_frozen(graph, item)
            )
        dead = [expressions[n] for n in last_use.get(index, ())]
        if dead:
            line = f"    del {', '.join(dead)}"
            words = [f"{name}," for name in dead]
            lines += [line] if len(line) <= WIDTH else wrapped(words, "del (", ")")
    lines += _waiting(items, waited, len(items), expressions)
    if function.yields_products and not any("yield from" in line for line in lines):
        lines.append("    yield from ()  # it has no product to ask for")
    lines += _returned(graph.outputs, function.outputs, expressions)
    return "\n".join(lines) + "\n"


def _expressions(graph: Graph) -> dict[str, str]:
    """The name of each value in the source."""
    expressions = {}
    for parameter in graph.parameters:
        holder = "a" if parameter.role == "adapter" else "w"
        expressions[parameter.name] = f"{holder}.{python_name(parameter.name)}"
    for name in graph.types:
        expressions.setdefault(name, python_name(name))
    if len(set(expressions.values())) != len(expressions):
        raise CodegenError(f"two values of graph @{graph.name} have one Python name")
    return expressions


def _is_frozen(graph: Graph, node: Node) -> bool:
    """Return whether a node's second input is a weight of the base."""
    parameter = graph.parameters_by_name.get(node.inputs[1]) if len(node.inputs) > 1 else None
    return parameter is not None and parameter.role == "frozen"


def _launch(kernel: GroupKernel, expressions: Mapping[str, str]) -> list[str]:
    targets = ", ".join(expressions[name] for name in kernel.outputs)
    arguments = ["batch,"] * kernel.appends
    arguments += [f"{expressions[name]}," for name in kernel.inputs]
    arguments[-1] = arguments[-1].removesuffix(",")
    return wrapped(arguments, f"{targets} = {kernel.name}(", ")")


def _statement(node: Node, expressions: Mapping[str, str], yields: bool = False) -> list[str]:
    entry = operator(node.op)
    arguments = [expressions[name] for name in node.inputs]
    attributes = dict(node.attributes)
    request = entry.request_source(arguments, attributes) if yields else None
    source = entry.source(arguments, attributes) if request is None else request
    targets = ", ".join(expressions[value.name] for value in node.outputs)
    if entry.returns_sequence and len(node.outputs) == 1:
        targets = f"({targets},)"
    return [statement(f"{targets} = {source}")]


def _beginning(node: Node, expressions: Mapping[str, str]) -> list[str]:
    """The statement that begins a collective; its first output's name holds the pending one."""
    entry = collective_of(node)
    assert entry is not None
    source = entry.begun_source([expressions[n] for n in node.inputs], dict(node.attributes))
    return [statement(f"{expressions[node.name]} = {source}")]


def _waiting(
    items: Sequence[Item], waited: Mapping[int, int], index: int, expressions: Mapping[str, str]
) -> list[str]:
    """Statements that wait for the collectives that the item at a place is the first to read."""
    lines = []
    for begun in (items[place] for place, first in waited.items() if first == index):
        assert isinstance(begun, Node)
        targets = ", ".join(expressions[value.name] for value in begun.outputs)
        lines.append(f"    {targets} = {expressions[begun.name]}()")
    return lines


def _last_uses(
    graph: Graph, items: Sequence[Item], waited: Mapping[int, int]
) -> dict[int, list[str]]:
    """For each item's index, the values that no later one reads; outputs and parameters stay."""
    lasting = {*graph.outputs, *graph.parameters_by_name}
    last: dict[str, int] = {value.name: -1 for value in graph.inputs}
    for index, item in enumerate(items):
        made = item.outputs if isinstance(item, GroupKernel) else [v.name for v in item.outputs]
        last |= dict.fromkeys(made, waited.get(index, index)) | dict.fromkeys(item.inputs, index)
    uses: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in lasting and index >= 0:
            uses.setdefault(index, []).append(name)
    return uses


def _returned(
    outputs: Sequence[str], groups: Sequence[Sequence[str]] | None, expressions: Mapping[str, str]
) -> list[str]:
    if groups is None:
        return [f"    return {', '.join(expressions[name] for name in outputs)}"]
    lines: list[str] = []
    for i, group in enumerate(groups):
        lines += wrapped([f"{expressions[name]}," for name in group], f"group_{i} = (", ")")
    return [*lines, f"    return {', '.join(f'group_{i}' for i in range(len(groups)))}"]
