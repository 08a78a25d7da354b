"""`pcg init`: a configuration file of training, with every key and its meaning."""

from __future__ import annotations

import dataclasses
import os
import re
from enum import StrEnum
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer
import yaml

from pcg.errors import PcgError
from pcg.files import is_there, write_text

from .options.console import err, plain_text
from .options.fields import field_options


class Objective(StrEnum):
    """The kinds of training."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"
    GRPO = "grpo"


def init_command(
    objective: Annotated[Objective, typer.Argument(help="Kind of training.", metavar="KIND")],
    model: Annotated[str, typer.Option(help="Directory or hub id of the model.", metavar="MODEL")],
    data: Annotated[Path, typer.Option(help="File of rows.", metavar="FILE")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The configuration file.", metavar="FILE")
    ] = Path("train.yaml"),
) -> None:
    """Write a commented configuration file for pcg train sft, dpo, kto or grpo.

    Required keys have values; every other key is a comment with its default.
    """
    if is_there(output):
        raise PcgError(f"{output} exists; give another --output")
    near = {"model": model, "data": str(data)}
    for name, value in near.items():
        if is_there(Path(value)):
            near[name] = os.path.relpath(value, output.parent)
    write_text(output, configuration(objective, {**near, "output": "adapters/mine"}))
    err().print(f"wrote {output}; train: pcg train {objective} {output}", soft_wrap=True)


def configuration(objective: Objective, given: dict[str, Any]) -> str:
    """Return the text of a configuration with the given values."""
    lines: list[str] = [f"# pcg train {objective}: paths are relative to this file's folder"]
    seen: set[str] = set()
    title = None
    for owner in _keys(objective):
        for option in field_options(owner):
            if option.name in seen:
                continue
            seen.add(option.name)
            if option.title != title:
                title = option.title
                lines += ["", f"# ── {title} ──"]
            is_given = option.name in given or option.default is dataclasses.MISSING
            value = given.get(option.name, None if is_given else _plain(option.default))
            text = yaml.safe_dump({option.name: value}, default_flow_style=True, width=1000)
            help = re.sub(r"--([a-z][a-z-]*)", _key, plain_text(option.help))
            comments = wrap(help, 98, break_on_hyphens=False)
            lines += ["", *(f"# {line}" for line in comments)]
            lines.append(("" if is_given else "#") + text.strip()[1:-1])
    return "\n".join(lines) + "\n"


def _keys(objective: Objective) -> tuple[type, ...]:
    from pcg.train.grpo.train import GRPO_KEYS
    from pcg.train.preference.dpo import DPO_KEYS
    from pcg.train.preference.kto import KTO_KEYS
    from pcg.train.sft import SFT_KEYS

    keys = {
        Objective.SFT: SFT_KEYS,
        Objective.DPO: DPO_KEYS,
        Objective.KTO: KTO_KEYS,
        Objective.GRPO: GRPO_KEYS,
    }
    return keys[objective]


def _key(match: re.Match[str]) -> str:
    return match[1].replace("-", "_")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
