"""Layers of a model that are differentiated alike."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.passes.differentiate import Differentiated


@dataclass(frozen=True)
class LayerKind:
    """Layers that are differentiated alike: those of one block, the first to train one apart.

    Attributes:
        name: the name for their graphs.
        block: the index of their block in the model.
        layers: the layers' numbers.
        shared: inputs that come from the prologue, which all layers read.
        gradients: the block's graph and its backward.
    """

    name: str
    block: int
    layers: tuple[int, ...]
    shared: tuple[str, ...]
    gradients: Differentiated
