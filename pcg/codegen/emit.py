"""Emit the functions of a program as one Python file, for PyTorch or for Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pcg.codegen import function_emitter, triton_emitter
from pcg.codegen.program_functions import Function
from pcg.ir.operators.linear import BasePiece, piece_constant

_HEADER = '''"""{title}

Emitted by pcg for {backend}. {note}
"""

{imports}
'''
_TORCH_IMPORTS = """import torch
import torch.nn.functional as F

from pcg.kernels.torch import ops as K"""


def emit_serving(name: str, functions: Sequence[Function], backend: str) -> str:
    """The source of the functions that serve, and of the others that serving calls."""
    others = triton_emitter.SERVING if backend == "triton" else ()
    note = "It generates, for adapters of any rank in one batch."
    return emit_module(name, note, functions, backend, others)


def emit_training(name: str, functions: Sequence[Function], backend: str) -> str:
    """The source of the functions that train."""
    return emit_module(name, "It finetunes one adapter at a time.", functions, backend)


def emit_module(
    title: str, note: str, functions: Sequence[Function], backend: str, others: Sequence[str] = ()
) -> str:
    """The source of functions as a Python file, with the sources of others behind them."""
    if backend == "triton":
        imports, called = triton_emitter.IMPORTS, "Triton"
        sources = map(triton_emitter.emit_function, functions)
    else:
        imports, called = _TORCH_IMPORTS, "PyTorch"
        sources = map(function_emitter.emit_function, functions)
    header = _HEADER.format(title=_quoted(title), backend=called, note=note, imports=imports)
    return "\n\n".join([header, *_pieces(functions), *sources, *others])


def _pieces(functions: Sequence[Function]) -> Iterator[str]:
    """The texts of the pieces that functions ask a base executor for, each once."""
    called = (n for one in functions for n in one.graph.nodes if n.op == BasePiece.name)
    for text in dict.fromkeys(str(node.attribute("text")) for node in called):
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        yield f"{piece_constant(text)} = '''{escaped}'''\n"


def _quoted(title: str) -> str:
    """A title that cannot end its docstring: a model's name is a stranger's, and this file runs."""
    return "".join(c if c.isprintable() and c not in '"\\' else "_" for c in title)
