"""Emit graphs for PyTorch, on any device: one statement a node."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.codegen.function_emitter import emit_function

__all__ = ["SERVING", "emit_function", "emit_module"]

SERVING: Sequence[str] = ()
"""Functions that a serving program has beside those of its graphs."""

_HEADER = '''"""{title}

Emitted by pcg for PyTorch. {note}
"""

import torch
import torch.nn.functional as F

from pcg.kernels.torch import ops as K
'''


def emit_module(title: str, note: str, functions: Sequence[str]) -> str:
    """A Python file of emitted functions."""
    return "\n\n".join([_HEADER.format(title=title, note=note), *functions])
