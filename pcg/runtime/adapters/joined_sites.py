"""Products by low-rank matrices that belong together, and what a program reads of them.

z_i = y_i + (x A_iᵀ) B_iᵀ          the LoRA of linear operators of one input, whose products are
                                   one (lora_linear)
z = y + σ(x Aᵀ + b) Bᵀ             a bottleneck adapter (shrink, activate, expand_add)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from pcg.ir.graph import Graph, Node, Parameter
from pcg.ir.operators import operator
from pcg.ir.operators.lora import LoraLinear
from pcg.ir.program.program import python_name


@dataclass(frozen=True)
class Lora:
    """A and B of one linear operator, or of a bottleneck adapter.

    Attributes:
        a: its parameter.
        b: its parameter.
        size: outputs.
        column: where they begin in the product of all operators of the input.
    """

    a: Parameter
    b: Parameter
    size: int
    column: int


@dataclass(frozen=True)
class JoinedSite:
    """The LoRA of a lora_linear operator, or a bottleneck adapter.

    Attributes:
        modules: the linear operators that can have LoRA, in order; of a bottleneck, the one.
        columns: of the product, with those of operators that have no LoRA.
        bias: b of a bottleneck.
    """

    modules: tuple[Lora, ...]
    columns: int
    bias: Parameter | None = None

    @classmethod
    def of(cls, node: Node, parameters: Mapping[str, Parameter]) -> JoinedSite:
        """That of an operator.

        Args:
            node: the operator.
            parameters: of its graph, by name.
        """
        adapted = LoraLinear.adapted(dict(node.attributes))
        a, b = node.inputs[-2 * len(adapted) : -len(adapted)], node.inputs[-len(adapted) :]
        sizes = [value.type.features[0] for value in node.outputs]
        columns = [*accumulate(sizes, initial=0)]
        modules = tuple(
            Lora(parameters[own_a], parameters[own_b], sizes[i], columns[i])
            for i, own_a, own_b in zip(adapted, a, b, strict=True)
        )
        return cls(modules, columns[-1])

    @property
    def name(self) -> str:
        """The attribute that holds all of the LoRA of a lora_linear operator."""
        return python_name(self.modules[0].a.name)

    @property
    def matrices(self) -> list[Parameter]:
        """A of each module, then B of each, then b as a matrix of one row."""
        biases = [] if self.bias is None else [self.bias]
        return [one.a for one in self.modules] + [one.b for one in self.modules] + biases

    @property
    def in_size(self) -> int:
        """Of the input; how many ranks there are is left open."""
        return int(self.modules[0].a.type.shape[-1])


def bottlenecks_of(graph: Graph) -> list[JoinedSite]:
    """The bottleneck adapters of a graph that read and write tensors of their own."""
    found = []
    for node in graph.nodes:
        if node.op != "activate":
            continue
        shrink, (expand,) = graph.producers[node.inputs[0]], graph.consumers[node.name]
        if all(_is_its_own(graph, name) for name in (shrink.inputs[0], expand.inputs[0])):
            read = (shrink.inputs[1], expand.inputs[2], node.inputs[1])
            down, up, bias = (graph.parameters_by_name[name] for name in read)
            size = expand.output.type.features[0]
            found.append(JoinedSite((Lora(down, up, size, 0),), size, bias))
    return found


def _is_its_own(graph: Graph, name: str) -> bool:
    """Whether a value is no part of another, within which it may lie anywhere."""
    node = graph.producers.get(name)
    return node is None or (len(node.outputs) == 1 and not operator(node.op).is_view)
