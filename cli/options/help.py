"""Help of a command: the common options with a sentence each, the names of the others.

`--help-all` describes every option. No name is cut: a long one has a line of its own.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import Any

from typer.core import TyperCommand

from .console import plain_text

ALL = "--help-all"
COMMON = frozenset(
    (
        "adapter", "api_key", "batch", "batch_size", "chat", "compare", "data", "data_dir",
        "device", "dtype", "epochs", "eval_data", "finetune", "format", "gpu", "gpus", "host",
        "html", "json", "kv_cache_gib", "learning_rate", "lora_modules", "max_length",
        "max_model_len", "max_new_tokens", "max_num_seqs", "memory_budget", "output", "peft",
        "port", "pp", "price", "print_after", "prompt", "quantization", "r", "rate",
        "request_rate", "seq", "split_port", "target_modules", "temperature", "tp",
        "tpot_slo_ms", "use", "workload",
    )
)  # fmt: skip
"""The options that every help describes; also those of commands with few options."""
_FEW = 16
_NAMES_WIDTH = 26


class Command(TyperCommand):
    """A typer command whose help is plain text, grouped by subject."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the help of all options for --help-all."""
        end = args.index("--") if "--" in args else len(args)
        if ALL in args[:end]:
            print(help_text(self, ctx, describes_all=True))
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        formatter.write(help_text(self, ctx, describes_all=False) + "\n")


def help_text(command: Any, ctx: Any, *, describes_all: bool) -> str:
    """Return the help of a command in lines of the terminal's width."""
    width = min(shutil.get_terminal_size().columns, 100)
    options = [
        each
        for each in command.get_params(ctx)
        if each.param_type_name == "option" and each.name != "help"
    ]
    arguments = [each for each in command.get_params(ctx) if each.param_type_name != "option"]
    groups: dict[str, list[Any]] = {}
    for option in options:
        groups.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    describes_all = describes_all or len(options) <= _FEW
    usage = " ".join(["Usage:", ctx.command_path, "[OPTIONS]", *map(_metavar, arguments)])
    parts = [usage, "\n\n".join(_paragraphs(command.help or "", width))]
    if arguments:
        rows = [(_metavar(each), each.help or "") for each in arguments]
        parts.append("\n".join(["Arguments", *_rows(rows, width)]))
    for title, members in groups.items():
        shown = [each for each in members if describes_all or _is_common(each)]
        others = [each for each in members if each not in shown]
        rows = [(_names(each), each.help or "") for each in shown]
        if not describes_all:
            rows = [(names, _first_sentence(text)) for names, text in rows]
        lines = [title, *_rows(rows, width)]
        if others:
            named = ", ".join(each.opts[0] for each in others)
            lines.append(
                fill(
                    f"{'also ' if shown else ''}{named}", width, initial_indent="  ",
                    subsequent_indent="  ", break_on_hyphens=False,
                )
            )  # fmt: skip
        parts.append("\n".join(lines))
    if not describes_all:
        parts.append(f"{ALL} describes every option.")
    if command.epilog:
        parts.append(plain_text(command.epilog).replace("\n\n", "\n  "))
    return "\n\n".join(parts)


def _is_common(option: Any) -> bool:
    return option.required or option.name in COMMON


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _names(option: Any) -> str:
    names = ", ".join(option.opts)
    if option.secondary_opts:
        names += f" / {', '.join(option.secondary_opts)}"
    return names if option.is_flag else f"{names} {_metavar(option)}"


def _rows(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield lines of names and texts; a text begins below long names."""
    wide = min(max((len(names) for names, _ in rows), default=0), _NAMES_WIDTH)
    indent = " " * (wide + 4)
    for names, text in rows:
        text = " ".join(plain_text(text).split())
        if len(names) > wide:
            yield f"  {names}"
            names = ""
        yield fill(
            text, width, initial_indent=f"  {names:<{wide}}  ", subsequent_indent=indent
        ).rstrip()


def _paragraphs(text: str, width: int) -> list[str]:
    parts = re.split(r"\n\s*\n", plain_text(text).strip())
    return [
        fill(" ".join(part.split()), width, initial_indent="  ", subsequent_indent="  ")
        for part in parts
    ]


def _first_sentence(text: str) -> str:
    """Return the text up to its first period or semicolon."""
    return re.split(r"\.\s|;\s", plain_text(text).rstrip("."), maxsplit=1)[0] + "."
