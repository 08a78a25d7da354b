"""`pcg compile`: a model and a recipe to the folder of a program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import (
    Accumulation,
    Alpha,
    Backend,
    Batch,
    Budget,
    Costs,
    Dtype,
    Json,
    Model,
    Peft,
    Rank,
    Seq,
    SequenceParallel,
    Targets,
    TensorParallel,
    TpPlan,
    peft_of,
)
from .console import busy, count_text, err, print_json, size_text, table, time_text

if TYPE_CHECKING:
    from pcg.ir.program.manifest import Manifest
    from pcg.passes.stage import PassRecord
    from pcg.source import ModelSource


def compile_command(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the program.", metavar="DIR"),
    ] = None,
    peft: Peft = "lora",
    rank: Rank = None,
    alpha: Alpha = None,
    targets: Targets = None,
    tp: TensorParallel = 1,
    costs: Costs = None,
    tp_plan: TpPlan = None,
    sequence_parallel: SequenceParallel = False,
    gradient_accumulation_steps: Accumulation = 1,
    backend: Backend = "torch",
    dtype: Dtype = None,
    memory_budget: Budget = None,
    batch: Batch = 1,
    seq: Seq = 1024,
    print_after: Annotated[
        list[str] | None,
        typer.Option(help="Print the graphs after this pass. Repeatable.", metavar="PASS"),
    ] = None,
    dump_dir: Annotated[
        Path | None,
        typer.Option(help="Write the graphs after every pass to this folder.", metavar="DIR"),
    ] = None,
    json: Json = False,
) -> None:
    """Compile a model and a recipe to a program.

    A program is a folder: the graphs as text, the emitted source, the plan, a report. Weights are
    not needed, and not copied: the program remembers where they lie.
    """
    if output is None and not print_after and dump_dir is None:
        raise typer.BadParameter("say where the program goes", param_hint="-o")
    if json and print_after:
        raise typer.BadParameter("it does not go with --json", param_hint="--print-after")
    from pcg.source import resolve

    # Both know in milliseconds what is wrong, and torch takes seconds.
    source = resolve(model)
    recipe = peft_of(peft, rank, alpha, targets)

    with busy("starting"):
        from pcg import compiler
        from pcg.explain import explain as explaining
        from pcg.ir.program.folder import save_program
        from pcg.options import CompileOptions
        from pcg.passes.pipeline import Settings, pipeline
        from pcg.passes.stage import dump_to
    options: dict[str, Any] = {
        "tp": tp,
        "costs": costs,
        "tp_plan": tp_plan,
        "sequence_parallel": sequence_parallel,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "dtype": dtype,
        "memory_budget": memory_budget,
        "batch": batch,
        "seq": seq,
    }
    compile_options = CompileOptions(**{**options, "backend": backend})
    settings = Settings(compile_options, backend=compile_options.emitted_backend)
    names = pipeline(settings).names
    unknown = sorted(set(print_after or ()).difference(names))
    if unknown:
        raise typer.BadParameter(
            f"no pass {unknown[0]!r} runs; the passes are {', '.join(names)}",
            param_hint="--print-after",
        )
    dump = dump_to(dump_dir) if dump_dir is not None else None
    records: list[PassRecord] = []

    def observe(record: PassRecord) -> None:
        records.append(record)
        for name in record.labels:
            if name in (print_after or ()):
                print(f"# after {name}\n{record.text()}")
        if dump is not None:
            dump(record)

    with busy(f"compiling {source.name}"):
        program = compiler.compile_program(
            model, recipe, observe=observe, **{**options, "backend": backend}
        )
        manifest = None
        if output is not None:
            report = explaining.explain(model, recipe, **options).to_json()
            manifest = save_program(
                program,
                output,
                weights=_weights(model, source),
                tokenizer_directory=source.directory,
                report=report,
            )
    if json:
        print_json(_summary(program.name, records, output, manifest))
    else:
        _print_passes(program.name, records, output, manifest)


def _weights(model: str, source: ModelSource) -> str | None:
    """Where the weights lie: the directory that was given, or the id on the hub."""
    if Path(model).expanduser().exists():
        return None if source.directory is None else str(source.directory.resolve())
    return source.name


def _summary(
    name: str, records: list[PassRecord], output: Path | None, manifest: Manifest | None
) -> dict[str, object]:
    passes = [{"pass": r.name, "nodes": r.nodes, "seconds": round(r.seconds, 4)} for r in records]
    return {
        "model": name,
        "passes": passes,
        "output": None if output is None else str(output),
        "files": [] if manifest is None else sorted(manifest.files),
    }


def _print_passes(
    name: str, records: list[PassRecord], output: Path | None, manifest: Manifest | None
) -> None:
    console = err()
    rows = table("pass", "nodes", "time", right=("nodes", "time"))
    for record in records:
        rows.add_row(record.name, f"{record.nodes:,}", time_text(record.seconds))
    console.print(rows)
    if output is None or manifest is None:
        return
    size_bytes = sum((output / file).stat().st_size for file in manifest.files)
    files = count_text(len(manifest.files) + 1, "file")
    console.print(f"\n{name} → {output}: {files}, {size_text(size_bytes)}", soft_wrap=True)
    console.print(f'run it: pcg run {output} --prompt "…"', style="dim", soft_wrap=True)
