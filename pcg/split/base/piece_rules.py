"""The rules for graphs that clients have a base run: text of unknown origin.

    text         short; every type is of plain sizes, so that reading it takes no algebra; as
                 `pcg.passes.placement.piece` writes it, so that no name is the client's
    graph        the IR's rules (`pcg.ir.analysis.verifier`), few nodes, inputs and outputs
    operators    those of `PIECE_OPERATORS`, by which a token's result depends only on it, with
                 small numbers or known words as attributes
    values       have a row for each token, and at most a few times the numbers of the base's
                 widest matrix in it; except for vectors computed from weights
    weights      frozen tensors and constants of the base, of their shapes; a matrix is in few
                 products, so that a piece costs a few times its layer
    outputs      results of the piece's nodes

So a client can have a base compute only the operators of its layers, and the memory of a request is
known before it is taken: a number of bytes for each token.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from pcg.errors import IrError, SplitError
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Attribute, Graph, Node, Parameter
from pcg.ir.layouts import WHOLE
from pcg.ir.parser import parse_graph
from pcg.ir.types import DTYPE_BYTES, TORCH_NAMES, TensorType
from pcg.kernels.torch.products import is_remote
from pcg.passes.placement.piece import piece_text
from pcg.passes.placement.split_graph import LINEAR, PIECE_OPERATORS

FLOATS = ("f16", "bf16", "f32", "f64")
"""The dtypes of a piece's values."""
_WORDS = {"dtype": FLOATS, "approximate": ("none", "tanh"), "style": ("half", "interleaved")}
"""Attributes that are words. Others are numbers: emitted source has some of them as they are."""
_MOST_DIMS = 8
MOST_CHARACTERS = 2**16
_MOST_NODES = 256
_MOST_VALUES = 16
"""Inputs, and outputs, of a piece; a message has no more tensors."""
_MOST_PRODUCTS = 2
"""Products of each kind by one matrix, in a piece."""
_MOST_LINEAR = 64
"""Products of a piece, whatever its matrices; a layer has fewer."""
_MOST_WIDTHS = 4
"""Numbers that a value has for a token, in the widest sides of the base's matrices."""
_MOST_COPIES, _LEAST_BYTES = 4, 4
"""Copies of its result that a kernel has at once, and bytes of a number in them: a layer norm's
gradient has most. Kernels run one after the other."""
_SIZES = re.compile(r"(T|[0-9]{1,9})?(, [0-9]{1,9}){0,7}")
LAYER = "{layer}"
"""The place of the layer's number in the name of a weight."""
_SOURCE = re.compile(r"[A-Za-z0-9_.{}]{1,200}")


@dataclass(frozen=True)
class PieceGraph:
    """A graph that may run.

    Attributes:
        trains: True if it has a gradient in it.
        bytes_per_token: bytes of all its values for a token, with those of weights' vectors, and of
            temporary memory of kernels.
    """

    graph: Graph
    trains: bool
    bytes_per_token: int


def read_piece(text: str, widest: int) -> PieceGraph:
    """Read a graph that a client has written.

    Args:
        widest: the longest side of the base's matrices.
    Raises:
        SplitError: it may not run; names the rule.
    """
    if len(text) > MOST_CHARACTERS:
        raise SplitError(f"a piece has {MOST_CHARACTERS:,} characters at most, not {len(text):,}")
    for sizes in re.findall(r"\[([^\]]*)", text):
        if not _SIZES.fullmatch(sizes):
            raise SplitError(f"a piece has types such as f32[T, 64], not [{sizes[:40]}]")
    try:
        graph = parse_graph(text)
        _check_size(graph)
        # Before the verifier, which infers types: an operator that may not run infers nothing here.
        for node in graph.nodes:
            _check_operator(node)
        verify(graph)
    except IrError as error:
        raise SplitError(f"this is no piece: {str(error)[:500]}") from None
    most = _MOST_WIDTHS * widest
    _check_values(graph, most)
    for parameter in graph.parameters:
        _check_parameter(parameter)
    if piece_text(graph).text != text:
        raise SplitError("a piece has the text that pcg.connect writes: its names, and no scopes")
    values = [value for node in graph.nodes for value in node.outputs]
    types = [value.type for value in (*graph.inputs, *values)]
    total = sum(prod(type_.features) * DTYPE_BYTES[type_.dtype] for type_ in types)
    total += max(map(_temporary_bytes, graph.nodes))
    return PieceGraph(graph, any("_backward" in node.op for node in graph.nodes), total)


def check_weight(parameter: Parameter, layer: int, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of a piece's parameter. SplitError: the base lacks it, or has another."""
    name = parameter.source.replace(LAYER, str(layer))
    tensor = tensors.get(name)
    if tensor is None or is_remote(tensor):
        raise SplitError(f"{name[:200]!r} is no weight of this base")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (tuple(tensor.shape), dtype) != (parameter.type.features, TORCH_NAMES[parameter.type.dtype]):
        raise SplitError(f"{name[:200]} is {list(tensor.shape)} of {dtype}, not {parameter.type}")
    return tensor


def _check_size(graph: Graph) -> None:
    if len(graph.nodes) > _MOST_NODES:
        raise SplitError(f"a piece has {_MOST_NODES} nodes at most, not {len(graph.nodes)}")
    for what, count in (("inputs", len(graph.inputs)), ("outputs", len(graph.outputs))):
        if not 0 < count <= _MOST_VALUES:
            raise SplitError(f"a piece has 1 to {_MOST_VALUES} {what}, not {count}")
    sources = {
        parameter.name: parameter.source for parameter in graph.parameters
    }  # two may be of one matrix
    products = Counter(
        (node.op, sources.get(name))
        for node in graph.nodes
        if node.op in LINEAR
        for name in node.inputs[1:2]
    )
    if any(count > _MOST_PRODUCTS for count in products.values()):
        raise SplitError(f"a piece has {_MOST_PRODUCTS} products of a kind by a matrix at most")
    if products.total() > _MOST_LINEAR:
        raise SplitError(f"a piece has {_MOST_LINEAR} products at most, not {products.total()}")


def _check_operator(node: Node) -> None:
    if node.op not in PIECE_OPERATORS:
        raise SplitError(f"{node.op[:40]!r} is no operator that a base runs for its clients")
    for name, value in node.attributes:
        if not _is_plain(name, value):
            raise SplitError(
                f"{node.op[:40]} has {name[:40]}={str(value)[:40]!r}; use numbers or words"
            )


def _is_plain(name: str, value: Attribute) -> bool:
    if isinstance(value, str):
        return value in _WORDS.get(name, ())
    if isinstance(value, tuple):
        return len(value) <= _MOST_DIMS and all(abs(number) < 2**31 for number in value)
    return math.isfinite(value) and abs(value) < 2**63


def _check_values(graph: Graph, most: int) -> None:
    results = {value.name for node in graph.nodes for value in node.outputs}
    if len(set(graph.outputs)) < len(graph.outputs) or not results.issuperset(graph.outputs):
        raise SplitError("a piece returns values that its nodes make, each once")
    of_weights = {parameter.name for parameter in graph.parameters}
    for value in graph.inputs:
        _check_row(value.name, value.type, most)
    for node in graph.nodes:
        if of_weights.issuperset(node.inputs):
            of_weights.update(value.name for value in node.outputs)
            if any(
                len(output.type.features) > 1 or prod(output.type.features) > most
                for output in node.outputs
            ):
                raise SplitError(f"%{node.name} is no vector; weights make vectors alone")
            continue
        for value in node.outputs:
            _check_row(value.name, value.type, most)
        if node.op in LINEAR and node.inputs[1] not in graph.parameters_by_name:
            raise SplitError(f"%{node.name} multiplies by %{node.inputs[1]}, which is no weight")
    if of_weights.intersection(graph.outputs):
        raise SplitError("a piece returns nothing that is made of weights alone")


def _check_row(name: str, type_: TensorType, most: int) -> None:
    if not type_.is_token_wise or type_.dtype not in FLOATS:
        raise SplitError(
            f"%{name} is {type_}; a piece's values have floats in a row for each token"
        )
    if prod(type_.features) > most:
        raise SplitError(
            f"%{name} has {prod(type_.features):,} numbers a token, more than {most:,}"
        )


def _check_parameter(parameter: Parameter) -> None:
    if parameter.role == "adapter":
        raise SplitError(f"%{parameter.name} is an adapter's; a base has frozen weights alone")
    if not _SOURCE.fullmatch(parameter.source):
        raise SplitError(f"{parameter.source[:200]!r} is no weight of this base")
    if parameter.part != WHOLE or parameter.rows is not None:
        raise SplitError(f"%{parameter.name} is a part of a weight; a base has them whole")


def _temporary_bytes(node: Node) -> int:
    """Return a bound of a kernel's temporary memory, bytes a token."""
    types = [value.type for value in node.outputs]
    return _MOST_COPIES * sum(
        prod(type_.features) * max(_LEAST_BYTES, DTYPE_BYTES[type_.dtype]) for type_ in types
    )
