"""The folded model, and the compiled program for the runtime."""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from pcg.errors import ProgramError
from pcg.ir.graph import Graph, Node, Parameter
from pcg.ir.module_paths import (
    WHOLE_MODEL,
    embedding_path,
    layer_path,
    module_name,
    parameter_of,
    parameter_path,
)
from pcg.ir.operators import operator
from pcg.options import CompileOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelGraph:
    """A model as prologue · blocks · epilogue.

    Attributes:
        prologue: (input_ids, position_ids) to the first layer's input and the values that all
            layers share.
        blocks: the distinct layers.
        layers: the index of each layer's block.
        epilogue: the last layer's output to the logits.
    """

    prologue: Graph
    blocks: tuple[Graph, ...]
    layers: tuple[int, ...]
    epilogue: Graph

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return (self.prologue, *self.blocks, self.epilogue)

    @property
    def dtype(self) -> str:
        """The dtype of activations between layers."""
        return self.epilogue.inputs[0].type.dtype

    @property
    def adapter_dtype(self) -> str:
        """The dtype of adapters: fp32 over a half-precision base, as in peft, else the base's."""
        return "f64" if self.dtype == "f64" else "f32"

    def linear_sites(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every linear operator by site, its module's path with `{layer}`.

        A site may be in some layers only, with different sizes.
        """
        sites: dict[str, tuple[int, int]] = {}
        for graph in self.graphs:
            sites |= sites_of(graph)
        return sites

    def linear_places(self) -> dict[str, tuple[str, int | None]]:
        """Return the site and layer (None outside layers) of every linear module by path."""
        places: dict[str, tuple[str, int | None]] = {}
        blocks = [sites_of(block).keys() for block in self.blocks]
        for site in self.linear_sites():
            if "{layer}" not in site:
                places[site] = (site, None)
                continue
            for layer, block in enumerate(self.layers):
                if site in blocks[block]:
                    places[site.format(layer=layer)] = (site, layer)
        return places

    def linear_modules(self) -> dict[str, tuple[int, int]]:
        sites, blocks = self.linear_sites(), [sites_of(block) for block in self.blocks]
        return {
            path: sites[site] if layer is None else blocks[self.layers[layer]][site]
            for path, (site, layer) in self.linear_places().items()
        }

    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of all modules that adapters may adapt, by path.

        Every linear module of every layer; token embeddings, (width, vocabulary); `layers.<i>` for
        the attention of a layer, (features of its values, of its keys); and the empty path for the
        output of the token embedding, (vocabulary, width).
        """
        shapes = self.linear_modules() | self.embedding_sites()
        for layer, index in enumerate(self.layers):
            block = self.blocks[index]
            for node in block.nodes:
                if node.op == "attention":
                    keys, values = (prod(block.types[name].features) for name in node.inputs[1:3])
                    shapes[layer_path(layer)] = (values, keys)
        embedding = token_embedding(self.prologue)
        if embedding is not None:
            vocabulary, width = self.prologue.types[embedding.inputs[0]].features
            shapes[WHOLE_MODEL] = (vocabulary, width)
        return shapes

    def embedding_sites(self) -> dict[str, tuple[int, int]]:
        """Return (width, vocabulary) of every token embedding by site, which is its path."""
        sites: dict[str, tuple[int, int]] = {}
        for node in self.prologue.nodes:
            site = embedding_site(self.prologue, node)
            if site is not None:
                vocabulary, width = self.prologue.types[node.inputs[0]].features
                sites[site] = width, vocabulary
        return sites

    def embedding_modules(self) -> tuple[str, ...]:
        """Return the paths of the modules of token and position embeddings."""
        nodes = [node for node in self.prologue.nodes if node.op == "embedding"]
        tables = [self.prologue.parameters_by_name.get(node.inputs[0]) for node in nodes]
        sources = [table.source for table in tables if table is not None]
        return tuple(s.removesuffix(".weight") for s in sources if s.endswith(".weight"))

    @property
    def tokens(self) -> int:
        """The number of tokens that the model reads."""
        embedding = token_embedding(self.prologue)
        if embedding is None:
            return self.vocabulary
        return int(self.prologue.types[embedding.inputs[0]].features[0])

    @property
    def vocabulary(self) -> int:
        """The number of logits of a token."""
        return int(self.epilogue.types[self.epilogue.outputs[0]].shape[-1])

    @property
    def loss_chunk(self) -> int:
        """The most tokens with fp32 logits in memory in training: 16 MiB, or 16 tokens.

        Backward holds their gradient as well.
        """
        return max(16, 16 * 2**20 // (4 * self.vocabulary))

    @property
    def output_module(self) -> str:
        sites = (site_of(self.epilogue, node) for node in reversed(self.epilogue.nodes))
        return next(site for site in sites if site is not None)

    def map(self, change: Callable[[Graph], Graph]) -> ModelGraph:
        return dataclasses.replace(
            self,
            prologue=change(self.prologue),
            blocks=tuple(change(block) for block in self.blocks),
            epilogue=change(self.epilogue),
        )

    def parameters(self) -> Iterator[tuple[Parameter, int | None]]:
        """Yield every parameter of every layer with the layer's index; None outside the layers."""
        for graph, layer in self._in_order():
            yield from ((parameter, layer) for parameter in graph.parameters)

    def frozen(self) -> Iterator[tuple[str, Parameter, int | None]]:
        """Yield the base's parameters by name, with `{layer}`, and the index of the layer.

        A tied head's weight has two names: the embedding's, and that of its own module.
        """
        for graph, layer in self._in_order():
            named = {p.source: p for p in graph.parameters if p.role == "frozen"}
            for node in graph.nodes:
                names = own_parameters(graph, node).items()
                named |= {source: graph.parameters_by_name[name] for source, name in names}
            yield from ((source, parameter, layer) for source, parameter in named.items())

    def _in_order(self) -> list[tuple[Graph, int | None]]:
        layers = [(self.blocks[block], layer) for layer, block in enumerate(self.layers)]
        return [(self.prologue, None), *layers, (self.epilogue, None)]


def routed_layers(model: ModelGraph) -> tuple[tuple[int, ...], int, int]:
    """Return the layers with experts, and the experts that a token chooses there, and of how many.

    The numbers are those of the layer with the most. There are no layers if one has two choices of
    experts, as JetMoE's.
    """
    sizes: dict[int, tuple[Any, Any]] = {}
    for layer, index in enumerate(model.layers):
        block = model.blocks[index]
        for node in block.nodes:
            if node.op == "topk" and node.get("routes"):
                if layer in sizes:
                    return (), 0, 0
                sizes[layer] = node.output.type.shape[-1], block.types[node.inputs[0]].shape[-1]
    chosen, experts = (max(map(int, each)) for each in zip((0, 0), *sizes.values(), strict=True))
    return tuple(sizes), chosen, experts


def counts_on_host(model: ModelGraph) -> bool:
    """Return whether a layer synchronizes with the host, as experts do."""
    return any(operator(n.op).counts_on_host for block in model.blocks for n in block.nodes)


def token_embedding(prologue: Graph) -> Node | None:
    """Return the node that embeds token ids, the first input of a prologue, or None."""
    ids = prologue.inputs[0].name
    lookups = (n for n in prologue.nodes if n.op == "embedding" and n.inputs[1] == ids)
    return next(lookups, None)


def embedding_site(graph: Graph, node: Node) -> str | None:
    """Return the site of a token embedding with a weight of its own; None for other nodes."""
    if node.op != "embedding" or node.inputs[1] != graph.inputs[0].name:
        return None
    table = graph.parameters_by_name.get(node.inputs[0])
    if table is None or table.role != "frozen" or not table.source.endswith(".weight"):
        return None
    return embedding_path(table.source.removesuffix(".weight"))


def own_parameters(graph: Graph, node: Node) -> dict[str, str]:
    """Return the parameters of a node's module that an adapter may replace at the node.

    The keys are names in the model, with `{layer}`; the values are names in the graph.
    """
    if node.op not in ("linear", "embedding", "rms_norm", "layer_norm"):
        return {}
    parameters = [graph.parameters_by_name.get(name) for name in node.inputs]
    biases = (p for p in parameters if p is not None and p.source.endswith(".bias"))
    names = {p.source: p.name for p in biases}
    weight = next(iter(parameters[node.op != "embedding" :]), None)
    if weight is None or weight.role != "frozen" or weight.transposed:
        return names
    is_plain = weight.source.endswith(".weight") and len(weight.type.features) == 1
    site = weight.source.removesuffix(".weight") if is_plain else None
    if node.op in ("linear", "embedding"):
        site = site_of(graph, node) or embedding_site(graph, node)
    if site is None or parameter_of(site) is not None:
        return names
    return {f"{module_name(site)}.weight": weight.name, **names}


STACKED = ".stacked"
"""In the name of a weight [experts, out, in] that the model has in other dims, as DBRX's."""
IN_OUT = ".mT"
"""In the name of a weight that the model has as [experts, in, out], without `is_transposed`."""


def site_of(graph: Graph, node: Node) -> str | None:
    """Return the site of a linear node, where a bypass network may attach; None for other nodes.

    A tied head has its own module's site, not that of the embedding with the same weight; likewise
    a module of a layer with another layer's weight. The weights of experts are parameters of their
    own, and so is that of a router, a module that selects experts by its product, one that is not
    named weight, and one of a module whose product a module around it takes: peft does not treat
    them as linear modules. Experts in one matrix are no site, as peft's product is of all of them.
    """
    parameter = graph.parameters_by_name.get(adapted_weight(node) or "")
    if parameter is None or parameter.role != "frozen" or STACKED in parameter.name:
        return None
    if not _is_module(graph, node) or not parameter.source.endswith(".weight"):
        *experts, _, _ = parameter.type.features
        return parameter_path(parameter.source, (experts or [1])[0], IN_OUT in parameter.name)
    path = parameter.source.removesuffix(".weight")
    tied = re.fullmatch(rf"(.+)\.\d+\.{re.escape(node.scope)}", path)
    if tied:
        return f"{tied[1]}.{{layer}}.{node.scope}"
    if "{layer}" not in path:
        return node.scope
    # The product of a module around the weight's own.
    if f"{{layer}}.{node.scope}.".replace("..", ".") in path:
        return parameter_path(parameter.source, 1)
    return path


def computed_site(graph: Graph, node: Node) -> str | None:
    """Return the site of a layer's linear node with a computed weight, as by a parametrization.

    peft treats it as a linear module, and pcg attaches nothing to it.
    """
    if not _is_module(graph, node) or node.inputs[1] in graph.parameters_by_name:
        return None
    sources = (parameter.source.partition("{layer}") for parameter in graph.parameters)
    prefix = next((before for before, layer_mark, _ in sources if layer_mark), None)
    return None if prefix is None else f"{prefix}{{layer}}.{node.scope}"


def adapted_weight(node: Node) -> str | None:
    """Return the weight of a linear node, of experts too; None for other nodes."""
    place = {"linear": 1, "expert_linear": 2}.get(node.op)
    return None if place is None else node.inputs[place]


def _is_module(graph: Graph, node: Node) -> bool:
    if node.op != "linear":
        return False
    return all(other.op != "topk" or other.scope != node.scope for other in graph.nodes)


def sites_of(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every linear operator of a graph by site, of each expert's too."""
    sites: dict[str, tuple[int, int]] = {}
    for node in graph.nodes:
        site = site_of(graph, node) or computed_site(graph, node)
        if site is not None:
            *_, out, in_ = graph.types[adapted_weight(node) or ""].features
            sites[site] = (out, in_)
    return sites


@dataclass(frozen=True)
class TrainingGraph:
    """A layer's training graph: a forward that saves, and a backward that reads saved values.

    Attributes:
        block: index of the layer's block in the model.
        forward: returns the block's outputs, then saved values. The emitted functions have its name
            and that of `backward`.
        backward: takes the gradients of the outputs, then `saved`; recomputes its other inputs, and
            returns gradients of the carried inputs (none in the first layer), then of `trained`.
            None without trained parameters.
        saved: inputs of backward, in order: outputs of forward, and the graph's inputs.
        trained: adapter parameters with a gradient in `backward`.
    """

    block: int
    forward: Graph
    backward: Graph | None
    saved: tuple[str, ...]
    trained: tuple[str, ...]


@dataclass(frozen=True)
class Training:
    """The graphs and source that finetune adapters at a set of sites.

    Attributes:
        model: the model with bypass networks of concrete ranks.
        plans: the distinct training graphs of layers.
        layers: the index of each layer's plan.
        epilogue: hidden states and targets to loss and gradients.
        epilogue_trained, prologue_trained: adapter parameters with a gradient in these graphs.
        source: emitted Python of all graphs.
        prologue: backward of the prologue, from its inputs and the gradients of the first layer's
            inputs; None without trained parameters.
        restored: layers with an unsaved input, which backward recomputes by the layers before it,
            from the nearest saved input.
    """

    model: ModelGraph
    plans: tuple[TrainingGraph, ...]
    layers: tuple[int, ...]
    epilogue: Graph
    epilogue_trained: tuple[str, ...]
    source: str
    prologue: Graph | None = None
    prologue_trained: tuple[str, ...] = ()
    restored: tuple[int, ...] = ()

    @property
    def first_back(self) -> int:
        """The first layer with a backward; the number of layers if none trains."""
        return sum(self.plans[plan].backward is None for plan in self.layers)


@dataclass(frozen=True)
class Serving:
    """The graphs, with symbolic ranks, and the source that serve adapters at a set of sites."""

    model: ModelGraph
    source: str


@dataclass(frozen=True)
class Program:
    """A compiled model.

    Attributes:
        config: the model's config.json.
        base: the whole model without bypass networks, recompiled for adapters at other sites.
        serving: the graphs and source that generate.
        training: the graphs and source that finetune; None when compiled without a recipe.
        recipes: fields of the recipes that it was compiled for, by adapter name.
        options: the options of the compilation. Above tp=1, the graphs of `serving` and `training`
            are those of a rank.
        constants: tensors computed from the configuration, by name.
        base_prefix: name of the base model within the causal LM, which some checkpoints omit.
        renamings: patterns in a checkpoint's names and their replacements, applied in order.
        dtype: the dtype of weights and activations, in the IR's names.
        choices: the compiler's choices and their reasons, by subject: "backend".
    """

    name: str
    config: Mapping[str, Any]
    base: ModelGraph
    serving: Serving
    training: Training | None
    recipes: Mapping[str, Mapping[str, Any]]
    options: CompileOptions
    constants: Mapping[str, torch.Tensor]
    base_prefix: str
    dtype: str
    renamings: tuple[tuple[str, str], ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence in tokens; None if the configuration has no limit."""
        short = short_positions(self.config)
        if short is not None:
            return short
        names = "max_position_embeddings", "n_positions", "max_seq_len"
        values = map(self.config.get, names)
        size = next((size for size in values if isinstance(size, int)), None)
        return size if size is None else size - first_position(self.config)

    @property
    def padding(self) -> int | None:
        """The padding token if the model gives it no position, as RoBERTa; else None."""
        return first_position(self.config) - 1 if first_position(self.config) else None


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is that of a sequence classifier: its logits are of labels."""
    return str(next(iter(config.get("architectures") or ()), "")).endswith(CLASSIFIER)


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sequence classifier's labels, in the order of its logits; none of a causal LM."""
    if not is_classifier(config):
        return ()
    names = config.get("id2label") or range(config.get("num_labels") or 2)
    by_number = dict(names) if isinstance(names, Mapping) else {i: f"LABEL_{i}" for i in names}
    return tuple(str(by_number[key]) for key in sorted(by_number, key=int))


CLASSIFIER = "ForSequenceClassification"
"""The end of the names of transformers' sequence classifiers."""


def first_position(config: Mapping[str, Any]) -> int:
    """Return the position of a sequence's first token: 0, or in RoBERTa the one after padding's.

    RoBERTa's position of a token is the padding token's id, plus the number of other tokens up to
    it. A generated padding token counts too, as in transformers' generate.
    """
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and config.get("model_type") in _COUNTING:
        return padding + 1
    return 0


_COUNTING = (
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip


def short_positions(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence of models that compute longer ones otherwise; None of others.

    Beyond it, LongRoPE rotates all tokens of a step by the long factors, also those whose keys
    transformers has cached otherwise; and an indexer chooses the tokens of sparse attention.
    """
    for name in ("index_topk", "keep_window_size"):
        if config.get(name):
            return int(config[name])
    if config.get("attention_type") == "block_sparse":
        return (5 + 2 * int(config["num_random_blocks"])) * int(config["block_size"])
    if config.get("index_topk_blocks"):
        return int(config["index_topk_blocks"]) * int(config["index_block_size"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, Mapping))):
        if "short_factor" in parameters:
            name = "original_max_position_embeddings"
            sizes = (each.get(name) for each in (parameters, config))
            return min((size for size in sizes if isinstance(size, int)), default=None)
    return None


def python_name(name: str) -> str:
    """Return a value's or parameter's name as a Python identifier in the emitted source."""
    python = name.replace(".", "_")
    return f"{python}_" if keyword.iskeyword(python) or python in _TAKEN else python


_TAKEN = frozenset({"w", "a", "batch", "kept", "torch", "triton", "tl", "F", "K"})


# --------------------------------------------------------------------------------------- same model


_NEUTRAL_FIELDS = (
    "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id",
    "pretraining_tp", "use_cache",
)  # fmt: skip


def check_same_model(program: Program, config: Mapping[str, Any], where: str) -> None:
    """Refuse weights of another model, by their configuration; equal shapes are not sufficient.

    Args:
        config: the configuration next to the weights.
        where: the place of the weights, for the message.
    Raises:
        ProgramError: names the fields that differ.
    """
    both = sorted((program.config.keys() & config.keys()).difference(_NEUTRAL_FIELDS))
    other = [
        key
        for key in both
        if program.config[key] != config[key]
        and (isinstance(config[key], int | float) or key == "model_type" or "rope" in key)
        and "drop" not in key
    ]
    if other:
        shown = ", ".join(f"{k}={config[k]!r}, not {program.config[k]!r}" for k in other[:3])
        raise ProgramError(
            f"the weights in {where} are of another model than the program's ({shown}); compile "
            "that model, or give the weights of this one"
        )
