"""`pcg train`: train an adapter as a configuration file says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options.arguments import Json
from ..options.executors import check_alone
from .lines import step_lines
from .report import print_preferences, print_result, print_rewards, print_update

Config = Annotated[
    Path,
    typer.Argument(
        help="YAML file; its paths are relative to its folder.",
        show_default=False,
        metavar="CONFIG.yaml",
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        help="A value in place of the file's, as learning_rate=1e-4 or peft.r=8; repeatable.",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
    ),
]


def sft_command(config: Config, settings: Settings, json: Json = False) -> None:
    """Finetune an adapter on examples, as a file says.

    Its keys are the arguments of `executor.finetune` and the options of pcg finetune
    (docs/train.md). Interrupted with Ctrl-C, the same command goes on where it was.
    """
    check_alone("pcg train sft")
    from pcg.train.config_file import OutputOptions, has_adapter, read_config
    from pcg.train.sft import SFT_KEYS, train_sft

    read = read_config(config, SFT_KEYS, settings)
    output = read.make(OutputOptions).output
    replaces = has_adapter(output)
    with step_lines(read.values.get("log_every")):
        result = train_sft(read)
    print_result(result, read.values["model"], output, as_json=json, replaces=replaces)


def grpo_command(config: Config, settings: Settings, json: Json = False) -> None:
    """Train an adapter on rewards by GRPO, as a file says.

    Its keys are the options of docs/grpo.md, with data and rewards. Reward functions are Python of
    yours, and run in this process. Interrupted with Ctrl-C, or killed, the same command goes on
    from the last checkpoint.
    """
    check_alone("pcg train grpo")
    from pcg.train.config_file import OutputOptions, has_adapter, read_config
    from pcg.train.grpo.train import GRPO_KEYS, train_grpo_file

    read = read_config(config, GRPO_KEYS, settings)
    output = read.make(OutputOptions).output
    replaces = has_adapter(output)
    result = train_grpo_file(read, None if json else print_update)
    print_rewards(result, output, as_json=json, replaces=replaces)


def dpo_command(config: Config, settings: Settings, json: Json = False) -> None:
    """Train an adapter to prefer one of two outputs, as a file says.

    Its keys are those of pcg train sft, and the options of direct preference optimization
    (docs/preference.md). Interrupted with Ctrl-C, the same command goes on where it was.
    """
    check_alone("pcg train dpo")
    from pcg.train.config_file import OutputOptions, read_config
    from pcg.train.preference.dpo import DPO_KEYS, train_dpo

    read = read_config(config, DPO_KEYS, settings)
    output = read.make(OutputOptions).output
    with step_lines(read.values.get("log_every")):
        result = train_dpo(read)
    print_preferences(result, output, as_json=json)
