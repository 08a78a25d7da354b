"""The adapter that training makes: its name, its recipe, and the folder that it is saved in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pcg.errors import AdapterError, FinetuneError, UnsupportedError
from pcg.files import check_writable, is_directory, is_there
from pcg.peft.adapter_files import CONFIG, PICKLE, WEIGHTS
from pcg.peft.registry import SHORTHANDS, recipe_of_fields
from pcg.runtime.executor import Executor

CHECKPOINTS = "pcg-checkpoints"
"""Folder within the output that is removed when the adapter is saved."""
RECORD = "record"
"""Folder within the output that has the record of the run."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The adapter that is made.

    Attributes:
        adapter: the adapter's name.
        output: the directory to save it in, and the run's record; checkpoints are there, too,
            until it is saved.
        peft: the recipe of a new adapter: lora or another word, or an object with the fields of
            peft's adapter_config.json; by default that of the program, else lora.
        start_from: a saved adapter to go on with, instead of a new one.
        overwrite: replace the adapter that is saved in the output.
    """

    title: ClassVar[str] = "Adapter"

    adapter: str = "default"
    output: Path
    peft: str | Mapping[str, Any] | None = None
    start_from: Path | None = None
    overwrite: bool = False

    def check(self, *, resumes: bool) -> None:
        """Refuse an output that cannot be written, or has a finished adapter.

        Args:
            resumes: True if a checkpoint is demanded, whose job saved the adapter that is there.
        Raises:
            AdapterError: names the output, and what to do.
            FinetuneError: options do not go together.
        """
        output = self.output
        if is_there(output) and not is_directory(output):
            raise AdapterError(f"output {output} is a file; give a directory")
        if has_adapter(output) and not (self.overwrite or resumes):
            raise AdapterError(
                f"output {output} has a saved adapter; give another directory, overwrite: true to "
                "replace it, or resume: true to go on from a checkpoint. "
                f"start_from: {output} trains it further"
            )
        check_writable(output, f"adapter {self.adapter!r}", AdapterError)
        if self.start_from is not None and self.peft is not None:
            raise FinetuneError("start_from is a saved adapter with a recipe; leave peft out")

    def configuration(self, executor: Executor) -> Any:
        """Return the recipe or the saved adapter to start from, as `add_adapter` takes it.

        Raises:
            UnsupportedError: `peft` is a word that names no method.
        """
        if self.start_from is not None:
            return self.start_from
        if self.peft is None:
            return own_recipe(executor, self.adapter)
        if isinstance(self.peft, str) and self.peft.lower() not in SHORTHANDS:
            raise UnsupportedError(
                f"peft={self.peft!r}; use one of {', '.join(SHORTHANDS)}, or an object with "
                "peft_type and the method's fields"
            )
        return self.peft


def has_adapter(folder: Path) -> bool:
    """Return whether a folder has a saved adapter."""
    return any(is_there(folder / name) for name in (CONFIG, WEIGHTS, PICKLE))


def own_recipe(executor: Executor, name: str) -> Any:
    """Return the program's one recipe for an adapter that has none of its own; None without it."""
    recipes = executor.program.recipes
    if name not in recipes and len(recipes) == 1:
        return recipe_of_fields(next(iter(recipes.values())))
    return None
