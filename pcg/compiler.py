"""The compiler's public calls: from a model and PEFT recipes to a program, and to an executor.

Long by what its calls say of their arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pcg.errors import (
    ProgramError,
    SourceError,
    UnsupportedError,
)
from pcg.ir.operators import operator
from pcg.ir.program.folder import load_program
from pcg.ir.program.manifest import read_manifest
from pcg.ir.program.memory_budget import MemoryBudget
from pcg.ir.program.program import ModelGraph, Program, Serving, Training
from pcg.options import (
    adapter_dtype,
    check_backend,
    check_degree,
    check_device,
    costs_name,
    dtype_name,
    is_recipe,
    recipes_of,
)
from pcg.parallel.base_plan import read_tp_plan
from pcg.parallel.costs.catalog import find_cost_model, own_sheet
from pcg.parallel.ranks.group import Ranks, check_started, join_group, own_device
from pcg.parallel.ranks.same_program import check_same_program
from pcg.passes.bypasses import Bypasses
from pcg.passes.pipeline import Compilation, PassRecord, made, run_passes
from pcg.passes.sites import bypasses_of
from pcg.peft.registry import Recipe, recipe_fields
from pcg.runtime.model.base_weights import TensorSource
from pcg.runtime.model.random_weights import RandomWeights
from pcg.runtime.model.weights import Checkpoint, StateDictCheckpoint, Weights
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.source import resolve
from pcg.trace import Trace
from pcg.trace import trace as trace_config

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor


def _require_runnable(name: str, model: ModelGraph) -> None:
    for graph in model.graphs:
        for node in graph.nodes:
            if not operator(node.op).executable:
                raise UnsupportedError(
                    f"{name} cannot run yet: operator {node.op!r} (in {node.scope}); pcg traces "
                    "and explains mixture-of-experts models, and runs dense ones"
                )


def compile_program(
    model: str | os.PathLike[str] | Mapping[str, Any],
    peft: object = "lora",
    *,
    tp: int = 1,
    costs: str | os.PathLike[str] | None = None,
    tp_plan: str | os.PathLike[str] | Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_steps: int = 1,
    backend: str = "torch",
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
        tp_plan: the base's plan: a style, as colwise or rowwise, for each module path of a layer,
            or a JSON file of such; Megatron's, read off the graph, by default.
        sequence_parallel: whether ranks hold parts of the tokens of norms and residuals.
        gradient_accumulation_steps: batches an optimizer step, over which the sums of copied
            adapter weights' gradients are spread where the search weighs them.
        backend: "torch", which runs on any device, or "triton", fused for NVIDIA GPUs.
        dtype: torch's name of the dtype; the configuration's own by default.
        memory_budget: what finetuning may keep for backward: from 1, all that spares a matrix
            product (the default), to 0, the least; or bytes, as "8GiB".
        batch: sequences of a step that the budget is planned for.
        seq: tokens of each.
        observe: told of each pass as it ends.
    Raises:
        PcgError: what cannot be read, traced or attached is named.
    """
    check_degree(tp, costs, tp_plan, sequence_parallel, gradient_accumulation_steps)
    check_backend(backend)
    source = resolve(model)
    recipes = recipes_of(peft)
    model_type = str(source.config["model_type"])

    def bypasses(base: ModelGraph) -> Bypasses:
        return bypasses_of(base, recipes.values(), model_type, adapter_dtype(base.dtype))

    budget = MemoryBudget.parse(memory_budget, batch, seq)
    name = costs_name(costs) if tp > 1 else ""
    state = Compilation(
        source.name,
        source.config,
        bypasses,
        dtype_name(dtype),
        budget=budget,
        tp=tp,
        costs=find_cost_model(name) if name else None,
        tp_plan=read_tp_plan(tp_plan),
        sequence_parallel=sequence_parallel,
        gradient_accumulation_steps=gradient_accumulation_steps,
        backend=backend,
    )
    state = run_passes(state, observe, last="raise")
    _require_runnable(state.name, made(state.base))
    state = run_passes(state, observe, first="attach")
    traced = made(state.traced)
    return Program(
        source.name,
        source.config,
        made(state.base),
        made(state.serving),
        state.training,
        {name: recipe_fields(recipe) for name, recipe in recipes.items()},
        budget,
        traced.constants,
        traced.base_prefix,
        traced.dtype,
        tp,
        name,
        state.tp_plan,
        state.sequence_parallel,
        state.gradient_accumulation_steps,
        state.backend,
    )


def compile(
    model: Any,
    peft: object = None,
    *,
    tp: int = 1,
    costs: str | os.PathLike[str] | None = None,
    tp_plan: str | os.PathLike[str] | Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_steps: int = 1,
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
        tp_plan: the base's plan: a style, as colwise or rowwise, for each module path of a layer,
            or a JSON file of such; Megatron's, read off the graph, by default.
        sequence_parallel: whether ranks hold parts of the tokens of norms and residuals.
        gradient_accumulation_steps: batches an optimizer step, over which the sums of copied
            adapter weights' gradients are spread where the search weighs them.
        backend: "torch", which runs on any device; "triton", fused for NVIDIA GPUs; "auto" is
            "torch".
        dtype: torch's name of the dtype, or a torch dtype; the configuration's own by default.
        device: of the weights; the GPU where there is one, else the CPU. Over ranks "cuda" is a
            GPU of each one's own, and a GPU that two of them name is refused.
        memory_budget: what finetuning may keep for backward: from 1, all that spares a matrix
            product (the default), to 0, the least; or bytes, as "8GiB".
        batch: sequences of a step that the budget is planned for.
        seq: tokens of each.
    Raises:
        ParallelError: the ranks have compiled different programs; which, and in what.
        PcgError: what cannot be read, traced, attached or loaded is named.
    """
    if backend == "auto":
        backend = "torch"
    check_degree(tp, costs, tp_plan, sequence_parallel, gradient_accumulation_steps)
    if tp > 1:
        check_started(tp)
        # A rank's own GPU comes first: torch's current one is the same on all of them.
        device = own_device(_device(device))
        if costs is None:
            costs = own_sheet(device)
    options: dict[str, Any] = {
        "tp": tp,
        "costs": costs,
        "tp_plan": tp_plan,
        "sequence_parallel": sequence_parallel,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "backend": backend,
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


def compile_random(
    model: str | os.PathLike[str] | Mapping[str, Any],
    *,
    backend: str = "torch",
    dtype: str | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> Executor:
    """Compile a model and give it random weights: an executor to measure, which makes no sense.

    Args:
        model: as `compile_program` takes it; its weights are not read.
        backend: "torch" or "triton".
        dtype: torch's name of the dtype; the configuration's own by default.
        device: of the weights; the GPU where there is one, else the CPU.
        seed: of the weights.
    Raises:
        PcgError: what cannot be read or traced is named.
    """
    source = resolve(model)
    program = compile_program(model, None, backend=backend, dtype=dtype)
    weights = RandomWeights(float(source.config.get("initializer_range", 0.02)), seed)
    return make_executor(program, weights, None, source.directory, device)


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
    return trace_config(resolve(model).config, dtype_name(dtype), whole)


def make_executor(
    program: Program,
    weights: TensorSource,
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
    from pcg.runtime.model.state import ModelState

    device = _device(device)
    check_device(program.backend, device)
    if ranks is None:
        device = own_device(device)
        ranks = join_group(program.tp, device)
    check_same_program(ranks, program)
    tokenizer = None
    if directory is not None and (directory / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(directory)
    eos_ids = _eos_ids(program, tokenizer)
    executor = Executor(
        ModelState(program, weights, SPECIALISER, tokenizer, eos_ids, device, ranks)
    )
    if isinstance(peft, Mapping) and not is_recipe(peft):
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


class _Specialiser:
    """Runs the pipeline again from attach, for adapters at other sites."""

    def serving(self, program: Program, recipes: Sequence[Recipe]) -> Serving:
        return made(self._run(program, recipes, trains=False).serving)  # type: ignore[no-any-return]

    def training(self, program: Program, recipe: Recipe, windows: bool = False) -> Training:
        state = self._run(program, [recipe], trains=True, windows=windows)
        return made(state.training)  # type: ignore[no-any-return]

    @staticmethod
    def _run(
        program: Program, recipes: Sequence[Recipe], trains: bool, windows: bool = False
    ) -> Compilation:
        model_type = str(program.config["model_type"])
        dtype = adapter_dtype(program.base.dtype)

        def bypasses(base: ModelGraph) -> Bypasses:
            return bypasses_of(base, recipes, model_type, dtype)

        state = Compilation(
            program.name,
            program.config,
            bypasses,
            trains=trains,
            budget=program.memory_budget,
            tp=program.tp,
            costs=find_cost_model(program.costs) if program.costs else None,
            tp_plan=program.tp_plan,
            windows=windows,
            sequence_parallel=program.sequence_parallel,
            gradient_accumulation_steps=program.gradient_accumulation_steps,
            backend=program.backend,
            base=program.base,
        )
        return run_passes(state, first="attach")


SPECIALISER = _Specialiser()
