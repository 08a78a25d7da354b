"""Open what `run` and `finetune` work on: a compiled program, or a model compiled on the spot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from .console import busy
from .options import flags_of

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Options of what runs, and where.

    Attributes:
        device: the device, as torch names it; a GPU where there is one, else the CPU.
        weights: where the weights of a compiled program lie, if no longer where it found them.
        trust_edits: run a program whose emitted source was edited.
    """

    title: ClassVar[str] = "Program or model"

    device: str | None = None
    weights: str | None = None
    trust_edits: bool = False


def is_program(where: str) -> bool:
    """True if a compiled program is there, and not a model."""
    return (Path(where).expanduser() / "manifest.json").is_file()


def open_executor(
    where: str, peft: object, compiling: Mapping[str, Any], place: PlaceOptions
) -> Executor:
    """An executor of a program's folder or of a model, with adapters.

    Args:
        where: the folder or the model.
        peft: adapters by name, or None.
        compiling: fields of `CompileOptions`; a program has its own.
        place: where it runs.
    Raises:
        PcgError: what is wrong with the folder, the weights or an adapter.
    """
    if is_program(where):
        with busy(f"loading {where}"):
            from pcg import compiler

            executor = compiler.load(
                where, place.weights, place.device, trust_edits=place.trust_edits
            )
            if isinstance(peft, Mapping):
                for name, path in peft.items():
                    executor.add_adapter(name, path)
        return executor
    from pcg.source import resolve

    resolve(where, weights=True)  # a wrong name is an answer in milliseconds
    with busy(f"compiling and loading {where}"):
        from pcg import compiler

        return compiler.compile(where, peft, device=place.device, **compiling)


def ranks_of(where: str, compiling: Mapping[str, Any], place: PlaceOptions) -> int:
    """The number of ranks that a program's folder or a model runs on.

    Args:
        where: the folder or the model.
        compiling: fields of `CompileOptions` that are given.
        place: where it runs.
    Raises:
        typer.BadParameter: an option for models alone, or for programs alone; or a program was
            compiled for another number of ranks, or otherwise.
    """
    if not is_program(where):
        for name, is_given in (("weights", place.weights), ("trust_edits", place.trust_edits)):
            if is_given:
                raise typer.BadParameter(
                    f"{where} is not a compiled program", param_hint=flags_of(name)[0]
                )
        return int(compiling.get("tp", 1))
    from pcg.ir.program.folder import degree_of, is_sequence_parallel

    for name in compiling:
        if name not in ("tp", "sequence_parallel"):
            raise typer.BadParameter(
                f"a program's {name} is chosen by pcg compile", param_hint=flags_of(name)[0]
            )
    folder = Path(where).expanduser()
    own, asked = degree_of(folder), compiling.get("tp")
    if asked not in (None, own):
        raise typer.BadParameter(
            f"{where} was compiled for {own}; compile it again: pcg compile MODEL --tp {asked}",
            param_hint="--tp",
        )
    if compiling.get("sequence_parallel") and not is_sequence_parallel(folder):
        raise typer.BadParameter(
            f"{where} was compiled without; compile it again: pcg compile MODEL --tp {own} "
            "--sequence-parallel",
            param_hint="--sequence-parallel",
        )
    return own


def on_ranks(degree: int, act: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """Do a command's work here, or on ranks that are started for it.

    Under torchrun this process is a rank already.

    Raises:
        PcgError: what is wrong, on whichever rank.
    """
    if degree == 1:
        act(**arguments)
        return
    from pcg.parallel.ranks.group import started_ranks
    from pcg.parallel.ranks.launch import launch, mute_others

    if started_ranks() == 1:
        launch(degree, act, arguments)
        return
    mute_others()
    act(**arguments)
