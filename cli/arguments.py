"""The arguments that several commands share: the model, its recipe, where it runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

RECIPE = "Recipe"
OPTIMIZER = "Optimizer and schedule"


def complete_model(incomplete: str) -> list[str]:
    """The models that ship with pcg, for shells."""
    from pcg.source import shipped

    return [name for name in shipped() if name.lower().startswith(incomplete.lower())]


Model = Annotated[
    str,
    typer.Argument(
        help="Directory with a config.json, hub id, or a model of [cyan]pcg models[/].",
        autocompletion=complete_model,
        show_default=False,
        metavar="MODEL",
    ),
]
Runnable = Annotated[
    str,
    typer.Argument(
        help="Compiled program, or a directory or hub id of a model with weights.",
        autocompletion=complete_model,
        show_default=False,
        metavar="DIR_OR_MODEL",
    ),
]
Peft = Annotated[
    str,
    typer.Option(
        help="lora, dora, adalora, ia3, vera, houlsby, pfeiffer, parallel, bitfit, prompt, "
        "p-tuning, prefix, none, or the directory of an adapter whose recipe to take.",
        metavar="METHOD|none|PATH",
        rich_help_panel=RECIPE,
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(
        help="LoRA rank. 16 by default.", show_default=False, rich_help_panel=RECIPE, metavar="R"
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        help="LoRA alpha; the scale is alpha / rank. Twice the rank by default.",
        show_default=False,
        rich_help_panel=RECIPE,
        metavar="ALPHA",
    ),
]
Targets = Annotated[
    str | None,
    typer.Option(
        help="Modules to adapt: names parted by commas, or all-linear, the default.",
        show_default=False,
        rich_help_panel=RECIPE,
        metavar="NAME,…",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16 or float64; the model's own by default.",
        show_default=False,
        metavar="DTYPE",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--memory-budget",
        help="What finetuning keeps for backward: 1 all that spares a matrix product (the "
        "default), 0 the least, or bytes, as 8GiB.",
        show_default=False,
        metavar="0..1|BYTES",
    ),
]
Batch = Annotated[int, typer.Option(help="Sequences of a finetuning step.", metavar="B")]
Seq = Annotated[int, typer.Option(help="Tokens of a sequence.", metavar="S")]
TensorParallel = Annotated[int, typer.Option("--tp", help="Tensor-parallel degree.", metavar="N")]
SequenceParallel = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel",
        help="With --tp: ranks hold parts of the tokens of norms and residuals.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--tp",
        help="Tensor-parallel degree: so many processes are started here. A program has its own.",
        show_default=False,
        metavar="N",
        min=1,
    ),
]
Accumulation = Annotated[
    int,
    typer.Option(
        "--gradient-accumulation-steps",
        help="With --tp: batches an optimizer step, which share the sums of adapters' gradients.",
        metavar="N",
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        help="What source is emitted for: torch (any device) or triton (NVIDIA GPUs).",
        metavar="NAME",
    ),
]
ModelBackend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Of a model: torch (any device) or triton (NVIDIA GPUs). A program has its own.",
        show_default=False,
        metavar="NAME",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="As torch names it; a GPU where there is one, else the CPU.",
        show_default=False,
        metavar="DEVICE",
    ),
]
WeightsPlace = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="Where the weights of a compiled program lie, if no longer where it found them.",
        show_default=False,
        metavar="PATH",
    ),
]
TrustEdits = Annotated[
    bool, typer.Option("--trust-edits", help="Run a program whose emitted source was edited.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]


OptimizerName = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help="Of torch.optim: adadelta, adafactor, adagrad, adam, adamax, adamw, asgd, muon, "
        "nadam, radam, rmsprop, rprop or sgd.",
        rich_help_panel=OPTIMIZER,
        metavar="NAME",
    ),
]
OptimizerOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--optimizer-option",
        help="Of the optimizer, by torch's name, as momentum=0.9 or etas=[0.5,1.2]. Repeatable.",
        show_default=False,
        rich_help_panel=OPTIMIZER,
        metavar="NAME=VALUE",
    ),
]


def optimizer_options_of(values: list[str] | None) -> dict[str, Any] | None:
    """Options of an optimizer by name, from `name=value` each; what is no JSON is a word."""
    options: dict[str, Any] = {}
    for value in values or ():
        name, equals, text = value.partition("=")
        if not (name and equals and text):
            raise typer.BadParameter(f"{value!r}; use NAME=VALUE", param_hint="--optimizer-option")
        if name in options:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--optimizer-option")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options or None


def adapters_of(values: list[str]) -> dict[str, Path]:
    """Adapters by name, from `name=path` each."""
    adapters: dict[str, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            raise typer.BadParameter(f"{value!r}; use NAME=PATH", param_hint="--adapter")
        if name in adapters:
            raise typer.BadParameter(f"two adapters are called {name!r}", param_hint="--adapter")
        adapters[name] = Path(path).expanduser()
    return adapters


def peft_of(
    peft: str,
    rank: int | None = None,
    alpha: float | None = None,
    targets: str | None = None,
    *,
    option: str = "--peft",
) -> Any:
    """What the options of the recipe mean, as `pcg.compile` takes it.

    Args:
        peft: none, a word of `SHORTHANDS` or the directory of an adapter.
        rank: of LoRA.
        alpha: of LoRA.
        targets: of LoRA.
        option: that `peft` was given by.
    Raises:
        typer.BadParameter: options that do not go together.
        AdapterError: a number out of its range.
    """
    given = {"--rank": rank, "--alpha": alpha, "--targets": targets}
    options = [name for name, value in given.items() if value is not None]
    if peft.lower() != "lora" and options:
        raise typer.BadParameter(f"it has no effect with --peft {peft}", param_hint=options[0])
    if peft.lower() == "none":
        return None
    if peft.lower() == "lora":
        return lora_of(rank, alpha, targets) if options else "lora"
    from pcg.peft.registry import SHORTHANDS, is_shorthand

    if is_shorthand(peft):
        return peft.lower()
    if not Path(peft).expanduser().is_dir():
        raise typer.BadParameter(
            f"{peft!r} is neither none nor one of {', '.join(SHORTHANDS)}, nor the directory of an "
            "adapter",
            param_hint=option,
        )
    path = Path(peft).expanduser()
    return {path.resolve().name: path}


def lora_of(rank: int | None, alpha: float | None, targets: str | None) -> Any:
    """The default recipe with what was given in place of its own."""
    from pcg.peft.recipe import ALL_LINEAR
    from pcg.peft.registry import SHORTHANDS

    recipe: Any = SHORTHANDS["lora"]
    modules: str | tuple[str, ...] = ALL_LINEAR
    if targets is not None and targets.lower() != ALL_LINEAR:
        modules = tuple(name.strip() for name in targets.split(",") if name.strip())
        if not modules:
            raise typer.BadParameter("it names no module", param_hint="--targets")
    rank = recipe.r if rank is None else rank
    return dataclasses.replace(
        recipe, r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=modules
    )


Costs = Annotated[
    str | None,
    typer.Option(
        help="Device that adapters are parallelized for: a name, as H100, or a file of "
        "pcg profile.",
        show_default=False,
        metavar="NAME|FILE",
    ),
]
TpPlan = Annotated[
    Path | None,
    typer.Option(
        "--tp-plan",
        help="JSON file with the base's plan over ranks: colwise, rowwise or replicated for each "
        "module path, as self_attn.q_proj.",
        show_default=False,
        metavar="FILE",
    ),
]
