"""`pcg finetune`: train an adapter on a file of data, and save it in peft's format.

The options are those of `FinetuneOptions`, with its defaults; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import (
    OPTIMIZER,
    Alpha,
    Device,
    Dtype,
    Json,
    ModelBackend,
    OptimizerName,
    OptimizerOptions,
    Rank,
    Ranks,
    Runnable,
    SequenceParallel,
    Targets,
    TrustEdits,
    WeightsPlace,
    lora_of,
    optimizer_options_of,
)
from .console import count_text, err, print_json, time_text
from .executors import on_ranks, open_executor, ranks_of

if TYPE_CHECKING:
    from pcg.ir.program.program import Program
    from pcg.runtime.training.result import FinetuneResult

LENGTH = "Length and batches"
DATA = "Data"
EVALUATION = "Evaluation"
CHECKPOINTS = "Checkpoints"

OWN_CHECKPOINTS = "pcg-checkpoints"
"""Folder within the output that is removed when the adapter is saved."""


def finetune_command(
    program: Runnable,
    data: Annotated[
        Path,
        typer.Option(
            help="JSON lines (chat, prompt/completion, alpaca, ShareGPT, text) or a .txt file.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    adapter: Annotated[
        str, typer.Option(help="Name of the adapter.", metavar="NAME", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Directory to save it in.", metavar="PATH", show_default=False
        ),
    ],
    start_from: Annotated[
        Path | None,
        typer.Option(help="Go on with this saved adapter, instead of a new one.", metavar="PATH"),
    ] = None,
    rank: Rank = None,
    alpha: Alpha = None,
    targets: Targets = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Passes over the data. 1 without --max-steps.",
            rich_help_panel=LENGTH,
            metavar="N",
        ),
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(help="Steps, instead of epochs.", rich_help_panel=LENGTH, metavar="N"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Examples a batch. 8 without --max-tokens.", rich_help_panel=LENGTH, metavar="N"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens a batch.", rich_help_panel=LENGTH, metavar="N")
    ] = None,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(help="Batches a step.", rich_help_panel=LENGTH, metavar="N")
    ] = 1,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", "--lr", rich_help_panel=OPTIMIZER, metavar="X")
    ] = 2e-4,
    optimizer: OptimizerName = "adamw",
    optimizer_options: OptimizerOptions = None,
    weight_decay: Annotated[float, typer.Option(rich_help_panel=OPTIMIZER, metavar="X")] = 0.0,
    betas: Annotated[
        tuple[float, float] | None,
        typer.Option(
            help="Of Adam's family; torch's by default.",
            rich_help_panel=OPTIMIZER,
            show_default=False,
            metavar="X X",
        ),
    ] = None,
    eps: Annotated[
        float | None,
        typer.Option(
            help="Torch's by default.",
            rich_help_panel=OPTIMIZER,
            show_default=False,
            metavar="X",
        ),
    ] = None,
    max_grad_norm: Annotated[
        float, typer.Option(help="0 does not clip.", rich_help_panel=OPTIMIZER, metavar="X")
    ] = 1.0,
    schedule: Annotated[
        str,
        typer.Option(
            help="linear, cosine, cosine_with_restarts, polynomial, constant or "
            "constant_with_warmup.",
            rich_help_panel=OPTIMIZER,
            metavar="NAME",
        ),
    ] = "linear",
    warmup_steps: Annotated[
        int | None, typer.Option(rich_help_panel=OPTIMIZER, metavar="N")
    ] = None,
    warmup_ratio: Annotated[
        float | None,
        typer.Option(
            help="Of all steps, instead of --warmup-steps.", rich_help_panel=OPTIMIZER, metavar="X"
        ),
    ] = None,
    min_lr_ratio: Annotated[
        float,
        typer.Option(
            help="Where the schedule ends, of the rate.", rich_help_panel=OPTIMIZER, metavar="X"
        ),
    ] = 0.0,
    cycles: Annotated[
        int,
        typer.Option(help="Of cosine_with_restarts.", rich_help_panel=OPTIMIZER, metavar="N"),
    ] = 1,
    power: Annotated[
        float, typer.Option(help="Of polynomial.", rich_help_panel=OPTIMIZER, metavar="X")
    ] = 1.0,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens an example may have; longer ones keep their head.",
            rich_help_panel=DATA,
            metavar="N",
        ),
    ] = None,
    data_format: Annotated[
        str,
        typer.Option(
            help="Of the rows; auto takes it from the first.", rich_help_panel=DATA, metavar="NAME"
        ),
    ] = "auto",
    append_eos: Annotated[
        bool, typer.Option(help="End text with the end token.", rich_help_panel=DATA)
    ] = True,
    empty: Annotated[
        str,
        typer.Option(
            help="What to do with rows that have nothing to learn.",
            rich_help_panel=DATA,
            metavar="error|drop",
        ),
    ] = "error",
    seed: Annotated[
        int,
        typer.Option(help="Of the order, and of new weights.", rich_help_panel=DATA, metavar="N"),
    ] = 0,
    shuffle: Annotated[bool, typer.Option(help="Anew each epoch.", rich_help_panel=DATA)] = True,
    eval_data: Annotated[
        Path | None,
        typer.Option(
            help="File to measure the loss on.", rich_help_panel=EVALUATION, metavar="FILE"
        ),
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(help="Steps; each epoch by default.", rich_help_panel=EVALUATION, metavar="N"),
    ] = None,
    eval_at_start: Annotated[
        bool, typer.Option("--eval-at-start", rich_help_panel=EVALUATION)
    ] = False,
    patience: Annotated[
        int | None,
        typer.Option(
            help="Stop after N evaluations without improvement.",
            rich_help_panel=EVALUATION,
            metavar="N",
        ),
    ] = None,
    min_delta: Annotated[
        float,
        typer.Option(
            help="What the loss must fall by to improve.", rich_help_panel=EVALUATION, metavar="X"
        ),
    ] = 0.0,
    restore_best: Annotated[
        bool | None,
        typer.Option(
            help="Save the adapter of the best evaluation. Yes with --patience.",
            rich_help_panel=EVALUATION,
        ),
    ] = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            help="In PATH by default, until the adapter is saved.",
            rich_help_panel=CHECKPOINTS,
            metavar="DIR",
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            help="Steps; each epoch by default.", rich_help_panel=CHECKPOINTS, metavar="N"
        ),
    ] = None,
    keep_last: Annotated[
        int, typer.Option(help="Checkpoints to keep.", rich_help_panel=CHECKPOINTS, metavar="N")
    ] = 2,
    resume: Annotated[
        bool | None,
        typer.Option(
            help="Demand a checkpoint to go on from, or start anew. By default it goes on from "
            "one if there is one.",
            rich_help_panel=CHECKPOINTS,
            show_default=False,
        ),
    ] = None,
    log_every: Annotated[
        int | None, typer.Option(help="Steps between lines of a log.", metavar="N")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show a bar on a terminal.")] = True,
    json: Json = False,
    tp: Ranks = None,
    sequence_parallel: SequenceParallel = False,
    weights: WeightsPlace = None,
    dtype: Dtype = None,
    backend: ModelBackend = None,
    device: Device = None,
    trust_edits: TrustEdits = False,
) -> None:
    """Finetune an adapter on a file of data.

    It is saved in peft's format.
    Interrupted with Ctrl-C, the same command goes on where it was, to the very same adapter.
    """
    given = dict(locals())
    recipe = _recipe(rank, alpha, targets, start_from)
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file; give a directory", param_hint="--output")
    from pcg.runtime.training.options import FinetuneOptions

    names = [field.name for field in dataclasses.fields(FinetuneOptions)]
    options = {name: given[name] for name in names}
    options["max_grad_norm"] = max_grad_norm or None
    options["optimizer_options"] = optimizer_options_of(optimizer_options)
    options["resume"] = "auto" if resume is None else resume
    options["checkpoint_dir"] = checkpoint_dir or output / OWN_CHECKPOINTS
    FinetuneOptions(**options)  # says what is wrong before the model is loaded
    degree = ranks_of(program, tp, sequence_parallel)
    place = {
        "weights": weights,
        "dtype": dtype,
        "backend": backend,
        "device": device,
        "trust_edits": trust_edits,
        "tp": degree,
        "sequence_parallel": sequence_parallel,
    }
    arguments = {
        "program": program,
        "place": place,
        "data": data,
        "adapter": adapter,
        "recipe": recipe,
        "options": options,
        "output": output,
        "json": json,
    }
    on_ranks(degree, train, arguments)


def train(
    program: str,
    place: dict[str, Any],
    data: Path,
    adapter: str,
    recipe: Any,
    options: dict[str, Any],
    output: Path,
    json: bool,
) -> None:
    """Finetune an adapter, save it, and print what came of it.

    Args:
        program: folder or model.
        place: how to open it.
        data: the file.
        adapter: its name.
        recipe: what it starts as; None for the program's own.
        options: of `Executor.finetune`.
        output: directory to save it in.
        json: print one object.
    """
    if options["log_every"] is not None:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("pcg.finetuning").setLevel(logging.INFO)
    executor = open_executor(program, {}, **place)
    if recipe is None:
        recipe = _compiled_recipe(executor.program, adapter)
    result = executor.finetune(data, adapter=adapter, peft=recipe, **options)
    executor.save_adapter(adapter, output)
    if executor.ranks.rank:
        return
    if options["checkpoint_dir"] == output / OWN_CHECKPOINTS:
        shutil.rmtree(output / OWN_CHECKPOINTS, ignore_errors=True)
    if json:
        summary = {**dataclasses.asdict(result), "output": str(output)}
        del summary["checkpoint"]
        print_json(summary)
    else:
        _print(result, program, output)


def _recipe(
    rank: int | None, alpha: float | None, targets: str | None, start_from: Path | None
) -> Any:
    """What the adapter starts as; None where no option says."""
    given = {"--rank": rank, "--alpha": alpha, "--targets": targets}
    options = [name for name, value in given.items() if value is not None]
    if start_from is not None and options:
        raise typer.BadParameter("a saved adapter has its own", param_hint=options[0])
    if start_from is not None:
        return start_from
    return lora_of(rank, alpha, targets) if options else None


def _compiled_recipe(program: Program, name: str) -> Any:
    """The recipe that the program was compiled for, where it is one for any name."""
    if name in program.recipes or len(program.recipes) != 1:
        return None
    from pcg.peft.registry import recipe_of_fields

    return recipe_of_fields(next(iter(program.recipes.values())))


def _print(result: FinetuneResult, program: str, output: Path) -> None:
    console = err()
    steps = count_text(result.steps, "step")
    resumed = "" if result.resumed_from is None else f", resumed from step {result.resumed_from}"
    speed = f"{result.tokens / max(result.seconds, 1e-9):,.0f} tokens/s"
    lines = [f"{result.adapter}: {steps} in {time_text(result.seconds)}, {speed}{resumed}"]
    if result.losses:
        few = max(1, len(result.losses) // 10)
        first, last = (sum(part) / few for part in (result.losses[:few], result.losses[-few:]))
        lines.append(f"loss {first:.4f} → {last:.4f}")
    if result.eval_losses:
        values = [f"{loss:.4f}" for _, loss in result.eval_losses]
        ends = values[0] if len(values) == 1 else f"{values[0]} → {values[-1]}"
        lines.append(f"evaluation loss {ends}, best {result.best_loss:.4f} at {result.best_step}")
    if result.stopped == "early":
        lines.append(f"stopped early, at step {result.steps} of {result.total_steps}")
    if result.restored:
        lines.append(f"the adapter is that of step {result.best_step}")
    lines.append(f"saved in {output}")
    console.print("\n".join(lines), soft_wrap=True)
    console.print(
        f'use it: pcg run {program} --adapter {result.adapter}={output} --prompt "…"',
        style="dim",
        soft_wrap=True,
    )
