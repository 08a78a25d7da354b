"""Direct preference optimization (Rafailov et al., 2023) of an adapter, by arguments or a file.

    result = dpo(executor, DpoArguments("pairs.jsonl", adapter="polite", beta=0.1))

trains beside what an engine of the executor serves, if one runs on a thread.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pcg.errors import FinetuneError
from pcg.options import CompileOptions
from pcg.runtime.executor import Executor
from pcg.train.config_file import ConfigFile
from pcg.train.model import ModelOptions, open_model
from pcg.train.outputs import CHECKPOINTS, RECORD, OutputOptions
from pcg.train.preference.options import DpoArguments, DpoOptions
from pcg.train.preference.records import PreferenceResult
from pcg.train.preference.run import PreferenceRun


@dataclass(frozen=True, kw_only=True)
class DpoFileOptions(DpoOptions):
    """Options of direct preference optimization by a file.

    Attributes:
        data: a file of JSON lines with two outputs a row; several as a list.
        eval_data: files to measure the loss and the rewards on.
        reference_adapter: a saved adapter that is the reference, instead of `reference`.
    """

    title: ClassVar[str] = "Data"

    data: tuple[Path, ...]
    eval_data: tuple[Path, ...] | None = field(default=None, repr=False, compare=False)
    reference_adapter: Path | None = None


DPO_KEYS = (ModelOptions, OutputOptions, DpoFileOptions, CompileOptions)
"""The dataclasses whose fields are the keys of a configuration."""


def dpo(executor: Executor, given: DpoArguments) -> PreferenceResult:
    """Train an adapter on preferences, and serve it.

    Raises:
        DataError: data that cannot be used, with file and line.
        FinetuneError: bad options, numbers that are not finite, or a checkpoint that cannot be
            saved or belongs to another run.
        FinetuneInterrupted: Ctrl-C; the checkpoint is as after the last complete step.
        UnsupportedError: the recipe has a feature that pcg does not train; or there are ranks.
    """
    return PreferenceRun(executor, given).run()


def train_dpo(config: ConfigFile) -> PreferenceResult:
    """Train an adapter on preferences as a configuration says, and save it in its output.

    Raises:
        PcgError: what is wrong with the configuration, the model or the data, before a step.
        FinetuneInterrupted: Ctrl-C; the same call goes on from the checkpoint.
    """
    files = config.make(OutputOptions)
    checkpoints = files.output / CHECKPOINTS
    own = {"checkpoint_dir": checkpoints, "record": files.output / RECORD}
    options = config.make(DpoFileOptions, **own)
    files.check(resumes=options.resume is True)
    executor = open_model(config)
    given = {**own, **config.given(DpoFileOptions, "reference_adapter")}
    if options.reference_adapter is not None:
        if options.reference is not None:
            raise FinetuneError("reference and reference_adapter are both given; use one of them")
        given["reference"] = f"{files.adapter}-reference"
        executor.add_adapter(given["reference"], options.reference_adapter)
    peft = files.configuration(executor)
    result = dpo(executor, DpoArguments(adapter=files.adapter, peft=peft, **given))
    executor.save_adapter(files.adapter, files.output)
    if given["checkpoint_dir"] == checkpoints:
        shutil.rmtree(checkpoints, ignore_errors=True)
    return result
