"""Tracing of a Hugging Face causal LM to a token-flat graph of the operator table."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from threading import Lock
from typing import Any, TypeAlias

import torch

from pcg.errors import PcgError, TraceError, UnsupportedError
from pcg.formats.registry import StoredFormat, stored_format
from pcg.ir.graph import Graph
from pcg.trace.export import TraceFacts, export
from pcg.trace.importer import import_graph
from pcg.trace.model_config import in_one_line, parse_config, with_cause

_TRACING = Lock()
"""Held while a model is traced: the hooks that count operators, and torch.export, are global."""
_MOST_CACHED = 64
"""Number of traces cached for later compilations; each holds a graph of at most 1 MiB."""

ToTrace: TypeAlias = Mapping[str, Any] | torch.nn.Module
"""The contents of a config.json, or a module."""


@dataclass(frozen=True)
class TracedModel(TraceFacts):
    """A traced model, before any pass.

    Attributes:
        graph: input_ids and position_ids, both [T], to logits [T, V]; a few layers of all kinds.
        constants: values of the graph's constants.
        dtype: the dtype of weights and activations, in the IR's names.
        stored: the format of a quantized checkpoint; None for a float checkpoint.
    """

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    dtype: str
    stored: StoredFormat | None


def trace(model: ToTrace, dtype: str | None = None, whole: bool = False) -> TracedModel:
    """Trace a causal LM.

    Args:
        model: the contents of a config.json, to trace on the meta device without weights; or the
            module itself, with its own classes, buffers and hooks.
        dtype: torch's name of the dtype, such as `bfloat16`; the model's own by default.
        whole: trace every layer instead of one layer of each kind, plus one.
    Raises:
        TraceError: the model has no token-flat graph; names the operator and the module.
    """
    stored = stored_format(model) if isinstance(model, Mapping) else None
    try:
        with _TRACING:
            exported = export(model, dtype, whole)
        graph, constants = import_graph(exported)
    except (TraceError, UnsupportedError) as error:
        named = with_cause(error, *_known_as(model))
        if named is error:
            raise
        raise named from error
    except PcgError:
        raise
    except Exception as error:
        name, config = _known_as(model)
        failed = TraceError(f"cannot trace {name}: {type(error).__name__}: {in_one_line(error)}")
        raise with_cause(failed, name, config) from error
    floating = next(
        p.type.dtype for p in graph.parameters if p.role == "frozen" and p.type.is_float
    )
    facts = {field.name: getattr(exported, field.name) for field in fields(TraceFacts)}
    return TracedModel(**facts, graph=graph, constants=constants, dtype=floating, stored=stored)


def _known_as(model: ToTrace) -> tuple[str, Mapping[str, Any]]:
    """Return a model's name in refusals, and its configuration with defaults."""
    if isinstance(model, torch.nn.Module):
        config: Any = getattr(model, "config", None)
        return type(model).__name__, config.to_dict() if hasattr(config, "to_dict") else {}
    name = str(model.get("model_type", "the model"))
    try:
        return name, parse_config(model).to_dict()
    except PcgError:
        return name, model


def trace_once(model: ToTrace, dtype: str | None, whole: bool) -> TracedModel:
    """Trace with arguments of `trace`; caches configurations, not modules."""
    if isinstance(model, torch.nn.Module):
        return trace(model, dtype, whole)
    return _trace_of_json(json.dumps(model, sort_keys=True), dtype, whole)


@functools.lru_cache(_MOST_CACHED)
def _trace_of_json(config: str, dtype: str | None, whole: bool) -> TracedModel:
    return trace(json.loads(config), dtype, whole)
