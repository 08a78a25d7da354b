"""`pcg finetune`: train an adapter on files of data, and save it in peft's format."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pcg.errors import AdapterError, FinetuneError
from pcg.files import check_writable, is_directory, is_there
from pcg.options import CompileOptions
from pcg.runtime.training.options import FinetuneOptions
from pcg.units import counted, duration_text

from .console import err, print_json
from .executors import PlaceOptions, on_ranks, open_executor, ranks_of
from .options.arguments import Json, Runnable
from .options.fields import Given
from .options.method import Method

if TYPE_CHECKING:
    from pcg.runtime.training.result import FinetuneResult

OWN_CHECKPOINTS = "pcg-checkpoints"
"""Folder within the output that is removed when the adapter is saved."""


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """The data of a job, and the adapter that it makes.

    Attributes:
        data: a file of JSON lines (chat, prompt-completion, alpaca, ShareGPT, text) or a .txt file;
            several, one after the other, if the option is repeated.
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
    place: PlaceOptions,
    json: Json = False,
) -> None:
    """Finetune an adapter on files of data.

    It is saved in peft's format; a saved one is replaced only with --overwrite or --resume.
    Interrupted with Ctrl-C, the same command goes on where it was, to the very same adapter.
    """
    _check_output(files, options.values.get("resume") is True)
    given = {"checkpoint_dir": files.output / OWN_CHECKPOINTS, **options.values}
    if not given.get("max_grad_norm", 1.0):
        given["max_grad_norm"] = None
    FinetuneOptions(**given)  # says what is wrong before the model is loaded
    peft = _configuration(method, files)
    compiled = dict(compiling.values)
    degree = ranks_of(program, compiled, place)
    if degree == 1:
        # Which spreads sums over ranks; of the job it is, too.
        compiled.pop("gradient_accumulation_steps", None)
    arguments = {
        "program": program,
        "compiling": {**compiled, "tp": degree},
        "place": place,
        "files": files,
        "peft": peft,
        "options": given,
        "json": json,
    }
    on_ranks(degree, train, arguments)


def train(
    program: str,
    compiling: Mapping[str, Any],
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
        place: the device, the weights, and the trust in edits.
        files: the data and the adapter.
        peft: the configuration or the adapter to start from; None for the program's own.
        options: fields of `FinetuneOptions`.
        json: True to print one object.
    """
    log = logging.getLogger("pcg.finetuning")
    if options.get("log_every") is not None:
        logging.basicConfig(format="%(message)s")
        log.setLevel(logging.INFO)
    else:
        log.addHandler(logging.NullHandler())  # a collapse is this command's error
    from pcg.peft.registry import recipe_of_fields

    executor = open_executor(program, None, compiling, place)
    name, output = files.adapter, files.output
    recipes = executor.program.recipes
    if peft is None and name not in recipes and len(recipes) == 1:  # which is for any name
        peft = recipe_of_fields(next(iter(recipes.values())))
    result = executor.finetune(files.data, adapter=name, peft=peft, **options)
    if result.is_collapsed:
        raise FinetuneError(_collapse(result, output))
    replaces = _has_adapter(output)
    executor.save_adapter(name, output)
    if executor.ranks.rank:
        return
    if options["checkpoint_dir"] == output / OWN_CHECKPOINTS:
        shutil.rmtree(output / OWN_CHECKPOINTS, ignore_errors=True)
    if json:
        summary = {**dataclasses.asdict(result), "output": str(output)}
        del summary["checkpoint"]
        print_json(summary)
    else:
        _print(result, program, output, replaces)


def _check_output(files: AdapterFiles, resumes: bool) -> None:
    """Refuse an output that cannot be written, or has a finished adapter, before anything is read.

    Args:
        resumes: True if a checkpoint is demanded, whose job saved the adapter that is there.
    """
    output = files.output
    if is_there(output) and not is_directory(output):
        raise typer.BadParameter(f"{output} is a file; give a directory", param_hint="--output")
    if _has_adapter(output) and not (files.overwrite or resumes):
        raise typer.BadParameter(
            f"{output} has a saved adapter; give another directory, --overwrite to replace it, or "
            f"--resume to go on from a checkpoint. --start-from {output} trains it further",
            param_hint="--output",
        )
    check_writable(output, f"adapter {files.adapter!r}", AdapterError)


def _has_adapter(output: Path) -> bool:
    from pcg.peft.reader import CONFIG, PICKLE, WEIGHTS

    return any(is_there(output / name) for name in (CONFIG, WEIGHTS, PICKLE))


def _collapse(result: FinetuneResult, output: Path) -> str:
    """The words on a job whose adapter is not worth its place."""
    assert result.first_data is not None
    before, after = result.first_data
    return (
        f"{result.adapter} has collapsed and is not saved in {output}: the loss of the first "
        f"step's data was {before:.4f} before, and is {after:.4f} after {result.steps} steps; "
        f"lower --lr or warm up longer, with --no-resume. The adapter is in {result.checkpoint}"
    )


def _configuration(method: Method, files: AdapterFiles) -> Any:
    """The configuration or the adapter to start from; None where no option says."""
    if files.start_from is not None:
        if method.is_given:
            raise typer.BadParameter("a saved adapter has its own", param_hint=method.first_flag)
        return files.start_from
    return method.one() if method.is_given else None


def _print(result: FinetuneResult, program: str, output: Path, replaces: bool) -> None:
    from pcg.runtime.training.result import LossChange

    console = err()
    steps = counted(result.steps, "step")
    resumed = "" if result.resumed_from is None else f", resumed from step {result.resumed_from}"
    speed = f"{result.tokens / max(result.seconds, 1e-9):,.0f} tokens/s"
    lines = [f"{result.adapter}: {steps} in {duration_text(result.seconds)}, {speed}{resumed}"]
    change = LossChange.of(result.losses)
    if result.steps == 1:
        lines.append(f"loss {change.first:.4f}")
    else:
        lines.append(f"loss {change.first:.4f} → {change.last:.4f}, {_ends(change.steps)}")
    if result.first_data is not None:
        before, after = result.first_data
        lines.append(f"loss of the first step's data {before:.4f} → {after:.4f}, before and after")
    if result.eval_losses:
        ends = dict.fromkeys((result.eval_losses[0], result.eval_losses[-1]))
        losses = " → ".join(f"{loss:.4f} at step {step}" for step, loss in ends)
        lines.append(
            f"evaluation loss {losses}, best {result.best_loss:.4f} at step {result.best_step}"
        )
    if result.stopped == "early":
        lines.append(f"stopped early, at step {result.steps} of {result.total_steps}")
    if result.restored:
        lines.append(f"the adapter is that of step {result.best_step}")
    lines.append(f"saved in {output}{', in place of the adapter there' if replaces else ''}")
    console.print("\n".join(lines), soft_wrap=True)
    console.print(
        f"use it: pcg run {shlex.quote(str(program))} "
        f'--adapter {shlex.quote(f"{result.adapter}={output}")} --prompt "…"',
        style="dim",
        soft_wrap=True,
    )


def _ends(steps: int) -> str:
    return "of the first and the last step" if steps == 1 else f"means of {steps} steps each"
