"""Open what `run` and `finetune` work on: a compiled program, or a model compiled on the spot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .console import busy

if TYPE_CHECKING:
    from pcg.options import Backend
    from pcg.runtime.executor import Executor


def open_executor(
    where: str,
    adapters: Mapping[str, Path],
    *,
    weights: str | None,
    dtype: str | None,
    device: str | None,
    trust_edits: bool,
    backend: Backend | None = None,
    tp: int | None = None,
    sequence_parallel: bool = False,
) -> Executor:
    """An executor of a program's folder or of a model, with adapters.

    Args:
        where: the folder or the model.
        adapters: by name.
        weights: of a program, where they lie now.
        dtype: of a model.
        device: of the weights.
        trust_edits: accept a program whose source was edited.
        backend: of a model.
        tp: number of ranks, of which this process is one; of a program its own where None.
        sequence_parallel: of a model, whether they hold parts of the tokens; a program has its own.

    Raises:
        typer.BadParameter: an option that goes with the other of the two.
        PcgError: what is wrong with the folder, the weights or an adapter.
    """
    if (Path(where).expanduser() / "manifest.json").is_file():
        for option, value in (("dtype", dtype), ("backend", backend)):
            if value is not None:
                raise typer.BadParameter(
                    f"a program's {option} is chosen by pcg compile", param_hint=f"--{option}"
                )
        with busy(f"loading {where}"):
            from pcg import compiler

            executor = compiler.load(where, weights, device, trust_edits=trust_edits)
            for name, path in adapters.items():
                executor.add_adapter(name, path)
        return executor
    given = {"--weights": weights is not None, "--trust-edits": trust_edits}
    for option, is_given in given.items():
        if is_given:
            raise typer.BadParameter(f"{where} is not a compiled program", param_hint=option)
    from pcg.source import resolve

    resolve(where, weights=True)  # a wrong name is an answer in milliseconds
    with busy(f"compiling and loading {where}"):
        from pcg import compiler

        return compiler.compile(
            where,
            dict(adapters) or None,
            tp=tp or 1,
            sequence_parallel=sequence_parallel,
            backend=backend or "auto",
            dtype=dtype,
            device=device,
        )


def ranks_of(where: str, tp: int | None, sequence_parallel: bool) -> int:
    """How many ranks a program's folder or a model runs on.

    Raises:
        typer.BadParameter: a program was compiled for another number, or otherwise.
    """
    folder = Path(where).expanduser()
    if not (folder / "manifest.json").is_file():
        return tp or 1
    from pcg.ir.program.folder import degree_of, is_sequence_parallel

    own = degree_of(folder)
    if tp is not None and tp != own:
        raise typer.BadParameter(
            f"{where} was compiled for {own}; compile it again: pcg compile MODEL --tp {tp}",
            param_hint="--tp",
        )
    if sequence_parallel and not is_sequence_parallel(folder):
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
