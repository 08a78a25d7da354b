"""Executors whose programs are compiled once per session for equal models and options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import pcg.compiler as compiler
from pcg.ir.program.program import Program
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import Checkpoint, StateDictCheckpoint
from pcg.source import resolve

_PROGRAMS: dict[str, Program] = {}


def program(model: Any, **options: Any) -> Program:
    """Return the program of a model with some options of `compile_program`, without adapters.

    Args:
        model: a transformers model in memory, a directory that holds one, or a configuration.
    """
    if isinstance(model, torch.nn.Module):
        dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
        facts: list[Any] = [model.config.to_dict(), dtypes]
    else:
        facts = [dict(model) if isinstance(model, dict) else resolve(model).config]
    key = json.dumps([facts, options], sort_keys=True, default=str)
    if key not in _PROGRAMS:
        _PROGRAMS[key] = compiler.compile_program(model, None, **options)
    return _PROGRAMS[key]


def executor(model: Any, peft: Any = None, *, device: str = "cpu", **options: Any) -> Executor:
    """Return a fresh executor, as `pcg.compile` does without comparing logits.

    Args:
        model: a transformers model in memory, or a directory that holds one.
        peft: adapters to add, by name.
        options: those of `compile_program`.
    """
    made = program(model, **options)
    if isinstance(model, torch.nn.Module):
        weights: Any = StateDictCheckpoint(model.state_dict(keep_vars=True), made.base_prefix)
        return compiler.make_executor(made, weights, peft, None, device)
    directory = Path(model)
    weights = Checkpoint.open(resolve(directory, weights=True), made.base_prefix, made.renamings)
    return compiler.make_executor(made, weights, peft, directory, device)
