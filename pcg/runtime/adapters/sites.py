"""Sites, the operators of a graph that read adapters' weights, and sources, their paths.

z_i = y_i + (x A_iᵀ) B_iᵀ          the LoRA of linear operators with a common input, as a product
                                   (lora_linear)
z = y + σ(x Aᵀ + b) Bᵀ             a bottleneck adapter (shrink, activate, expand_add)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from pcg.ir.graph import Graph, Node, Parameter
from pcg.ir.module_paths import WHOLE_MODEL
from pcg.ir.operators import operator
from pcg.ir.operators.lora import LoraLinear
from pcg.ir.program.program import ModelGraph, python_name
from pcg.kernels.sizes import ROW_ALIGNMENT
from pcg.peft.adapter import Adapter


@dataclass(frozen=True)
class LoraModule:
    """A and B of a linear operator, or of a bottleneck adapter.

    `column` is the first output in the joined product of all operators of the input.
    """

    a: Parameter
    b: Parameter
    size: int
    column: int


@dataclass(frozen=True)
class JoinedSite:
    """A lora_linear operator, or a bottleneck adapter with its bias.

    Attributes:
        columns: columns of the joined product, of operators without LoRA too.
        part: index of the part of the model: a layer, or after the layers prologue and epilogue.
    """

    modules: tuple[LoraModule, ...]
    columns: int
    bias: Parameter | None = None
    part: int = 0
    layer: int = 0

    @classmethod
    def of(cls, node: Node, parameters: Mapping[str, Parameter]) -> JoinedSite:
        """Return the site of an operator, by the parameters of its graph."""
        adapted = LoraLinear.adapted(dict(node.attributes))
        a, b = node.inputs[-2 * len(adapted) : -len(adapted)], node.inputs[-len(adapted) :]
        sizes = [value.type.features[0] for value in node.outputs[: int(node.get("count", 1))]]  # type: ignore[arg-type]
        columns = [*accumulate(sizes, initial=0)]
        modules = tuple(
            LoraModule(parameters[own_a], parameters[own_b], sizes[i], columns[i])
            for i, own_a, own_b in zip(adapted, a, b, strict=True)
        )
        return cls(modules, columns[-1])

    @property
    def name(self) -> str:
        """The attribute that holds all LoRA of a lora_linear operator."""
        return python_name(self.modules[0].a.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes of the site in emitted functions."""
        if self.bias is None:
            return (self.name,)
        return tuple(python_name(matrix.name) for matrix in self.matrices)

    @property
    def fits_kernels(self) -> bool:
        """True if kernels can read the site's rows, and sum in fp32."""
        places = [self.in_size, self.columns]
        places += [place for module in self.modules for place in (module.column, module.size)]
        is_aligned = not any(place % ROW_ALIGNMENT for place in places)
        return is_aligned and self.modules[0].a.type.dtype != "f64"

    @property
    def matrices(self) -> list[Parameter]:
        """A of each module, then B of each module, then b as a matrix of a single row."""
        biases = [] if self.bias is None else [self.bias]
        return [m.a for m in self.modules] + [m.b for m in self.modules] + biases

    @property
    def row_sizes(self) -> list[int]:
        """Elements of a row of each of the `matrices` except the bias, which has the inner size."""
        return [self.in_size] * len(self.modules) + [module.size for module in self.modules]

    @property
    def in_size(self) -> int:
        return int(self.modules[0].a.type.shape[-1])


def bottlenecks_of(graph: Graph) -> list[JoinedSite]:
    """Find the bottleneck adapters of a graph that read and write whole tensors."""
    sites = []
    for node in graph.nodes:
        if node.op != "activate":
            continue
        shrink, (expand,) = graph.producers[node.inputs[0]], graph.consumers[node.name]
        if all(_is_its_own(graph, name) for name in (shrink.inputs[0], expand.inputs[0])):
            read = (shrink.inputs[1], expand.inputs[2], node.inputs[1])
            down, up, bias = (graph.parameters_by_name[name] for name in read)
            size = expand.output.type.features[0]
            sites.append(JoinedSite((LoraModule(down, up, size, 0),), size, bias))
    return sites


def _is_its_own(graph: Graph, name: str) -> bool:
    node = graph.producers.get(name)
    return node is None or (len(node.outputs) == 1 and not operator(node.op).is_view)


@dataclass(frozen=True)
class GraphSites:
    """The sites of a graph: its lora_linear operators, and other adapter parameters by name."""

    joined: tuple[JoinedSite, ...]
    single: tuple[tuple[str, Parameter], ...]

    @classmethod
    def of(cls, graph: Graph) -> GraphSites:
        parameters = graph.parameters_by_name
        joined, names = [], set[str]()
        for node in graph.nodes:
            if node.op == "lora_linear":
                joined.append(JoinedSite.of(node, parameters))
                names.update(matrix.name for matrix in joined[-1].matrices)
        single = tuple(
            (python_name(p.name), p)
            for p in graph.parameters
            if p.role == "adapter" and p.name not in names
        )
        return cls(tuple(joined), single)


def model_sources(model: ModelGraph) -> frozenset[str]:
    """Return the sources of the adapter parameters that a program reads, in all layers."""
    return frozenset(
        parameter.source.format(layer=layer)
        for parameter, layer in model.parameters()
        if parameter.role == "adapter"
    )


def served_sources(adapter: Adapter) -> frozenset[str]:
    """Return the sources of the parameters that a program needs to serve an adapter."""
    served = _joined((path, w.served) for path, w in adapter.weights.items())
    return served | {*adapter.replaced}


def trained_sources(adapter: Adapter) -> frozenset[str]:
    """Return the sources of the parameters that a program needs to train an adapter."""
    trained = _joined((path, w.parameters) for path, w in adapter.weights.items())
    return trained | {*adapter.shared} | {*adapter.replaced}


def _joined(kinds_by_path: Iterable[tuple[str, Iterable[str]]]) -> frozenset[str]:
    return frozenset(
        kind if path == WHOLE_MODEL else f"{path}.{kind}"
        for path, kinds in kinds_by_path
        for kind in kinds
    )
