"""Check that all ranks of a group have compiled the same program.

Each rank compiles by itself, from its device's sheet and its files. Where those differ, so may the
plans, and then ranks wait for messages that nobody sends. So they compare SHA-256s of texts first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pcg.errors import ParallelError
from pcg.ir.printer import print_graphs
from pcg.ir.program.program import ModelGraph, Program, Serving, Training
from pcg.parallel.ranks.group import Ranks

_DIGEST_BYTES = 32
_SHOWN_BYTES = 32
"""Length of a text that an error shows, such as the name of a device's sheet."""


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
    check_same(
        ranks,
        {
            "the model": f"{program.dtype} {_model_text(program.base)} {constants.hexdigest()}",
            "the adapters": str(sorted(map(str, program.recipes.items()))),
            "costs": _costs_text(program.options.costs),
            "tp_plan": str(sorted(program.options.styles.items())),
            "sequence_parallel": str(program.options.sequence_parallel),
            "the memory budget": str(program.options.budget),
            "the serving program": serving_text(program.serving),
            "the training program": training_text(program.training),
        },
    )


def check_same(ranks: Ranks, texts: Mapping[str, str]) -> None:
    """Refuse to go on where ranks differ in texts that have to be equal.

    All ranks call this, with texts by the names of what these describe.

    Raises:
        ParallelError: on every rank; names those that differ from the first, and in what.
    """
    if ranks.size == 1:
        return
    own = b"".join(map(_record, texts.values()))
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(ranks.device)
    found = [bytes(part.cpu().numpy()) for part in ranks.all_gather(sent)]
    words = [
        f"rank {rank} in {', '.join(differences)}"
        for rank, other in enumerate(found)
        if (differences := _differences(list(texts), found[0], other))
    ]
    if words:
        raise ParallelError(
            f"{ranks.size} ranks have to run one program, and some differ from rank 0: "
            f"{'; '.join(words)}. Give all ranks the same model, adapters and options, costs=NAME "
            "or one profile among them, or compile once and load that program on all"
        )


def _record(text: str) -> bytes:
    """A text's SHA-256, and the text itself where it is short."""
    encoded = text.encode()
    shown = encoded if len(encoded) <= _SHOWN_BYTES else b""
    return hashlib.sha256(encoded).digest() + shown.ljust(_SHOWN_BYTES, b"\0")


def _differences(names: Sequence[str], first: bytes, other: bytes) -> list[str]:
    """The differences between the records of two ranks, in words."""
    size = _DIGEST_BYTES + _SHOWN_BYTES
    words = []
    for index, name in enumerate(names):
        ours, theirs = (whole[index * size : (index + 1) * size] for whole in (first, other))
        if ours != theirs:
            before, now = (r[_DIGEST_BYTES:].rstrip(b"\0").decode() for r in (ours, theirs))
            words.append(f"{name} ({now}, not {before})" if before and now else name)
    return words


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
