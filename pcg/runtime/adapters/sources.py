"""Sources: the paths of the adapter parameters that a program reads, or that an adapter has."""

from __future__ import annotations

from collections.abc import Iterable

from pcg.ir.module_paths import WHOLE_MODEL
from pcg.ir.program.program import ModelGraph
from pcg.peft.adapter import Adapter


def model_sources(model: ModelGraph) -> frozenset[str]:
    """Sources of the adapter parameters that a program reads, in all layers."""
    return frozenset(
        parameter.source.format(layer=layer)
        for parameter, layer in model.parameters()
        if parameter.role == "adapter"
    )


def served_sources(adapter: Adapter) -> frozenset[str]:
    """Sources of the parameters that a program needs to serve an adapter."""
    served = _joined((path, w.served) for path, w in adapter.weights.items())
    return served | _bias_sources(adapter)


def trained_sources(adapter: Adapter) -> frozenset[str]:
    """Sources of the parameters that a program needs to train an adapter."""
    trained = _joined((path, w.parameters) for path, w in adapter.weights.items())
    return trained | {*adapter.shared} | _bias_sources(adapter)


def _joined(kinds_by_path: Iterable[tuple[str, Iterable[str]]]) -> frozenset[str]:
    return frozenset(
        kind if path == WHOLE_MODEL else f"{path}.{kind}"
        for path, kinds in kinds_by_path
        for kind in kinds
    )


def _bias_sources(adapter: Adapter) -> frozenset[str]:
    return frozenset(f"{path}.bias" for path in adapter.biases)
