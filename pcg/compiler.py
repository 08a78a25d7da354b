"""Public calls of the compiler: from a model and PEFT recipes to a program, and to an executor."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from pcg.errors import (
    AdapterError,
    CostModelError,
    LogitsError,
    ProgramError,
    SourceError,
)
from pcg.files import cache_folder, expanded
from pcg.given_module import (
    VERIFIED_PARAMETERS,
    check_logits,
    check_weights,
    labelled,
    source_of,
)
from pcg.ir.program.folder import load_program, save_program
from pcg.ir.program.manifest import MANIFEST, read_manifest
from pcg.ir.program.program import Program, check_same_model, is_classifier
from pcg.ir.types import TORCH_NAMES
from pcg.kernels import attention_libraries
from pcg.kernels.attention_libraries import is_ready
from pcg.kernels.devices import indexed, on_device
from pcg.kernels.torch.product_times import fastest_dtype, fastest_format
from pcg.kernels.triton.backend import check_device, choose_backend, machine_device
from pcg.keywords import takes
from pcg.options import AUTO, Backend, CompileOptions, dtype_name
from pcg.parallel.costs.catalog import costs_name, own_profile, own_sheet
from pcg.passes.graphs.pass_base import PassRecord
from pcg.passes.pipeline import BaseSpecialiser, pipeline, settings_of
from pcg.passes.place import CallPieces
from pcg.passes.quantize_weights import experts_of
from pcg.peft.adapter_files import is_recipe, recipes_of
from pcg.peft.recipe import Recipe
from pcg.peft.registry import recipe_fields, recipe_of_fields
from pcg.ranks.agreement import agreed, check_same, check_same_program
from pcg.ranks.join import RankOptions, check_started, join_mesh, own_device, started_ranks
from pcg.ranks.mesh import MeshSizes, RankMesh
from pcg.runtime.model.base_weights import TensorSource, check_same_weights
from pcg.runtime.model.gguf_weights import open_weights
from pcg.runtime.model.random_weights import RandomWeights
from pcg.runtime.model.weights import StateDictCheckpoint, Weights
from pcg.runtime.requests.plain import tokenizer_facts
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.source import COMPOSITE, ModelSource, resolve, tokenizer_directory
from pcg.trace import TracedModel
from pcg.trace import trace as trace_config

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor

_LOG = logging.getLogger("pcg.compiler")
MOST_CACHED = 64
"""Programs in the user's cache; the oldest are removed."""


@dataclass(frozen=True)
class ProgramArguments(CompileOptions):
    """Arguments of `compile_program`.

    Attributes:
        model: a directory with a config.json, a hub id, an id that ships with pcg, a config, or a
            transformers model in memory.
        peft: None, a word of `pcg.peft.registry.SHORTHANDS`, a recipe, a peft configuration, a dict
            of its fields, or {name: any of these, or an adapter's directory}.
        observe: called with the record of each finished pass.
        place: cuts the layers between a base executor and its client; None for a single process.
    """

    model: Any
    peft: object = "lora"
    observe: Callable[[PassRecord], None] | None = field(default=None, kw_only=True)
    place: CallPieces | None = field(default=None, kw_only=True)


@takes(ProgramArguments)
def compile_program(arguments: ProgramArguments) -> Program:
    """Compile a model to a program, without weights; PcgError names the unreadable part."""
    source, to_trace = source_of(arguments.model, arguments.labels)
    device = machine_device()
    return _compiled(
        source,
        to_trace,
        arguments.peft,
        arguments,
        device,
        arguments.observe,
        place=arguments.place,
    )


def _recipes_of(peft: object, config: Mapping[str, Any]) -> dict[str, Recipe]:
    return recipes_of(peft, config.get(COMPOSITE, ""), of_labels=is_classifier(config))


def _measured_format(
    config: Mapping[str, Any], traced: TracedModel, device: torch.device
) -> str | None:
    """Return the fastest format of a model; None for a stored one, and for experts."""
    if config.get("quantization_config") or experts_of(traced.graph):
        return None
    return fastest_format(device, TORCH_NAMES[traced.dtype])


def _compiled(
    source: ModelSource,
    to_trace: Mapping[str, Any] | torch.nn.Module,
    peft: object,
    options: CompileOptions,
    device: torch.device,
    observe: Callable[[PassRecord], None] | None = None,
    whole: bool = False,
    place: CallPieces | None = None,
) -> Program:
    recipes = _recipes_of(peft, source.config)
    is_measured = options.quantization == AUTO
    values = {
        option.name: getattr(options, option.name) for option in dataclasses.fields(CompileOptions)
    }
    values["costs"] = costs_name(options.costs) if options.tp > 1 else None
    values["tp_plan"] = options.styles or None
    is_fastest = options.dtype == AUTO
    values["dtype"] = fastest_dtype(device) if is_fastest else dtype_name(options.dtype)
    values["quantization"] = None if is_measured else options.quantization
    values["memory_budget"] = options.budget.written
    values["backend"] = choose_backend(options.backend, device).name
    settled = CompileOptions(**{**values, "attention": attention_libraries.OWN})
    settings = settings_of(source.name, source.config, recipes.values(), settled, place)
    passes = pipeline(replace(settings, whole=whole))
    traced = passes.trace.run(to_trace, observe)
    if is_measured:
        chosen = _measured_format(source.config, traced.trace, device)
        settled = replace(settled, quantization=chosen)
        passes = pipeline(replace(settings, options=settled))
    base = passes.raise_operators.run(passes.fold.run(traced, observe), observe)
    backend = choose_backend(options.backend, device, base.model)
    if backend.name == "torch" and options.backend == "auto" and device.type == "cuda":
        _LOG.warning("%s is compiled for %s", source.name, backend)
    attention = attention_libraries.choose_libraries(options.attention, backend.name, device)
    settled = replace(settled, backend=backend.name, attention=attention)
    settings = settings_of(source.name, source.config, recipes.values(), settled, place)
    emitted = pipeline(settings).emitted(base, observe)
    attention = attention_libraries.choice_text(attention, emitted.graphs.values())
    return Program(
        source.name,
        source.config,
        base.model,
        serving=emitted.serving,
        training=emitted.training,
        recipes={name: recipe_fields(recipe) for name, recipe in recipes.items()},
        options=replace(settled, dtype=TORCH_NAMES[traced.trace.dtype]),
        constants=traced.trace.constants,
        base_prefix=traced.trace.base_prefix,
        dtype=traced.trace.dtype,
        renamings=traced.trace.renamings,
        choices={"backend": str(backend), "attention": attention},
    )


@dataclass(frozen=True)
class CompileArguments(RankOptions, CompileOptions):
    """Arguments of `compile`.

    Attributes:
        model: a directory with weights, a hub id, or a transformers model in memory.
        peft: None, a word such as "lora", a recipe, a peft configuration, or {name: any of these,
            or an adapter's directory}; named adapters are added to the executor.
        tp: tensor-parallel degree. Above 1, this process is a rank of that many processes, as
            started by torchrun, and all ranks make the same calls.
        device: the device of the weights; by default the GPU if available, else the CPU. Over ranks
            "cuda" is each rank's own GPU, and a GPU that two ranks name is refused.
        cache: load the program that an equal call has compiled, or keep it, under XDG_CACHE_HOME;
            not for a model in memory.
        tokenizer: a directory, a hub id, or a tokenizer of transformers; by default the model's
            own, for a model in memory that of its `config._name_or_path`.
        verify: compare the logits of a few tokens with those of a model in memory; by default for
            at most 2e9 parameters.
    """

    model: Any
    peft: object = None
    device: str | torch.device | None = field(default=None, kw_only=True)
    cache: bool = field(default=False, kw_only=True)
    tokenizer: Any = field(default=None, kw_only=True)
    verify: bool | None = field(default=None, kw_only=True)


@takes(CompileArguments)
def compile(arguments: CompileArguments) -> Executor:
    """Compile a model and load its weights; return an executor that generates and finetunes.

    A model in memory is traced itself, with its own classes, buffers and hooks, and stays
    unchanged.

    Raises:
        ParallelError: the ranks have compiled different programs; names the difference.
        PcgError: the model or an adapter cannot be read, traced, attached or loaded.
    """
    device, module = arguments.device, arguments.model
    sizes = arguments.sizes(arguments.tp)
    if sizes.world > 1:
        if started_ranks() == 1:
            check_started(sizes)
        # Select the rank's own GPU first: torch's current GPU is the same on all ranks.
        device = own_device(machine_device(device))
    costs = arguments.costs
    if arguments.tp > 1 and costs is None:
        costs = _own_sheet(machine_device(device), arguments.tp)
    mesh = join_mesh(sizes, machine_device(device), arguments.rank_timeout_s).sharing(
        arguments.shard_base
    )
    ranks, options = mesh.world, arguments
    if arguments.tp > 1:
        check_same(ranks, "compile", {"costs": "given" if costs else "measured"})
        costs = costs or own_profile(mesh.tp, arguments.dtype, source_of(arguments.model)[0].config)
        options = replace(arguments, costs=costs)

    def compiled_here(
        source: ModelSource,
        to_trace: Mapping[str, Any] | torch.nn.Module,
        options: CompileOptions,
        whole: bool = False,
    ) -> Program:
        return _compiled(
            source, to_trace, arguments.peft, options, machine_device(device), whole=whole
        )

    if not isinstance(module, torch.nn.Module):

        def read() -> tuple[ModelSource, Program, Weights]:
            source = resolve(module, weights=True)
            source, _ = labelled(source, source.config, arguments.labels)
            compile_here = partial(compiled_here, source, source.config, options)
            program = (
                _cached(_cache_key(source, arguments, options, device), compile_here)
                if arguments.cache
                else compile_here()
            )
            return source, program, open_weights(source, program)

        source, program, checkpoint = agreed(ranks, "compile", read)
        return make_executor(
            program,
            checkpoint,
            arguments.peft,
            source,
            device,
            mesh,
            tokenizer=arguments.tokenizer,
        )
    source, _ = source_of(module, arguments.labels)
    if source.location:
        source = replace(source, directory=tokenizer_directory(source.location, downloads=False))
    count = sum(parameter.numel() for parameter in module.parameters())
    verified = count <= VERIFIED_PARAMETERS if arguments.verify is None else arguments.verify

    def loaded(whole: bool, options: CompileOptions) -> Executor:
        def trace_here() -> Program:
            check_weights(module)
            return compiled_here(source, module, options, whole)

        program = agreed(ranks, "compile", trace_here)
        weights = StateDictCheckpoint(module.state_dict(keep_vars=True), program.base_prefix)
        return make_executor(
            program,
            weights,
            arguments.peft,
            source,
            device,
            mesh,
            tokenizer=arguments.tokenizer,
        )

    def compiled(whole: bool) -> Executor:
        if not verified or options.quantization is None:
            executor = loaded(whole, options)
            if verified:
                check_logits(executor, module)
            return executor
        # The float program is verified, as quantization changes the logits.
        check_logits(loaded(whole, replace(options, quantization=None)), module)
        return loaded(whole, options)

    try:
        return compiled(whole=False)
    except LogitsError:
        # Layers with equal modules may depend on their index.
        return compiled(whole=True)


def _cache_key(
    source: ModelSource,
    arguments: CompileArguments,
    options: CompileOptions,
    device: str | torch.device | None,
) -> str:
    """Return everything that a program depends on, as text: also pcg's files and the machine."""
    recipes = _recipes_of(arguments.peft, source.config)
    place = machine_device(device)
    names = [option.name for option in dataclasses.fields(CompileOptions)]
    files = sorted(Path(__file__).parent.rglob("*.py"))
    facts = {
        "model": [source.name, source.config],
        "options": {name: getattr(options, name) for name in names},
        "recipes": {name: recipe_fields(recipe) for name, recipe in recipes.items()},
        "device": str(place) if place.type == "cpu" else torch.cuda.get_device_properties(place),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "versions": [torch.__version__, importlib.metadata.version("transformers")],
        "libraries": [
            find_spec("triton") is not None,
            *map(is_ready, attention_libraries.LIBRARIES),
        ],
        "pcg": [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
    }
    return json.dumps(facts, sort_keys=True, default=str)


def _cached(key: str, compile_here: Callable[[], Program]) -> Program:
    """Return the program of a key from the user's cache, or compile it and keep it there."""
    folder = cache_folder("programs") / hashlib.sha256(key.encode()).hexdigest()[:32]
    if folder.exists():
        try:
            return load_program(folder)
        except (OSError, ProgramError):  # damaged, and compiled again
            shutil.rmtree(folder, ignore_errors=True)
    program = compile_here()
    # A cache that cannot be written costs time alone.
    with contextlib.suppress(OSError, ProgramError):
        save_program(program, folder)
        kept = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in kept[:-MOST_CACHED]:
            shutil.rmtree(old, ignore_errors=True)
    return program


def _own_sheet(device: torch.device, degree: int) -> str | None:
    try:
        return own_sheet(device, degree)
    except CostModelError:
        return None


def compile_random(
    model: str | os.PathLike[str] | Mapping[str, Any],
    *,
    tp: int = 1,
    backend: Backend = "auto",
    dtype: str | None = None,
    adapter_copies: Literal["bfloat16", "float32"] | None = None,
    attention: str = "auto",
    device: str | torch.device | None = None,
    seed: int = 0,
) -> Executor:
    """Compile a model with random weights; return an executor for measurements.

    Args:
        model: the model without its weights, as for `compile_program`.
        tp, backend, dtype, adapter_copies, attention: as in `CompileOptions`.
        device: the device of the weights; by default the GPU if available, else the CPU.
    """
    source = resolve(model)
    options = CompileOptions(
        tp=tp, backend=backend, dtype=dtype, adapter_copies=adapter_copies, attention=attention
    )
    program = _compiled(source, source.config, None, options, machine_device(device))
    weights = RandomWeights(float(source.config.get("initializer_range", 0.02)), seed)
    return make_executor(program, weights, None, source, device)


@dataclass(frozen=True)
class LoadArguments(RankOptions):
    """Arguments of `load`.

    Attributes:
        directory: the folder of a compiled program. Loading runs its emitted source.
        weights: directory or hub id of the weights; by default their location at compile time.
        device: the device of the weights; by default the GPU if available, else the CPU.
        trust_edits: accept edited emitted source.
    """

    directory: str | os.PathLike[str]
    weights: str | os.PathLike[str] | None = None
    device: str | torch.device | None = None
    trust_edits: bool = field(default=False, kw_only=True)


@takes(LoadArguments)
def load(arguments: LoadArguments) -> Executor:
    """Load a compiled folder and its weights; return an executor that generates and finetunes.

    Raises:
        PcgError: the folder or the weights are missing, damaged, or of another model.
    """
    folder, weights = expanded(arguments.directory), arguments.weights
    program = load_program(folder, trust_edits=arguments.trust_edits)
    for name, fields in program.recipes.items():
        try:
            recipe_of_fields(fields)
        except (AttributeError, TypeError, AdapterError) as error:
            raise ProgramError(
                f"{folder / MANIFEST}: recipe {name!r} is damaged: {error}"
            ) from error
    place = weights if weights is not None else read_manifest(folder).weights
    if place is None:
        raise ProgramError(
            f"{folder} was compiled from a configuration alone; say where the weights of "
            f"{program.name} lie: --weights PATH (weights=PATH)"
        )
    try:
        source = resolve(place, weights=True)
    except SourceError as error:
        if weights is not None:
            raise
        raise ProgramError(
            f"{folder} was compiled from {place}, whose weights cannot be used now ({error}); say "
            "where they lie: --weights PATH (weights=PATH)"
        ) from error
    check_same_model(program, source.config, os.fspath(place))
    source, _ = labelled(source, source.config, program.options.labels)
    checkpoint = open_weights(source, program)
    # A program compiled from a shipped config has no tokenizer; the weights include it.
    has_tokenizer = (folder / "tokenizer.json").exists()
    if has_tokenizer:
        source = replace(source, directory=folder)
    device = own_device(machine_device(arguments.device))
    mesh = join_mesh(arguments.sizes(program.options.tp), device, arguments.rank_timeout_s)
    mesh = mesh.sharing(arguments.shard_base)
    return make_executor(program, checkpoint, None, source, device, mesh)


def trace(model: Any, dtype: str | None = None, *, whole: bool = False) -> TracedModel:
    """Trace a model to a graph, before any pass; no weights are needed.

    Args:
        model: a directory, a hub id, an id that ships with pcg, a config, or a transformers model.
        dtype: torch's name of the dtype; the configuration's own by default.
        whole: trace every layer instead of one layer of each kind, plus one.
    Raises:
        SourceError: the model cannot be found or read.
        TraceError: the model has no graph; names the operator and the module.
    """
    return trace_config(source_of(model)[1], dtype_name(dtype), whole)


def make_executor(
    program: Program,
    weights: TensorSource,
    peft: object,
    source: ModelSource | None,
    device: str | torch.device | None = None,
    mesh: RankMesh | None = None,
    place: CallPieces | None = None,
    *,
    tokenizer: Any = None,
) -> Executor:
    """Return an executor of a program with weights.

    Args:
        weights: the weights of the program's base.
        peft: the adapters to add, by name; other values add none.
        source: the location of the base, and the directory of its tokenizer.
        tokenizer: as in `CompileArguments`.
        device: the device of the weights; by default the GPU if available, else the CPU.
        mesh: the ranks that run it; by default the processes of torchrun.
        place: as in `compile_program`.
    """
    from pcg.runtime.executor import Executor
    from pcg.runtime.model.state import ModelState

    device = machine_device(device)
    if mesh is None:
        device = own_device(device)
        mesh = join_mesh(MeshSizes(tp=program.options.tp), device)
    device = indexed(device)
    ranks = mesh.world
    check_same_program(ranks, program)

    def check() -> None:
        check_device(program.options.backend, device)
        attention_libraries.check_libraries(program.options.attention, device)

    agreed(ranks, "the device", check)
    check_same_weights(ranks, weights)
    directory = None if source is None else source.directory
    files = None if directory is None else tokenizer_directory(directory, downloads=False)
    chosen = files if tokenizer is None else tokenizer
    read = agreed(
        ranks,
        "the tokenizer",
        lambda: None if chosen is None else Tokenizer.of(chosen),
        tokenizer_facts,
        "Give all ranks the same tokenizer.json, and the files beside it",
    )
    specialiser = BaseSpecialiser(place)
    with on_device(device):
        state = ModelState(
            program,
            weights,
            specialiser,
            tokenizer=read,
            has_own_tokenizer=tokenizer is None and read is not None,
            base_name="" if source is None else source.location,
            device=device,
            mesh=mesh,
        )
    executor = Executor(state)
    if isinstance(peft, Mapping) and not is_recipe(peft):
        for name, value in peft.items():
            executor.add_adapter(str(name), value)
    return executor
