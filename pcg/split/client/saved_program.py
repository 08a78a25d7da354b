"""Programs of clients that were saved: one loads them where it would compile, in less memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pcg.errors import SplitError
from pcg.ir.program.folder import load_program
from pcg.ir.program.program import Program
from pcg.peft.reader import is_recipe
from pcg.split.model_facts import config_difference


def load_for(
    folder: str | os.PathLike[str], facts: Mapping[str, Any], *, linear_only: bool
) -> Program:
    """Load a program that runs by a base.

    Args:
        facts: the base's.
        linear_only: each product has to be a call: the client's noise hides nothing else, or the
            base runs nothing else.
    Raises:
        ProgramError: the folder is missing, damaged or edited.
        SplitError: the program is of another model or dtype, or has other pieces than the base
            runs.
    """
    program = load_program(folder)
    again = f"save one by a client of this base: pcg compile split://… -o {folder}"
    difference = config_difference(program.config, facts["config"])
    if difference:
        raise SplitError(
            f"the program in {folder} is of another model than the base's {facts['name']} "
            f"({difference}); {again}"
        )
    if program.options.dtype != facts["dtype"]:
        raise SplitError(
            f"the program in {folder} runs in {program.options.dtype}, and the base "
            f"{facts['name']} in {facts['dtype']}; {again}"
        )
    if program.options.backend != "torch" or program.options.tp != 1:
        raise SplitError(
            f"the program in {folder} is for {program.options.backend} on {program.options.tp} "
            f"rank(s), and a client runs PyTorch on one; {again}"
        )
    if linear_only and has_pieces(program):
        raise SplitError(
            f"the program in {folder} calls the base for parts of layers, and here each product "
            f"has to be a call; connect with cut='linear' and save its program"
        )
    return program


def has_pieces(program: Program) -> bool:
    """Return whether a program calls a base for more than products."""
    graphs = [*program.serving.model.graphs]
    for plan in program.training.plans if program.training is not None else ():
        graphs += [plan.forward, *([] if plan.backward is None else [plan.backward])]
    return any(node.op == "base_piece" for graph in graphs for node in graph.nodes)


def check_given(peft: object, model: object, memory_budget: object, default: object) -> None:
    """Refuse arguments that a program has decided. SplitError: names the first."""
    if model is not None:
        raise SplitError("model=… and program=… are both given; a program has its model")
    if peft is not None and (not isinstance(peft, Mapping) or is_recipe(peft)):
        raise SplitError(
            "program=… has its recipes; give peft={name: recipe or folder} to add adapters"
        )
    if memory_budget != default:
        raise SplitError("program=… has its memory budget; leave memory_budget out")
