"""The compiler: from a model's configuration and PEFT recipes to a program.

    trace → fold → raise → attach → parallelize
          → differentiate → prune → compress → rematerialize → fuse → emit

The order stands in `PIPELINE` and nowhere else. Each pass takes the compilation so far and returns
it with its own result filled in; the verifier runs on every graph after every pass.

The file is long because the public calls (compile, load, trace, explain, compare) stand below the
pipeline that they run, so that the way from a model to an executor reads top to bottom.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pcg.codegen.emit import emit_serving, emit_training
from pcg.errors import (
    ParallelError,
    PassError,
    PcgError,
    ProgramError,
    SourceError,
    UnsupportedError,
)
from pcg.ir.graph import Graph
from pcg.ir.memory_budget import MemoryBudget
from pcg.ir.operators import operator
from pcg.ir.printer import print_graphs
from pcg.ir.program import ModelGraph, Program, Serving, Training
from pcg.ir.program_folder import load_program
from pcg.ir.program_manifest import read_manifest
from pcg.ir.recipes import Recipe, is_shorthand, recipe_fields
from pcg.ir.types import TORCH_NAMES
from pcg.ir.verifier import verify
from pcg.parallel.costs import SHEETS, CostModel, cost_model, own_sheet
from pcg.parallel.layer_costs import DeviceCosts
from pcg.parallel.ranks import Ranks, check_started, join, own_device
from pcg.passes.attach import attach
from pcg.passes.bypasses import Bypasses
from pcg.passes.compress import compress
from pcg.passes.fold import fold
from pcg.passes.fuse import fuse
from pcg.passes.parallelize import Sharded, parallelize, search_layer
from pcg.passes.plan import Frontiers, MemoryPlan, frontiers
from pcg.passes.prune import prune
from pcg.passes.raise_ import raise_model
from pcg.passes.sites import bypasses_of
from pcg.passes.train import LayerKind, layer_kinds, train_epilogue, train_prologue
from pcg.runtime.adapter_config import config_fields
from pcg.runtime.adapters import read_adapter, recipe_from
from pcg.runtime.tokenizer import Tokenizer
from pcg.runtime.weights import Checkpoint, StateDictCheckpoint, Weights
from pcg.source import resolve
from pcg.trace import Trace
from pcg.trace import trace as trace_config

if TYPE_CHECKING:
    import sympy

    from pcg.parallel.devices import Device
    from pcg.parallel.search import Search
    from pcg.passes.step_memory import Account, Asked
    from pcg.report import Report
    from pcg.runtime.executor import Executor


@dataclass(frozen=True)
class Compilation:
    """What the passes have made so far.

    Attributes:
        name: of the model.
        config: its config.json.
        bypasses: where bypass networks attach, by a function of the model's linear sites.
        dtype: asked for; None for the configuration's own.
        trains: whether to build what finetunes.
        budget: what that may keep for backward.
        whole: trace every layer, not one of each kind.
        tp: tensor-parallel degree. Above 1, the graphs after `parallelize` are those of one rank.
        costs: of the device and links that bypass networks are parallelized for.
    """

    name: str
    config: Mapping[str, Any]
    bypasses: Callable[[ModelGraph], Bypasses]
    dtype: str | None = None
    trains: bool = True
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    whole: bool = False
    tp: int = 1
    costs: CostModel | None = None
    traced: Trace | None = None
    base: ModelGraph | None = None
    serving_model: ModelGraph | None = None
    training_model: ModelGraph | None = None
    local_base: ModelGraph | None = None
    sharded: Sharded | None = None
    kinds: tuple[LayerKind, ...] = ()
    frontiers: Frontiers | None = None
    plan: MemoryPlan | None = None
    training_prologue: tuple[Graph | None, tuple[str, ...]] = (None, ())
    training_epilogue: tuple[Graph, Graph, tuple[str, ...]] | None = None
    serving: Serving | None = None
    training: Training | None = None

    def device_costs(self, trains: bool) -> DeviceCosts | None:
        """What a step costs on the device; None where that is not known."""
        if self.costs is None:
            return None
        tokens = self.budget.batch * self.budget.seq
        return DeviceCosts(self.costs, self.tp, tokens, self.budget.seq, trains=trains)

    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that the last pass made, for printing and verifying."""
        if self.training_epilogue is not None and self.training_model is not None:
            found: list[Graph | None] = [self.training_prologue[0]]
            for kind in () if self.plan else self.kinds:
                found += [kind.gradients.graph, kind.gradients.backward]
            for plan in self.plan.plans if self.plan else ():
                found += [plan.forward, plan.backward]
            layers = [graph for graph in found if graph is not None]
            return (self.training_model.prologue, *layers, self.training_epilogue[0])
        model = self.serving_model or self.base
        if model is not None:
            return model.graphs
        return (self.traced.graph,) if self.traced else ()


# ------------------------------------------------------------------------------------ the passes


def _trace(state: Compilation) -> Compilation:
    return dataclasses.replace(state, traced=trace_config(state.config, state.dtype, state.whole))


def _fold(state: Compilation) -> Compilation:
    traced = _made(state.traced)
    return dataclasses.replace(state, base=fold(traced.graph, traced.layers_path, traced.schedule))


def _raise(state: Compilation) -> Compilation:
    return dataclasses.replace(state, base=raise_model(_made(state.base)))


def _attach(state: Compilation) -> Compilation:
    base = _made(state.base)
    bypasses = state.bypasses(base)
    serving = attach(base, bypasses.for_serving())
    training = attach(base, bypasses) if state.trains and bypasses else None
    return dataclasses.replace(state, serving_model=serving, training_model=training)


def _parallelize(state: Compilation) -> Compilation:
    base = _made(state.base)
    if state.tp == 1:
        return dataclasses.replace(state, local_base=base)

    def over_ranks(model: ModelGraph | None, trains: bool) -> Sharded | None:
        if model is None:
            return None
        return parallelize(model, base, state.tp, state.device_costs(trains), trains)

    serving, training = (
        over_ranks(state.serving_model, False),
        over_ranks(state.training_model, True),
    )
    return dataclasses.replace(
        state,
        local_base=parallelize(base, base, state.tp).local,
        serving_model=serving.local if serving else None,
        training_model=training.local if training else None,
        sharded=training or serving,
    )


def _differentiate(state: Compilation) -> Compilation:
    model = state.training_model
    if model is None:
        return state
    return dataclasses.replace(
        state,
        kinds=layer_kinds(model),
        training_prologue=train_prologue(model),
        training_epilogue=train_epilogue(model),
    )


def _prune(state: Compilation) -> Compilation:
    kinds = tuple(
        dataclasses.replace(kind, gradients=prune(kind.gradients, kind.wrt)) for kind in state.kinds
    )
    return dataclasses.replace(state, kinds=kinds)


def _compress(state: Compilation) -> Compilation:
    kinds = tuple(
        dataclasses.replace(kind, gradients=compress(kind.gradients)) for kind in state.kinds
    )
    return dataclasses.replace(state, kinds=kinds)


def _rematerialize(state: Compilation) -> Compilation:
    if state.training_model is None:
        return state
    budget = state.budget
    found = frontiers(state.training_model, state.kinds, budget.batch, budget.seq)
    return dataclasses.replace(state, frontiers=found, plan=found.plan(budget))


def _fuse(state: Compilation) -> Compilation:
    return dataclasses.replace(state, serving_model=fuse(_made(state.serving_model)))


def _emit(state: Compilation) -> Compilation:
    model = _made(state.serving_model)
    serving = Serving(model, emit_serving(state.name, model))
    training = None
    if state.training_model is not None:
        epilogue, loss, trained = _made(state.training_epilogue)
        model, plan = state.training_model, _made(state.plan)
        prologue, prologue_trained = state.training_prologue
        source = emit_training(state.name, model, plan.plans, plan.layers, epilogue, loss, prologue)
        training = Training(
            model,
            plan.plans,
            plan.layers,
            epilogue,
            trained,
            source,
            prologue,
            prologue_trained,
            plan.restored,
        )
    return dataclasses.replace(state, serving=serving, training=training)


def _require_runnable(name: str, model: ModelGraph) -> None:
    for graph in model.graphs:
        for node in graph.nodes:
            if not operator(node.op).executable:
                raise UnsupportedError(
                    f"{name} cannot run yet: operator {node.op!r} (in {node.scope}); pcg traces "
                    "and explains mixture-of-experts models, and runs dense ones"
                )


PIPELINE: tuple[tuple[str, Callable[[Compilation], Compilation]], ...] = (
    ("trace", _trace),
    ("fold", _fold),
    ("raise", _raise),
    ("attach", _attach),
    ("parallelize", _parallelize),
    ("differentiate", _differentiate),
    ("prune", _prune),
    ("compress", _compress),
    ("rematerialize", _rematerialize),
    ("fuse", _fuse),
    ("emit", _emit),
)


def _made(value: Any) -> Any:
    if value is None:
        raise PassError("a pass ran before the one whose result it needs")
    return value


# ------------------------------------------------------------------------------------ running them


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: its time, and how many nodes its graphs have."""

    name: str
    seconds: float
    nodes: int
    graphs: tuple[Graph, ...]

    def text(self) -> str:
        """Its graphs as text IR."""
        return print_graphs(self.graphs)


def run_passes(
    state: Compilation,
    observe: Callable[[PassRecord], None] | None = None,
    *,
    first: str = "trace",
    last: str = "emit",
) -> Compilation:
    """Run the pipeline from one pass to another.

    Args:
        state: where to begin.
        observe: told of each pass as it ends.
        first: the first pass to run; what earlier ones make must be in the state.
        last: the last pass to run.
    Raises:
        PassError: a pass failed; it carries the graphs that the pass got.
    """
    names = [name for name, _ in PIPELINE]
    for name, run in PIPELINE[names.index(first) : names.index(last) + 1]:
        started = time.perf_counter()
        before = state.graphs()
        try:
            state = run(state)
            for graph in state.graphs():
                verify(graph)
        except PcgError:
            raise
        except Exception as error:
            text = print_graphs(before) if before else ""
            raise PassError(f"pass {name!r} failed on {state.name}: {error!r}", text) from error
        if observe is not None:
            graphs = state.graphs()
            nodes = sum(len(graph.nodes) for graph in graphs)
            observe(PassRecord(name, time.perf_counter() - started, nodes, graphs))
    return state


def dump_to(directory: str | Path) -> Callable[[PassRecord], None]:
    """An observer that writes each pass's text IR to `<n>-<pass>.pcg` in a directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in PIPELINE]

    def observe(record: PassRecord) -> None:
        path = folder / f"{names.index(record.name)}-{record.name}.pcg"
        path.write_text(record.text(), encoding="utf-8")

    return observe


# ------------------------------------------------------------------------------------ public calls


def compile_program(
    model: str | os.PathLike[str] | Mapping[str, Any],
    peft: object = "lora",
    *,
    tp: int = 1,
    costs: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    memory_budget: float | str | None = None,
    batch: int = 1,
    seq: int = 1024,
    observe: Callable[[PassRecord], None] | None = None,
) -> Program:
    """Compile a model to a program; no weights are needed.

    Args:
        model: a directory with a config.json, a hub id, an id that ships with pcg, or a config.
        peft: None, "lora", a peft LoraConfig, a dict of its fields, or {name: one of these or the
            path of an adapter}.
        tp: tensor-parallel degree.
        costs: the device that adapters are parallelized for: a name, as H100 (the default), or a
            file of `pcg profile`.
        dtype: torch's name of the dtype; the configuration's own by default.
        memory_budget: what finetuning may keep for backward: from 1, all that spares a matrix
            product (the default), to 0, the least; or bytes, as "8GiB".
        batch: sequences of a step that the budget is planned for.
        seq: tokens of each.
        observe: told of each pass as it ends.
    Raises:
        PcgError: what cannot be read, traced or attached is named.
    """
    _check_degree(tp)
    source = resolve(model)
    recipes = recipes_of(peft)
    model_type = str(source.config["model_type"])

    def bypasses(base: ModelGraph) -> Bypasses:
        return bypasses_of(base, recipes.values(), model_type, _adapter_dtype(base.dtype))

    budget = MemoryBudget.parse(memory_budget, batch, seq)
    name = _costs_name(costs) if tp > 1 else ""
    state = Compilation(
        source.name,
        source.config,
        bypasses,
        _dtype_name(dtype),
        budget=budget,
        tp=tp,
        costs=cost_model(name) if name else None,
    )
    state = run_passes(state, observe, last="raise")
    _require_runnable(state.name, _made(state.base))
    state = run_passes(state, observe, first="attach")
    traced = _made(state.traced)
    return Program(
        source.name,
        source.config,
        _made(state.base),
        _made(state.serving),
        state.training,
        {name: recipe_fields(recipe) for name, recipe in recipes.items()},
        budget,
        traced.constants,
        traced.base_prefix,
        traced.dtype,
        tp,
        name,
    )


def compile(
    model: Any,
    peft: object = None,
    *,
    tp: int = 1,
    costs: str | os.PathLike[str] | None = None,
    backend: str = "auto",
    dtype: str | None = None,
    device: str | torch.device | None = None,
    memory_budget: float | str | None = None,
    batch: int = 1,
    seq: int = 1024,
) -> Executor:
    """Compile a model and load its weights: an executor that generates and finetunes.

    Args:
        model: a directory with weights, a hub id, or a transformers model in memory.
        peft: None, "lora", a peft LoraConfig, or {name: LoraConfig, recipe or adapter directory};
            named adapters are added to the executor.
        tp: tensor-parallel degree. Above 1, this is one of so many processes, as torchrun starts
            them, and all of them make the same calls.
        costs: the device that adapters are parallelized for: a name, as H100, or a file of
            `pcg profile`; the sheet of the device that there is by default.
        backend: "auto" or "torch".
        dtype: torch's name of the dtype, or a torch dtype; the configuration's own by default.
        device: of the weights; the GPU where there is one, else the CPU.
        memory_budget: what finetuning may keep for backward: from 1, all that spares a matrix
            product (the default), to 0, the least; or bytes, as "8GiB".
        batch: sequences of a step that the budget is planned for.
        seq: tokens of each.
    Raises:
        PcgError: what cannot be read, traced, attached or loaded is named.
    """
    if backend not in ("auto", "torch"):
        raise UnsupportedError(f"backend={backend!r} does not exist yet; use 'torch' or 'auto'")
    _check_degree(tp)
    if tp > 1:
        check_started(tp)
        if costs is None:
            costs = own_sheet(_device(device))
    options: dict[str, Any] = {
        "tp": tp,
        "costs": costs,
        "memory_budget": memory_budget,
        "batch": batch,
        "seq": seq,
    }
    module = model if isinstance(model, torch.nn.Module) else None
    if module is not None:
        if hasattr(module, "peft_config"):
            raise UnsupportedError(
                "the model is wrapped by peft already; give the base model, and its adapter by "
                "peft={name: directory}"
            )
        config = module.config.to_dict()  # type: ignore[union-attr,operator]
        dtype = dtype or str(next(module.parameters()).dtype)
        program = compile_program(config, peft, dtype=dtype, **options)
        weights: Weights = StateDictCheckpoint(module.state_dict(), program.base_prefix)
        return make_executor(program, weights, peft, None, device)
    source = resolve(model, weights=True)
    program = compile_program(model, peft, dtype=dtype, **options)
    return make_executor(
        program, Checkpoint.open(source, program.base_prefix), peft, source.directory, device
    )


def load(
    directory: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    *,
    trust_edits: bool = False,
) -> Executor:
    """Load a compiled folder and its weights: an executor that generates and finetunes.

    Args:
        directory: of a compiled program. Loading it runs its emitted source.
        weights: directory or hub id that holds the weights; where they lay at compile time by
            default.
        device: of the weights; the GPU where there is one, else the CPU.
        trust_edits: accept emitted source that was edited.
    Raises:
        PcgError: the folder or the weights are missing, damaged, or of another model.
    """
    folder = Path(directory).expanduser()
    program = load_program(folder, trust_edits=trust_edits)
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
    _check_same_model(program, source.config, os.fspath(place))
    checkpoint = Checkpoint.open(source, program.base_prefix)
    # A program compiled from a shipped config has no tokenizer; the weights come with one.
    has_tokenizer = (folder / "tokenizer.json").exists()
    tokenizer_directory = folder if has_tokenizer else source.directory
    return make_executor(program, checkpoint, None, tokenizer_directory, device)


# Fields of a config.json that change no number of what runs.
_NEUTRAL_FIELDS = (
    "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id",
    "pretraining_tp", "use_cache",
)  # fmt: skip


def _check_same_model(program: Program, config: Mapping[str, Any], where: str) -> None:
    """Refuse weights whose configuration says another model; their shapes alone would not tell."""
    both = sorted((program.config.keys() & config.keys()).difference(_NEUTRAL_FIELDS))
    other = [
        key
        for key in both
        if program.config[key] != config[key]
        and (isinstance(config[key], int | float) or key == "model_type" or "rope" in key)
        and "drop" not in key
    ]
    if other:
        shown = ", ".join(f"{k}={config[k]!r}, not {program.config[k]!r}" for k in other[:3])
        raise ProgramError(
            f"the weights in {where} are of another model than the program's ({shown}); compile "
            "that model, or give the weights of this one"
        )


def trace(model: Any, dtype: str | None = None, *, whole: bool = False) -> Trace:
    """Trace a model to a graph, before any pass; no weights are needed.

    Args:
        model: a directory, a hub id, an id that ships with pcg, a config, or a transformers model.
        dtype: torch's name of the dtype; the configuration's own by default.
        whole: trace every layer instead of one of each kind (and one more).
    Raises:
        SourceError: the model cannot be found or read.
        TraceError: it cannot be turned into a graph; names the operator and the module.
    """
    if isinstance(model, torch.nn.Module):
        model = model.config.to_dict()  # type: ignore[union-attr,operator]
    return trace_config(resolve(model).config, _dtype_name(dtype), whole)


def explain(
    model: Any,
    peft: object = "lora",
    *,
    tp: int = 1,
    costs: str | os.PathLike[str] | None = None,
    batch: int = 1,
    seq: int = 1024,
    dtype: str | None = None,
    memory_budget: float | str | None = None,
    gpus: Sequence[str] = (),
    find_region: bool = False,
    peers: bool = False,
) -> Report:
    """Account for the memory of a finetuning step, and say what is kept for backward and why.

    Args:
        model: a directory, a hub id, an id that ships with pcg, a config, or a transformers model;
            no weights are needed.
        peft: None, "lora" or another word of `pcg.ir.recipes.SHORTHANDS`, a configuration of
            peft's, or {name: one of these, or an adapter directory}.
        tp: tensor-parallel degree.
        costs: the device that bypass networks are parallelized for: a name, as H100, or a file of
            `pcg profile`; the first of `gpus` that has a sheet by default, else H100.
        batch: sequences of a step.
        seq: tokens of each.
        dtype: torch's name of the dtype; the configuration's own by default.
        memory_budget: as for `compile`.
        gpus: names of GPUs to fit the step to.
        find_region: give formulas in the rank, too, where there is one, and find for which sequence
            lengths and ranks the plan stays the optimum; over ranks, where the best strategies
            change with tokens, rank, degree and link. Takes seconds.
        peers: say what torch's min-cut partitioner keeps, too, on one rank; takes seconds, most of
            them to import functorch and inductor.
    Raises:
        PcgError: what cannot be read, traced or attached is named.
    """
    options = {"batch": batch, "seq": seq, "dtype": dtype, "memory_budget": memory_budget}
    options["find_region"] = find_region
    found = compare(model, {"": peft}, tp=tp, costs=costs, gpus=gpus, **options)  # type: ignore[arg-type]
    return _with_peers(found[""], model, recipes_of(peft)) if peers else found[""]


def _with_peers(report: Report, model: Any, recipes: Mapping[str, Recipe]) -> Report:
    """The report with what torch's partitioner keeps."""
    from pcg.passes.peers import with_peers

    if report.tp > 1:
        raise UnsupportedError(
            f"peers: torch's partitioner divides the graph of one rank, not of {report.tp}; "
            "use tp=1"
        )
    is_module = isinstance(model, torch.nn.Module)
    config = model.config.to_dict() if is_module else resolve(model).config
    adapters = {
        name: config_fields(recipe, recipe.target_modules or (), "", {})
        | ({"target_modules": None} if recipe.target_modules is None else {})
        for name, recipe in recipes.items()
    }
    return with_peers(report, config, recipes, adapters)


def compare(
    model: Any,
    pefts: Mapping[str, object],
    *,
    tp: int = 1,
    costs: str | os.PathLike[str] | None = None,
    batch: int = 1,
    seq: int = 1024,
    dtype: str | None = None,
    memory_budget: float | str | None = None,
    gpus: Sequence[str] = (),
    find_region: bool = False,
) -> dict[str, Report]:
    """`explain` of several recipes over one model, which is traced once; by their names.

    Args:
        model: as for `explain`.
        pefts: by name, what `explain` takes as `peft`.
        tp: and all others: as for `explain`.
        costs: the device that bypass networks are parallelized for.
        batch: sequences of a step.
        seq: tokens of each.
        dtype: torch's name of the dtype.
        memory_budget: as for `compile`.
        gpus: names of GPUs to fit the step to.
        find_region: as for `explain`.
    """
    from pcg.parallel.devices import device_of

    _check_degree(tp)
    if isinstance(model, torch.nn.Module):
        model = model.config.to_dict()  # type: ignore[union-attr,operator]
    devices = [device_of(name) for name in gpus]
    recipes = {name: recipes_of(peft) for name, peft in pefts.items()}
    budget = MemoryBudget.parse(memory_budget, batch, seq)
    source = resolve(model)
    state = Compilation(
        source.name,
        source.config,
        lambda base: Bypasses(),
        _dtype_name(dtype),
        budget=budget,
        tp=tp,
        costs=cost_model(_costs_name(costs, gpus)) if tp > 1 else None,
    )
    folded = run_passes(state, last="fold")
    return {
        name: _explained(folded, found, devices, find_region) for name, found in recipes.items()
    }


def _costs_name(costs: str | os.PathLike[str] | None, gpus: Sequence[str] = ()) -> str:
    """The sheet or the profile asked for; else the first GPU that has a sheet, else an H100."""
    if costs is None:
        return next((name for name in gpus if name.upper() in map(str.upper, SHEETS)), "H100")
    path = Path(costs).expanduser()
    return str(path.resolve()) if path.is_file() else os.fspath(costs)


def _check_degree(tp: object) -> None:
    if type(tp) is not int or tp < 1:
        raise ParallelError(f"tp={tp!r}; use an int of at least 1")


def _explained(
    folded: Compilation,
    recipes: Mapping[str, Recipe],
    devices: Sequence[Device],
    find_region: bool,
) -> Report:
    """The report of a folded model and recipes."""
    from pcg.passes.account import account
    from pcg.passes.fit import fit
    from pcg.passes.parallel_report import parallel_rows
    from pcg.passes.step_memory import Asked

    what = _account_of(folded, recipes)
    asked = Asked(folded.name, folded.config, recipes, folded.budget, folded.tp)
    report = account(what, asked)
    if find_region and what.frontiers is not None:
        report = _with_regions(report, folded, what, asked)
    if what.sharded is not None and folded.costs is not None:
        rows = parallel_rows(what.sharded, _made(folded.device_costs(trains=True)))
        if find_region:
            rows["regions"] = _parallel_regions(folded, recipes)
        report = dataclasses.replace(report, parallel=rows)
    return dataclasses.replace(report, fits=tuple(fit(what, asked, device) for device in devices))


def _with_regions(report: Report, folded: Compilation, what: Account, asked: Asked) -> Report:
    """The report with formulas in the rank and the degree, and where its plan stays the optimum."""
    from pcg.passes.account import formula_text
    from pcg.passes.degree_formulas import in_degree
    from pcg.passes.plan import replanned
    from pcg.passes.rank_formulas import in_rank, rank_of, with_rank
    from pcg.passes.region import MOST_RANK, MOST_TOKENS, region
    from pcg.passes.step_memory import step_formulas

    budget, plan, kinds = folded.budget, _made(what.plan), _made(what.frontiers).kinds
    rank = rank_of(asked.recipes)

    def at_length(seq: int) -> MemoryPlan:
        found = frontiers(_made(what.training), kinds, budget.batch, seq)
        return found.plan(dataclasses.replace(budget, seq=seq))

    def formulas_of(state: Compilation, recipes: Mapping[str, Recipe]) -> dict[str, sympy.Expr]:
        then = _account_of(state, recipes)
        then = dataclasses.replace(then, plan=replanned(plan, _made(then.frontiers)))
        return step_formulas(then, dataclasses.replace(asked, tp=state.tp))

    def at_degree(degree: int) -> dict[str, sympy.Expr] | None:
        state = dataclasses.replace(folded, tp=degree)
        try:
            if rank is None:
                return formulas_of(state, asked.recipes)
            return in_rank(lambda r: formulas_of(state, with_rank(asked.recipes, r)), rank)
        except KeyError:
            return None  # its graphs are others

    degrees: dict[str, tuple[int, ...]] = {}
    if folded.tp > 1:
        formulas, degrees = in_degree(at_degree, folded.tp)
    else:
        formulas = _made(at_degree(1))
    ranks = None
    if rank is not None:

        def at_rank(other: int) -> MemoryPlan:
            return _made(_account_of(folded, with_rank(asked.recipes, other)).plan)  # type: ignore[no-any-return]

        ranks = region(at_rank, rank, MOST_RANK)
    return dataclasses.replace(
        report,
        formulas={name: formula_text(formula) for name, formula in formulas.items()},
        region=region(at_length, budget.seq, MOST_TOKENS),
        rank_region=ranks,
        formula_degrees=degrees,
    )


def _parallel_regions(
    folded: Compilation, recipes: Mapping[str, Recipe]
) -> dict[str, list[dict[str, Any]]]:
    """Where the best strategies change with tokens: as asked, and with one thing otherwise."""
    from pcg.parallel.costs import SheetModel
    from pcg.passes.parallel_report import token_regions
    from pcg.passes.rank_formulas import rank_of, with_rank

    def at(state: Compilation, then: Mapping[str, Recipe]) -> list[dict[str, Any]]:
        bypasses = _bypasses_of(state, then)
        attached = run_passes(
            dataclasses.replace(state, bypasses=bypasses), first="raise", last="attach"
        )
        pairs = zip(_made(attached.training_model).blocks, _made(attached.base).blocks, strict=True)
        layers = list(pairs)

        def searches_at(tokens: int) -> list[Search]:
            costs = DeviceCosts(_made(state.costs), state.tp, tokens, state.budget.seq)
            return [search_layer(block, plain, state.tp, costs) for block, plain in layers]

        return token_regions(searches_at)

    found = {"as asked": at(folded, recipes)}
    rank = rank_of(recipes)
    for other in (8, 64, 256):
        if rank is not None and other != rank:
            found[f"rank {other}"] = at(folded, with_rank(recipes, other))
    for degree in (2, 4, 8):
        if degree != folded.tp:
            try:
                found[f"tp {degree}"] = at(dataclasses.replace(folded, tp=degree), recipes)
            except ParallelError:
                continue  # it does not divide the model
    model = folded.costs
    if isinstance(model, SheetModel):
        for link in model.sheet.links:
            if link != model.link_name:
                costs = SheetModel(model.name, model.sheet, link, model.achieved)
                found[link] = at(dataclasses.replace(folded, costs=costs), recipes)
    return found


def _account_of(folded: Compilation, recipes: Mapping[str, Recipe]) -> Account:
    """What a report of a folded model and recipes accounts for."""
    from pcg.passes.adapter_use import AdapterUse, adapter_use
    from pcg.passes.step_memory import Account

    def use_of(base: ModelGraph) -> AdapterUse:
        model_type = str(folded.config["model_type"])
        return adapter_use(base, recipes, model_type, _adapter_dtype(base.dtype))

    state = dataclasses.replace(folded, bypasses=lambda base: use_of(base).bypasses)
    attached = run_passes(state, first="raise", last="parallelize")
    refusal = ""
    kinds: tuple[LayerKind, ...] = ()
    try:
        attached = run_passes(attached, first="differentiate", last="prune")
        kinds = attached.kinds
        attached = run_passes(attached, first="compress", last="rematerialize")
    except UnsupportedError as error:
        refusal = str(error)
    unraised = _made(folded.base)
    return Account(
        unraised,
        _made(attached.base),
        _made(attached.local_base),
        attached.training_model,
        kinds,
        attached.frontiers,
        attached.plan,
        attached.training_epilogue[0] if attached.training_epilogue else None,
        use_of(unraised),
        _adapter_dtype(unraised.dtype),
        _made(folded.traced).attention,
        refusal,
        attached.sharded,
    )


def _bypasses_of(
    folded: Compilation, recipes: Mapping[str, Recipe]
) -> Callable[[ModelGraph], Bypasses]:
    from pcg.passes.adapter_use import adapter_use

    model_type = str(folded.config["model_type"])
    return lambda base: adapter_use(base, recipes, model_type, _adapter_dtype(base.dtype)).bypasses


def make_executor(
    program: Program,
    weights: Weights,
    peft: object,
    directory: Path | None,
    device: str | torch.device | None = None,
    ranks: Ranks | None = None,
) -> Executor:
    """An executor of a program with weights, and the adapters that `peft` names.

    Args:
        program: to run.
        weights: of its base.
        peft: adapters by name, or recipes without.
        directory: of the tokenizer; None for none.
        device: of the weights.
        ranks: that run it; those that torchrun has started by default.
    """
    from pcg.runtime.executor import Executor

    device = _device(device)
    if ranks is None:
        device = own_device(device)
        ranks = join(program.tp, device)
    tokenizer = None
    if directory is not None and (directory / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(directory)
    executor = Executor(
        program, weights, SPECIALISER, tokenizer, _eos_ids(program, tokenizer), device, ranks
    )
    if isinstance(peft, Mapping) and not _is_recipe(peft):
        for name, value in peft.items():
            executor.add_adapter(str(name), value)
    return executor


def _device(device: str | torch.device | None) -> torch.device:
    """The device asked for; else the GPU where there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _eos_ids(program: Program, tokenizer: Tokenizer | None) -> frozenset[int]:
    if tokenizer is not None:
        return frozenset(tokenizer.eos_ids)
    eos = program.config.get("eos_token_id")
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def recipes_of(peft: object) -> dict[str, Recipe]:
    """The recipes that `peft` names; one without a name is called `default`."""
    if peft is None:
        return {}
    if isinstance(peft, Mapping) and not _is_recipe(peft):
        return {str(name): _recipe(value) for name, value in peft.items()}
    return {"default": _recipe(peft)}


def _is_recipe(peft: Mapping[Any, Any]) -> bool:
    return "peft_type" in peft


def _recipe(value: object) -> Recipe:
    if isinstance(value, str | os.PathLike) and not is_shorthand(value):
        return read_adapter(value, "adapter").recipe
    return recipe_from(value)


class _Specialiser:
    """Runs the pipeline again from attach, for adapters at other sites."""

    def serving(self, program: Program, recipes: Sequence[Recipe]) -> Serving:
        return _made(self._run(program, recipes, trains=False).serving)  # type: ignore[no-any-return]

    def training(self, program: Program, recipe: Recipe) -> Training:
        return _made(self._run(program, [recipe], trains=True).training)  # type: ignore[no-any-return]

    @staticmethod
    def _run(program: Program, recipes: Sequence[Recipe], trains: bool) -> Compilation:
        model_type = str(program.config["model_type"])
        dtype = _adapter_dtype(program.base.dtype)

        def bypasses(base: ModelGraph) -> Bypasses:
            return bypasses_of(base, recipes, model_type, dtype)

        state = Compilation(
            program.name,
            program.config,
            bypasses,
            trains=trains,
            budget=program.memory_budget,
            tp=program.tp,
            costs=cost_model(program.costs) if program.costs else None,
            base=program.base,
        )
        return run_passes(state, first="attach")


SPECIALISER = _Specialiser()


def _adapter_dtype(base: str) -> str:
    """Dtype of adapters over a base: fp32 over half precision, as peft has it."""
    return "f64" if base == "f64" else "f32"


def _dtype_name(dtype: object) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in TORCH_NAMES.values():
        raise UnsupportedError(f"dtype={name!r}; use one of float32, bfloat16, float16, float64")
    return name
