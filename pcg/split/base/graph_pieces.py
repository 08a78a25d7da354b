"""Graphs that clients have defined, and how they run.

A client may call the graphs that it has defined itself. Those with one text are one, whoever has
defined them, and are kept as long as one of these clients is there.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pcg.codegen.emit import emit_module
from pcg.codegen.program_functions import Function
from pcg.errors import SplitError
from pcg.ir.graph import Graph
from pcg.ir.program.program import python_name
from pcg.ir.types import TORCH_NAMES
from pcg.passes.fusion.fuse_linears import FuseLinears
from pcg.runtime.model.product_weights import as_group, joined, lie_side_by_side, product_weights
from pcg.runtime.model.runner import load_functions
from pcg.split.base.piece_rules import LAYER, PieceGraph, check_weight, read_piece
from pcg.split.pieces import UNKNOWN_GRAPH, Piece, graph_digest

_MOST_GRAPHS = 256
"""Graphs of one client."""
_FUNCTION = "piece"


@dataclass(eq=False)
class _Defined:
    """A graph that may run, its function, and its weights by layer."""

    piece: PieceGraph
    fused: Graph
    function: Callable[..., Any]
    clients: set[bytes] = field(default_factory=set)
    layers: dict[int, SimpleNamespace] = field(default_factory=dict)

    def key(self, layer: int) -> int:
        """Return what `layers` has a layer's weights by: one for all, if they are of no layer."""
        is_layered = any(LAYER in one.source for one in self.piece.graph.parameters)
        return layer if is_layered else 0


class GraphPieces:
    """The graphs of a base's clients.

    Args:
        tensors: the base's frozen tensors and constants, by name.
        widest: the longest side of its matrices.
        layers: the number of its layers.
    """

    def __init__(self, tensors: Mapping[str, Tensor], widest: int, layers: int) -> None:
        self._tensors = tensors
        self._widest = widest
        self._layers = layers
        self._defined: dict[str, _Defined] = {}

    def __len__(self) -> int:
        return len(self._defined)

    def define(self, client: bytes, text: str) -> str:
        """Let a client call a graph; returns its digest. SplitError: it may not run."""
        digest = graph_digest(text)
        known = self._defined.get(digest)
        if known is None or client not in known.clients:
            own = sum(client in one.clients for one in self._defined.values())
            if own >= _MOST_GRAPHS:
                raise SplitError(f"a client defines {_MOST_GRAPHS} graphs at most")
        if known is None:
            known = self._defined[digest] = _compiled(read_piece(text, self._widest))
        known.clients.add(client)
        return digest

    def forget(self, client: bytes) -> None:
        """Forget a client that is gone, and the graphs that nobody else has defined."""
        for one in self._defined.values():
            one.clients.discard(client)
        self._defined = {key: one for key, one in self._defined.items() if one.clients}

    def checked(self, client: bytes, piece: Piece, inputs: Sequence[Tensor]) -> PieceGraph:
        """Check a call. SplitError: the graph is unknown, or inputs or weights do not fit."""
        found = self._defined.get(piece.weights[0])
        if found is None or client not in found.clients:
            raise SplitError(f"{UNKNOWN_GRAPH}: {piece}")
        wanted = found.piece.graph.inputs
        tokens = len(inputs[0]) if inputs and inputs[0].dim() else 0
        shapes = [(tokens, *value.type.features) for value in wanted]
        if not tokens or shapes != [tuple(one.shape) for one in inputs]:
            given = ", ".join(str(list(one.shape)) for one in inputs)
            shown = ", ".join(str(value.type) for value in wanted)
            raise SplitError(f"the piece takes {shown} with T from 1 on, not {given or 'nothing'}")
        for value, one in zip(wanted, inputs, strict=True):
            if one.dtype != getattr(torch, TORCH_NAMES[value.type.dtype]):
                raise SplitError(f"the piece takes {value.type}, not {one.dtype}")
        layer = found.key(piece.layer)
        if layer not in found.layers:
            found.layers[layer] = self._bound(found.fused, layer)
        return found.piece

    def run(self, piece: Piece, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a graph that was checked."""
        found = self._defined.get(piece.weights[0])
        if found is None:
            raise SplitError(f"{UNKNOWN_GRAPH}: {piece}")
        result = found.function(found.layers[found.key(piece.layer)], None, None, *inputs)
        return result if isinstance(result, tuple) else (result,)

    def _bound(self, graph: Graph, layer: int) -> SimpleNamespace:
        """Return a layer's weights, as the function reads them."""
        weights = SimpleNamespace()
        for parameter in graph.parameters:
            tensor = check_weight(parameter, layer, self._tensors)
            setattr(weights, python_name(parameter.name), tensor)
        for product in product_weights(graph):
            names = [python_name(name) for name in product.weights]
            tensors = [getattr(weights, name) for name in names]
            if len(names) > 1 and lie_side_by_side(tensors):
                biases = [getattr(weights, python_name(name)) for name in product.biases]
                for name in names[1:]:
                    setattr(weights, name, None)
                setattr(weights, names[0], as_group(joined(tensors).detach(), tensors, biases))
        return weights


def _compiled(piece: PieceGraph) -> _Defined:
    fused = FuseLinears().run(piece.graph)
    function = Function(fused.replace(name=_FUNCTION), _FUNCTION, "A piece of a layer.", free=True)
    source = emit_module("A piece", "A base executor runs it.", [function], "torch")
    loaded = load_functions(source, _FUNCTION)[_FUNCTION]
    # The lines are kept for tracebacks, also of graphs that are forgotten.
    linecache.cache.pop(loaded.__code__.co_filename, None)
    return _Defined(piece, fused, loaded)
