"""`pcg finetune`: train an adapter on data files; `pcg train`: train from a configuration file."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pcg.errors import AdapterError
from pcg.files import check_writable, is_directory, is_there
from pcg.ir.program.manifest import is_program_folder
from pcg.options import CompileOptions
from pcg.runtime.training.options import FinetuneOptions
from pcg.units import counted, duration_text

from .options.console import err, print_json
from .options.executors import (
    PlaceOptions,
    TrainingRanks,
    check_alone,
    on_ranks,
    open_executor,
    shards_and_replicas,
)
from .options.fields import Given, Json, Runnable
from .options.method import Method

if TYPE_CHECKING:
    from pcg.runtime.training.options import FinetuneResult
    from pcg.train.config_file import ConfigFile
    from pcg.train.grpo.loop import GrpoResult, Sample
    from pcg.train.preference.run import PreferenceResult


@contextmanager
def step_lines(log_every: object) -> Iterator[None]:
    """Print the training log's step lines on standard error inside the block.

    Args:
        log_every: steps between lines; None for a line every few seconds if no bar is shown.
    """
    log, lines = logging.getLogger("pcg.finetuning"), _Lines()
    if log_every is None:  # the command reports errors itself
        lines.addFilter(lambda record: record.levelno == logging.INFO)
    before = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(before)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------- report


_LONGEST_PROMPT = 80


def use_command(
    model: str, options: Mapping[str, Any], adapter: str, output: Path, data: Sequence[Path]
) -> str:
    """Return the command that runs a trained adapter with the first prompt of its data.

    Args:
        options: options of the run, of which the weights' format and the template are needed.
    """
    from pcg.runtime.data.formats import rename_columns
    from pcg.runtime.data.sources import read_rows

    first = next(read_rows(tuple(data)))
    row = first.value if isinstance(first.value, Mapping) else {}
    if columns := options.get("columns"):
        row = rename_columns(row, columns, first.where)
    names = ["messages", "conversations", "input", "prompt", "instruction"]
    names = ["text"] if options.get("labels") else names
    prompt: Any = next((row[name] for name in names if row.get(name)), "…")
    is_chat = options.get("data_format") == "chat" or not isinstance(prompt, str)
    if not isinstance(prompt, str):
        messages = prompt.get("messages", ()) if isinstance(prompt, Mapping) else prompt
        users = (m for m in messages if (m.get("role") or m.get("from")) in ("user", "human"))
        user: Mapping[str, Any] = next(users, {})
        prompt = user.get("content", user.get("value"))
    if not isinstance(prompt, str) or len(prompt) > _LONGEST_PROMPT or not prompt.isprintable():
        prompt = "…"
    quantization = options.get("quantization")
    words = ["pcg", "run", model, *(["--quantization", str(quantization)] if quantization else [])]
    for label in options.get("labels") or ():
        words += ["--labels", label]
    words += ["--adapter", f"{adapter}={output}"]
    if is_chat:
        words.append("--chat")
        if options.get("chat_template") is not None:
            words += ["--chat-template", str(options["chat_template"])]
        for name, value in (options.get("chat_template_kwargs") or {}).items():
            words += ["--chat-template-kwargs", f"{name}={dumps(value)}"]
    return shlex.join([*words, "--prompt", prompt])


def _print_use(command: str) -> None:
    err().print(f"use it: {command}", style="dim", soft_wrap=True)


def print_result(
    result: FinetuneResult, use: str, output: Path, *, as_json: bool, replaces: bool
) -> None:
    """Print a job's losses on standard error, or its whole result as a JSON object.

    Args:
        use: the command that runs the adapter.
        output: the directory that the adapter is saved in.
        replaces: True if the directory already had an adapter.
    """
    if as_json:
        summary = {**dataclasses.asdict(result), "output": str(output)}
        del summary["checkpoint"]
        print_json(summary)
    else:
        _print(result, output, replaces)
        _print_use(use)


def print_preferences(result: PreferenceResult, use: str, output: Path, *, as_json: bool) -> None:
    """Print a run's margins on standard error, or its whole result as a JSON object."""
    if as_json:
        summary = {**dataclasses.asdict(result), "output": str(output)}
        del summary["checkpoint"]
        print_json(summary)
        return
    resumed = "" if result.resumed_from is None else f", resumed from step {result.resumed_from}"
    steps = counted(result.steps, "step")
    lines = [f"{result.adapter}: {steps} in {duration_text(result.seconds)}{resumed}"]
    named = [("steps", result.history), ("evaluations", [each for _, each in result.evaluations])]
    words = {"loss": "loss", "margin": "rewards/margins", "accuracy": "rewards/accuracies"}
    for name, history in named:
        if history:
            first, last = history[0], history[-1]
            both = {word: key for word, key in words.items() if key in first and key in last}
            changes = [f"{word} {first[key]:.4f} → {last[key]:.4f}" for word, key in both.items()]
            lines.append(f"{', '.join(changes)}, of the first and the last of the {name}")
    lines.append(f"saved in {output}")
    err().print("\n".join(lines), soft_wrap=True)
    _print_use(use)


def _print(result: FinetuneResult, output: Path, replaces: bool) -> None:
    from pcg.runtime.training.options import LossChange

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
    err().print("\n".join(lines), soft_wrap=True)


def _ends(steps: int) -> str:
    return "of the first and the last step" if steps == 1 else f"means of {steps} steps each"


# ------------------------------------------------------------------------------------------ rewards


_SHOWN = 60


def print_update(step: int, numbers: Mapping[str, float], samples: Sequence[Sample]) -> None:
    """Print an update and the completion with the highest advantage on standard error."""
    shown = {
        "reward": numbers.get("reward"),
        "±": numbers.get("reward_std"),
        "length": numbers.get("completions/mean_length"),
        "kl": numbers.get("kl"),
        "loss": numbers.get("loss"),
    }
    parts = [f"{name} {value:.4g}" for name, value in shown.items() if value is not None]
    line = f"step {step}: {', '.join(parts)}"
    if samples:
        best = max(samples, key=lambda sample: sample.advantage)
        text = repr(best.completion)
        line += f"  {text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}"
    err().print(line, soft_wrap=True, markup=False, highlight=False)


def print_rewards(
    result: GrpoResult, use: str, output: Path, *, as_json: bool, replaces: bool
) -> None:
    """Print the rewards on standard error, or all numbers as a JSON object.

    Args:
        output: the directory that the adapter is saved in.
        replaces: True if the directory already had an adapter.
    """
    if as_json:
        print_json(
            {
                "adapter": result.adapter,
                "steps": result.steps,
                "seconds": result.seconds,
                "history": list(result.history),
                "output": str(output),
            }
        )
        return
    rewards = [numbers["reward"] for numbers in result.history if "reward" in numbers]
    lines = [
        f"{result.adapter}: {counted(result.steps, 'step')} in {duration_text(result.seconds)}",
        f"saved in {output}{', in place of the adapter there' if replaces else ''}",
    ]
    if rewards:
        lines.insert(1, f"reward {rewards[0]:.4g} → {rewards[-1]:.4g}, first and last step")
    err().print("\n".join(lines), soft_wrap=True)
    _print_use(use)


# ----------------------------------------------------------------------------------------- finetune


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """The data, the adapter and the output of a job.

    Attributes:
        data: a file of rows, a .txt file, a folder, a glob, or a hub id; rows (chat,
            prompt-completion, alpaca, ShareGPT, text, tokens) are in JSON lines, CSV or Parquet;
            repeat the option to concatenate several, or to mix them by --probabilities.
        adapter: the adapter's name.
        output: the directory to save the adapter in; it also holds the job's checkpoints.
        start_from: a saved adapter to train further, instead of a new adapter.
        overwrite: replace the adapter that is saved in the output.
        keep_checkpoints: keep the checkpoints of a finished job, so that --resume with more epochs
            or steps extends it.
    """

    data: tuple[Path, ...]
    adapter: str
    output: Path
    start_from: Path | None = None
    overwrite: bool = False
    keep_checkpoints: bool = False


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
    """Finetune an adapter on data files.

    The adapter is saved in peft's format; --overwrite or --resume permits to replace a saved
    adapter. After Ctrl-C, the same command resumes the job and yields the identical adapter.
    """
    from pcg.train.config_file import CHECKPOINTS, RECORD

    _check_output(files, options.values.get("resume") is True)
    places = {"checkpoint_dir": files.output / CHECKPOINTS, "record": files.output / RECORD}
    values = {**places, **options.values}
    if not values.get("max_grad_norm", 1.0):
        values["max_grad_norm"] = None
    job = FinetuneOptions(**values)  # checks the options before the model is loaded
    peft = _configuration(method, files)
    compiled = dict(compiling.values)
    tp, dp = shards_and_replicas(program, compiled, place, over.dp)
    if tp > 1 and not is_program_folder(program):
        compiled |= own_step(job, compiled, dp, place.cp)
    if tp == 1:
        # This is also a job option; the compile option only affects sums over ranks.
        compiled.pop("gradient_accumulation_steps", None)
    compiled["tp"] = tp
    ranks = replace(over, dp=dp)
    act = partial(train, program, compiled, ranks, place, files, peft, values, json)
    on_ranks(tp * dp * place.groups, act)


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
    """Finetune and save an adapter on this rank, and print its losses.

    If `peft` is None, the adapter uses the program's method.
    """
    from pcg.peft.adapter_files import has_adapter
    from pcg.train.config_file import OutputOptions, own_recipe
    from pcg.train.sft import finetune_and_save

    executor = open_executor(program, None, compiling, place, over)
    replaces = has_adapter(files.output)
    peft = own_recipe(executor, files.adapter) if peft is None else peft
    with step_lines(options.get("log_every")):
        keeps = files.keep_checkpoints
        target = OutputOptions(adapter=files.adapter, output=files.output, keep_checkpoints=keeps)
        result = finetune_and_save(executor, files.data, target, peft, options)
    if executor.ranks.rank:
        return
    use = use_command(program, {**compiling, **options}, files.adapter, files.output, files.data)
    print_result(result, use, files.output, as_json=json, replaces=replaces)


def own_step(
    job: FinetuneOptions, compiling: Mapping[str, Any], dp: int = 1, cp: int = 1
) -> dict[str, int]:
    """Return the batch and the length of a job's step, to plan its layouts over ranks.

    The result is empty if the examples' length is unbounded, or `compiling` sets batch or seq.

    Args:
        compiling: fields of `CompileOptions` that the command line sets.
        dp: the number of replicas that divide a batch.
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
    """Refuse an output that cannot be written or has a finished adapter, before data is read.

    Args:
        resumes: True if the job must resume from a checkpoint; then a saved adapter is expected.
    """
    from pcg.peft.adapter_files import has_adapter

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
    """Return the method's configuration or the adapter to start from; None if neither is set."""
    if files.start_from is not None:
        if method.is_given:
            raise typer.BadParameter("a saved adapter has its own", param_hint=method.first_flag)
        return files.start_from
    return method.one() if method.is_given else None


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
        help="Override a value of the file, such as learning_rate=1e-4 or peft.r=8. Repeatable.",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
    ),
]


def sft_command(config: Config, settings: Settings, json: Json = False) -> None:
    """Finetune an adapter on examples, from a configuration file.

    The file's keys are the arguments of `executor.finetune` and the options of pcg finetune
    (docs/finetuning.md). After Ctrl-C, the same command resumes the job.
    """
    check_alone("pcg train sft")
    from pcg.peft.adapter_files import has_adapter
    from pcg.train.config_file import OutputOptions, read_config
    from pcg.train.sft import SFT_KEYS, train_sft

    read = read_config(config, SFT_KEYS, settings)
    output = read.make(OutputOptions).output
    replaces = has_adapter(output)
    with step_lines(read.values.get("log_every")):
        result = train_sft(read)
    print_result(result, _use(read), output, as_json=json, replaces=replaces)


def grpo_command(config: Config, settings: Settings, json: Json = False) -> None:
    """Train an adapter on rewards by GRPO, from a configuration file.

    The file's keys are the options of GRPO (docs/finetuning.md), data and rewards. Reward functions
    are your Python code and run in this process. After Ctrl-C or a crash, the same command resumes
    from the last checkpoint.
    """
    check_alone("pcg train grpo")
    from pcg.peft.adapter_files import has_adapter
    from pcg.train.config_file import OutputOptions, read_config
    from pcg.train.grpo.train import GRPO_KEYS, train_grpo_file

    read = read_config(config, GRPO_KEYS, settings)
    output = read.make(OutputOptions).output
    replaces = has_adapter(output)
    result = train_grpo_file(read, None if json else print_update)
    print_rewards(result, _use(read), output, as_json=json, replaces=replaces)


def dpo_command(config: Config, settings: Settings, json: Json = False) -> None:
    """Train an adapter on preferences between two outputs, from a configuration file.

    The file's keys are those of pcg train sft and the options of direct preference optimization
    (docs/finetuning.md). After Ctrl-C, the same command resumes the job.
    """
    from pcg.train.preference.dpo import DPO_KEYS, train_dpo

    _train_on_preferences("dpo", config, settings, DPO_KEYS, train_dpo, as_json=json)


def kto_command(config: Config, settings: Settings, json: Json = False) -> None:
    """Train an adapter on completions that are labelled desirable or not, from a configuration.

    The file's keys are those of pcg train sft and the options of Kahneman-Tversky optimization
    (docs/finetuning.md). After Ctrl-C, the same command resumes the job.
    """
    from pcg.train.preference.kto import KTO_KEYS, train_kto

    _train_on_preferences("kto", config, settings, KTO_KEYS, train_kto, as_json=json)


def _train_on_preferences(
    kind: str,
    path: Path,
    settings: Sequence[str],
    keys: Sequence[type],
    train: Callable[[ConfigFile], PreferenceResult],
    *,
    as_json: bool,
) -> None:
    check_alone(f"pcg train {kind}")
    from pcg.train.config_file import OutputOptions, read_config

    config = read_config(path, keys, settings)
    output = config.make(OutputOptions).output
    with step_lines(config.values.get("log_every")):
        result = train(config)
    print_preferences(result, _use(config), output, as_json=as_json)


def _use(config: ConfigFile) -> str:
    from pcg.train.config_file import OutputOptions

    files, values = config.make(OutputOptions), config.values
    model = config.near(values["model"])
    return use_command(model, values, files.adapter, files.output, values["data"])
