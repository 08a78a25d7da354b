"""`pcg compile`: compile a model and a PEFT method; `pcg opt`: run passes over text IR."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pcg.errors import ProgramError
from pcg.files import check_writable, expanded, is_there
from pcg.gguf_file import SUFFIX
from pcg.options import CompileOptions
from pcg.units import counted, duration_text, size_text

from .options.console import busy, err, print_json, print_table, table
from .options.executors import SPLIT, PlaceOptions, open_executor
from .options.fields import Given, Json, Model
from .options.method import Method

if TYPE_CHECKING:
    from pcg.ir.program.manifest import Manifest
    from pcg.ir.program.program import Program
    from pcg.passes.graphs.pass_base import PassRecord
    from pcg.source import ModelSource


def opt_command(
    file: Annotated[
        str | None,
        typer.Argument(help="Graphs as text IR: a file, or - for standard input.", metavar="FILE"),
    ] = None,
    passes: Annotated[
        str | None,
        typer.Option(
            help="Passes to run, in order: raise,fuse_linears,localize{degree=4}.", metavar="PASSES"
        ),
    ] = None,
    list_passes: Annotated[
        bool, typer.Option("--list", help="List the passes and their options.")
    ] = False,
) -> None:
    """Run passes over graphs in text IR, and print the graphs.

    The verifier checks the graphs of the file and the result of each pass.
    """
    if list_passes:
        _list()
        return
    if file is None:
        raise typer.BadParameter("give a file, or - for standard input", param_hint="FILE")
    from pcg.errors import ParseError
    from pcg.passes.registry import run_text

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ParseError(f"{file} is no text in UTF-8: {error.reason}") from error
    except OSError as error:
        raise ParseError(f"{file} cannot be read: {error.strerror}") from error
    try:
        print(run_text(text, passes), end="")
    except ParseError as error:
        raise ParseError(f"{file}: {error}") from error


def _list() -> None:
    from pcg.passes.registry import PASSES, options_of

    for kind in PASSES:
        options = ",".join(f"{name}=…" for name in options_of(kind))
        usage = f"{kind.name}{{{options}}}" if options else kind.name
        print(f"{usage:<40} {(kind.__doc__ or '').partition(chr(10))[0]}")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options of a compilation's outputs.

    Attributes:
        output: the folder of the program.
        print_after: a pass after which the graphs are printed. Repeatable.
        dump_dir: a folder to write the graphs to after every pass.
    """

    output: Path | None = None
    print_after: Sequence[str] = ()
    dump_dir: Path | None = None

    def check(self, json: bool) -> None:
        """Refuse incompatible options and output paths that cannot be written."""
        if self.output is None and not self.print_after and self.dump_dir is None:
            raise typer.BadParameter("say where the program goes", param_hint="-o")
        if json and self.print_after:
            raise typer.BadParameter("it does not go with --json", param_hint="--print-after")
        if self.output is not None:
            from pcg.ir.program.folder import free_folder

            free_folder(self.output)
        if self.dump_dir is not None:
            check_writable(self.dump_dir, "the graphs", ProgramError)


def compile_command(
    model: Model,
    method: Method,
    options: Given[CompileOptions],
    to: OutputOptions,
    json: Json = False,
) -> None:
    """Compile a model and a PEFT method to a program.

    A program is a folder with the graphs as text, the emitted source, the plan and a report. It
    needs no weights and copies none: it records their location. If the model is a base executor,
    split://HOST:PORT, the program is a client's: split://HOST:PORT?program=DIR runs it.
    """
    to.check(json)
    if model.startswith(SPLIT):
        _compile_client(model, method, options, to, json)
        return
    from pcg.source import resolve

    # Report wrong options within milliseconds, before the slow import of torch.
    asked = options.make()
    source = resolve(model)
    peft = method.configuration()

    with busy("starting"):
        from pcg import compiler
        from pcg.explain import explain as explaining
        from pcg.ir.program.folder import save_program
        from pcg.kernels.triton.backend import choose_backend, machine_device
        from pcg.passes.graphs.pass_base import dump_to
        from pcg.passes.pipeline import Settings, pipeline
    backend = choose_backend(asked.backend, machine_device())
    exact = dataclasses.replace(asked, dtype=None, quantization=None)  # which change no pass
    names = pipeline(Settings(exact, backend=backend.name)).names
    unknown = sorted(set(to.print_after).difference(names))
    if unknown:
        raise typer.BadParameter(
            f"no pass {unknown[0]!r} runs; the passes are {', '.join(names)}",
            param_hint="--print-after",
        )
    dump = dump_to(to.dump_dir) if to.dump_dir is not None else None
    records: list[PassRecord] = []

    def observe(record: PassRecord) -> None:
        records.append(record)
        for name in record.labels:
            if name in to.print_after:
                print(f"# after {name}\n{record.text()}")
        if dump is not None:
            dump(record)

    with busy(f"compiling {source.name}"):
        program = compiler.compile_program(model, peft, observe=observe, **options.values)
        manifest = None
        if to.output is not None:
            planned = {key: value for key, value in options.values.items() if key != "backend"}
            settled = program.options
            planned |= {"dtype": settled.dtype, "quantization": settled.quantization}
            manifest = save_program(
                program,
                to.output,
                weights=_weights(model, source),
                tokenizer_directory=source.directory,
                report=explaining.explain(model, peft, **planned).to_json(),
            )
    if json:
        print_json(_summary(program, records, to.output, manifest))
    else:
        _print_passes(program, records, to.output, manifest)


def _compile_client(
    where: str, method: Method, options: Given[CompileOptions], to: OutputOptions, json: bool
) -> None:
    if to.output is None or to.print_after or to.dump_dir is not None:
        raise typer.BadParameter("the program of a client is written to a folder alone (-o)")
    executor = open_executor(where, method.configuration(), options.values, PlaceOptions())
    executor.save_program(to.output)  # type: ignore[attr-defined]
    if json:
        print_json({"model": executor.program.name, "output": str(to.output)})
        return
    err().print(f"{executor.program.name} → {to.output}", soft_wrap=True)
    err().print(f"run it: pcg run '{where}?program={to.output}'", style="dim", soft_wrap=True)


def _weights(model: str, source: ModelSource) -> str | None:
    """Return the location of the weights: the model's directory, GGUF file or hub id."""
    if is_there(expanded(model)):
        if source.weight_files and source.weight_files[0].suffix == SUFFIX:
            return str(source.weight_files[0])
        return None if source.directory is None else str(source.directory.resolve())
    return source.name


def _summary(
    program: Program, records: list[PassRecord], output: Path | None, manifest: Manifest | None
) -> dict[str, object]:
    passes = [{"pass": r.name, "nodes": r.nodes, "seconds": round(r.seconds, 4)} for r in records]
    return {
        "model": program.name,
        "choices": dict(program.choices),
        "passes": passes,
        "output": None if output is None else str(output),
        "files": [] if manifest is None else sorted(manifest.files),
    }


def _print_passes(
    program: Program, records: list[PassRecord], output: Path | None, manifest: Manifest | None
) -> None:
    console = err()
    rows = table("pass", "nodes", "time", right=("nodes", "time"))
    for record in records:
        rows.add_row(record.name, f"{record.nodes:,}", duration_text(record.seconds))
    print_table(rows, console)
    console.print()
    for what, choice in program.choices.items():
        console.print(f"{what}  {choice}", soft_wrap=True, highlight=False)
    if output is None or manifest is None:
        return
    size_bytes = sum((output / file).stat().st_size for file in manifest.files)
    files = counted(len(manifest.files) + 1, "file")
    console.print(f"\n{program.name} → {output}: {files}, {size_text(size_bytes)}", soft_wrap=True)
    console.print(f'run it: pcg run {output} --prompt "…"', style="dim", soft_wrap=True)
