"""The model that is trained over, as a configuration names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pcg import compiler
from pcg.errors import FinetuneError, UnsupportedError
from pcg.files import expanded, is_directory
from pcg.ir.program.manifest import is_program_folder
from pcg.options import CompileOptions
from pcg.runtime.executor import Executor
from pcg.source import resolve
from pcg.train.config_file import ConfigFile


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model that is trained over.

    Attributes:
        model: a directory with a config.json, a hub id, a model that ships with pcg, or the folder
            of a compiled program.
        device: the device, as torch names it; a GPU where there is one, else the CPU.
        weights: where the weights of a compiled program lie, if no longer where it found them.
        trust_edits: run a program whose emitted source was edited.
    """

    title: ClassVar[str] = "Model"

    model: str
    device: str | None = None
    weights: str | None = None
    trust_edits: bool = False


def open_model(config: ConfigFile) -> Executor:
    """Return an executor of the model that a configuration names, without adapters.

    Raises:
        PcgError: what is wrong with the model, its weights or an option.
    """
    place = config.make(ModelOptions)
    compiling = config.given(CompileOptions, "gradient_accumulation_steps")
    if compiling.pop("tp", 1) != 1:
        raise UnsupportedError(
            f"tp={config.values['tp']}; training by a file runs on one rank. pcg finetune --tp "
            "finetunes over several"
        )
    model = _near(config, place.model)
    if is_program_folder(model):
        if compiling:
            raise FinetuneError(f"a program's {next(iter(compiling))} is chosen by pcg compile")
        weights = None if place.weights is None else _near(config, place.weights)
        return compiler.load(model, weights, place.device, trust_edits=place.trust_edits)
    for name in ("weights", "trust_edits"):
        if getattr(place, name):
            raise FinetuneError(f"{name} is for compiled programs, and {model} is none")
    resolve(model, weights=True)  # a wrong name is an answer in milliseconds
    return compiler.compile(model, None, device=place.device, **compiling)


def _near(config: ConfigFile, name: str) -> str:
    """Return the directory of a name in the configuration's folder, or the name where none is."""
    folder = config.path.parent / expanded(name)
    return str(folder) if is_directory(folder) else name
