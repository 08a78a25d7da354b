"""Open what `run` and `finetune` work on: a compiled program, or a model compiled on the spot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .console import busy

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor


def open_executor(
    where: str,
    adapters: Mapping[str, Path],
    *,
    weights: str | None,
    dtype: str | None,
    device: str | None,
    trust_edits: bool,
) -> Executor:
    """An executor of a program's folder or of a model, with adapters.

    Raises:
        typer.BadParameter: an option that goes with the other of the two.
        PcgError: what is wrong with the folder, the weights or an adapter.
    """
    if (Path(where).expanduser() / "manifest.json").is_file():
        if dtype is not None:
            raise typer.BadParameter(
                "a program's dtype is chosen by pcg compile", param_hint="--dtype"
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

        return compiler.compile(where, dict(adapters) or None, dtype=dtype, device=device)
