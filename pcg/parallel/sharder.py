"""Shard a graph over the ranks of a tensor-parallel group, given the layouts of its parameters.

Nodes are taken in order. Of the ways in which ranks can run one (`Operator.shardings`), the one is
taken whose inputs cost the fewest bytes to bring into its layouts, forward and backward together:

    - → =    0 forward, an all-reduce backward          + → -    an all-reduce forward, 0 backward
    - → |d   0 forward, an all-gather backward          |d → -   an all-gather forward, 0 backward
    = → |d   0 both ways                                |d → +   0 both ways

Of n ranks, an all-reduce of a tensor moves 2 (n - 1) / n of its bytes a rank, an all-gather
(n - 1) / n. A layout that a value was once brought into is there for all later readers. What a rank
computes counts, too, a byte for FLOPS_PER_BYTE operations: a product on whole tensors is done n
times over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.graph import Builder, Graph, Node, Parameter, Value
from pcg.ir.layouts import (
    PRE_REDUCE,
    REPLICATED,
    WHOLE,
    Layout,
    Sharding,
)
from pcg.ir.operators import operator
from pcg.ir.operators.collective import FLOPS_PER_BYTE
from pcg.ir.operators.model import CONTEXT
from pcg.ir.types import TOKENS, State, TensorType

CONTEXT_TOKENS = 1024
"""That a token attends to, where operations of attention are counted."""

OPEN_RANK = 16
"""That adapters have where programs serve any."""

_SUFFIX = {
    "combine": "joined",
    "partition": "part",
    "place": "summand",
    "reduce": "sum",
    "replicate": "everywhere",
    "take": "taken",
}
_FROM = {"partition": WHOLE, "reduce": PRE_REDUCE, "replicate": WHOLE, "take": REPLICATED}
"""The layout that a transition starts from; of the others, any parts."""


def shard(
    graph: Graph,
    degree: int,
    layouts: Mapping[str, Layout],
    inputs: Mapping[str, Layout] | None = None,
) -> Graph:
    """The graph with layouts in its types, and the operators that change them.

    Args:
        graph: with whole tensors.
        degree: number of ranks.
        layouts: of parameters by name; a frozen one that is not named takes what costs the least,
            an adapter's is whole.
        inputs: layouts of inputs by name; whole where not named. Outputs are whole.
    Raises:
        TypeCheckError: no way to run an operator takes its parameters in these layouts.
    """
    return _Sharder(graph, degree, layouts, inputs or {}).run()


class _Sharder:
    def __init__(
        self,
        graph: Graph,
        degree: int,
        layouts: Mapping[str, Layout],
        inputs: Mapping[str, Layout],
    ) -> None:
        self.graph = graph
        self.degree = degree
        self.layouts = dict(layouts)
        self.builder = Builder(graph.name)
        self.builder.reserved = graph.types
        self.versions: dict[str, dict[Layout, str]] = {}
        self.active = _with_gradient(graph)
        for value in graph.inputs:
            layout = inputs.get(value.name, WHOLE)
            self.builder.input(value.name, layout.of(value.type, degree))
            self.versions[value.name] = {layout: value.name}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._node(node)
        outputs = [self._in(name, WHOLE) for name in self.graph.outputs]
        return self.builder.build(outputs)

    def _node(self, node: Node) -> None:
        types = tuple(self.graph.types[name] for name in node.inputs)
        found: list[tuple[Fraction, int, int, Sharding]] = []
        for index, rule in enumerate(operator(node.op).shardings(types, dict(node.attributes))):
            cost = self._cost(node, rule)
            if cost is not None:
                found.append((*cost, index, rule))
        if not found:
            raise TypeCheckError(self._refusal(node, types))
        *_, rule = min(found, key=lambda entry: entry[:3])
        inputs = [
            self._in(name, layout) for name, layout in zip(node.inputs, rule.inputs, strict=True)
        ]
        outputs = tuple(
            Value(value.name, layout.of(value.type, self.degree))
            for value, layout in zip(node.outputs, rule.outputs, strict=True)
        )
        op = rule.op or node.op
        self.builder.append(Node(op, tuple(inputs), outputs, node.attributes, node.scope))
        for value, layout in zip(node.outputs, rule.outputs, strict=True):
            self.versions[value.name] = {layout: value.name}

    # ------------------------------------------------------------------------------------- costs

    def _cost(self, node: Node, rule: Sharding) -> tuple[Fraction, int] | None:
        """Bytes and transitions of bringing the inputs into a rule's layouts; None for no way.

        Among ways that cost as little, that with fewer transitions leaves values as they are.
        """
        outputs = zip(node.outputs, rule.outputs, strict=True)
        if not all(self._fits(value.type, layout) for value, layout in outputs):
            return None
        work = self._work(node)
        is_parted = any(layout.dim for layout in rule.inputs)
        total = Fraction(work, FLOPS_PER_BYTE * (self.degree if is_parted else 1))
        steps = 0
        for name, layout in {*zip(node.inputs, rule.inputs, strict=True)}:
            if not self._fits(self.graph.types[name], layout):
                return None
            parameter = self.graph.parameters_by_name.get(name)
            if parameter is not None:
                if not self._may_hold(parameter, layout):
                    return None
                continue
            path = self._path(name, layout)
            if path is None:
                return None
            total += sum(cost for cost, _, _ in path)
            steps += len(path)
        return total, steps

    def _work(self, node: Node) -> int:
        """Operations of a product for one token; 0 of any other operator."""
        entry = operator(node.op)
        if not entry.is_product:
            return 0
        types = tuple(self.graph.types[name] for name in node.inputs)
        outputs = tuple(value.type for value in node.outputs)
        return _number(entry.flops(types, outputs, dict(node.attributes)))

    def _fits(self, type_: TensorType, layout: Layout) -> bool:
        """Whether ranks can hold it so; tokens are not parted, each rank has them all."""
        is_tokens = type_.is_token_wise and layout.dim == -len(type_.dims)
        return not is_tokens and layout.fits(type_, self.degree)

    def _may_hold(self, parameter: Parameter, layout: Layout) -> bool:
        fixed = self.layouts.get(parameter.name)
        if fixed is None and parameter.role == "adapter":
            fixed = WHOLE
        if parameter.role != "adapter":
            # It has no gradient, so that whole and replicated are one.
            if fixed is None:
                return True
            if fixed == WHOLE:
                return layout in (WHOLE, REPLICATED, PRE_REDUCE)
        return layout == fixed

    def _path(self, name: str, wanted: Layout) -> list[tuple[Fraction, str, Layout]] | None:
        """The transitions, with their costs, from a layout that a value has to a wanted one."""
        best: dict[Layout, tuple[Fraction, list[tuple[Fraction, str, Layout]]]] = {
            layout: (Fraction(0), []) for layout in self.versions[name]
        }
        for _ in range(3):
            for layout, (cost, steps) in list(best.items()):
                for step in self._transitions(name, layout, wanted):
                    total = cost + step[0]
                    if step[2] not in best or total < best[step[2]][0]:
                        best[step[2]] = (total, [*steps, step])
        return best[wanted][1] if wanted in best else None

    def _transitions(
        self, name: str, layout: Layout, wanted: Layout
    ) -> Iterator[tuple[Fraction, str, Layout]]:
        type_ = self.graph.types[name]
        size = _number(type_.size_bytes)
        share = Fraction(size * (self.degree - 1), self.degree)
        backward = share if name in self.active else Fraction(0)
        if layout == WHOLE:
            yield 2 * backward, "replicate", REPLICATED
            if wanted.dim and self._fits(type_, wanted):
                yield backward, "partition", wanted
        elif layout == REPLICATED:
            if wanted.dim and self._fits(type_, wanted):
                yield Fraction(0), "take", wanted
        elif layout == PRE_REDUCE:
            yield 2 * share, "reduce", WHOLE
        elif layout.state is State.PARTITIONED:
            yield share, "combine", WHOLE
            yield Fraction(0), "place", PRE_REDUCE

    # ------------------------------------------------------------------------------------- values

    def _in(self, name: str, wanted: Layout) -> str:
        """A value in a layout, brought into it where it is not."""
        parameter = self.graph.parameters_by_name.get(name)
        if parameter is not None:
            return self._parameter(parameter, wanted)
        versions = self.versions[name]
        if wanted not in versions:
            path = self._path(name, wanted)
            assert path is not None
            for _, op, layout in path:
                if layout not in versions:
                    source = next(v for k, v in versions.items() if self._leads(op, k))
                    versions[layout] = self._transition(name, source, op, layout)
        return versions[wanted]

    @staticmethod
    def _leads(op: str, layout: Layout) -> bool:
        return layout == _FROM[op] if op in _FROM else layout.state is State.PARTITIONED

    def _transition(self, name: str, source: str, op: str, layout: Layout) -> str:
        dim = layout.dim or next(
            (k.dim for k, v in self.versions[name].items() if v == source and k.dim), 0
        )
        attributes = (("dim", dim),) if op not in ("reduce", "replicate") else ()
        made = self.builder.fresh(f"{name}_{_SUFFIX[op]}")
        value = Value(made, layout.of(self.graph.types[name], self.degree))
        maker = self.graph.producers.get(name)
        scope = maker.scope if maker else ""
        self.builder.append(Node(op, (source,), (value,), attributes, scope))
        return made

    def _parameter(self, parameter: Parameter, layout: Layout) -> str:
        """A parameter in a layout; one that is read in two is two parameters."""
        if parameter.role != "adapter" and layout == WHOLE:
            layout = REPLICATED
        versions = self.versions.setdefault(parameter.name, {})
        if layout not in versions:
            name = parameter.name if not versions else self.builder.fresh(f"{parameter.name}_again")
            type_ = layout.of(parameter.type, self.degree)
            if parameter.role != "adapter" and layout == REPLICATED:
                type_ = parameter.type
            value = Value(name, type_)
            versions[layout] = self.builder.parameter(replace(parameter, value=value))
        return versions[layout]

    def _refusal(self, node: Node, types: Sequence[TensorType]) -> str:
        held = []
        for name in node.inputs:
            parameter = self.graph.parameters_by_name.get(name)
            layouts = (
                self.layouts.get(name, WHOLE) if parameter else next(iter(self.versions[name]))
            )
            held.append(f"%{name} in {layouts}")
        rules = operator(node.op).shardings(tuple(types), dict(node.attributes))
        return (
            f"operator {node.op!r} (in {node.scope or 'the layer'}) cannot run over {self.degree} "
            f"ranks with {', '.join(held)}; it takes {', '.join(dict.fromkeys(map(str, rules)))}"
        )


def _number(formula: sympy.Expr) -> int:
    """A formula for one token of a context; a rank that is left open is OPEN_RANK."""
    known = formula.subs({TOKENS: 1, CONTEXT: CONTEXT_TOKENS})
    return int(known.subs(dict.fromkeys(known.free_symbols, OPEN_RANK)))


def _with_gradient(graph: Graph) -> set[str]:
    """Values that a gradient may flow back to: what a layer hands on, and what adapters reach."""
    active = {value.name for value in graph.inputs[: len(graph.outputs)]}
    active |= {p.name for p in graph.parameters if p.role == "adapter"}
    for node in graph.nodes:
        if any(name in active for name in node.inputs):
            active.update(value.name for value in node.outputs if value.type.is_float)
    return active
