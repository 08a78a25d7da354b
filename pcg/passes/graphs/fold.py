"""Folding of a traced model to prologue · block × N · epilogue.

A node's module path determines its layer. Values that depend only on positions and constants, such
as rotary tables, belong to the prologue, except views and functions of weights, which each reading
block computes itself. The layers are then renamed to a canonical form, in which layers of the same
kind are equal graphs.

A layer may also read its slice of a tensor with a slice for each layer, and what a layer far before
it makes, as shared keys and values. Both are carried through all layers. The slices turn by one at
each layer, so that each layer reads the first.

    prologue(input_ids, position_ids) -> carried, invariants
    block(carried, invariants)        -> carried              once a layer
    epilogue(carried, invariants)     -> logits
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pcg.errors import TraceError, UnsupportedError
from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.operators import operator
from pcg.ir.operators.recurrent import numbered_states
from pcg.ir.program.program import ModelGraph
from pcg.passes.graphs.pass_base import Pass, readable_names

PROLOGUE = -1


@dataclass(frozen=True)
class Fold(Pass[Graph, ModelGraph]):
    """Fold the graph of a whole model, which takes input_ids and position_ids.

    Attributes:
        layers_path: module path of the list of layers; by default the outermost numbered modules.
        schedule: for each layer of the model, the equal traced layer; by default each traced layer
            once.
    Raises:
        TraceError: no layers, or a layer reads a value of a layer other than the previous.
        UnsupportedError: a layer has two attentions, or an operator that sees sequences is outside
            the layers.
    """

    name = "fold"
    layers_path: str = ""
    schedule: tuple[int, ...] = ()

    def run(self, before: Graph) -> ModelGraph:
        return _Folder(before, self.layers_path or _numbered(before)).run(self.schedule)


def _numbered(graph: Graph) -> str:
    """Return the path of a graph's outermost numbered modules."""
    matches = (re.match(r"(.+?)\.\d+(\.|$)", node.scope) for node in graph.nodes)
    return min((match[1] for match in matches if match), key=len, default="layers")


class _Folder:
    def __init__(self, graph: Graph, layers_path: str) -> None:
        self.layers_path = layers_path
        self._pattern = re.compile(re.escape(layers_path) + r"\.(\d+)(?:\.(.*))?$")
        self.graph = graph
        self.graph, self._turned = _with_turned(self._with_idle_layers(), layers_path)
        outer = {p.name for p in graph.parameters if not p.source.startswith(f"{layers_path}.")}
        constant = self._depend_on(set(), "constant") | outer
        self._positional = self._depend_on({"position_ids"}, "constant") | (
            self._depend_on({"position_ids", *outer}) - self._depend_on(constant)
        )
        self._weights = self._depend_on(set(), "frozen", "constant")
        matches = (self._pattern.match(node.scope) for node in graph.nodes)
        self._count = 1 + max((int(match[1]) for match in matches if match), default=-1)
        if not self._count:
            raise TraceError(f"no node of the graph comes from a layer of {layers_path}")
        self._region = self._find_regions()
        self._copies = self._copy_inputs()
        self._check_sequences()

    def _with_idle_layers(self) -> Graph:
        """Give layers that compute nothing a view of their input, as of images without an image.

        The first layer and the last are not idle.
        """
        graph, alike = self.graph, self._depend_on({"position_ids"}, "constant", "frozen")
        matches = ((node, self._pattern.match(node.scope)) for node in graph.nodes)
        layer_of = {
            value.name: int(match[1]) for node, match in matches if match for value in node.outputs
        }
        present = set(layer_of.values())
        for idle in sorted({*range(1, max(present, default=0))} - present):
            readers = (node for node in graph.nodes if layer_of.get(node.name, idle) > idle)
            names = [name for node in readers for name in node.inputs]
            handed = {n for n in names if layer_of.get(n) == idle - 1 and n not in alike}
            if len(handed) != 1:
                return graph  # it is refused by name
            (name,) = handed
            builder = Builder.extending(graph.replace(nodes=(), outputs=()))
            builder.reserved, passed = graph.types, name
            for node in graph.nodes:
                inputs = tuple(passed if each == name else each for each in node.inputs)
                builder.append(node.changed(inputs=inputs, attributes={}))
                if node is graph.producers[name]:
                    shape, scope = (-1, *graph.types[name].features), f"{self.layers_path}.{idle}"
                    passed = builder.add("reshape", [name], shape=shape, scope=scope)
                    layer_of[passed] = idle
            graph = graph.replace(nodes=tuple(builder.nodes))
        return graph

    def _copy_inputs(self) -> list[str]:
        """Copy what the first layer and later ones read, as Zamba's embeddings; return the copies.

        Layers hand on a copy, so that gradients flow in a chain.
        """
        readers: dict[str, set[int]] = {}
        for node in self.graph.nodes:
            for name in node.inputs:
                readers.setdefault(name, set()).add(self._region[node.name])
        read = (name for name, regions in readers.items() if 0 in regions and max(regions) > 0)
        of_tokens = self._depend_on({"input_ids"}, "constant", "frozen")
        copied = {
            name
            for name in read
            if name in of_tokens
            and name not in self._weights | self._positional
            and self.graph.types[name].is_float
            and self._region.get(name) == PROLOGUE
        }
        builder = Builder.extending(self.graph.replace(nodes=(), outputs=()))
        builder.reserved, copies = self.graph.types, dict[str, str]()
        for node in self.graph.nodes:
            is_later = self._region[node.name] > 0
            inputs = tuple(copies.get(n, n) if is_later else n for n in node.inputs)
            builder.append(node.changed(inputs=inputs, attributes={}))
            for value in node.outputs:
                if value.name in copied:  # not a view, which is the same value
                    copies[value.name] = builder.add("sub", [value.name], scalar=0)
        self.graph = self.graph.replace(nodes=tuple(builder.nodes))
        self._region |= dict.fromkeys(copies.values(), PROLOGUE)
        return list(copies.values())

    def _check_sequences(self) -> None:
        """Refuse a model that needs more than one KV cache entry per layer, or states elsewhere."""
        scopes: dict[int, list[str]] = {}
        for node in self.graph.nodes:
            is_within = 0 <= self._region[node.name] < self._count
            if "state" in operator(node.op).attributes and not is_within:
                raise UnsupportedError(
                    f"{node.op} outside the layers of {self.layers_path}: {node.scope}; pcg has "
                    "recurrent states of layers alone"
                )
            if node.op == "attention":
                scopes.setdefault(self._region[node.name], []).append(node.scope)
        for region, attentions in scopes.items():
            modules = ", ".join(dict.fromkeys(attentions))
            if not 0 <= region < self._count:
                raise UnsupportedError(
                    f"attention outside the layers of {self.layers_path}: {modules}; pcg's KV "
                    "cache has one entry for each layer, and none elsewhere"
                )
            if len(attentions) > 1:
                raise UnsupportedError(
                    f"two attentions in one layer: {self.layers_path}.{region} computes "
                    f"{len(attentions)} ({modules}), which would share the layer's one entry of "
                    "pcg's KV cache"
                )

    def run(self, schedule: Sequence[int]) -> ModelGraph:
        schedule = schedule or range(self._count)
        # The region after the last layer with nodes is the epilogue.
        working = {self._region[node.name] for node in self.graph.nodes} - {self._count}
        idle = sorted({*range(self._count), *schedule} - working)
        if idle:
            raise TraceError(
                f"{self.layers_path}.{idle[0]}, as traced, computes nothing, as a layer that "
                "returns its input; leave it out of the layers"
            )
        regions = [self._with_recomputed(i) for i in range(PROLOGUE, self._count + 1)]
        reads = [self._reads(nodes) for nodes in regions]
        carried = [self._carried(reads[i + 1], i) for i in range(self._count + 1)]
        self._carry_far(regions[0], reads, carried)
        others = (
            name for i, names in enumerate(reads[1:]) for name in names if name not in carried[i]
        )
        invariants = list(dict.fromkeys(others))
        for name in invariants:
            if self._region_of(name) != PROLOGUE:
                raise TraceError(
                    f"%{name}, made by layer {self._region_of(name)}, is read by a later layer "
                    "than the next; pcg folds models whose layers form a chain"
                )
        counts = sorted({len(names) for names in carried[1:]})
        if len(counts) > 1:
            raise TraceError(
                f"layers hand on {' or '.join(map(str, counts))} tensors to the next; pcg folds "
                "models whose layers all hand on as many"
            )
        dtypes = [[self.graph.types[name].dtype for name in names] for names in carried[:2]]
        if len(dtypes[0]) == len(dtypes[1]) and dtypes[0] != dtypes[1]:
            raise UnsupportedError(
                f"the first layer of {self.layers_path} takes {', '.join(dtypes[0])} and gives "
                f"{', '.join(dtypes[1])}, as with residual_in_fp32; pcg folds models whose layers "
                "have one dtype: use dtype='float32', or residual_in_fp32=False"
            )
        outputs = [*carried[0], *invariants]
        prologue = self._graph("prologue", regions[0], self.graph.inputs, outputs)
        shared = readable_names(prologue)
        prologue = prologue.renamed(shared)
        blocks: list[Graph] = []
        block_of: list[int] = []
        for i in range(self._count):
            used = [name for name in invariants if name in reads[i + 1]]
            block = self._block(regions[i + 1], i, carried[i], used, carried[i + 1], shared)
            if block not in blocks:
                blocks.append(block)
            block_of.append(blocks.index(block))
        layers = [block_of[traced] for traced in schedule]
        # A traced layer may serve only the trace of the layer before it.
        taken = sorted(set(layers))
        used = [name for name in invariants if name in reads[-1]]
        inputs = self._values([*carried[-1], *used])
        epilogue = self._graph("epilogue", regions[-1], inputs, self.graph.outputs)
        epilogue = _readable(epilogue, carried[-1], shared)
        return ModelGraph(
            prologue,
            tuple(blocks[block].replace(name=f"block_{i}") for i, block in enumerate(taken)),
            tuple(taken.index(block) for block in layers),
            epilogue,
        )

    def _carry_far(
        self, prologue: list[Node], reads: Sequence[Sequence[str]], carried: list[list[str]]
    ) -> None:
        """Carry turned slices, and values of layers to others than the next, through all layers."""
        everywhere = ([name] * len(carried) for name in self._copies)
        for names in (*self._turned, *everywhere):
            for names_of_region, name in zip(carried, names, strict=True):
                names_of_region[:] = [*(n for n in names_of_region if n != name), name]
        far = dict.fromkeys(
            name
            for region, names in enumerate(reads, PROLOGUE)
            for name in names
            if PROLOGUE < self._region_of(name) < region - 1
        )
        # What the next layer alone reads, as shared keys, is no hidden state by its type.
        hidden = [self.graph.types[name] for name in min(carried[1:], key=len)]
        others = [
            [n for n in names if len(names) > len(hidden) and self.graph.types[n] not in hidden]
            for names in carried[1:]
        ]
        chain = self._chain(others)
        if not chain:
            far.update((n, None) for names in others for n in names)
        builder = Builder.extending(self.graph)

        def before_all(number: int, name: str) -> str:
            # No layer reads what is carried before; equal values would be merged.
            type_ = self.graph.types[name]
            before = builder.add("cast", ["position_ids"], dtype=type_.dtype)
            before = builder.add("mul", [before], scalar=number)
            before = builder.add("reshape", [before], shape=(-1,) + (1,) * len(type_.features))
            return builder.add("expand", [before], shape=(-1, *type_.features))

        if chain:
            handed = before_all(len(far), chain[0]), *chain, chain[-1]
            for names, name in zip(carried, handed, strict=True):
                names[:] = [*(n for n in names if n != name), name]
        for number, name in enumerate(far):
            made_by, before = self._region_of(name), before_all(number, name)
            for region, names in enumerate(carried):
                here = name if region > made_by else before
                names[:] = [*(n for n in names if n != here), here]
        prologue += builder.nodes[len(self.graph.nodes) :]
        self.graph = self.graph.replace(nodes=tuple(builder.nodes))

    def _chain(self, others: Sequence[Sequence[str]]) -> list[str]:
        """Return what each layer but the last hands on to the next beside hidden states, if all do.

        Zaya's router has states of the layer before.
        """
        *between, last = others
        names = [name for names in between for name in names]
        regions = [self._region_of(name) for name in names]
        types = {self.graph.types[name] for name in names}
        is_chain = len(names) > 1 and regions == list(range(len(between))) and len(types) == 1
        return names if is_chain and not last else []

    def _depend_on(self, inputs: set[str], *roles: str) -> set[str]:
        """Return the values that depend only on these inputs and on parameters of these roles."""
        names = inputs | {p.name for p in self.graph.parameters if p.role in roles}
        for node in self.graph.nodes:
            if all(name in names for name in node.inputs):
                names.update(value.name for value in node.outputs)
        return names

    def _find_regions(self) -> dict[str, int]:
        """Return the region of each value: the prologue, a layer, or the epilogue."""
        regions: dict[str, int] = {}
        for node in self.graph.nodes:
            match = self._pattern.match(node.scope)
            before = [regions.get(name, PROLOGUE) for name in node.inputs]
            latest = max(before, default=PROLOGUE)
            if node.name in self._positional or (not match and latest == PROLOGUE):
                region = PROLOGUE
            else:
                region = int(match[1]) if match else self._count
            if region < latest:
                raise TraceError(
                    f"layers that run several times: %{node.name} of {node.scope} reads what a "
                    "later layer makes"
                )
            regions.update((value.name, region) for value in node.outputs)
        return regions

    def _region_of(self, name: str) -> int:
        return self._region.get(name, PROLOGUE)

    def _is_recomputed(self, node: Node) -> bool:
        """Return whether each reading region recomputes the node: a view or weight function."""
        if all(name in self._weights for name in node.inputs):
            return True
        return node.name in self._positional and operator(node.op).is_view

    def _with_recomputed(self, region: int) -> list[Node]:
        """Return the region's nodes, with recomputed nodes before each reader."""
        nodes: list[Node] = []
        for node in self.graph.nodes:
            if self._region[node.name] == region:
                views = self._recomputed_before(node) if region != PROLOGUE else ()
                nodes += [view for view in dict.fromkeys(views) if view not in nodes]
                nodes.append(node)
        return nodes

    def _recomputed_before(self, node: Node) -> list[Node]:
        views: list[Node] = []
        for name in node.inputs:
            producer = self.graph.producers.get(name)
            if producer and self._is_recomputed(producer):
                views += [*self._recomputed_before(producer), producer]
        return views

    def _reads(self, nodes: Iterable[Node]) -> list[str]:
        """Return the values that nodes read but do not compute, in order, without parameters."""
        defined: set[str] = set()
        reads: dict[str, None] = {}
        for node in nodes:
            reads.update(dict.fromkeys(name for name in node.inputs if name not in defined))
            defined.update(value.name for value in node.outputs)
        return [name for name in reads if name not in self.graph.parameters_by_name]

    def _carried(self, reads: Sequence[str], region: int) -> list[str]:
        """Return a region's reads of the previous region; for the first, its exclusive reads."""
        if region > 0:
            return [name for name in reads if self._region_of(name) == region - 1]
        others = {
            name for node in self.graph.nodes if self._region[node.name] > 0 for name in node.inputs
        }
        return [name for name in reads if name not in self._positional and name not in others]

    def _values(self, names: Iterable[str]) -> list[Value]:
        return [Value(name, self.graph.types[name]) for name in names]

    def _graph(
        self, name: str, nodes: Sequence[Node], inputs: Iterable[Value], outputs: Iterable[str]
    ) -> Graph:
        parts = (tuple(inputs), self.graph.parameters, tuple(nodes), tuple(outputs))
        return Graph(name, *parts).without_dead_code()

    def _block(
        self,
        nodes: Sequence[Node],
        index: int,
        carried: Sequence[str],
        invariants: Sequence[str],
        outputs: Sequence[str],
        shared: Mapping[str, str],
    ) -> Graph:
        graph = self._graph("block", nodes, self._values([*carried, *invariants]), outputs)
        prefix = f"{self.layers_path}.{index}"
        parameters = tuple(_relative(p, prefix, self.layers_path) for p in graph.parameters)
        names = {old.name: new.name for old, new in zip(graph.parameters, parameters, strict=True)}
        scoped = tuple(
            dataclasses.replace(node, scope=self._relative_scope(node.scope))
            for node in numbered_states(graph).nodes
        )
        renamed = graph.replace(nodes=scoped).renamed(names).replace(parameters=parameters)
        return _readable(renamed, carried, shared)

    def _relative_scope(self, scope: str) -> str:
        match = self._pattern.match(scope)
        return (match[2] or "") if match else scope


def _with_turned(graph: Graph, layers_path: str) -> tuple[Graph, list[list[str]]]:
    """Replace slices of layers i, at index i, by the first of a tensor that each layer turns.

    Returns:
        The graph, and the names of each such tensor: before the layers, and after each of them.
    """
    layer_of = re.compile(re.escape(layers_path) + r"\.(\d+)(?:\.|$)")
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)

    def layers_reading(node: Node) -> set[str]:
        layers: set[str] = set()
        for reader in readers.get(node.name, ()):
            match = layer_of.match(reader.scope)
            layers |= {match[1]} if match else layers_reading(reader) or {""}
        return layers

    matches = (layer_of.match(node.scope) for node in graph.nodes)
    count = len({match[1] for match in matches if match})
    slices: dict[tuple[str, int], list[str]] = {}
    for node in graph.nodes:
        if node.op == "slice" and not layer_of.match(node.scope):
            start, dim = (cast(int, node.attribute(name)) for name in ("start", "dim"))
            if node.get("stop") == start + 1 and layers_reading(node) == {str(start)}:
                slices.setdefault((node.inputs[0], dim), []).append(node.name)
    turned: dict[tuple[str, int], list[str]] = {
        key: [key[0]] for key, names in slices.items() if len(names) == count
    }
    builder = Builder.extending(graph.replace(nodes=(), outputs=()))
    builder.reserved = graph.types
    scopes: dict[str, str] = {}  # of what a layer alone reads, by name
    for node in graph.nodes:
        key = next((key for key in turned if node.name in slices[key]), None)
        if key is not None:
            names, scope = turned[key], f"{layers_path}.{node.get('start')}"
            whole, dim = names[-1], key[1]
            first = node.changed(inputs=(whole,), attributes={"start": 0, "stop": 1}, scope=scope)
            builder.append(first)
            size = graph.types[key[0]].shape[dim]
            rest = builder.add("slice", [whole], dim=dim, start=1, stop=size, scope=scope)
            names.append(builder.add("concat", [rest, node.name], dim=dim, scope=scope))
            scopes[node.name] = scope
            continue
        scope = next((scopes[name] for name in node.inputs if name in scopes), "")
        if scope and not layer_of.match(node.scope):
            scopes[node.name] = scope
            node = dataclasses.replace(node, scope=scope)
        builder.append(node)
    return graph.replace(nodes=tuple(builder.nodes)), list(turned.values())


def _readable(graph: Graph, carried: Sequence[str], shared: Mapping[str, str]) -> Graph:
    """Name values readably; the carried values of layers are x, x_1, …."""
    names = {name: f"x_{i}" if i else "x" for i, name in enumerate(carried)}
    return graph.renamed(readable_names(graph, {**shared, **names}))


def _relative(parameter: Parameter, prefix: str, layers_path: str) -> Parameter:
    if not parameter.source.startswith(prefix + "."):
        return parameter
    name = parameter.name.removeprefix(prefix + ".")
    source = f"{layers_path}.{{layer}}{parameter.source.removeprefix(prefix)}"
    return dataclasses.replace(parameter, value=Value(name, parameter.type), source=source)
