"""A program as the files of its folder, and back: `program_from(files_of(program))` equals it.

    base.pcg, serving.pcg, training.pcg   every graph as text IR, in the order of `_graphs` below
    serving.py, training.py               the emitted source
    plan.json                             ranks; the block of each layer; values saved for backward
    constants.safetensors                 tensors computed from the configuration
    config.json                           the model's

The rest of a program, such as its name and recipes, is in manifest.json (`pcg.ir.program.folder`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from pcg.errors import IrError, ProgramError
from pcg.ir.graph import Graph
from pcg.ir.parser import parse_graphs
from pcg.ir.printer import print_graph
from pcg.ir.program.program import ModelGraph, Program, Serving, Training, TrainingGraph
from pcg.ir.types import TORCH_NAMES
from pcg.options import CompileOptions, MemoryBudget

BASE_IR = "base.pcg"
SERVING_IR = "serving.pcg"
TRAINING_IR = "training.pcg"
SERVING = "serving.py"
TRAINING = "training.py"
PLAN = "plan.json"
CONSTANTS = "constants.safetensors"
CONFIG = "config.json"

REQUIRED = (BASE_IR, SERVING_IR, SERVING, PLAN, CONSTANTS, CONFIG)
SOURCES = (SERVING, TRAINING)


@dataclass(frozen=True)
class Facts:
    """The fields of a `Program` that the files do not hold."""

    name: str
    recipes: Mapping[str, Mapping[str, Any]]
    base_prefix: str
    dtype: str


def files_of(program: Program) -> dict[str, bytes]:
    """The files of a program by name.

    Raises:
        ProgramError: the configuration holds what JSON cannot.
    """
    # Costs 1 s by torch; the text forms do without.
    import safetensors.torch

    constants = {name: t.detach().cpu().clone() for name, t in program.constants.items()}
    files = {
        BASE_IR: _text_ir([("The model without bypass networks.", program.base.graphs)]),
        SERVING_IR: _text_ir([("What serves: ranks are open.", program.serving.model.graphs)]),
        SERVING: program.serving.source,
        PLAN: json_text(_plan(program)),
        CONFIG: json_text(program.config, "the model's configuration"),
    }
    training = program.training
    if training is not None:
        files[TRAINING_IR] = _text_ir(_training_sections(training))
        files[TRAINING] = training.source
    encoded = {name: text.encode() for name, text in files.items()}
    return {**encoded, CONSTANTS: safetensors.torch.save(constants)}


def program_from(files: Mapping[str, bytes], facts: Facts) -> Program:
    """The program of files that `files_of` made.

    Raises:
        ProgramError: a file is missing or damaged, or two do not go together; it is named.
    """
    import safetensors.torch

    plan = _json(files, PLAN)
    try:
        layers = tuple(map(int, plan["layers"]))
        trains = plan["training"]
        serving_model = _model(_graphs(files, SERVING_IR), layers)
        training = None
        if trains is not None:
            training = _training(
                _graphs(files, TRAINING_IR), layers, trains, _text(files, TRAINING)
            )
        constants = safetensors.torch.load(files[CONSTANTS])
        return Program(
            facts.name,
            _json(files, CONFIG),
            _model(_graphs(files, BASE_IR), layers),
            Serving(serving_model, _text(files, SERVING)),
            training,
            facts.recipes,
            _options(plan, facts.dtype),
            constants,
            facts.base_prefix,
            facts.dtype,
        )
    except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        raise ProgramError(
            f"{PLAN} and the graphs do not go together ({type(error).__name__}: {error}); "
            "compile again"
        ) from error
    except safetensors.SafetensorError as error:
        raise ProgramError(f"{CONSTANTS} is damaged: {error}; compile again") from error


def json_text(value: object, what: str = "it") -> str:
    """JSON as it stands in the folder.

    Raises:
        ProgramError: it holds what JSON cannot.
    """
    try:
        return json.dumps(value, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise ProgramError(f"{what} cannot be saved as JSON: {error}") from error


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ProgramError: it is damaged, or holds something else; says where.
    """
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        raise ProgramError(
            f"{name} is damaged at line {error.lineno}, column {error.colno}: {error.msg}; "
            "compile again"
        ) from error
    except UnicodeDecodeError as error:
        raise ProgramError(
            f"{name} is damaged: byte {error.start} is not UTF-8; compile again"
        ) from error
    if not isinstance(value, dict):
        raise ProgramError(f"{name} holds a {type(value).__name__}, not an object; compile again")
    return value


# ------------------------------------------------------------------------------------------ graphs


def _text_ir(sections: Iterable[tuple[str, Iterable[Graph]]]) -> str:
    parts = []
    for comment, graphs in sections:
        parts.append(f"# {comment}\n" + "\n\n".join(map(print_graph, graphs)))
    return "\n\n".join(parts) + "\n"


def _training_sections(training: Training) -> Iterator[tuple[str, Iterable[Graph]]]:
    yield "The model with bypass networks of these ranks.", training.model.graphs
    for plan in training.plans:
        yield "A layer, forward: its outputs, then what it keeps.", (plan.forward,)
        if plan.backward is not None:
            yield "A layer, backward.", (plan.backward,)
    yield "Hidden states and targets to loss and gradients.", (training.epilogue,)
    if training.prologue is not None:
        yield "The prologue, backward.", (training.prologue,)


def _training(
    graphs: Iterable[Graph], layers: tuple[int, ...], plan: Mapping[str, Any], source: str
) -> Training:
    rest = iter(graphs)
    model = _model((next(rest) for _ in range(2 + len(set(layers)))), layers)
    plans = []
    for entry in plan["plans"]:
        forward = next(rest)
        backward = next(rest) if entry["has_backward"] else None
        kept = tuple(value["value"] for value in entry["kept"])
        plans.append(
            TrainingGraph(int(entry["block"]), forward, backward, kept, tuple(entry["trained"]))
        )
    epilogue = next(rest)
    prologue_trained = tuple(plan.get("prologue_trained", ()))  # older folders train none
    prologue = next(rest) if prologue_trained else None
    if next(rest, None) is not None:
        raise ValueError(f"more graphs in {TRAINING_IR} than planned")
    of_layers = tuple(map(int, plan["layers"]))
    if len(of_layers) != len(layers) or not set(of_layers) <= set(range(len(plans))):
        raise ValueError(f"{len(plans)} plans for {len(layers)} layers, {of_layers}")
    return Training(
        model,
        tuple(plans),
        of_layers,
        epilogue,
        tuple(plan["epilogue_trained"]),
        source,
        prologue,
        prologue_trained,
        tuple(map(int, plan.get("restored", ()))),  # older folders make no input again
    )


def _model(graphs: Iterable[Graph], layers: tuple[int, ...]) -> ModelGraph:
    prologue, *blocks, epilogue = graphs
    if sorted(set(layers)) != list(range(len(blocks))):
        raise ValueError(f"{len(blocks)} blocks, layers {sorted(set(layers))}")
    return ModelGraph(prologue, tuple(blocks), layers, epilogue)


def _graphs(files: Mapping[str, bytes], name: str) -> tuple[Graph, ...]:
    try:
        return parse_graphs(_text(files, name))
    except IrError as error:
        raise ProgramError(f"{name} is damaged: {error}; compile again") from error


def _text(files: Mapping[str, bytes], name: str) -> str:
    if name not in files:
        raise ProgramError(f"{name} is missing; compile again")
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise ProgramError(f"{name} is damaged: byte {error.start} is not UTF-8") from error


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        raise ProgramError(f"{name} is missing; compile again")
    return json_object(files[name], name)


# ------------------------------------------------------------------------------------------- plan


def _plan(program: Program) -> dict[str, Any]:
    """The facts that the graphs do not hold: ranks, layers' blocks, saved values."""
    options = program.options
    return {
        "symbols": {"T": "tokens of the step"},
        "tp": options.tp,
        "costs": "" if options.costs is None else str(options.costs),
        "tp_plan": options.styles,
        "sequence_parallel": options.sequence_parallel,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "backend": options.backend,
        "layers": list(program.base.layers),
        "memory_budget": dataclasses.asdict(options.budget),
        "training": None if program.training is None else _training_plan(program.training),
    }


def _options(plan: Mapping[str, Any], dtype: str) -> CompileOptions:
    """The options of a plan; older folders are of one rank."""
    budget = MemoryBudget(**plan["memory_budget"])
    return CompileOptions(
        tp=int(plan.get("tp", 1)),
        costs=str(plan.get("costs", "")) or None,
        tp_plan=dict(plan.get("tp_plan", {})) or None,
        sequence_parallel=bool(plan.get("sequence_parallel", False)),
        gradient_accumulation_steps=int(plan.get("gradient_accumulation_steps", 1)),
        dtype=TORCH_NAMES[dtype],
        memory_budget=budget.written,
        batch=budget.batch,
        seq=budget.seq,
        backend=plan.get("backend", "torch"),
    )


def _training_plan(training: Training) -> dict[str, Any]:
    plans = []
    for index, plan in enumerate(training.plans):
        graph = training.model.blocks[plan.block]
        # Inputs behind the carried ones come from the prologue, and all layers share them.
        shared = {value.name for value in graph.inputs[len(graph.outputs) :]}
        types = plan.forward.types
        own = [types[name].size_bytes for name in plan.saved if name not in shared]
        plans.append(
            {
                "block": plan.block,
                "layers": [layer for layer, of in enumerate(training.layers) if of == index],
                "bytes_per_layer": str(sympy.Add(*own)),
                "kept": [
                    {
                        "value": name,
                        "type": str(types[name]),
                        "bytes": str(types[name].size_bytes),
                        "shared_by_layers": name in shared,
                    }
                    for name in plan.saved
                ],
                "trained": list(plan.trained),
                "has_backward": plan.backward is not None,
            }
        )
    return {
        "layers": list(training.layers),
        "restored": list(training.restored),
        "plans": plans,
        "epilogue_trained": list(training.epilogue_trained),
        "prologue_trained": list(training.prologue_trained),
    }
