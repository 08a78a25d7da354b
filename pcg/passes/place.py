"""Cut of a model between a base and a client, for serving and for training.

`Place` reports the cut of all graphs. `CallPieces` cuts the layers of a running program and writes
the client's graphs: the client's nodes, and a call of the base for each piece. The prologue and the
epilogue stay unchanged, as each of their products is a separate round trip.

The client's nodes run as soon as their inputs are available; each call's outputs enable further
nodes. Nodes before the rest of the model form the new forward, nodes after it the new backward,
which may also compute values of the old forward. Views, and values computed only from frozen
weights, are computed at their first reader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pcg.errors import CostModelError, UnsupportedError
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.operators.linear import BasePiece
from pcg.ir.program.program import ModelGraph
from pcg.options import SplitLink
from pcg.parallel.costs.cost_model import CostModel
from pcg.passes.graphs.differentiate import Differentiated
from pcg.passes.graphs.pass_base import Named, Pass
from pcg.passes.placement.cut import GraphCut, StepCut, cut_graph
from pcg.passes.placement.exact_cut import Cut, RoundTrip, exact_cut
from pcg.passes.placement.piece import piece_graph, piece_text
from pcg.passes.placement.split_graph import LINEAR, SplitGraph, split_problem
from pcg.passes.placement.split_problem import SplitCosts, bits, mask_of
from pcg.passes.stages import Gradients, ModelGradients

# ------------------------------------------------------------------------------------ client graphs


def client_graphs(split: SplitGraph, cut: Cut) -> tuple[Graph, Graph | None]:
    """Return the client's forward, and its backward if the split problem has a backward.

    Raises:
        UnsupportedError: a piece reads no matrix of the base, or too many values.
    """
    return _Writer(split, cut).run()


@dataclass
class _Part:
    """The client's forward or backward under construction."""

    nodes: list[Node] = field(default_factory=list)
    values: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)

    def append(self, node: Node) -> None:
        self.nodes.append(node)
        self.values.update(value.name for value in node.outputs)


class _Writer:
    def __init__(self, split: SplitGraph, cut: Cut) -> None:
        self.split, self.cut, self.problem = split, cut, split.problem
        graphs = split.graphs
        self.types = {
            key: type_ for graph in reversed(graphs) for key, type_ in graph.types.items()
        }
        self.makers = {key: node for graph in graphs for key, node in graph.producers.items()}
        self.parameters = {
            key: p for graph in graphs for key, p in graph.parameters_by_name.items()
        }
        self.placed = {node.name for node in split.nodes if node is not None}
        self.parts = [_Part()]

    def run(self) -> tuple[Graph, Graph | None]:
        problem = self.problem
        client_nodes = mask_of(range(len(problem.nodes)))
        for trip in self.cut.trips:
            client_nodes &= ~trip.nodes
        has = mask_of(v for v in range(len(problem.values)) if v not in problem.makers)
        client_nodes, has = self._client(client_nodes, has)
        for trip in self.cut.trips:
            self._call(trip)
            has |= trip.returned
            _, has = self._client(trip.again, has)
            client_nodes, has = self._client(client_nodes, has)
        assert not client_nodes, "a cut leaves no node out"
        forward, *backward = self.split.graphs
        written = self._forward(forward, self.parts[0], self.parts[1:])
        return written, self._backward(backward[0]) if backward else None

    def _client(self, waiting: int, has: int) -> tuple[int, int]:
        """Run every node with available inputs; return the remaining nodes and available values."""
        for number in bits(waiting):
            node = self.problem.nodes[number]
            if mask_of(node.reads) & ~has:
                continue
            if len(self.parts) == 1 and number >= self.split.first_backward:
                continue
            waiting &= ~(1 << number)
            has |= mask_of(node.makes)
            origin = self.split.nodes[number]
            if origin is None:
                self.parts.append(_Part())
            else:
                self._append(origin)
        return waiting, has

    def _append(self, node: Node) -> None:
        for name in node.inputs:
            self._provide(name)
        self.parts[-1].append(node)

    def _provide(self, name: str) -> None:
        """Make a value available in the current part, through views and weight-only nodes."""
        part = self.parts[-1]
        if name in part.values or name in self.parameters:
            return
        if name not in self.makers or (part is not self.parts[0] and name in self.parts[0].values):
            part.read.add(name)
            return
        maker = self.makers[name]
        assert maker.name not in self.placed, f"%{name} is not there where the client reads it"
        self._append(maker)

    def _call(self, trip: RoundTrip) -> None:
        names = self.problem.values
        nodes = [self.problem.nodes[n].name for n in bits(trip.nodes | trip.repeated)]
        sent = [names[value].name for value in bits(trip.sent)]
        returned = [names[value].name for value in bits(trip.returned)]
        graph = piece_graph("piece", self.split.graphs, nodes, sent, returned)
        piece = piece_text(graph)
        matrices = [node.inputs[1] for node in graph.nodes if node.op in LINEAR]
        if not matrices:
            raise UnsupportedError(f"the piece of {', '.join(nodes)} has no matrix of the base")
        for name in piece.inputs:
            self._provide(name)
        outputs = tuple(Value(name, self.types[name]) for name in piece.outputs)
        attributes = (("text", piece.text),)
        call = Node(BasePiece.name, (*piece.inputs, matrices[0]), outputs, attributes)
        self.parts[-1].append(call)

    def _forward(self, graph: Graph, part: _Part, later: Iterable[_Part]) -> Graph:
        for name in graph.outputs:
            if name not in part.values and name in self.makers:
                self._at_end(part, name)
        return graph.replace(nodes=tuple(part.nodes), parameters=self._read(part.nodes))

    def _backward(self, graph: Graph) -> Graph:
        part = self.parts[1]
        for name in graph.outputs:
            if name not in part.values and name in self.makers:
                self._at_end(part, name)
        part.read.update(name for name in graph.outputs if name not in part.values)
        incoming = [value for value in graph.inputs if value.name in part.read]
        known = {value.name for value in incoming}
        forward = self.split.graphs[0]
        order = [*(v.name for v in forward.inputs), *(n for n in self.types if n in self.makers)]
        others = [n for n in order if n in part.read and n not in known]
        inputs = (*incoming, *(Value(name, self.types[name]) for name in others))
        return graph.replace(
            inputs=inputs, nodes=tuple(part.nodes), parameters=self._read(part.nodes)
        )

    def _at_end(self, part: _Part, name: str) -> None:
        kept, self.parts = self.parts, self.parts[: self.parts.index(part) + 1]
        self._provide(name)
        self.parts = kept

    def _read(self, nodes: Iterable[Node]) -> tuple[Parameter, ...]:
        read = {name for node in nodes for name in node.inputs}
        return tuple(parameter for name, parameter in self.parameters.items() if name in read)


# -------------------------------------------------------------------------------------- call pieces


@dataclass(frozen=True)
class LayerCut:
    """The cut of some layers of a program.

    Attributes:
        trains: True for the layers' forward and backward.
        cut: the cut; None if each product is a call.
        reason: the reason for None; empty otherwise.
    """

    name: str
    trains: bool
    cut: GraphCut | None
    reason: str = ""


@dataclass(frozen=True)
class CallPieces(Pass[Gradients, Gradients]):
    """Make the client's layers call the base for the pieces of the cheapest cut.

    A graph whose cut cannot be searched or written stays unchanged: each of its products is a call.

    Attributes:
        serving: costs of a decoding step.
        training: costs of a training step.
        tell: called with each cut.
    """

    name = "place"
    serving: SplitCosts
    training: SplitCosts
    tell: Callable[[LayerCut], None]

    def run(self, before: Gradients) -> Gradients:
        model = before.serving
        blocks = []
        for index, block in enumerate(model.blocks):
            count = model.layers.count(index)
            blocks.append(self._cut(block.name, count, block, None, self.serving)[0])
        after = dataclasses.replace(
            before, serving=dataclasses.replace(model, blocks=tuple(blocks))
        )
        if after.training is None:
            return after
        kinds = []
        for kind in after.training.kinds:
            pair = kind.gradients
            if pair.backward.outputs:
                graphs = self._cut(
                    kind.name, len(kind.layers), pair.graph, pair.backward, self.training
                )
            else:
                graphs = self._cut(kind.name, len(kind.layers), pair.graph, None, self.training)
            kinds.append(dataclasses.replace(kind, gradients=_with(pair, *graphs)))
        training = dataclasses.replace(after.training, kinds=tuple(kinds))
        return Gradients(after.serving, training)

    def _cut(
        self, name: str, count: int, graph: Graph, backward: Graph | None, costs: SplitCosts
    ) -> tuple[Graph, Graph | None]:
        trains = costs is self.training
        try:
            split = split_problem(graph, backward, costs)
            best = exact_cut(split.problem)
            written = client_graphs(split, best)
            cut = cut_graph(name, count, split, best)
        except (CostModelError, UnsupportedError) as error:
            self.tell(LayerCut(name, trains, None, str(error)))
            return graph, backward
        self.tell(LayerCut(name, trains, cut))
        return written


def _with(pair: Differentiated, graph: Graph, backward: Graph | None) -> Differentiated:
    return dataclasses.replace(
        pair, graph=graph, backward=pair.backward if backward is None else backward
    )


# -------------------------------------------------------------------------------------------- place


TARGETS = "targets"
"""The loss's input that never leaves the client."""


@dataclass(frozen=True)
class Placed:
    """The cuts of a model's steps.

    Attributes:
        decode: a step of one token of each sequence.
        prefill: a step of whole sequences.
        training: forward and backward of whole sequences; None without training.
    """

    decode: StepCut
    prefill: StepCut
    training: StepCut | None

    def check(self) -> None:
        """Check nothing: pieces have no interfaces to other graphs."""

    @property
    def graphs(self) -> Named:
        steps = {"decode": self.decode, "prefill": self.prefill, "training": self.training}
        return {
            f"{name}.{piece.graph.name}": piece.graph
            for name, step in steps.items()
            if step is not None
            for graph in step.graphs
            for piece in graph.pieces
        }


@dataclass(frozen=True)
class Place(Pass[Gradients, Placed]):
    """Cut the graphs between a base and a client.

    The pass runs after `prune`: the client keeps the forward's values that backward reads; the base
    keeps nothing and recomputes values.

    Attributes:
        batch: sequences of a step.
        seq: tokens of a sequence.
        privacy: send only linear operators.
    Raises:
        CostModelError: a device has no cost for an operator.
        UnsupportedError: the privacy is impossible, or a graph is too wide.
    """

    name = "place"
    base: CostModel
    client: CostModel
    link: SplitLink
    batch: int = 1
    seq: int = 1024
    privacy: bool = False

    def run(self, before: Gradients) -> Placed:
        whole = self.batch * self.seq
        training = None
        if before.training is not None:
            pairs = _trained(before.training)
            training = StepCut(whole, tuple(self._cut(*pair, whole) for pair in pairs))
        serving = _served(before.serving)
        return Placed(
            StepCut(self.batch, tuple(self._cut(*graph, self.batch) for graph in serving)),
            StepCut(whole, tuple(self._cut(*graph, whole) for graph in serving)),
            training,
        )

    def _cut(
        self, name: str, count: int, graph: Graph, backward: Graph | None, tokens: int
    ) -> GraphCut:
        costs = SplitCosts(self.base, self.client, self.link, tokens, self.seq)
        problem = split_problem(
            graph, backward, costs, linear_only=self.privacy, private=(TARGETS,)
        )
        return cut_graph(name, count, problem)


_Counted = tuple[str, int, Graph, Graph | None]


def _served(model: ModelGraph) -> tuple[_Counted, ...]:
    blocks = [
        (block.name, model.layers.count(index), block, None)
        for index, block in enumerate(model.blocks)
    ]
    ends = (model.prologue, model.epilogue)
    first, last = ((graph.name, 1, graph, None) for graph in ends)
    return first, *blocks, last


def _trained(model: ModelGradients) -> Iterable[_Counted]:
    def pair(name: str, count: int, gradients: Differentiated) -> _Counted:
        return name, count, gradients.graph, gradients.backward

    prologue = model.model.prologue
    if model.prologue is None:
        yield prologue.name, 1, prologue, None
    else:
        yield pair(prologue.name, 1, model.prologue)
    for kind in model.kinds:
        yield pair(kind.name, len(kind.layers), kind.gradients)
    yield pair("loss", 1, model.loss)
