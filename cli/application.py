"""The typer application: the commands of `pcg`, and the exit status of each error.

    PcgError, OSError      error: …     exit 1
    any other exception    error: …     exit 1, and the message calls it a bug
    wrong usage            typer's box  exit 2
    Ctrl-C                 interrupted  exit 130

With --debug the first two are raised, with their tracebacks.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pcg.errors import FinetuneInterrupted, PcgError
from pcg.keywords import name_here
from pcg.version import __version__

from .bench_serve import serve_command as bench_serve_command
from .chat import chat_command
from .compile import compile_command, opt_command
from .data import show_command
from .doctor import doctor_command, models_command
from .evaluate import eval_command
from .explain import explain_command
from .init import init_command
from .merge import combine_command, export_command, merge_command, push_command
from .options.console import fail
from .options.fields import with_options
from .options.help import Command
from .plan import plan_command
from .profile import profile_command
from .quantize import quantize_command
from .run import run_command
from .runs import compare_command, list_command, report_command
from .serve import check_command, serve_base_command, serve_command
from .simulate import simulate_command
from .train import dpo_command, finetune_command, grpo_command, kto_command, sft_command

_COMMAND = "pcg.command"
"""The key of the command that runs, in the metadata of click's context."""
INTERRUPTED = 130  # 128 + SIGINT, the shells' convention


class LazyGroup(TyperGroup):
    """A typer group that builds the options of a command only to run it or to show its help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the command name and build the command's options."""
        name, command, rest = super().resolve_command(ctx, args)
        make = getattr(getattr(command, "callback", None), "make", None)
        command = command if make is None else make()
        ctx.meta[_COMMAND] = command
        return name, command, rest


class DefaultGroup(LazyGroup):
    """A group that runs its first command if the command line names no other."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the name of the first command, unless a command or help is requested."""
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


MODULES = "--lora-modules"


def _repeated_modules(args: Sequence[str]) -> list[str]:
    """Repeat `--lora-modules` before each module: vLLM's option accepts several NAME=PATH."""
    words: list[str] = []
    is_list = False
    for arg in args:
        is_module = not arg.startswith("-") and ("=" in arg or arg.lstrip().startswith("{"))
        is_list = is_list and is_module
        if is_list and words[-1] != MODULES:
            words.append(MODULES)
        words.append(arg)
        is_list = is_list or arg.partition("=")[0] == MODULES
    return words


class Group(LazyGroup):
    """The root group: --debug at any position, and one line for each error."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move --debug to the front, where the application reads it."""
        args = _repeated_modules(args)
        end = args.index("--") if "--" in args else len(args)
        if "--debug" in args[:end]:
            rest = [arg for arg in args[:end] if arg != "--debug"] + args[end:]
            args = ["--debug", *rest]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; convert an exception to one line and an exit status."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, FinetuneInterrupted) as error:
            fail(str(error) or "interrupted")
            raise typer.Exit(INTERRUPTED) from error
        except Exception as error:
            # Re-raise typer's exceptions (usage error, exit), and EPIPE from a closed output pipe.
            is_typers = type(error).__module__.partition(".")[0] in ("click", "typer")
            gone = isinstance(error, OSError) and error.errno == errno.EPIPE
            if type(error).__name__ == "NoSuchOption":
                _name_here(error)
            if is_typers or gone or ctx.params.get("debug"):
                raise
            parameters = getattr(ctx.meta.get(_COMMAND), "params", ())
            fail(f"error: {_with_options(_message(error), parameters)}")
            raise typer.Exit(1) from error


def _name_here(error: Any) -> None:
    """Add our name of another library's option to the error for an unknown option."""
    flags = {} if error.ctx is None else {p.name: p.opts[0] for p in error.ctx.command.params}
    ours, sentence = name_here(error.option_name.lstrip("-").replace("-", "_"), flags)
    if ours or sentence:
        hint = f"the name here is {flags[ours]}" if ours else sentence
        error.message, error.possibilities = f"{error.message}; {hint}", None


def _with_options(message: str, parameters: Sequence[Any]) -> str:
    """Replace the names of Python arguments in a message by the command's options.

    A name is an argument if it has an underscore, or a value: tp=3.
    """
    for parameter in parameters:
        name, option = parameter.name or "", parameter.opts[0]
        if option.startswith("--") and name:
            message = re.sub(rf"{option} \({name}=?\)", option, message)
            end = r"(?![\w(.'\"])" if "_" in name else "(?==)"
            message = re.sub(rf"(?<![\w.'\"/-]){name}{end}", option, message)
            message = re.sub(rf"({option}(?:=\S+)?) \({option}\)", r"\1", message)
            message = re.sub(rf"{option}='([\w.-]+)'", rf"{option} \1", message)
            if parameter.secondary_opts:
                message = message.replace(f"{option}=False", parameter.secondary_opts[0])
            if getattr(parameter, "is_flag", False):
                message = message.replace(f"{option}=True", option)
    return message


def _message(error: Exception) -> str:
    if isinstance(error, PcgError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    if isinstance(error, ModuleNotFoundError) and not _is_ours(error.name):
        from .options.extras import install_line

        return f"{error.name} is not installed: {install_line(str(error.name))}"
    # torch's class is recognized by name, so that torch is not imported; pcg's is a PcgError.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory: {error}; use fewer or shorter sequences at a time"
    return (
        f"{type(error).__name__}: {error}\nThis is a bug in pcg; --debug shows where it happened."
    )


def _is_ours(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in ("pcg", __name__.partition(".")[0])


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: [cyan]pcg explain meta-llama/Llama-3.1-8B --peft lora[/]",
)


def _version(show: bool) -> None:
    if show:
        print(f"pcg {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Compile, serve and finetune many adapters over one frozen language model."""


def _add(group: typer.Typer, command: Callable[..., None], *examples: str) -> None:
    name = command.__name__.removesuffix("_command").replace("_", "-")
    epilog = "\n\n".join(["Example:", *(f"[cyan]{example}[/]" for example in examples)])

    def make() -> Any:
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        alone.info.context_settings = app.info.context_settings
        alone.command(name, epilog=epilog, cls=Command)(with_options(command))
        return typer.main.get_command(alone)

    def listed() -> None: ...

    listed.make = make  # type: ignore[attr-defined]
    group.command(name, help=command.__doc__)(listed)


bench = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(bench, name="bench", help="Serve a workload and report the results.")
train = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(train, name="train", help="Train an adapter from a configuration file.")
data = typer.Typer(cls=DefaultGroup, no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(data, name="data", help="Show finetuning data, or check a server's data folder.")
adapters = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(adapters, name="adapters", help="Combine saved adapters.")
runs = typer.Typer(cls=DefaultGroup, rich_markup_mode="rich")
app.add_typer(runs, name="runs", help="List the runs below a folder, and compare them.")

_add(app, explain_command, "pcg explain llama-3.1-70b --batch 1 --seq 1024")
_add(app, compile_command, "pcg compile examples/checkpoint --rank 8 -o program")
_add(
    app,
    run_command,
    'pcg run program --prompt "def main(" --adapter sql=adapters/sql --use sql',
)
_add(
    app,
    chat_command,
    "pcg chat MODEL --adapter mine=adapters/mine",
    'pcg chat MODEL --system "Answer in one word." --temperature 0.7',
)
_add(
    app,
    finetune_command,
    "pcg finetune program --data train.jsonl --adapter mine --output adapters/mine",
    "pcg finetune MODEL --peft dora --r 16 --dropout 0.1 --data train.jsonl --adapter mine -o mine",
)
_add(
    app,
    eval_command,
    "pcg eval MODEL --adapter mine=adapters/mine --data test.jsonl",
    "pcg eval MODEL --adapter mine=adapters/mine --tasks arc_easy --limit 100",
)
_add(
    app,
    serve_command,
    "pcg serve examples/checkpoint --lora-modules typed=examples/adapters/typed",
    "pcg serve MODEL --host 0.0.0.0 --api-keys keys.json --tpot-slo-ms 50",
)
_add(
    app,
    serve_base_command,
    "pcg serve-base examples/checkpoint --port 8300",
    "pcg serve-base MODEL --policy opportunistic --wait-ms 2",
)
_add(app, init_command, "pcg init sft --model MODEL --data train.csv -o train.yaml")
_add(app, models_command, "pcg models --json", "pcg models --families")
_add(
    app,
    opt_command,
    "pcg compile MODEL --print-after trace | pcg opt - --passes fold,raise",
    "pcg opt --list",
)
_add(
    app,
    plan_command,
    "pcg plan llama-3.1-8b --workload train:4x2048 --gpus H100,A100-80,L40S",
    "pcg plan MODEL --workload serve:20req/s --tpot-slo-ms 50 --price H100=2.5,L40S=1.1",
)
_add(
    app,
    quantize_command,
    "pcg quantize MODEL --format nf4 -o model-nf4",
    "pcg quantize MODEL --format fp8_block --max-shard-size 4GB -o model-fp8",
)
_add(
    app,
    merge_command,
    "pcg merge MODEL --adapter adapters/mine -o merged",
    "pcg merge MODEL-nf4 --adapter adapters/mine --dtype bfloat16 -o merged",
)
_add(app, export_command, "pcg export MODEL --adapter adapters/mine -o mine.gguf")
_add(app, push_command, "pcg push adapters/mine OWNER/NAME --private")
_add(app, profile_command, "pcg profile --tp 2 -o profile.json")
_add(app, simulate_command, "pcg simulate flexllm --model Llama-3.1-8B --duration 60")
_add(app, doctor_command, "pcg doctor", "pcg doctor Qwen/Qwen2.5-7B")
_add(
    bench,
    bench_serve_command,
    "pcg bench serve examples/checkpoint --request-rate 4 --adapters 8",
    "pcg bench serve MODEL --finetune random --tpot-slo-ms 100 --plot latencies.svg",
)
_add(
    train,
    sft_command,
    "pcg train sft examples/configs/sft.yaml",
    "pcg train sft sft.yaml --set learning_rate=1e-4 --set output=adapters/mine",
)
_add(
    train,
    grpo_command,
    "pcg train grpo examples/configs/grpo.yaml",
    "pcg train grpo grpo.yaml --set beta=0.04 --set rewards=rewards.py:correct",
)
_add(train, dpo_command, "pcg train dpo examples/configs/dpo.yaml")
_add(train, kto_command, "pcg train kto examples/configs/kto.yaml")
_add(data, show_command, "pcg data train.jsonl --model examples/checkpoint")
_add(data, check_command, "pcg data check kept", "pcg data check kept --repair")
_add(
    adapters,
    combine_command,
    "pcg adapters combine adapters/a adapters/b --weights 1,0.5 -o both",
)
_add(runs, list_command, "pcg runs list", "pcg runs list adapters --json")
_add(runs, compare_command, "pcg runs compare adapters/a adapters/b --html compared.html")
_add(runs, report_command, "pcg runs report adapters/a")
