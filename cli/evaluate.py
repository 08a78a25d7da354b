"""`pcg eval`: loss, accuracy, and lm-eval's tasks of a base and its adapters, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from pcg.errors import PcgError
from pcg.options import CompileOptions
from pcg.runtime.training.options import ChatOptions

from .options.console import busy, out, print_json
from .options.executors import PlaceOptions, check_alone, open_executor
from .options.fields import Given, Json, Only, Runnable, flags_of
from .run import SERVING


@dataclass(frozen=True, kw_only=True)
class EvalOptions(ChatOptions):
    """Options of an evaluation.

    Attributes:
        adapter: a saved adapter by its name; repeat the option for several.
        data: a file of rows: those of finetuning for loss and perplexity, or questions with choices
            and answer for accuracy.
        columns: the data's name of a column, by the name that is read, such as question=text.
        batch_size: rows of a batch; each row runs once for each model.
        max_length: maximum number of tokens of a row.
        chat_template: the chat template, instead of that of each adapter or of the model: a file,
            or the template's text.
        tasks: tasks of lm-eval, instead of data.
        include_path: a folder with YAML files of further tasks.
        limit: number of documents of a task.
        num_fewshot: number of examples in a context of a task.
    """

    title: ClassVar[str] = "Evaluation"

    adapter: Mapping[str, str] | None = None
    data: tuple[Path, ...] = ()
    columns: Mapping[str, str] | None = None
    batch_size: int = 8
    max_length: int | None = None
    tasks: tuple[str, ...] = ()
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None


_OF_DATA = ("columns", "max_length", "chat_template", "chat_template_kwargs")
_OF_TASKS = ("include_path", "limit", "num_fewshot")


def eval_command(
    program: Runnable,
    options: EvalOptions,
    compiling: Annotated[Given[CompileOptions], Only(SERVING)],
    place: PlaceOptions,
    json: Json = False,
) -> None:
    """Evaluate a base and its adapters on the same rows, or by tasks of lm-eval."""
    check_alone("pcg eval")
    if bool(options.data) == bool(options.tasks):
        raise typer.BadParameter("give one of --data and --tasks", param_hint="--data")
    unread, other = (_OF_TASKS, "tasks") if options.data else (_OF_DATA, "data")
    for name in unread:
        if getattr(options, name) != getattr(EvalOptions, name):
            raise typer.BadParameter(
                f"it has no effect without --{other}", param_hint=flags_of(name)[0]
            )
    if "base" in (options.adapter or {}):
        raise typer.BadParameter(
            "base is the model without one; use another name", param_hint="--adapter"
        )
    executor = open_executor(program, dict(options.adapter or {}), compiling.values, place)
    with busy("evaluating"):
        rows = _tasks(executor, options) if options.tasks else _rows(executor, options)
    if json:
        print_json({"models": rows})
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        out().print("  ".join(cells), soft_wrap=True, highlight=False)


def _rows(executor: Any, options: EvalOptions) -> list[dict[str, Any]]:
    from pcg.evaluation import evaluate

    scores = evaluate(
        executor,
        options.data,
        batch_size=options.batch_size,
        max_length=options.max_length,
        columns=options.columns,
        chat_template=options.chat_template,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    each = [dataclasses.asdict(score) for score in scores]
    return [{name: value for name, value in row.items() if value is not None} for row in each]


def _tasks(executor: Any, options: EvalOptions) -> list[dict[str, Any]]:
    try:
        from pcg.lm_eval_model import evaluate_tasks
    except ModuleNotFoundError as error:
        raise PcgError(f"--tasks needs {error.name}: pip install 'pcg[lm-eval]'") from error
    rows = []
    for adapter in (None, *executor.adapters):
        results = evaluate_tasks(
            executor,
            options.tasks,
            adapter,
            include_path=None if options.include_path is None else str(options.include_path),
            limit=options.limit,
            num_fewshot=options.num_fewshot,
        )
        row: dict[str, Any] = {"model": adapter or "base"}
        for task, metrics in results.items():
            for name, value in metrics.items():
                if isinstance(value, int | float) and "_stderr" not in name:
                    row[f"{task}: {name.partition(',')[0]}"] = value
        rows.append(row)
    return rows


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
