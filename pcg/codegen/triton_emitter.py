"""Emit functions for NVIDIA GPUs: a Triton kernel for each group of nodes that one can run.

Kernels stand before the function that launches them. A node in no group is PyTorch, or a template
kernel behind a function of `pcg.kernels.triton.ops`.
"""

from __future__ import annotations

from pcg.codegen import function_emitter
from pcg.codegen.function_emitter import Item
from pcg.codegen.group_kernel import group_kernel
from pcg.codegen.program_functions import Function
from pcg.errors import CodegenError
from pcg.ir.analysis.kernel_group import KernelGroup, items_of
from pcg.ir.graph import KernelGraph
from pcg.ir.operators import operator

IMPORTS = """import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pcg.kernels.triton import ops as K"""
SERVING = (
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
"""Functions of a serving program that choose tokens."""
_MOST_NAMED = 3
"""The most operators that a kernel's name has."""


def emit_function(function: Function) -> str:
    """The source of one function, behind its kernels. CodegenError: its nodes are not grouped."""
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
    return "\n\n".join([*kernels, function_emitter.emit_function(function, items)])


def _operators(group: KernelGroup) -> list[str]:
    """The operators that a kernel is named by; what reads and adds for them is left out."""
    found = dict.fromkeys(node.op for node in group.nodes)
    named = [op for op in found if op != "add_deferred" and not operator(op).is_view]
    every = named or list(found)
    return every if len(every) <= _MOST_NAMED else [*every[: _MOST_NAMED - 1], "and_more"]
