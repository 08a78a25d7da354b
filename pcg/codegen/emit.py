"""Emission of a program's functions as a readable Python file, for PyTorch or for Triton.

A function takes the layer's weights `w`, its adapters' weights `a`, the `batch` (for attention) and
the graph's inputs, and returns the graph's outputs. Nodes of a module are adjacent under the
module's path. In training functions a value is deleted after its last use. Each statement is a node
in PyTorch, or the launch of a kernel that runs several nodes. A collective that overlaps other
nodes takes a statement that starts it, and a statement that waits for it.

For Triton, each group of nodes that a kernel can run gets a kernel before the function that
launches it. A node in no group is PyTorch, or a template kernel behind a function of
`pcg.kernels.triton.ops`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from pcg.codegen.group_kernel import GroupKernel, group_kernel
from pcg.codegen.lines import WIDTH, statement, wrapped
from pcg.codegen.program_functions import Function
from pcg.errors import CodegenError
from pcg.ir.analysis.dataflow import collective_of, waits
from pcg.ir.analysis.kernel_group import KernelGroup, items_of
from pcg.ir.graph import Graph, KernelGraph, Node
from pcg.ir.operators import operator
from pcg.ir.operators.linear import BasePiece, piece_constant
from pcg.ir.printer import scope_text
from pcg.ir.program.program import python_name

# ---------------------------------------------------------------------------------------- functions


Item: TypeAlias = Node | GroupKernel
"""A node, or the launch of a kernel for several nodes."""


def emit_function(function: Function, items: Sequence[Item] | None = None) -> str:
    """Emit a function of nodes and launches, in order; by default the graph's nodes."""
    graph, holders = function.graph, function.holders
    expressions = _expressions(graph)
    packed = {value for values in holders.values() for value in values}
    inputs = [expressions[v.name] for v in graph.inputs if v.name not in packed]
    lines = [f"def {function.name}({', '.join(['w', 'a', 'batch', *holders, *inputs])}):"]
    lines += [f'    """{function.doc}', ""]
    lines += [f"    {value.name}: {value.type}" for value in graph.inputs]
    lines += [f"    -> {output}: {graph.types[output]}" for output in graph.outputs]
    lines.append('    """')
    for holder, values in holders.items():
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
    """Start a collective; its first output's name holds the pending result."""
    entry = collective_of(node)
    assert entry is not None
    source = entry.begun_source([expressions[n] for n in node.inputs], dict(node.attributes))
    return [statement(f"{expressions[node.name]} = {source}")]


def _waiting(
    items: Sequence[Item], waited: Mapping[int, int], index: int, expressions: Mapping[str, str]
) -> list[str]:
    """Wait for the collectives that the item at an index reads first."""
    lines = []
    for begun in (items[place] for place, first in waited.items() if first == index):
        assert isinstance(begun, Node)
        targets = ", ".join(expressions[value.name] for value in begun.outputs)
        lines.append(f"    {targets} = {expressions[begun.name]}()")
    return lines


def _last_uses(
    graph: Graph, items: Sequence[Item], waited: Mapping[int, int]
) -> dict[int, list[str]]:
    """Return for each item's index the values without later readers, except kept values."""
    lasting = {*graph.outputs, *graph.parameters_by_name}
    last: dict[str, int] = {value.name: -1 for value in graph.inputs}
    for index, item in enumerate(items):
        outputs = item.outputs if isinstance(item, GroupKernel) else [v.name for v in item.outputs]
        last |= dict.fromkeys(outputs, waited.get(index, index)) | dict.fromkeys(item.inputs, index)
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


# ------------------------------------------------------------------------------------------ kernels


TRITON_IMPORTS = """import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pcg.kernels.triton import ops as K"""
TRITON_SERVING = (
    '''def greedy(logits):
    """Each row's most likely token, [R, V] to [R]; of equal ones the first."""
    return K.greedy(logits)
''',
    '''def draw(logits, limits, uniform):
    """A token of each row within its limits, at its own number, and whether one could be drawn."""
    return K.draw(logits, limits, uniform)
''',
    '''def keep(logits, limits):
    """The logits of tokens within each row's limits, over its temperature; -inf for others."""
    return K.keep(logits, limits)
''',
)
"""A serving program's functions that sample tokens."""
_MOST_NAMED = 3
"""Maximum number of operators in a kernel's name."""


def emit_with_kernels(function: Function) -> str:
    """Emit a function after its kernels; raise CodegenError if its nodes are not grouped."""
    graph = function.graph
    if not isinstance(graph, KernelGraph):
        raise CodegenError(f"the nodes of graph @{graph.name} are not grouped to kernels")
    kernels: list[str] = []
    items: list[Item] = []
    names: dict[str, int] = {}
    for item in items_of(graph):
        if not isinstance(item, KernelGroup):
            items.append(item)
            continue
        stem = "_".join([function.name, *_operators(item)])
        names[stem] = number = names.get(stem, 0) + 1
        kernel = group_kernel(item, stem if number == 1 else f"{stem}_{number}")
        kernels.append(f"{kernel.source}\n")
        items.append(kernel)
    return "\n\n".join([*kernels, emit_function(function, items)])


def _operators(group: KernelGroup) -> list[str]:
    """Return the operators in a kernel's name, without views and deferred adds."""
    operators = dict.fromkeys(node.op for node in group.nodes)
    named = [op for op in operators if op != "add_deferred" and not operator(op).is_view]
    every = named or list(operators)
    return every if len(every) <= _MOST_NAMED else [*every[: _MOST_NAMED - 1], "and_more"]


# -------------------------------------------------------------------------------------------- files


_HEADER = '''"""{title}

Emitted by pcg for {backend}. {note}
"""

{imports}
'''
_TORCH_IMPORTS = """import torch
import torch.nn.functional as F

from pcg.kernels.torch import ops as K"""


def emit_serving(name: str, functions: Sequence[Function], backend: str) -> str:
    """Emit the serving functions, and the sampling functions that serving calls."""
    others = TRITON_SERVING if backend == "triton" else ()
    note = "It generates, for adapters of any rank in one batch."
    return emit_module(name, note, functions, backend, others)


def emit_training(name: str, functions: Sequence[Function], backend: str) -> str:
    """Emit the training functions."""
    return emit_module(name, "It finetunes one adapter at a time.", functions, backend)


def emit_module(
    title: str, note: str, functions: Sequence[Function], backend: str, others: Sequence[str] = ()
) -> str:
    """Emit functions as a Python file, followed by other sources."""
    if backend == "triton":
        imports, called = TRITON_IMPORTS, "Triton"
        sources = map(emit_with_kernels, functions)
    else:
        imports, called = _TORCH_IMPORTS, "PyTorch"
        sources = map(emit_function, functions)
    header = _HEADER.format(title=_quoted(title), backend=called, note=note, imports=imports)
    return "\n\n".join([header, *_pieces(functions), *sources, *others])


def _pieces(functions: Sequence[Function]) -> Iterator[str]:
    """Yield the texts of the pieces that functions request from a base executor, each once."""
    called = (n for function in functions for n in function.graph.nodes if n.op == BasePiece.name)
    for text in dict.fromkeys(str(node.attribute("text")) for node in called):
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        yield f"{piece_constant(text)} = '''{escaped}'''\n"


def _quoted(title: str) -> str:
    """Sanitize a title so that it cannot end its docstring: model names are untrusted."""
    return "".join(c if c.isprintable() and c not in '"\\' else "_" for c in title)
