"""Check that weights are of the model that a program was compiled from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcg.errors import ProgramError
from pcg.ir.program.program import Program

_NEUTRAL_FIELDS = (
    "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id",
    "pretraining_tp", "use_cache",
)  # fmt: skip


def check_same_model(program: Program, config: Mapping[str, Any], where: str) -> None:
    """Refuse weights whose configuration says another model; their shapes alone would not tell.

    Args:
        config: the configuration beside the weights.
        where: where they are, for the message.
    Raises:
        ProgramError: says in which fields they differ.
    """
    both = sorted((program.config.keys() & config.keys()).difference(_NEUTRAL_FIELDS))
    other = [
        key
        for key in both
        if program.config[key] != config[key]
        and (isinstance(config[key], int | float) or key == "model_type" or "rope" in key)
        and "drop" not in key
    ]
    if other:
        shown = ", ".join(f"{k}={config[k]!r}, not {program.config[k]!r}" for k in other[:3])
        raise ProgramError(
            f"the weights in {where} are of another model than the program's ({shown}); compile "
            "that model, or give the weights of this one"
        )
