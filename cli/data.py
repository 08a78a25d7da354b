"""`pcg data FILE`: rows of finetuning data with the tokens that are learned, and their faults."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pcg.errors import DataError
from pcg.runtime.training.options import DataOptions
from pcg.units import counted

from .options.console import busy, out, print_json
from .options.fields import Given, Json, Only, complete_model

if TYPE_CHECKING:
    from pcg.runtime.data.dataset import ReadOptions
    from pcg.runtime.data.example import Example
    from pcg.runtime.text.tokenizer import Tokenizer

_MOST_FAULTS = 20
_LONGEST = 2000
"""Tokens of a shown example; an ellipsis stands for further ones."""


@dataclass
class Counts:
    """Counts over the rows, the examples of the first rows, and the faults.

    Rows without a token to learn are counted, and have no examples.
    """

    format: str = ""
    rows: int = 0
    lengths: list[int] = field(default_factory=list)
    learned: int = 0
    truncated: int = 0
    without_target: int = 0
    duplicates: int = 0
    shown: list[tuple[str, list[Example]]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def show_command(
    data: Annotated[
        list[Path], typer.Argument(help="Files, folders, globs or hub ids of rows.", metavar="FILE")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="The model whose tokenizer and chat template read the rows.",
            autocompletion=complete_model,
            metavar="MODEL",
        ),
    ],
    reading: Annotated[
        Given[DataOptions],
        Only(("data_format", "columns", "chat_template", "chat_template_kwargs")),
    ],
    max_length: Annotated[
        int | None, typer.Option(help="Count rows of more tokens, which training cuts.", min=2)
    ] = None,
    examples: Annotated[int, typer.Option(help="Number of rows to show.", min=0)] = 3,
    json: Json = False,
) -> None:
    """Show rows of finetuning data with what is learned, and the faults of all rows.

    Exits with 1 if a row cannot be used.
    """
    from pcg.runtime.data.dataset import ReadOptions
    from pcg.runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.of(model)
    with busy("reading"):
        reader = reading.make()
        options = ReadOptions(
            max_length,
            reader.data_format,
            empty="drop",
            template=reader.template(),
            variables=reader.variables(),
            columns=reader.columns or {},
        )
        counts = _read(data, tokenizer, options, examples)
    if json:
        print_json(_summary(counts))
    else:
        _print(counts, tokenizer, max_length)
    if counts.faults:
        raise typer.Exit(1)


def _read(
    data: Sequence[Path], tokenizer: Tokenizer, options: ReadOptions, examples: int
) -> Counts:
    counts, seen = Counts(), set()
    for where, read in _rows(data, tokenizer, options, counts):
        counts.rows += 1
        if isinstance(read, DataError):
            counts.faults.append(str(read))
            continue
        if not read:
            continue
        counts.lengths += [len(example.ids) for example in read]
        counts.learned += sum(example.targets for example in read)
        key = hash(tuple((*example.ids, *example.labels) for example in read))
        counts.duplicates += key in seen
        seen.add(key)
        if len(counts.shown) < examples:
            counts.shown.append((where, read))
    return counts


def _rows(
    data: Sequence[Path], tokenizer: Tokenizer, options: ReadOptions, counts: Counts
) -> Iterator[tuple[str, list[Example] | DataError]]:
    """Yield each row's examples, or its fault; a file that cannot be read further ends all."""
    from pcg.runtime.data.dataset import ExampleReader, converted, kind_of_rows
    from pcg.runtime.data.sources import gather, holds_documents, read_rows

    gathered = gather(list(data))
    reader = ExampleReader(gathered, tokenizer, options)
    try:
        if holds_documents(gathered):
            yield from ((where, [example]) for example, where in reader)
            return
        for row in read_rows(gathered):
            try:
                if not reader.format and options.format == "auto":
                    value = converted(row.value, row.where, options.columns)
                    rows = kind_of_rows(value)
                    reader = ExampleReader(gathered, tokenizer, replace(options, rows=rows))
                yield row.where, [example for example, _ in reader.examples([row])]
            except DataError as error:
                yield row.where, error
    except DataError as error:
        if not counts.rows:  # nothing could be read
            raise
        yield "", DataError(f"{error}; rows behind it were not read")
    finally:
        counts.format = reader.format
        counts.truncated, counts.without_target = reader.truncated, reader.dropped


def _named(examples: Sequence[Example]) -> Iterator[tuple[str, Example]]:
    """Yield the examples of a row with their parts in a preference; empty for other rows."""
    if len(examples) == 2:
        yield from zip(("chosen", "rejected"), examples, strict=True)
        return
    yield from (("" if one.is_desirable else "undesirable", one) for one in examples)


def _summary(counts: Counts) -> dict[str, Any]:
    return {
        "format": counts.format,
        "rows": counts.rows,
        "tokens": sum(counts.lengths),
        "learned": counts.learned,
        "longest": max(counts.lengths, default=0),
        "truncated": counts.truncated,
        "without_target": counts.without_target,
        "duplicates": counts.duplicates,
        "faults": counts.faults,
        "examples": [
            {"where": where, "part": part, "ids": [*example.ids], "labels": [*example.labels]}
            for where, read in counts.shown
            for part, example in _named(read)
        ],
    }


def _print(counts: Counts, tokenizer: Tokenizer, max_length: int | None) -> None:
    console = out()
    shown = [(where, *named) for where, read in counts.shown for named in _named(read)]
    for where, part, example in shown:
        size = f"{counted(len(example.ids), 'token')}, {example.targets:,} learned"
        title = " · ".join(filter(None, (where, part, size)))
        console.print(f"── {title} ──", style="bold cyan", soft_wrap=True)
        for is_learned, text in _parts(example, tokenizer):
            if console.is_terminal:
                console.print(text, style="green" if is_learned else "dim", end="", soft_wrap=True)
            else:
                sys.stdout.write(f"«{text}»" if is_learned else text)
        sys.stdout.write("\n\n")
        sys.stdout.flush()
    lengths = counts.lengths or [0]
    lines = [
        f"{counted(counts.rows, 'row')} of {counts.format or 'no format'}",
        f"{sum(lengths):,} tokens, {counts.learned:,} learned; a row has {min(lengths):,} to "
        f"{max(lengths):,}, on average {sum(lengths) / len(lengths):,.0f}",
        f"{counted(counts.duplicates, 'duplicate')}, {counts.without_target:,} without a token "
        "to learn" + (f", {counts.truncated:,} cut at {max_length:,}" if max_length else ""),
    ]
    console.print("\n".join(lines), soft_wrap=True)
    for fault in counts.faults[:_MOST_FAULTS]:
        console.print(fault, style="red", soft_wrap=True)
    if len(counts.faults) > _MOST_FAULTS:
        console.print(f"and {len(counts.faults) - _MOST_FAULTS:,} more faults", style="red")


def _parts(example: Example, tokenizer: Tokenizer) -> Iterator[tuple[bool, str]]:
    """Yield the text of runs of tokens, and whether a run is learned."""
    from pcg.runtime.data.example import IGNORED

    pairs = list(zip(example.ids, example.labels, strict=True))[:_LONGEST]
    for is_learned, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        ids = [index for index, _ in run]
        yield is_learned, tokenizer.decode(ids, skip_special_tokens=False)
    if len(example.ids) > _LONGEST:
        yield False, "…"
