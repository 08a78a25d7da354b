"""The base executor: the frozen weights of a model, and the pieces that run by them.

It keeps nothing of a client between two calls. Tensors that are read other than by products, such
as embeddings and norms, and biases, which the client adds so that a linear piece is linear, are
fetched once.

A client may call the graphs that it has defined itself. Graphs of equal text are shared, and kept
while a client that has defined them is connected.
"""

from __future__ import annotations

import hashlib
import json
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pcg.codegen.emit import emit_module
from pcg.codegen.program_functions import Function
from pcg.errors import CostModelError, SplitError
from pcg.files import is_file
from pcg.ir.graph import Graph
from pcg.ir.operators.linear import multiplied
from pcg.ir.program.program import python_name
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.torch.products import has_stand_in, is_remote, linear, linear_backward
from pcg.kernels.torch.quantized import float_weight
from pcg.parallel.costs.catalog import own_sheet
from pcg.parallel.costs.own_rates import own_rates
from pcg.passes.fusion.fuse_products import FuseLinears
from pcg.runtime.executor import Executor
from pcg.runtime.model.base_weights import weight_digests
from pcg.runtime.model.bound_weights import (
    as_group,
    joined,
    lie_side_by_side,
    product_weights,
)
from pcg.runtime.model.runner import load_functions
from pcg.split.base.piece_rules import LAYER, PieceGraph, check_weight, read_piece
from pcg.split.messages import (
    GRADIENT,
    GRAPH,
    LINEAR,
    TOKENIZER_FILES,
    UNKNOWN_GRAPH,
    BaseFacts,
    Message,
    Piece,
    Rates,
    config_text,
    graph_digest,
)
from pcg.split.shared_memory import LEAST_BYTES

# ------------------------------------------------------------------------------------- graph pieces


_MOST_GRAPHS = 256
"""Graphs of one client."""
_FUNCTION = "piece"


@dataclass(eq=False)
class _Defined:
    piece: PieceGraph
    fused: Graph
    function: Callable[..., Any]
    clients: set[bytes] = field(default_factory=set)
    layers: dict[int, SimpleNamespace] = field(default_factory=dict)

    def key(self, layer: int) -> int:
        """Return the key of a layer's weights in `layers`; the same key for all without a layer."""
        is_layered = any(LAYER in parameter.source for parameter in self.piece.graph.parameters)
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
        """Let a client call a graph; return its digest. SplitError: it may not run."""
        digest = graph_digest(text)
        known = self._defined.get(digest)
        if known is None or client not in known.clients:
            count = sum(client in graph.clients for graph in self._defined.values())
            if count >= _MOST_GRAPHS:
                raise SplitError(f"a client defines {_MOST_GRAPHS} graphs at most")
        if known is None:
            known = self._defined[digest] = _compiled(read_piece(text, self._widest))
        known.clients.add(client)
        return digest

    def forget(self, client: bytes) -> None:
        """Forget a client, and the graphs that no other client has defined."""
        for graph in self._defined.values():
            graph.clients.discard(client)
        self._defined = {key: graph for key, graph in self._defined.items() if graph.clients}

    def checked(self, client: bytes, piece: Piece, inputs: Sequence[Tensor]) -> PieceGraph:
        """Check a call. SplitError: the graph is unknown, or inputs or weights do not fit."""
        known = self._defined.get(piece.weights[0])
        if known is None or client not in known.clients:
            raise SplitError(f"{UNKNOWN_GRAPH}: {piece}")
        wanted = known.piece.graph.inputs
        tokens = len(inputs[0]) if inputs and inputs[0].dim() else 0
        shapes = [(tokens, *value.type.features) for value in wanted]
        if not tokens or shapes != [tuple(tensor.shape) for tensor in inputs]:
            shown_inputs = ", ".join(str(list(tensor.shape)) for tensor in inputs)
            shown = ", ".join(str(value.type) for value in wanted)
            raise SplitError(
                f"the piece takes {shown} with T from 1 on, not {shown_inputs or 'nothing'}"
            )
        for value, tensor in zip(wanted, inputs, strict=True):
            if tensor.dtype != getattr(torch, TORCH_NAMES[value.type.dtype]):
                raise SplitError(f"the piece takes {value.type}, not {tensor.dtype}")
        layer = known.key(piece.layer)
        if layer not in known.layers:
            known.layers[layer] = self._bound(known.fused, layer)
        return known.piece

    def run(self, piece: Piece, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        known = self._defined.get(piece.weights[0])
        if known is None:
            raise SplitError(f"{UNKNOWN_GRAPH}: {piece}")
        result = known.function(known.layers[known.key(piece.layer)], None, None, *inputs)
        return result if isinstance(result, tuple) else (result,)

    def _bound(self, graph: Graph, layer: int) -> SimpleNamespace:
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


# ------------------------------------------------------------------------------------ base executor


_MOST_REPLY_BYTES = 2**32
_MOST_PIECES = 4096
"""Joined pieces that are remembered."""


class BaseExecutor:
    """Runs pieces by the weights of an executor.

    Attributes:
        multiplied: the weights [out, in] of linear pieces, by name.
        fetched: the tensors that clients may have.
        graphs: the graphs that clients have defined.
        runs_graphs: True if clients may define any.
        absent: names of matrices that other bases hold.
    """

    runs_graphs: ClassVar[bool] = True

    def __init__(self, executor: Executor) -> None:
        program = executor.program
        if executor.ranks.size > 1:
            raise SplitError(f"a base executor runs on one rank, not on {executor.ranks.size}")
        self.name = program.name
        self.config = program.config
        self.dtype: torch.dtype = getattr(torch, TORCH_NAMES[program.dtype])
        self.device = executor.device
        self._store = executor.state.weight_store
        self.multiplied: dict[str, Tensor] = {}
        self.fetched: dict[str, Tensor] = {}
        constants: dict[str, Tensor] = {}
        self._parameters = dict(self._store.frozen())
        for graph, layer, holder in self._store.bind(program.base).holders(program.base):
            products = set(multiplied(graph))
            for parameter in graph.parameters:
                kept = constants
                if parameter.role == "frozen":
                    kept = self.multiplied if parameter.name in products else self.fetched
                tensor: Tensor = getattr(holder, python_name(parameter.name))
                if kept is self.fetched:
                    tensor = float_weight(tensor)
                kept[parameter.source.format(layer=layer)] = tensor
        widest = max(max(weight.shape) for weight in self.multiplied.values())
        tensors = {**constants, **self.fetched, **self.multiplied}
        self.graphs = GraphPieces(tensors, widest, len(program.base.layers))
        self.absent: tuple[str, ...] = ()
        self._joined: dict[tuple[str, ...], Tensor | None] = {}
        self._squares: dict[str, Tensor] = {}

    def leave_absent(self) -> None:
        """Leave out the matrices that other bases hold."""
        self.absent = tuple(name for name, weight in self.multiplied.items() if is_remote(weight))
        self.multiplied = {
            n: weight for n, weight in self.multiplied.items() if not is_remote(weight)
        }

    def publish(self, publish: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> None:
        """Put the large tensors that clients fetch into memory that they can map.

        Args:
            publish: a transport's function; it returns the tensors that moved.
        """
        if self.device.type == "cpu":
            large = {
                n: tensor for n, tensor in self.fetched.items() if tensor.nbytes >= LEAST_BYTES
            }
            for name, tensor in publish(large).items():
                # In place, so that all who have the tensor leave the memory where it was.
                self.fetched[name].data = tensor

    @cached_property
    def digest(self) -> str:
        """A digest of the configuration and of all weights."""
        text = f"{config_text(self.config)} {self.dtype} {config_text(self.digests)}"
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """A digest of each weight, those that other bases hold included."""
        return weight_digests(self._store)

    @property
    def size_bytes(self) -> int:
        return self._store.size_bytes

    @property
    def _sheet(self) -> str:
        """The name of the device's data sheet; that of an H100 for a GPU without a sheet."""
        try:
            return own_sheet(self.device)
        except CostModelError:
            return "H100"

    def facts(
        self, files: Mapping[str, str], *, rows: bool, most_bytes: int, instance: str
    ) -> BaseFacts:
        """Describe the base to clients; the arguments are fields of a session."""
        rates = own_rates(self.device, self.dtype)
        return BaseFacts(
            name=self.name,
            config=json.loads(config_text(_float_config(self.config))),
            dtype=str(self.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            digest=self.digest,
            device=self._sheet,
            rates=None if rates is None else Rates(**asdict(rates)),
            graphs=self.runs_graphs,
            pieces={n: (weight.shape[0], weight.shape[1]) for n, weight in self.multiplied.items()},
            fetched={name: tuple(tensor.shape) for name, tensor in self.fetched.items()},
            absent=self.absent,
            digests=dict(self.digests),
            files=dict(files),
            rows=rows,
            most_bytes=most_bytes,
            instance=instance,
        )

    def checked(self, piece: Piece, inputs: Sequence[Tensor]) -> None:
        """Check a piece's inputs. SplitError: it is unknown, or they do not fit."""
        for name in piece.weights:
            if name not in self.multiplied:
                raise SplitError(f"{name[:200]!r} is no weight that this base multiplies by")
        if len(set(piece.weights)) < len(piece.weights):
            raise SplitError(f"{str(piece)[:200]} names a weight twice")
        shapes = [self.multiplied[name].shape for name in piece.weights]
        width = shapes[0][1] if piece.kind == LINEAR else shapes[0][0]
        if any(shape[1] != shapes[0][1] for shape in shapes):
            raise SplitError(f"the weights of {piece} have inputs of different sizes")
        if len(inputs) != 1 or inputs[0].dim() != 2 or inputs[0].shape[1] != width:
            shown = ", ".join(str(list(tensor.shape)) for tensor in inputs)
            raise SplitError(f"{piece} takes one tensor [tokens, {width}], not {shown or 'none'}")
        if not len(inputs[0]):
            raise SplitError(f"{piece} was given no tokens")
        outs = sum(shape[0] for shape in shapes) if piece.kind == LINEAR else shapes[0][1]
        size = len(inputs[0]) * outs * inputs[0].element_size()
        if size > _MOST_REPLY_BYTES:
            raise SplitError(
                f"{len(inputs[0])} tokens through {str(piece)[:200]} are {size} bytes, and a reply "
                f"has {_MOST_REPLY_BYTES} at most; send fewer tokens at once"
            )
        if inputs[0].dtype not in (self.dtype, torch.float32, torch.float64):
            raise SplitError(f"the base runs in {self.dtype}, and not in {inputs[0].dtype}")

    @torch.no_grad()
    def run(self, piece: Piece, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a piece on the tokens of a request, or of several in a row."""
        if piece.kind == GRAPH:
            return self.graphs.run(piece, [tensor.to(self.device) for tensor in inputs])
        return (self._product(piece, inputs[0].to(self.device)),)

    def _product(self, piece: Piece, x: Tensor) -> Tensor:
        if piece.kind == GRADIENT:
            return linear_backward(x, _in(self.multiplied[piece.weights[0]], x.dtype))
        whole = self._whole(piece.weights)
        if whole is not None:
            return linear(x, _in(whole, x.dtype))
        weights = (self.multiplied[name] for name in piece.weights)
        return torch.cat([linear(x, _in(weight, x.dtype)) for weight in weights], -1)

    def _whole(self, names: tuple[str, ...]) -> Tensor | None:
        """Return weights joined without a copy; None if they are not side by side."""
        if names not in self._joined:
            weights = [self.multiplied[name] for name in names]
            if len(self._joined) >= _MOST_PIECES:
                self._joined.clear()
            is_one = lie_side_by_side(weights) and not any(map(has_stand_in, weights))
            self._joined[names] = joined(weights) if is_one else None
        return self._joined[names]

    @torch.no_grad()
    def answer(self, message: Message) -> Message:
        """Answer a request that is no piece. SplitError: it is invalid."""
        if message.op == "fetch":
            name = message.text("name")
            if name not in self.fetched:
                raise SplitError(
                    f"{name[:200]!r} stays at the base"
                    if name in self.multiplied
                    else f"this base has no tensor {name[:200]!r}"
                )
            return Message("reply", message.seq, tensors=(self.fetched[name],))
        if message.op == "lengths":
            name = message.text("name")
            if name not in self._squares:
                self._squares[name] = self._weight(name).float().square().sum(1)
            return Message("reply", message.seq, tensors=(self._squares[name],))
        if message.op == "rows":
            weight = self._weight(message.text("name"))
            end = message.number("end", len(weight))
            begin = message.number("begin", end)
            return Message("reply", message.seq, tensors=(weight[begin - 1 : end],))
        raise SplitError(f"{message.op[:100]!r} is nothing that a base does")

    def _weight(self, name: str) -> Tensor:
        if name not in self.multiplied:
            raise SplitError(f"{name[:200]!r} is no weight that this base multiplies by")
        return float_weight(self.multiplied[name])


def _in(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype; a quantized weight multiplies inputs of any."""
    return weight if has_stand_in(weight) else weight.to(dtype)


def _float_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the weights' format, which a client does not need."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


def tokenizer_files(directory: object) -> dict[str, str]:
    """Return the small text files of a model's directory that its tokenizer is read from."""
    from pathlib import Path

    if directory is None:
        return {}
    paths = [Path(str(directory)) / name for name in TOKENIZER_FILES]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if is_file(path)}
