"""Supervised finetuning by a configuration file, with a saved adapter as the result.

    config = read_config(Path("sft.yaml"), SFT_KEYS)
    result = train_sft(config)

The configuration has the keys of `Executor.finetune`, and gives the same adapter as that call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pcg.errors import FinetuneError
from pcg.options import CompileOptions
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import FinetuneOptions, FinetuneResult
from pcg.train.config_file import (
    CHECKPOINTS,
    RECORD,
    ConfigFile,
    DataPath,
    ModelOptions,
    OutputOptions,
    open_model,
)


@dataclass(frozen=True, kw_only=True)
class SftOptions(FinetuneOptions):
    """Options of supervised finetuning.

    Attributes:
        data: a file of rows (chat, prompt-completion, alpaca, ShareGPT, text) in JSON lines, CSV or
            Parquet, a .txt file, a folder, a glob, a hub id, or a list of these to concatenate.
        eval_data: files for evaluation, or several by name: an object, or NAME=FILE,….
    """

    title: ClassVar[str] = "Data"

    data: tuple[DataPath, ...]
    eval_data: Mapping[str, tuple[DataPath, ...]] | tuple[DataPath, ...] | None = field(
        default=None, repr=False, compare=False
    )


SFT_KEYS = (ModelOptions, OutputOptions, SftOptions, CompileOptions)
"""The dataclasses with a configuration's keys as fields."""


def train_sft(config: ConfigFile) -> FinetuneResult:
    """Finetune an adapter by a configuration, and save the adapter in the output.

    Raises:
        PcgError: the configuration, the model or the data is unusable; before the first step.
        FinetuneInterrupted: Ctrl-C; the same call continues from the checkpoint.
    """
    files = OutputOptions.of(config)
    folders = {"checkpoint_dir": files.output / CHECKPOINTS, "record": files.output / RECORD}
    options = config.make(SftOptions, **folders)
    files.check(resumes=options.resume is True)
    values = {**folders, **config.given(SftOptions, "data")}
    executor = open_model(config)
    peft = files.configuration(executor)
    return finetune_and_save(executor, options.data, files, peft, values)


def finetune_and_save(
    executor: Executor,
    data: tuple[Path, ...],
    files: OutputOptions,
    peft: Any,
    options: Mapping[str, Any],
) -> FinetuneResult:
    """Finetune an adapter, and save it unless it has collapsed; a collective call over ranks.

    Args:
        peft: the recipe or the adapter to start from; None for the program's recipe.
        options: fields of `FinetuneOptions`. Checkpoints in the output are removed when the adapter
            is saved, unless `files` keep them.
    Raises:
        FinetuneError: the adapter has collapsed, or see `Executor.finetune`.
    """
    result = executor.finetune(data, adapter=files.adapter, peft=peft, **options)
    if result.is_collapsed:
        raise FinetuneError(_collapse(result, files.output))
    files.save(executor, options["checkpoint_dir"])
    return result


def _collapse(result: FinetuneResult, output: Path) -> str:
    """Describe a collapsed job."""
    assert result.first_data is not None
    before, after = result.first_data
    return (
        f"{result.adapter} has collapsed and is not saved in {output}: the loss of the first "
        f"step's data was {before:.4f} before, and is {after:.4f} after {result.steps} steps; "
        "lower the learning rate (--lr) or warm up longer, and start at step 0 (resume: false, "
        f"--no-resume). The adapter is in {result.checkpoint}"
    )
