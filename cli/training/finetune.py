"""`pcg finetune`: train an adapter on files of data, and save it in peft's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from pcg.errors import AdapterError
from pcg.files import check_writable, is_directory, is_there
from pcg.ir.program.manifest import is_program_folder
from pcg.options import CompileOptions
from pcg.runtime.training.options import FinetuneOptions

from ..options.arguments import Json, Runnable
from ..options.executors import (
    PlaceOptions,
    TrainingRanks,
    on_ranks,
    open_executor,
    shards_and_replicas,
)
from ..options.fields import Given
from ..options.method import Method
from .lines import step_lines
from .report import print_result


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """The data of a job, and the adapter that it makes.

    Attributes:
        data: a file of JSON lines (chat, prompt-completion, alpaca, ShareGPT, text, tokens) or a
            .txt file; several, one after the other, if the option is repeated.
        adapter: the adapter's name.
        output: the directory to save it in; checkpoints are there, too, until it is saved.
        start_from: a saved adapter to go on with, instead of a new one.
        overwrite: replace the adapter that is saved in the output.
    """

    data: tuple[Path, ...]
    adapter: str
    output: Path
    start_from: Path | None = None
    overwrite: bool = False


def finetune_command(
    program: Runnable,
    files: AdapterFiles,
    method: Method,
    options: Given[FinetuneOptions],
    compiling: Given[CompileOptions],
    over: TrainingRanks,
    place: PlaceOptions,
    json: Json = False,
) -> None:
    """Finetune an adapter on files of data.

    It is saved in peft's format; a saved one is replaced only with --overwrite or --resume.
    Interrupted with Ctrl-C, the same command goes on where it was, to the very same adapter.
    """
    from pcg.train.config_file import CHECKPOINTS, RECORD

    _check_output(files, options.values.get("resume") is True)
    folders = {"checkpoint_dir": files.output / CHECKPOINTS, "record": files.output / RECORD}
    options_given = {**folders, **options.values}
    if not options_given.get("max_grad_norm", 1.0):
        options_given["max_grad_norm"] = None
    job = FinetuneOptions(**options_given)  # says what is wrong before the model is loaded
    peft = _configuration(method, files)
    compiled = dict(compiling.values)
    tp, dp = shards_and_replicas(program, compiled, place, over.dp)
    if tp > 1 and not is_program_folder(program):
        compiled |= own_step(job, compiled, dp, place.cp)
    if tp == 1:
        # Which spreads sums over ranks; of the job it is, too.
        compiled.pop("gradient_accumulation_steps", None)
    arguments = {
        "program": program,
        "compiling": {**compiled, "tp": tp},
        "over": replace(over, dp=dp),
        "place": place,
        "files": files,
        "peft": peft,
        "options": options_given,
        "json": json,
    }
    on_ranks(tp * dp * place.groups, train, arguments)


def train(
    program: str,
    compiling: Mapping[str, Any],
    over: TrainingRanks,
    place: PlaceOptions,
    files: AdapterFiles,
    peft: Any,
    options: Mapping[str, Any],
    json: bool,
) -> None:
    """Finetune an adapter, save it, and print the losses.

    Args:
        program: the folder of a program, or a model.
        compiling: fields of `CompileOptions`.
        over: how ranks divide a step, and what each of them holds.
        place: the device, the weights, and the trust in edits.
        files: the data and the adapter.
        peft: the configuration or the adapter to start from; None for the program's own.
        options: fields of `FinetuneOptions`.
        json: True to print one object.
    """
    from pcg.train.config_file import has_adapter, own_recipe
    from pcg.train.sft import finetune_and_save

    executor = open_executor(program, None, compiling, place, over)
    replaces = has_adapter(files.output)
    peft = own_recipe(executor, files.adapter) if peft is None else peft
    with step_lines(options.get("log_every")):
        result = finetune_and_save(executor, files.data, files.adapter, files.output, peft, options)
    if executor.ranks.rank:
        return
    print_result(result, program, files.output, as_json=json, replaces=replaces)


def own_step(
    job: FinetuneOptions, compiling: Mapping[str, Any], dp: int = 1, cp: int = 1
) -> dict[str, int]:
    """The batch and the length to plan a job's layouts over ranks for, which are its own.

    Empty where the length of its examples has no bound, or another step is asked for.

    Args:
        compiling: fields of `CompileOptions` that are given.
        dp: the number of replicas, over which a batch is divided.
        cp: the number of ranks that share the tokens of a sequence.
    """
    if job.max_length is None or not {"batch", "seq"}.isdisjoint(compiling):
        return {}
    bounds = job.batch_bounds
    size, tokens = bounds["batch_size"], bounds["max_tokens"]
    most = None if tokens is None else max(tokens // job.max_length, 1)
    batch = min(filter(None, (size, most)))
    return {"batch": -(-batch // dp), "seq": -(-job.max_length // cp)}


def _check_output(files: AdapterFiles, resumes: bool) -> None:
    """Refuse an output that cannot be written, or has a finished adapter, before anything is read.

    Args:
        resumes: True if a checkpoint is demanded, whose job saved the adapter that is there.
    """
    from pcg.train.config_file import has_adapter

    output = files.output
    if is_there(output) and not is_directory(output):
        raise typer.BadParameter(f"{output} is a file; give a directory", param_hint="--output")
    if has_adapter(output) and not (files.overwrite or resumes):
        raise typer.BadParameter(
            f"{output} has a saved adapter; give another directory, --overwrite to replace it, or "
            f"--resume to go on from a checkpoint. --start-from {output} trains it further",
            param_hint="--output",
        )
    check_writable(output, f"adapter {files.adapter!r}", AdapterError)


def _configuration(method: Method, files: AdapterFiles) -> Any:
    """The configuration or the adapter to start from; None where no option says."""
    if files.start_from is not None:
        if method.is_given:
            raise typer.BadParameter("a saved adapter has its own", param_hint=method.first_flag)
        return files.start_from
    return method.one() if method.is_given else None
