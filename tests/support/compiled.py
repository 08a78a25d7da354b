"""Executors whose programs are compiled once per session for equal models and options."""

from __future__ import annotations

import json
from typing import Any

import torch

import pcg.compiler as compiler
from pcg.ir.program.program import Program
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import Checkpoint, StateDictCheckpoint
from pcg.source import resolve

_PROGRAMS: dict[str, Program] = {}


def program(model: Any, peft: Any = None, **options: Any) -> Program:
    """Return the program of a model with some options of `compile_program`.

    Args:
        model: a model of transformers in memory, unmodified and of one dtype; a directory that
            holds one; or a configuration.
        peft: adapters that the program is compiled for, by name.
    """
    if isinstance(model, torch.nn.Module):
        # Its configuration is traced, which is cached for all options.
        (dtype,) = {parameter.dtype for parameter in model.parameters()}
        options = {"dtype": str(dtype).removeprefix("torch."), **options}
        model = model.config.to_dict()
    facts = dict(model) if isinstance(model, dict) else resolve(model).config
    key = json.dumps([facts, peft, options], sort_keys=True, default=str)
    if key not in _PROGRAMS:
        _PROGRAMS[key] = compiler.compile_program(model, peft, **options)
    return _PROGRAMS[key]


def executor(
    model: Any, peft: Any = None, *, device: str = "cpu", is_own: bool = False, **options: Any
) -> Executor:
    """Return a fresh executor, as `pcg.compile` does without comparing logits.

    Args:
        model: a transformers model in memory, or a directory that holds one.
        peft: adapters to add, by name.
        is_own: True for a program that is compiled for the adapters, as `pcg.compile` does; False
            for one without adapters and training, to which they are added.
        options: those of `compile_program`.
    """
    made = program(model, peft if is_own else None, **options)
    if isinstance(model, torch.nn.Module):
        weights: Any = StateDictCheckpoint(model.state_dict(keep_vars=True), made.base_prefix)
        return compiler.make_executor(made, weights, peft, None, device)
    source = resolve(model, weights=True)
    weights = Checkpoint.open(source, made.base_prefix, made.renamings)
    return compiler.make_executor(made, weights, peft, source, device)
