"""A program as the files of its folder: `files_of` encodes, `program_from` decodes.

    base.pcg, serving.pcg, training.pcg   every graph as text IR, in the order of `_graphs` below
    serving.py, training.py               the emitted source
    plan.json                             ranks; the block of each layer; values saved for backward
    constants.safetensors                 tensors computed from the configuration
    config.json                           the model's

The rest, such as the name and the recipes, is in manifest.json (`pcg.ir.program.manifest`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy

from pcg.errors import IrError, PcgError, ProgramError
from pcg.files import json_object
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.parser import parse_graphs
from pcg.ir.printer import print_graph
from pcg.ir.program.interfaces import check_model, check_training
from pcg.ir.program.manifest import AGAIN, Manifest, json_text
from pcg.ir.program.program import ModelGraph, Program, Serving, Training, TrainingGraph
from pcg.ir.types import TORCH_NAMES
from pcg.options import CompileOptions, MemoryBudget
from pcg.units import shown

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


def files_of(program: Program) -> dict[str, bytes]:
    """Encode a program as files by name. ProgramError: JSON cannot hold the configuration."""
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


def program_from(files: Mapping[str, bytes], manifest: Manifest) -> Program:
    """Decode the files that `files_of` wrote.

    Raises:
        ProgramError: a file is missing, damaged, or contradicts another; names it.
    """
    import safetensors.torch

    plan = json_object(files[PLAN], PLAN, ProgramError, AGAIN)
    try:
        layers = tuple(map(int, plan["layers"]))
        base = _model(_graphs(files, BASE_IR), layers)
        serving = Serving(_model(_graphs(files, SERVING_IR), layers), _text(files, SERVING))
        training = None
        check_model(base)
        check_model(serving.model)
        if plan["training"] is not None:
            training = _training(files, layers, plan["training"])
            check_training(training)
        return Program(
            manifest.model,
            json_object(files[CONFIG], CONFIG, ProgramError, AGAIN),
            base,
            serving=serving,
            training=training,
            recipes=manifest.recipes,
            options=options_from(plan, manifest.dtype),
            constants=safetensors.torch.load(files[CONSTANTS]),
            base_prefix=manifest.base_prefix,
            dtype=manifest.dtype,
            choices={name: str(text) for name, text in manifest.choices.items()},
        )
    except safetensors.SafetensorError as error:
        raise ProgramError(f"{CONSTANTS} is damaged: {error}; compile again") from error
    except IrError as error:
        raise ProgramError(f"the program's graphs do not fit: {error}; compile again") from error
    except PcgError:
        raise
    except Exception as error:  # which, the files decide
        raise ProgramError(
            f"{PLAN} and the graphs do not go together ({type(error).__name__}: "
            f"{shown(str(error), 200)}); compile again"
        ) from error


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
    files: Mapping[str, bytes], layers: tuple[int, ...], plan: Mapping[str, Any]
) -> Training:
    rest = iter(_graphs(files, TRAINING_IR))
    # Older folders have the base's blocks here, too.
    blocks = tuple(map(int, plan.get("blocks", layers)))
    if len(blocks) != len(layers):
        raise ValueError(f"{len(blocks)} layers to train, of {len(layers)}")
    model = _model((next(rest) for _ in range(2 + len(set(blocks)))), blocks)
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
        _text(files, TRAINING),
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
        graphs = parse_graphs(_text(files, name))
        for graph in graphs:
            verify(graph)
        return graphs
    except IrError as error:
        raise ProgramError(f"{name} is damaged: {error}; compile again") from error


def _text(files: Mapping[str, bytes], name: str) -> str:
    if name not in files:
        raise ProgramError(f"{name} is missing; compile again")
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise ProgramError(f"{name} is damaged: byte {error.start} is not UTF-8") from error


# ------------------------------------------------------------------------------------------- plan


def _plan(program: Program) -> dict[str, Any]:
    """Options, the layers' blocks, and saved values: facts that the graphs do not hold."""
    return {
        "symbols": {"T": "tokens of the step"},
        **dataclasses.asdict(program.options),
        "layers": list(program.base.layers),
        "training": None if program.training is None else _training_plan(program.training),
    }


def options_from(plan: Mapping[str, Any], dtype: str) -> CompileOptions:
    """The options in plan.json; older folders have fewer, and no dtype, batch and seq there."""
    names = {field.name for field in dataclasses.fields(CompileOptions)} & plan.keys()
    options = {name: plan[name] for name in names if plan[name] not in ("", {})}
    if isinstance(plan.get("memory_budget"), dict):
        budget = MemoryBudget(**plan["memory_budget"])
        options |= {"memory_budget": budget.written, "batch": budget.batch, "seq": budget.seq}
    older = {"dtype": TORCH_NAMES.get(dtype, dtype), "backend": "torch", "attention": "own"}
    return CompileOptions(**{**older, **options})


def _training_plan(training: Training) -> dict[str, Any]:
    plans = []
    for index, plan in enumerate(training.plans):
        graph = training.model.blocks[plan.block]
        # Inputs behind the carried ones come from the prologue, and all layers share them.
        shared = {value.name for value in graph.inputs[len(graph.outputs) :]}
        types = plan.forward.types
        sizes = [types[name].size_bytes for name in plan.saved if name not in shared]
        plans.append(
            {
                "block": plan.block,
                "layers": [layer for layer, of in enumerate(training.layers) if of == index],
                "bytes_per_layer": str(sympy.Add(*sizes)),
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
        "blocks": list(training.model.layers),
        "layers": list(training.layers),
        "restored": list(training.restored),
        "plans": plans,
        "epilogue_trained": list(training.epilogue_trained),
        "prologue_trained": list(training.prologue_trained),
    }
