"""Readable, deterministic value names: a module's output by its module, the rest by operator."""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import count

from pcg.ir.graph import Graph

_NAMED_BY_MODULE = {"embedding", "experts", "layer_norm", "linear", "rms_norm"}


def readable_names(graph: Graph, inputs: Mapping[str, str] | None = None) -> dict[str, str]:
    """A new name for each node's outputs, and for the inputs that `inputs` renames.

    `q_proj` for the linear operator of module `self_attn.q_proj`, `add_1` for the second addition.
    """
    names = {v.name: (inputs or {}).get(v.name, v.name) for v in graph.inputs}
    taken = {*names.values(), *graph.parameters_by_name}

    def unique(stem: str) -> str:
        name = unused_name(stem, taken)
        taken.add(name)
        return name

    for node in graph.nodes:
        last = node.scope.rsplit(".", 1)[-1]
        stem = last if node.op in _NAMED_BY_MODULE and last and not last.isdigit() else node.op
        base = unique(stem)
        names[node.outputs[0].name] = base
        for value in node.outputs[1:]:
            suffix = value.name.removeprefix(node.outputs[0].name + "_")
            names[value.name] = unique(f"{base}_{suffix}")
    return names


def unused_name(stem: str, taken: Container[str]) -> str:
    """The stem, else the first of `stem_1`, `stem_2`, … that is not taken."""
    if stem not in taken:
        return stem
    return next(name for n in count(1) if (name := f"{stem}_{n}") not in taken)
