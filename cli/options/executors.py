"""Opening of executors: a program, a model compiled on the spot, or a base executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

import typer

from pcg.errors import ParallelError, ProgramError
from pcg.files import expanded, is_file, read_json
from pcg.ir.program.manifest import is_program_folder, read_manifest
from pcg.options import PlanOptions

from .console import busy
from .fields import flags_of

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor

FIELDS: Mapping[str, tuple[str, ...]] = {
    "type": ("model_type",),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "dtype": ("dtype", "torch_dtype"),
}
"""Model families' names for each field of config.json."""
_CONNECTIONS = ExitStack()
"""Connections to base executors, closed after a command's work."""
SPLIT = "split://"
"""Prefix of a model name that addresses base executors: split://host:port."""
CLIENT = (
    "curve_key", "curve_server", "dtype", "memory_budget", "plaintext", "privacy", "program",
    "transport",
)  # fmt: skip
"""Compile options and address parameters (after the ?) that a client of a base executor accepts."""


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Options of the program, the device and the ranks.

    Attributes:
        device: the device, as torch names it; by default a GPU if available, else the CPU.
        weights: the location of a compiled program's weights, if they have moved.
        trust_edits: run a program whose emitted source was edited.
        pp: pipeline stages: multiplies the ranks; each group of ranks holds some of the layers
            (docs/parallel.md).
        cp: context-parallel degree: this many ranks, or groups of --tp ranks, share the tokens of
            each sequence or prompt (docs/parallel.md).
        rank_timeout_s: the longest time that a rank waits for the others, for example while they
            load weights, seconds; 300 by default.
    """

    title: ClassVar[str] = "Program or model"

    device: str | None = None
    weights: str | None = None
    trust_edits: bool = False
    pp: int = 1
    cp: int = 1
    rank_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, degree in (("pp", self.pp), ("cp", self.cp)):
            if degree < 1:
                raise ParallelError(f"{name}={degree}; use at least 1")

    @property
    def groups(self) -> int:
        """The number of groups of --tp ranks in a replica."""
        return self.pp * self.cp


@dataclass(frozen=True, kw_only=True)
class TrainingRanks:
    """Options for the division of a finetuning step over ranks, in addition to `tp`.

    Attributes:
        dp: data-parallel degree: multiplies the ranks; each group takes some sequences of every
            step. By default torchrun's processes divided by --tp, --cp and --pp, else 1.
        shard_base: keep 1/dp of the layers' weights on each replica; gather each layer before it
            runs and drop it afterwards. For bases that do not fit otherwise.
    """

    title: ClassVar[str] = PlanOptions.title

    dp: int | None = None
    shard_base: bool = False

    def __post_init__(self) -> None:
        if self.dp is not None and self.dp < 1:
            raise ParallelError(f"dp={self.dp}; use at least 1")


def open_executor(
    where: str,
    peft: object,
    compiling: Mapping[str, Any],
    place: PlaceOptions,
    over: TrainingRanks = TrainingRanks(),
) -> Executor:
    """Return an executor of a program, of a base executor, or of a model compiled with `compiling`.

    Raises:
        PcgError: a fault of the folder, the weights or an adapter.
    """
    if where.startswith(SPLIT):
        return _connected(where, peft, compiling, place)
    if is_program_folder(where):
        with busy(f"loading {where}"):
            from pcg import compiler

            executor = compiler.load(
                where,
                place.weights,
                place.device,
                trust_edits=place.trust_edits,
                dp=over.dp,
                pp=place.pp,
                cp=place.cp,
                shard_base=over.shard_base,
                rank_timeout_s=place.rank_timeout_s,
            )
            if isinstance(peft, Mapping):
                for name, path in peft.items():
                    executor.add_adapter(name, path)
        return executor
    from pcg.source import resolve

    resolve(where, weights=True)  # reports a wrong name within milliseconds
    with busy(f"compiling and loading {where}"):
        from pcg import compiler

        ranks: dict[str, Any] = {
            "device": place.device,
            "dp": over.dp,
            "pp": place.pp,
            "cp": place.cp,
            "shard_base": over.shard_base,
            "rank_timeout_s": place.rank_timeout_s,
        }
        return compiler.compile(where, peft, cache=True, **ranks, **compiling)


def _connected(
    where: str, peft: object, compiling: Mapping[str, Any], place: PlaceOptions
) -> Executor:
    """Return an executor of a base executor's model, by `pcg.connect`.

    Raises:
        typer.BadParameter: an option that clients do not have.
        PcgError: the base is absent or refuses the connection.
    """
    address, behind = _split_address(where)
    options = {**behind, **compiling}
    options.pop("tp", None)
    for name in options:
        if name not in CLIENT:
            raise typer.BadParameter(
                f"a client of a base executor has no {name}; it has {', '.join(CLIENT)}",
                param_hint=flags_of(name)[0] if name in compiling else "MODEL",
            )
    if "plaintext" in options:
        if options["plaintext"] not in ("0", "1", "false", "true"):
            raise typer.BadParameter(
                f"plaintext={options['plaintext']}; use true or false", param_hint="MODEL"
            )
        options["plaintext"] = options["plaintext"] in ("1", "true")
    with busy(f"connecting to {address}"):
        from pcg.split.client.connect import connect

        executor = connect(address, peft=peft, device=place.device, **options)
    _CONNECTIONS.callback(executor.close)
    return executor


def _split_address(where: str) -> tuple[str, dict[str, str]]:
    """Return the address and the parameters of split://HOST:PORT?NAME=VALUE&….

    Raises:
        typer.BadParameter: a parameter without name or value, or a repeated name.
    """
    address, _, query = where.removeprefix(SPLIT).partition("?")
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if not name or not value or name in options:
            raise typer.BadParameter(
                f"{part!r} is no option of a connection, or given twice; use "
                f"{SPLIT}HOST:PORT?NAME=VALUE&NAME=VALUE, with %26 for & in a value",
                param_hint="MODEL",
            )
        options[name] = unquote(value)
    return address.removesuffix("/"), options


def files_of(where: str, place: PlaceOptions) -> Path | None:
    """Return the directory with the tokenizer and the other files of a model.

    Raises:
        PcgError: the model cannot be found.
    """
    from pcg.source import resolve

    if where.startswith(SPLIT):
        return None  # the base sends the files
    if not is_program_folder(where):
        return resolve(where, weights=True).directory
    folder = expanded(where)
    if is_file(folder / "tokenizer.json"):
        return folder
    weights = place.weights or read_manifest(folder).weights
    return None if weights is None else resolve(weights, weights=True).directory


def degree_of(where: str, compiling: Mapping[str, Any], place: PlaceOptions) -> int:
    """Return the tensor-parallel degree of a program's folder or a model.

    Under torchrun, a model's degree defaults to the number of processes.

    Raises:
        typer.BadParameter: an option for models only or for programs only, an option that differs
            from the program's, or a degree that differs from torchrun's number of processes.
    """
    return shards_and_replicas(where, compiling, place, 1)[0]


def shards_and_replicas(
    where: str, compiling: Mapping[str, Any], place: PlaceOptions, dp: int | None
) -> tuple[int, int]:
    """Return the tensor-parallel and data-parallel degrees of a program's folder or a model.

    Args:
        dp: the data-parallel degree; None derives it from torchrun's number of processes.
    Raises:
        typer.BadParameter: see `degree_of`.
    """
    started, each = torchrun_ranks(), place.groups
    tp = _degree_of(where, compiling, place, max(started // ((dp or 1) * each), 1))
    if dp is None:
        dp = max(started // (tp * each), 1)
    taken = tp * dp * each
    _check_layers(where, place.pp)
    if started not in (1, taken):
        copies = f", each of which would run all of it; give --tp {started}" if taken == 1 else ""
        raise typer.BadParameter(
            f"torchrun has started {started} processes, and this takes {taken}{copies}",
            param_hint="--pp" if place.pp > 1 else "--cp" if place.cp > 1 else "--tp",
        )
    return tp, dp


def _check_layers(where: str, pp: int) -> None:
    """Refuse more pipeline stages than layers, before ranks are started.

    Raises:
        typer.BadParameter: names both numbers.
    """
    if pp == 1:
        return
    if is_program_folder(where):
        config = read_json(expanded(where) / "config.json", ProgramError)
    else:
        from pcg.source import resolve

        config = dict(resolve(where).config)
    known = (config[name] for name in FIELDS["layers"] if isinstance(config.get(name), int))
    layers = next(known, pp)
    if layers < pp:
        raise typer.BadParameter(
            f"{pp} stages need a layer each, and {where} has {layers}; use at most {layers}",
            param_hint="--pp",
        )


def torchrun_ranks() -> int:
    """Return the number of torchrun's processes, including this process; 1 without torchrun."""
    if "RANK" not in os.environ:
        return 1  # avoids the import of torch
    from pcg.ranks.join import started_ranks

    return started_ranks()


def check_alone(command: str) -> None:
    """Refuse to run copies of a single-process command under torchrun.

    Raises:
        typer.BadParameter: torchrun has started several processes.
    """
    started = torchrun_ranks()
    if started > 1:
        raise typer.BadParameter(
            f"torchrun has started {started} processes, which would each run all of {command}; "
            "start it without torchrun"
        )


def _degree_of(where: str, compiling: Mapping[str, Any], place: PlaceOptions, started: int) -> int:
    if not is_program_folder(where):
        for name, is_given in (("weights", place.weights), ("trust_edits", place.trust_edits)):
            if is_given:
                raise typer.BadParameter(
                    f"{where} is not a compiled program", param_hint=flags_of(name)[0]
                )
        is_split = where.startswith(SPLIT)
        degree = int(compiling.get("tp", 1 if is_split else started))
        if (degree > 1 or place.groups > 1) and is_split:
            raise typer.BadParameter(
                "a client of a base executor runs on one rank; the base may have several",
                param_hint="--tp" if degree > 1 else "--pp" if place.pp > 1 else "--cp",
            )
        return degree
    from pcg.ir.program.folder import options_of

    for name in compiling:
        if name not in ("tp", "sequence_parallel"):
            raise typer.BadParameter(
                f"a program's {name} is chosen by pcg compile", param_hint=flags_of(name)[0]
            )
    compiled, asked = options_of(where), compiling.get("tp")
    if asked not in (None, compiled.tp):
        raise typer.BadParameter(
            f"{where} was compiled for {compiled.tp}; compile it again: "
            f"pcg compile MODEL --tp {asked}",
            param_hint="--tp",
        )
    if compiling.get("sequence_parallel") and not compiled.sequence_parallel:
        raise typer.BadParameter(
            f"{where} was compiled without; compile it again: pcg compile MODEL --tp {compiled.tp} "
            "--sequence-parallel",
            param_hint="--sequence-parallel",
        )
    return compiled.tp


def on_ranks(degree: int, act: Callable[[], None], stops: Collection[Signals] = ()) -> None:
    """Run a command's work in this process, or on newly started ranks.

    Under torchrun this process is already a rank.

    Args:
        act: a picklable partial of a module-level function.
        stops: signals to forward to the ranks for an orderly end.
    """
    if degree > 1:
        from pcg.ranks.join import started_ranks
        from pcg.ranks.launch import launch, mute_others

        if started_ranks() == 1:
            launch(degree, act, {}, stops)
            return
        mute_others()
    with _CONNECTIONS:
        act()
