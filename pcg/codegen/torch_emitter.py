"""Emit graphs as PyTorch functions, to be read as well as run.

A function takes the layer's weights `w`, its adapters' weights `a`, the `batch` (for attention) and
the graph's inputs, and returns the graph's outputs. Nodes of one module stand together under the
module's path. In training functions a value is deleted after its last use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pcg.errors import CodegenError
from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.program import python_name

HEADER = '''"""{title}

Emitted by pcg for PyTorch. {note}
"""

import torch
import torch.nn.functional as F

from pcg.codegen.kernels import torch_ops as K
'''


def emit_module(title: str, note: str, functions: Sequence[str]) -> str:
    """A Python file of emitted functions."""
    return "\n\n".join([HEADER.format(title=title, note=note), *functions])


def emit_function(
    graph: Graph,
    name: str,
    doc: str,
    *,
    outputs: Sequence[Sequence[str]] | None = None,
    kept: Sequence[str] | None = None,
    free: bool = False,
) -> str:
    """One function.

    Args:
        graph: what it computes.
        name: of the function.
        doc: its docstring's first line.
        outputs: groups of the graph's outputs; each group is returned as a tuple. By default the
            outputs themselves.
        kept: inputs that arrive together, as one tuple `kept` before the others.
        free: delete each value after its last use.
    Returns:
        Python source, ending with a line break.
    """
    expressions = _expressions(graph)
    inputs = [expressions[v.name] for v in graph.inputs if v.name not in (kept or ())]
    packed = ["kept"] if kept is not None else []
    lines = [f"def {name}({', '.join(['w', 'a', 'batch', *packed, *inputs])}):"]
    lines += [f'    """{doc}', ""]
    lines += [f"    {value.name}: {value.type}" for value in graph.inputs]
    lines += [f"    -> {', '.join(f'{n}: {graph.types[n]}' for n in graph.outputs)}", '    """']
    if kept:
        lines.append(f"    {', '.join(map(python_name, kept))}, = kept")
        lines.append("    del kept")
    last_use = _last_uses(graph) if free else {}
    scope = None
    for index, node in enumerate(graph.nodes):
        if node.scope != scope:
            scope = node.scope
            lines.append(f"    # {scope or 'layer'}")
        lines.append(f"    {_statement(node, expressions)}")
        dead = [expressions[n] for n in last_use.get(index, ())]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    groups = outputs if outputs is not None else None
    lines.append(f"    return {_returned(graph.outputs, groups, expressions)}")
    return "\n".join(lines) + "\n"


def _expressions(graph: Graph) -> dict[str, str]:
    """How the source names each value."""
    expressions = {}
    for parameter in graph.parameters:
        holder = "a" if parameter.role == "adapter" else "w"
        expressions[parameter.name] = f"{holder}.{python_name(parameter.name)}"
    for name in graph.types:
        expressions.setdefault(name, python_name(name))
    if len(set(expressions.values())) != len(expressions):
        raise CodegenError(f"two values of graph @{graph.name} have one Python name")
    return expressions


def _statement(node: Node, expressions: Mapping[str, str]) -> str:
    entry = operator(node.op)
    arguments = [expressions[name] for name in node.inputs]
    source = entry.source(arguments, dict(node.attributes))
    targets = ", ".join(expressions[value.name] for value in node.outputs)
    return f"{targets} = {source}"


def _last_uses(graph: Graph) -> dict[int, list[str]]:
    """For each node's index, the values that no later node reads; outputs and parameters stay."""
    kept = {*graph.outputs, *graph.parameters_by_name}
    last: dict[str, int] = {value.name: -1 for value in graph.inputs}
    for index, node in enumerate(graph.nodes):
        for value in node.outputs:
            last[value.name] = index
        for name in node.inputs:
            last[name] = index
    uses: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in kept and index >= 0:
            uses.setdefault(index, []).append(name)
    return uses


def _returned(
    outputs: Sequence[str], groups: Sequence[Sequence[str]] | None, expressions: Mapping[str, str]
) -> str:
    if groups is None:
        return ", ".join(expressions[name] for name in outputs)
    parts = []
    for group in groups:
        names = [expressions[name] for name in group]
        parts.append(f"({', '.join(names)}{',' if len(names) == 1 else ''})")
    return ", ".join(parts)
