"""Check that all ranks of a group have compiled the same program.

Each rank compiles by itself, from its device's sheet and its files, by its own libraries. Where
those differ, so may the plans, and then ranks wait for messages that nobody sends.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path

import torch

from pcg.ir.printer import print_graphs
from pcg.ir.program.program import ModelGraph, Program, Serving, Training
from pcg.ranks.agreement import check_same
from pcg.ranks.described import described, fields_of
from pcg.ranks.group import Ranks
from pcg.version import __version__

PROGRAM_FIX = (
    "Give all ranks the same model, adapters, options and versions of libraries, costs=NAME or one "
    "profile among them, or compile once and load that program on all"
)
_SEEN_OTHERWISE = ("costs", "memory_budget", "tp_plan")
"""Options that are compared by what they name."""


def check_same_program(ranks: Ranks, program: Program) -> None:
    """Refuse to run on ranks that have compiled different programs; all ranks call this.

    Raises:
        ParallelError: on every rank; names those that differ from the first, and in what.
    """
    if ranks.size == 1:
        return
    constants = hashlib.sha256()
    for name, tensor in program.constants.items():
        constants.update(name.encode())
        constants.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    given = fields_of(program.options, _SEEN_OTHERWISE)
    facts = {
        **{name: version(name) for name in ("torch", "transformers")},
        "pcg": __version__,
        "the precision of products": torch.get_float32_matmul_precision(),
        "the model": f"{program.dtype} {_model_text(program.base)} {constants.hexdigest()}",
        "the adapters": str(sorted(map(str, program.recipes.items()))),
        "costs": _costs_text(program.options.costs),
        "tp_plan": str(sorted(program.options.styles.items())),
        "the memory budget": str(program.options.budget),
        **{name: described(value) for name, value in given.items()},
        "the serving program": serving_text(program.serving),
        "the training program": training_text(program.training),
    }
    check_same(ranks, "the program", facts, PROGRAM_FIX)


def serving_text(serving: Serving) -> str:
    """The serving program as text."""
    return _model_text(serving.model)


def training_text(training: Training | None) -> str:
    """The training program as text; empty for None."""
    if training is None:
        return ""
    graphs = [graph for plan in training.plans for graph in (plan.forward, plan.backward)]
    kept = [(plan.block, plan.saved, plan.trained) for plan in training.plans]
    rest = (training.layers, training.epilogue_trained, training.prologue_trained)
    text = print_graphs(g for g in (*graphs, training.epilogue, training.prologue) if g is not None)
    return f"{_model_text(training.model)} {text} {kept} {rest} {training.restored}"


def _model_text(model: ModelGraph) -> str:
    return f"{print_graphs(model.graphs)} {model.layers}"


def _costs_text(costs: str | os.PathLike[str] | None) -> str:
    if costs is None:
        return ""
    path = Path(costs)
    return path.read_text(encoding="utf-8") if path.is_file() else os.fspath(costs).upper()
