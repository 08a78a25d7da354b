"""The folder of a compiled program: its files, the tokenizer's, and a manifest with their hashes.

    base.pcg, serving.pcg, training.pcg   every graph as text IR, in the order of `_graphs` below
    serving.py, training.py               the emitted source
    plan.json                             ranks; the block of each layer; values saved for backward
    constants.safetensors                 tensors computed from the configuration
    config.json                           the model's
    manifest.json                         name, recipes and hashes (`pcg.ir.program.manifest`)

A folder is written under a temporary name and then renamed, so that readers always find the old or
the new program. It holds no weights: the manifest has their location. Loading compares the SHA-256
of every file with the manifest, and names each fault and its fix.

The emitted source is meant to be read, and may be edited: such a folder loads only with
`trust_edits=True`, because loading a program runs its source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sympy

from pcg.errors import IrError, PcgError, ProgramError
from pcg.files import check_writable, damage_of, exchange, expanded, json_object, sync
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.parser import parse_graphs
from pcg.ir.printer import print_graph
from pcg.ir.program.interfaces import check_model, check_training
from pcg.ir.program.manifest import (
    AGAIN,
    FORMAT,
    MANIFEST,
    Manifest,
    compile_again,
    json_text,
    read_bytes,
    read_manifest,
)
from pcg.ir.program.program import ModelGraph, Program, Serving, Training, TrainingGraph
from pcg.ir.types import TORCH_NAMES
from pcg.options import CompileOptions, MemoryBudget
from pcg.units import shown
from pcg.version import __version__

# -------------------------------------------------------------------------------------------- files


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
    """Encode a program as files by name; ProgramError if JSON cannot hold the configuration."""
    # The import takes 1 s because of torch; the text forms do not need it.
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
            renamings=tuple((pattern, other) for pattern, other in manifest.renamings),
            choices={name: str(text) for name, text in manifest.choices.items()},
        )
    except safetensors.SafetensorError as error:
        raise ProgramError(f"{CONSTANTS} is damaged: {error}; compile again") from error
    except IrError as error:
        raise ProgramError(f"the program's graphs do not fit: {error}; compile again") from error
    except PcgError:
        raise
    except Exception as error:  # the type depends on the files
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
    # Older folders also have the base's blocks in the plan.
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
        tuple(map(int, plan.get("restored", ()))),  # older folders recompute no input
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
    """Return options, the layers' blocks, and saved values, which the graphs do not hold."""
    return {
        "symbols": {"T": "tokens of the step"},
        **dataclasses.asdict(program.options),
        "layers": list(program.base.layers),
        "training": None if program.training is None else _training_plan(program.training),
    }


def options_from(plan: Mapping[str, Any], dtype: str) -> CompileOptions:
    """Return the options of plan.json; older folders lack some, and dtype, batch and seq."""
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
        # Inputs after the carried inputs belong to the prologue, and all layers share them.
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


# ------------------------------------------------------------------------------------------- folder


REPORT = "report.json"
_LEFT_S = 3600.0
"""Age of a temporary folder that no process still writes, seconds."""
TOKENIZER_FILES = (
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def options_of(directory: str | os.PathLike[str]) -> CompileOptions:
    """Return the options that a program was compiled with; raises ProgramError."""
    path = expanded(directory) / PLAN
    plan = json_object(read_bytes(path), str(path), ProgramError, AGAIN)
    dtype = read_manifest(directory).dtype
    with damage_of(str(path), ProgramError, AGAIN):
        return options_from(plan, dtype)


# ------------------------------------------------------------------------------------------- save


def save_program(
    program: Program,
    directory: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    tokenizer_directory: str | os.PathLike[str] | None = None,
    report: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a program's folder, replacing an existing program, and return its manifest.

    Args:
        weights: directory or hub id of the weights, for the manifest.
        tokenizer_directory: directory of the tokenizer's files, which are copied.
        report: the report of `pcg explain`, as JSON.
    Raises:
        ProgramError: it cannot be written, or the folder holds other files.
    """
    target = free_folder(directory)
    files = files_of(program)
    if report is not None:
        files[REPORT] = json_text(report, "the report").encode()
    beside = target.parent / f".{target.name}-{secrets.token_hex(4)}"
    try:
        if tokenizer_directory is not None:
            files |= _tokenizer_files(Path(tokenizer_directory))
        manifest = Manifest(
            FORMAT,
            _versions(),
            program.name,
            dtype=program.dtype,
            base_prefix=program.base_prefix,
            weights=None if weights is None else os.fspath(weights),
            recipes=program.recipes,
            files={name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)},
            renamings=program.renamings,
            choices=program.choices,
        )
        files[MANIFEST] = json_text(dataclasses.asdict(manifest), "the manifest").encode()
        beside.mkdir(parents=True)
        for name, content in files.items():
            _write(beside / name, content)
        _replace(target, beside)
        _sweep(target)
    except OSError as error:
        size_bytes = sum(map(len, files.values()))
        raise ProgramError(
            f"{target} cannot be saved ({size_bytes} bytes): {error.strerror or error}; what was "
            "there is as it was"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest


def free_folder(directory: str | os.PathLike[str]) -> Path:
    """Check that a program can be written to a directory, and return its path.

    Raises:
        ProgramError: it cannot be written to, or holds files that are not a program's.
    """
    target = expanded(directory)
    check_writable(target, "the program", ProgramError)
    if target.is_symlink():  # rename its target, not the link
        target = target.resolve()
    existing = {p.relative_to(target).as_posix() for p in target.rglob("*") if not p.is_dir()}
    if not existing:
        return target
    if MANIFEST not in existing:
        raise ProgramError(
            f"{target} is not empty and not a compiled program (it has {min(existing)}); give a "
            "new folder"
        )
    try:
        others = existing - {MANIFEST, *read_manifest(target).files}
    except ProgramError as error:
        raise ProgramError(
            f"{target} holds a program that cannot be read ({error}), so which of its files are "
            "others' is not known; remove it, or give a new folder"
        ) from error
    if others:
        raise ProgramError(
            f"{target} holds a program and {len(others)} other file{'s' * (len(others) > 1)}, such "
            f"as {min(others)}, which replacing it would delete; move them, or give a new folder"
        )
    return target


def _tokenizer_files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for pattern in TOKENIZER_FILES
        for path in directory.glob(pattern)
        if path.is_file()
    }


def _versions() -> dict[str, str]:
    versions = {"pcg": __version__}
    for name in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    sync(path)


def _replace(target: Path, new: Path) -> None:
    """Rename `new` to `target`, and remove the old program afterwards.

    If the file system cannot exchange folders, a process killed between two renames leaves the old
    program in a folder with the suffix `-old`.
    """
    if not target.exists():
        new.rename(target)
        return
    if exchange(new, target):
        shutil.rmtree(new, ignore_errors=True)
        return
    old = new.with_name(f"{new.name}-old")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove the temporary folders of killed processes."""
    name = re.compile(re.escape(f".{target.name}-") + "[0-9a-f]{8}(-old)?")
    with contextlib.suppress(OSError):
        for path in target.parent.iterdir():
            is_left = name.fullmatch(path.name) and time.time() - path.lstat().st_ctime > _LEFT_S
            if is_left and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


# ------------------------------------------------------------------------------------------- load


def load_program(directory: str | os.PathLike[str], *, trust_edits: bool = False) -> Program:
    """Read a program's folder.

    Args:
        trust_edits: accept edits of emitted source, the tokenizer's files and the report. Loading a
            program runs its source.
    Raises:
        ProgramError: the folder is missing, damaged, edited, or of a newer pcg; says the fix.
    """
    folder = expanded(directory)
    manifest = read_manifest(folder)
    files = {}
    for name, expected in manifest.files.items():
        files[name] = read_bytes(folder / name)
        digest = hashlib.sha256(files[name]).hexdigest()
        if digest != expected:
            _check_edit(folder, name, digest, expected, trust_edits)
    missing = [name for name in REQUIRED if name not in files]
    if missing:
        raise ProgramError(f"{folder / MANIFEST} names no {missing[0]}; {compile_again(folder)}")
    try:
        return program_from(files, manifest)
    except ProgramError as error:
        raise ProgramError(f"{folder}: {error}") from error


def _check_edit(folder: Path, name: str, digest: str, expected: str, trust_edits: bool) -> None:
    hashes = f"SHA-256 {digest[:8]}…, compiled as {expected[:8]}…"
    if name not in SOURCES and (name in REQUIRED or name.endswith(".pcg")):
        raise ProgramError(
            f"{folder / name} is damaged or was edited ({hashes}); only the emitted source may be "
            f"edited: {compile_again(folder)}"
        )
    if not trust_edits:
        raise ProgramError(
            f"{folder / name} was edited ({hashes}); if the edit is meant, accept it: "
            f"--trust-edits (trust_edits=True); else {compile_again(folder)}"
        )
