"""Kernels in Triton, written once, specialised by their arguments."""

from __future__ import annotations

import os

CHOICE = "PCG_PTXAS"
"""The variable that names the assembler; see `pcg.kernels.triton.ptxas`."""
TRITONS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
"""Triton's own: for GPUs before Hopper or Blackwell, by its version, and from there on."""


def choose_assembler(path: str) -> None:
    """Have Triton take an assembler for every GPU, before it compiles anything."""
    os.environ.update(dict.fromkeys(TRITONS, path))


if _path := os.environ.get(CHOICE):
    choose_assembler(_path)
elif _path := os.environ.get(TRITONS[0]):
    os.environ.setdefault(TRITONS[1], _path)
