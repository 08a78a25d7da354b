"""Attach bypass networks: Y = f_B(X) + f_A(X) at named sites (FlexLLM §4.1).

A site is a linear operator of the base, named by its module path with `{layer}` for the layer's
index; a token embedding (`embedding_path`); each layer's attention (`EACH_LAYER`); or the output of
the token embedding's module (`WHOLE_MODEL`). A method inserts its operators at a site
(`pcg.peft.method.Bypass`), before the base's operator to change its input, or after it. An
adapter's bias replaces the base's bias after the operator that adds it. In training, an adapter's
weight replaces the base's weight; in serving, its results replace the rows of its tokens.
Otherwise the base program only changes to read the bypass networks' outputs.

At each site and in every layer, a serving program has the operators of all adapters of any layer. A
token has a single adapter, and other adapters' operators do not change it, so their order is
arbitrary. In each layer, a training program has only the networks that the recipe requires there;
layers of a block with different networks, or networks of different ranks, become separate blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from pcg.errors import AdapterError, UnsupportedError
from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Attribute, Graph, Node, Parameter, Value
from pcg.ir.module_paths import (
    EACH_LAYER,
    WHOLE_MODEL,
    layer_path,
    module_name,
    parameter_of,
)
from pcg.ir.operators.recurrent import state_types
from pcg.ir.program.program import (
    ModelGraph,
    adapted_weight,
    computed_site,
    embedding_site,
    own_parameters,
    site_of,
    sites_of,
    token_embedding,
)
from pcg.ir.types import RANK, Size, tensor
from pcg.peft.method import Bypass, Shape
from pcg.peft.recipe import Recipe
from pcg.peft.registry import RECIPES

# ----------------------------------------------------------------------------------------- bypasses


@dataclass(frozen=True)
class LayerBypasses:
    """The bypass networks of a layer.

    Attributes:
        at: the networks at each site, in order, at most one per kind.
        replaced: names of the base's parameters that adapters replace, with `{layer}`.
    """

    at: Mapping[str, tuple[Bypass, ...]] = field(default_factory=dict)
    replaced: frozenset[str] = frozenset()

    @property
    def key(self) -> object:
        return frozenset(self.at.items()), self.replaced


@dataclass(frozen=True)
class Bypasses:
    """The bypass networks of a model.

    Attributes:
        at: the networks at each site of all layers, in order, at most one per kind.
        replaced: names of the base's parameters that adapters replace, in any layer.
        layers: the networks of each layer; empty if every layer has all networks.
        dtype: dtype of the adapters' parameters.
        dropout: probability that an element of a network's input is dropped in training.
        serving: True if values computed once per adapter are parameters.
    """

    at: Mapping[str, tuple[Bypass, ...]] = field(default_factory=dict)
    replaced: frozenset[str] = frozenset()
    dtype: str = "f32"
    dropout: float = 0.0
    serving: bool = False
    layers: tuple[LayerBypasses, ...] = ()

    def of(self, layer: int | None) -> LayerBypasses:
        """Return the networks of a layer, or for None the networks outside the layers."""
        if layer is None or not self.layers:
            return LayerBypasses(self.at, self.replaced)
        return self.layers[layer]

    def __bool__(self) -> bool:
        return bool(self.at or self.replaced)

    def for_serving(self) -> Bypasses:
        """Return the networks that serve adapters of any size together, without dropout."""
        at = {
            site: _united(each.served() for each in networks) for site, networks in self.at.items()
        }
        return dataclasses.replace(self, at=at, dropout=0.0, serving=True, layers=())


def _united(bypasses: Iterable[Bypass]) -> tuple[Bypass, ...]:
    by_kind: dict[object, Bypass] = {}
    for bypass in bypasses:
        kind = bypass.kind
        by_kind[kind] = by_kind[kind].union(bypass) if kind in by_kind else bypass
    return tuple(by_kind.values())


def bypasses_of(
    model: ModelGraph, recipes: Iterable[Recipe], model_type: str, dtype: str
) -> Bypasses:
    """Collect the bypass networks of all recipes.

    Args:
        model: the folded model, without bypass networks.
        model_type: `model_type` of config.json, for recipes without targets.
        dtype: the dtype of the adapters' parameters.
    Raises:
        AdapterError: a recipe fits no module of the model, or trains none of its parameters.
    """
    places = _places(model)
    at_sites: dict[str, list[Bypass]] = {}
    layers = [_Layer() for _ in model.layers]
    replaced: set[str] = set()
    dropout = 0.0
    order = list(RECIPES)
    for recipe in sorted(recipes, key=lambda recipe: order.index(recipe.peft_type)):
        adapted = recipe.bypasses_in(model, model_type)
        for path, bypass in adapted.items():
            site, layer = places[path]
            if site == EACH_LAYER and any(map(state_types, model.blocks)):
                raise UnsupportedError(
                    f"{recipe.method} over layers with recurrent state: it adds keys and values to "
                    "attention, and these layers have none; use LoRA or prompt tuning"
                )
            at_sites.setdefault(site, []).append(bypass)
            # A module whose rank was pruned to 0 has no parameters to train.
            if layer is not None and getattr(bypass, "rank", None) != 0:
                layers[layer].networks.setdefault(site, []).append(bypass)
        trained = [
            (source, layer)
            for source, _, layer in model.frozen()
            if recipe.replaces(source.format(layer=layer), adapted)
        ]
        recipe.check_saved([source.format(layer=layer) for source, layer in trained])
        if not adapted and not trained:
            raise AdapterError(
                f"{recipe.method} trains nothing of this {model_type}, which has no biases; "
                "use LoRA"
            )
        for source, layer in trained:
            replaced.add(source)
            if layer is not None:
                layers[layer].replaced.add(source)
        dropout = max(dropout, recipe.dropout)
    at = {site: _united(bypasses) for site, bypasses in at_sites.items()}
    of_layers = tuple(layer.united() for layer in layers)
    return Bypasses(at, frozenset(replaced), dtype, dropout, layers=of_layers)


@dataclass
class _Layer:
    """The networks of a layer by site, in the order of the recipes."""

    networks: dict[str, list[Bypass]] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)

    def united(self) -> LayerBypasses:
        at = {site: _united(bypasses) for site, bypasses in self.networks.items()}
        return LayerBypasses(at, frozenset(self.replaced))


def _places(model: ModelGraph) -> dict[str, tuple[str, int | None]]:
    """Return the site and the layer (None outside the layers) of each path for recipes."""
    layers = {layer_path(layer): (EACH_LAYER, layer) for layer in range(len(model.layers))}
    outside = {site: (site, None) for site in (WHOLE_MODEL, *model.embedding_sites())}
    return {**outside, **layers, **model.linear_places()}


# ------------------------------------------------------------------------------------------- attach


VIRTUAL = sympy.Symbol("n", integer=True, positive=True)
"""Number of virtual tokens, for prompts of any length."""


def attach(model: ModelGraph, bypasses: Bypasses) -> ModelGraph:
    """Attach bypass networks to a model.

    Raises:
        UnsupportedError: an operator cannot replace its trained bias.
    """
    prompted = embeds(model.prologue) if WHOLE_MODEL in bypasses.at else ""
    shapes = [pair for graph in model.graphs for pair in sites_of(graph).items()]

    def attached_graph(graph: Graph, here: LayerBypasses) -> Graph:
        embedding = prompted if graph is model.prologue else ""
        return _attach_graph(graph, bypasses, here, shapes, embedding)

    blocks, layers = _attach_layers(model, bypasses, attached_graph)
    outside = bypasses.of(None)
    ends = (attached_graph(graph, outside) for graph in (model.prologue, model.epilogue))
    prologue, epilogue = ends
    attached = ModelGraph(prologue, blocks, layers, epilogue)
    sources = {
        p.source for graph in attached.graphs for p in graph.parameters if p.role == "adapter"
    }
    missing = sorted(bypasses.replaced - sources)
    if missing:
        raise UnsupportedError(
            f"{missing[0]} is neither a bias that a linear operator or a layer norm adds, nor the "
            "weight of a linear module, a token embedding or a norm, and pcg trains no others; a "
            "name in modules_to_save is any end of a path, so name it longer, such as model.norm, "
            'or use bias="none"'
        )
    return attached


def _attach_layers(
    model: ModelGraph, bypasses: Bypasses, attached: Callable[[Graph, LayerBypasses], Graph]
) -> tuple[tuple[Graph, ...], tuple[int, ...]]:
    """Return the distinct layers with their networks, and each layer's index among them."""
    graphs: dict[Hashable, Graph] = {}
    of_layers: list[tuple[int, Graph]] = []
    kinds: list[tuple[int, Graph]] = []
    for layer, block in enumerate(model.layers):
        here = bypasses.of(layer)
        key = (block, here.key)
        if key not in graphs:
            graphs[key] = attached(model.blocks[block], here)
        of_layers.append((block, graphs[key]))
        if of_layers[-1] not in kinds:
            kinds.append(of_layers[-1])
    kinds.sort(key=lambda kind: kind[0])
    layers = tuple(map(kinds.index, of_layers))
    blocks = tuple(graph for _, graph in kinds)
    if len(blocks) > len(model.blocks):
        blocks = tuple(block.replace(name=f"block_{i}") for i, block in enumerate(blocks))
    return blocks, layers


def embeds(prologue: Graph) -> str:
    """Return the output of the module that embeds token ids: its last node.

    peft passes embeddings instead of ids to a model. Some models scale embeddings within that
    module (Gemma); others scale them after it, including a prompt's (Granite).
    """
    embedding = token_embedding(prologue)
    if embedding is None:
        raise UnsupportedError(
            "the model has no token embedding that pcg knows, before which virtual tokens would be"
        )
    ids, count = {"input_ids"}, 0
    for node in prologue.nodes:
        if not ids.isdisjoint(node.inputs):
            count += node.op == "embedding"
            ids.update(() if node.op == "embedding" else (value.name for value in node.outputs))
    if count > 1:
        raise UnsupportedError(
            "the model embeds its tokens twice, and virtual tokens have no second embedding; use "
            "a method that adapts modules, such as LoRA"
        )
    return [node.name for node in prologue.nodes if node.scope == embedding.scope][-1]


def _attach_graph(
    graph: Graph,
    bypasses: Bypasses,
    here: LayerBypasses,
    shapes: Sequence[tuple[str, Shape]],
    prompted: str,
) -> Graph:
    builder = Builder.extending(graph.replace(nodes=()))
    names: dict[str, str] = {}
    for node in graph.nodes:
        inputs = tuple(names.get(name, name) for name in node.inputs)
        node_here = dataclasses.replace(node, inputs=inputs)
        place = _Place(builder, graph, node_here, bypasses, here, shapes)
        new = place.attach(node.name == prompted)
        if new != node.name:
            names[node.name] = new
    return builder.build([names.get(name, name) for name in graph.outputs])


@dataclass
class _Place:
    """A node of the base with its attachments: `pcg.peft.method.Place`."""

    _builder: Builder
    _graph: Graph
    _node: Node
    _bypasses: Bypasses
    _here: LayerBypasses
    _shapes: Sequence[tuple[str, Shape]]  # (out, in) of each linear site of each of the graphs

    def __post_init__(self) -> None:
        site = site_of(self._graph, self._node) or embedding_site(self._graph, self._node)
        self.site = site or ""
        self.serving = self._bypasses.serving
        # Prefix of the names of the site's parameters in the graph.
        self._stem = self._node.scope
        if "{layer}" in self.site:
            self._stem = (adapted_weight(self._node) or "").removesuffix(".weight")

    def attach(self, prompted: bool) -> str:
        """Add the node with its bypass networks; return the value that replaces its output.

        `prompted` is True for the output of the token embedding.
        """
        at = self._here.at
        if (computed := computed_site(self._graph, self._node)) in at:
            raise UnsupportedError(
                f"the weight of {computed} is computed in a layer, as by a parametrization, and "
                "pcg attaches adapters to plain linear modules; make it a parameter "
                "(torch.nn.utils.parametrize.remove_parametrizations), or leave it out of the "
                "recipe's targets"
            )
        site = EACH_LAYER if self._node.op == "attention" else self.site
        networks = at.get(site, ()) if site else ()
        if networks and self._node.op == "embedding":
            self._require_scaled()
        if networks and self._node.op == "linear" and parameter_of(self.site) is None:
            self._require_plain()
        for bypass in networks:
            bypass.read(self)
        every = own_parameters(self._graph, self._node).items()
        replaced = {name: source for source, name in every if source in self._here.replaced}
        weight = next((name for name in replaced if not replaced[name].endswith(".bias")), None)
        if weight is not None and not self.serving:
            value = self._whole(weight, replaced.pop(weight))
        else:
            self._builder.append(self._node)
            value = self._node.name
        for bypass in networks:
            value = value if bypass.behind_bias else bypass.attach(self, value)
        if weight in replaced:
            value = self._replaced(value, weight, replaced.pop(weight))
        for name, source in replaced.items():  # a bias
            of_base = [] if weight is not None and not self.serving else [name]
            operands = [value, self._own(name, source), *of_base]
            value = self._builder.add("bias_add", operands, scope=self._node.scope)
        for bypass in networks:
            value = bypass.attach(self, value) if bypass.behind_bias else value
        for bypass in at.get(WHOLE_MODEL, ()) if prompted else ():
            value = bypass.attach(self, value)
        return value

    def _require_plain(self) -> None:
        """Refuse a module that adds operators to its product, by a hook or in a subclass.

        In peft, an adapter reads the module's input and adds to the module's output.
        """
        scope = self._node.scope
        if "{layer}" in self.site and not self.site.endswith(f"{{layer}}.{scope}"):
            raise UnsupportedError(
                f"the product in {scope or 'a layer'} reads the weight of {self.site}, where peft "
                "has no adapter of that module; give it a weight of its own, or leave "
                f"{self.site.rpartition('.')[2]} out of the recipe's targets"
            )
        inside = (n for n in self._graph.nodes if f"{n.scope}.".startswith(f"{scope}."))
        others = {n.op for n in inside} - {"linear", "reshape"}
        if others:
            raise UnsupportedError(
                f"{self.site} computes {', '.join(sorted(others))} beside its product, and pcg "
                "attaches adapters to plain linear modules; do that in a module around it, or "
                "leave it out of the recipe's targets"
            )

    def _require_scaled(self) -> None:
        """Refuse an embedding's module that does more than scale, as peft scales LoRA alike."""
        inside = [n for n in self._graph.nodes if n.scope == self._node.scope]
        others = {n.op for n in inside if len(n.inputs) > 1 and n.op != "embedding"}
        others |= {n.op for n in inside} - {"cast", "embedding", "mul", "reshape"}
        if others:
            raise UnsupportedError(
                f"{module_name(self.site)} computes {', '.join(sorted(others))} beside its rows, "
                "and pcg attaches adapters to plain or scaled embeddings; leave it out of the "
                "recipe's targets"
            )

    def _own(self, name: str, source: str) -> str:
        """Add the adapter's parameter in place of the base's."""
        shape = self._graph.types[name].features
        is_tied = self._graph.parameters_by_name[name].source != source
        stem = f"{self._node.scope}.weight" if is_tied else name
        return self._parameter(f"{stem}.own", source, *shape)

    def _whole(self, name: str, source: str) -> str:
        """Add the module with the adapter's weight, for training, without its bias."""
        weight, node = self._own(name, source), self._node
        dtype = node.output.type.dtype
        if node.op == "linear":
            value = self.add("shrink", "whole", node.inputs[0], weight)
        elif node.op == "embedding":
            padding = {k: v for k, v in node.attributes if k == "padding"}
            ids = node.inputs[1]
            value = self.add("embedding_shrink", "whole", ids, weight, by_row=True, **padding)
        else:
            normed, offset = self._normed()
            value = self.add("scale", "whole", normed, weight)
            if offset:
                value = self.add("add", "offset", value, normed)
        is_cast = self._builder.types[value].dtype != dtype
        return self.add("cast", "cast", value, dtype=dtype) if is_cast else value

    def _normed(self) -> tuple[str, bool]:
        """Add the norm without its weight; return also whether 1 is added to the weight."""
        attributes = self.attributes
        offset = attributes.get("offset", 0.0)
        if offset not in (0.0, 1.0):
            raise UnsupportedError(
                f"{self._node.scope} adds {offset} to its weight, and pcg trains weights of norms "
                "that add 0 or 1; leave it out of modules_to_save"
            )
        changed = {"weight": False, "bias": False, "offset": 0.0}
        plain = {name: changed.get(name, value) for name, value in attributes.items()}
        return self.add(self._node.op, "normed", self._node.inputs[0], **plain), bool(offset)

    def _replaced(self, value: str, name: str, source: str) -> str:
        """Replace the rows of adapters with a weight of their own, for serving."""
        weight, node = self._own(name, source), self._node
        biases = [b for b in node.inputs[1:] if b != name and node.op != "embedding"]
        x, offset, function = node.inputs[0], False, node.op
        if node.op == "embedding":
            x = node.inputs[1]
        elif node.op != "linear":
            (x, offset), function = self._normed(), "scale"
        operands = [value, x, weight, *biases]
        return self.add("replaced", "replaced", *operands, function=function, offset=offset)

    # ---------------------------------------------------------------------------- for bypasses

    @property
    def inputs(self) -> Sequence[str]:
        return self._node.inputs

    @property
    def attributes(self) -> Mapping[str, Attribute]:
        return dict(self._node.attributes)

    @property
    def shape(self) -> Shape:
        if self._node.op == "embedding":
            vocabulary, width = self.features(self._node.inputs[0])
            return width, vocabulary
        return sites_of(self._graph)[self.site]

    def features(self, value: str) -> tuple[int, ...]:
        return self._builder.types[value].features

    def largest(self, kind: type[Bypass]) -> Shape:
        at = self._bypasses.at
        shapes = [
            shape for site, shape in self._shapes for b in at.get(site, ()) if isinstance(b, kind)
        ]
        return max(out for out, _ in shapes), max(in_ for _, in_ in shapes)

    def module_input(self, names: Sequence[str]) -> str | None:
        parent = self.site.rpartition(".")[0]
        for node in self._builder.nodes:
            path, _, name = (site_of(self._graph, node) or "").rpartition(".")
            if path == parent and name in names:
                return node.inputs[0]
        return None

    def add(self, op: str, suffix: str, *inputs: str, **attributes: Attribute) -> str:
        name = f"{self._node.name}_{suffix}"
        return self._builder.add(op, inputs, name=name, scope=self._node.scope, **attributes)

    def adapter(self, kind: str, *shape: int | None, experts: int = 1) -> str:
        sizes = (RANK if size is None else size for size in shape)
        return self._parameter(
            f"{self._stem}.{kind}", f"{self.site}.{kind}", *sizes, experts=experts
        )

    def shared(self, name: str, source: str, *shape: int | None) -> str:
        return self._parameter(name, source, *(VIRTUAL if n is None else n for n in shape))

    def _parameter(self, name: str, source: str, *shape: Size, experts: int = 1) -> str:
        value = Value(name, tensor(self._bypasses.dtype, *shape))
        return self._builder.parameter(Parameter(value, "adapter", source, experts=experts))

    def dropped(self, *, keeps_dtype: bool = False) -> str:
        x, bypasses = self._node.inputs[0], self._bypasses
        if not bypasses.dropout:
            return x
        key = [node.name for node in self._graph.nodes].index(self._node.name)
        attributes: dict[str, Attribute] = {"p": float(bypasses.dropout), "key": key}
        if self._builder.types[x].dtype != bypasses.dtype and not keeps_dtype:
            attributes["dtype"] = bypasses.dtype
        return self.add("dropout", "x", x, **attributes)

    def set_input(self, index: int, value: str) -> None:
        inputs = [*self._node.inputs]
        inputs[index] = value
        self._node = dataclasses.replace(self._node, inputs=tuple(inputs))
