"""One graph as eager Hugging Face + PEFT runs it: what autograd keeps of it.

Autograd keeps, of each operator that a gradient passes through, the inputs and outputs that its
derivative reads (`Operator.eager_saves`). On the imported graph, one node an ATen operator, this is

    requires(y) = any requires(x)                    from trained parameters on
    kept        = ∪ storage(v) for v in saves(node)  once each, without parameters

A storage is what views share (`pcg.passes.storages`). Four things are not nodes of that graph and
are modelled here after their source: peft's LoRA branch (`_lora`), transformers' attention in its
default implementation (`_attention`), its grouped experts (`_experts`), and its loss (`loss`).
Source: torch's derivatives.yaml, peft 0.21 tuners/lora/layer.py, transformers 5.23
integrations/{sdpa_attention,moe}.py and loss/loss_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import sympy

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.operators.model import CONTEXT
from pcg.ir.program import site_of
from pcg.ir.types import DTYPE_BYTES, TensorType, promote
from pcg.passes.storages import TOKENS_OF_BATCH, Storage, Storages


@dataclass(frozen=True)
class Eager:
    """How eager PyTorch runs the model.

    Attributes:
        ranks: LoRA rank by module path.
        biases: sources of the base biases that are trained.
        attention: as `pcg.trace.Trace.attention`.
        seq: length of each sequence; a window that is not longer needs a mask.
        adapter_dtype: of the adapters' parameters; peft's default is fp32 over half precision.
        dropout: probability of the adapters' dropout.
        statistics_dtype: of the mean and deviation that layer norm keeps; fp32 on CUDA, the
            input's dtype on the CPU.
    """

    ranks: Mapping[str, int]
    attention: str
    seq: int
    biases: frozenset[str] = frozenset()
    adapter_dtype: str = "f32"
    dropout: float = 0.0
    statistics_dtype: str = "f32"


@dataclass(frozen=True)
class Kept:
    """A tensor kept for backward.

    Attributes:
        tensor: the value that it was made for.
        op: the operator that made it.
        size_bytes: formula in B and S.
    """

    tensor: str
    op: str
    size_bytes: sympy.Expr


@dataclass
class EagerWalk:
    """One pass over a graph, as eager PyTorch runs it.

    Attributes:
        carries: for each carried input, whether it requires a gradient.
        positional: names of invariants that are alike in all sequences of a batch.
        layer: index of the layer; None outside the layers.
        kept: by name of the storage, without what layers share.
        shared: invariants that are kept, by name.
    """

    graph: Graph
    eager: Eager
    carries: tuple[bool, ...]
    positional: frozenset[str]
    layer: int | None
    kept: dict[str, Kept] = field(default_factory=dict)
    shared: dict[str, Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._storages = Storages(self.graph, eager=True)
        self._needs = dict.fromkeys(self.graph.types, False)
        for value, needs in zip(self.graph.inputs, self.carries, strict=False):
            self._needs[value.name] = needs
        for parameter in self.graph.parameters:
            self._needs[parameter.name] = parameter.source in self.eager.biases
        self._carried = [value.name for value in self.graph.inputs[: len(self.carries)]]
        self._invariants = {value.name for value in self.graph.inputs[len(self.carries) :]}

    def run(self) -> EagerWalk:
        for node in self.graph.nodes:
            rank = self._rank(node)
            if rank is not None:
                self._lora(node, rank)
            elif node.op == "attention":
                self._attention(node)
            elif node.op == "experts":
                self._experts(node)
            else:
                self._plain(node)
        return self

    @property
    def requires(self) -> tuple[bool, ...]:
        """For each output, whether it requires a gradient."""
        return tuple(self._needs[name] for name in self.graph.outputs)

    @cached_property
    def size(self) -> sympy.Expr:
        """Bytes of what is kept, without what layers share; asked for after the run."""
        return sympy.Add(*(row.size_bytes for row in self.kept.values()))

    @property
    def keeps_output(self) -> bool:
        """Whether the memory of the first output is kept here already."""
        return self._storages[self.graph.outputs[0]].name in self.kept

    @property
    def size_of_input(self) -> sympy.Expr:
        """Bytes of the first carried input, where it is kept."""
        row = self.kept.get(self._carried[0])
        return sympy.Integer(0) if row is None else row.size_bytes

    # ------------------------------------------------------------------------------- keeping

    def _keep(self, storage: Storage, size: sympy.Expr | None = None) -> None:
        if storage.is_parameter:
            return
        is_shared = storage.name in self._invariants
        if size is None:
            tokens = CONTEXT if storage.name in self.positional and is_shared else TOKENS_OF_BATCH
            size = storage.size_bytes(tokens)
        rows = self.shared if is_shared else self.kept
        rows.setdefault(storage.name, Kept(storage.name, storage.op, size))

    def _keep_values(self, *names: str) -> None:
        for name in names:
            self._keep(self._storages[name])

    def _keep_new(self, name: str, op: str, dtype: str, per_token: int) -> None:
        """A tensor that is no value of the graph, of so many elements a token."""
        size = per_token * DTYPE_BYTES[dtype] * TOKENS_OF_BATCH
        self.kept.setdefault(name, Kept(name, op, size))

    # ------------------------------------------------------------------------------- operators

    def _plain(self, node: Node) -> None:
        self._storages.add(node)
        needs = [self._needs[name] for name in node.inputs]
        if not any(needs):
            return
        for value in node.outputs:
            self._needs[value.name] = value.type.is_float
        for index in operator(node.op).eager_saves(needs, dict(node.attributes)):
            self._keep_values(node.inputs[index] if index >= 0 else node.outputs[~index].name)
        if node.op == "layer_norm":
            rows = prod(self.graph.types[node.inputs[0]].features[:-1])
            for statistic in ("mean", "rstd"):
                name = f"{node.name}.{statistic}"
                self._keep_new(name, node.op, self.eager.statistics_dtype, rows)
        if node.op == "slice" and node.get("copied"):
            name = f"{node.name}.index"
            self.kept[name] = Kept(name, node.op, sympy.Integer(DTYPE_BYTES["i64"]))

    def _rank(self, node: Node) -> int | None:
        site = site_of(self.graph, node)
        return None if site is None else self.eager.ranks.get(site.format(layer=self.layer))

    def _lora(self, node: Node, rank: int) -> None:
        """PEFT's (base(x) + lora_B(lora_A(dropout(x.to(dtype)))) · scale).to(dtype of base(x))."""
        x = node.inputs[0]
        type_ = self.graph.types[x]
        in_ = type_.features[-1]
        dtype = self.eager.adapter_dtype
        self._plain(node)
        if self.eager.dropout:
            if self._needs[x]:
                self._keep_new(f"{node.name}.dropout_mask", "dropout", "bool", in_)
            self._keep_new(f"{node.name}.dropped", "dropout", dtype, in_)
        elif type_.dtype == dtype:
            self._keep_values(x)
        else:
            self._keep_new(f"{node.name}.lora_x", "cast", dtype, in_)
        self._keep_new(f"{node.name}.lora_s", "linear", dtype, rank)
        self._needs[node.name] = True

    def _attention(self, node: Node) -> None:
        """What the default implementation keeps: flash SDPA, masked or not, its math, or eager."""
        self._storages.add(node)
        names = node.inputs[:3]
        needs = [self._needs[name] for name in names]
        if not any(needs):
            return
        self._needs[node.name] = True
        if self.eager.attention.endswith("eager"):
            self._eager_attention(node, needs)
            return
        q, k, _ = (self.graph.types[name] for name in names)
        window = node.get("window")
        own = self.eager.attention == "own-sdpa"
        is_masked = own or (bool(window) and self.eager.seq >= int(window))  # type: ignore[arg-type]
        if own and q.shape[1] != k.shape[1]:
            self._math_attention(node)
            return
        self._keep_values(names[0], node.outputs[1].name)
        if self._is_head_major(names[0]):
            # The kernel's output has q's layout; what follows reads a copy with heads side by side.
            features = prod(node.output.type.features)
            self._keep_new(f"{node.name}.head_major", node.op, node.output.type.dtype, features)
        else:
            self._keep_values(node.name)
        if is_masked:
            for name in names[1:]:
                self._keep_repeated(name, q)
            self._keep_mask(node, q)
        else:
            self._keep_values(*names[1:])

    def _is_head_major(self, name: str) -> bool:
        """Whether q is dense in [B, heads, S, d]: torch.cat makes it so, projections do not."""
        while (node := self.graph.producers.get(name)) is not None:
            if node.op == "concat":
                return True
            if node.op not in ("add", "cast", "mul"):
                return False
            name = node.inputs[0]
        return False

    def _keep_repeated(self, name: str, q: TensorType) -> None:
        """Keys or values with one copy for each head that they serve."""
        type_ = self.graph.types[name]
        heads, kv_heads = q.features[0], type_.features[0]
        if heads == kv_heads:
            self._keep_values(name)
        else:
            self._keep_new(f"{name}.repeated", "reshape", type_.dtype, heads * type_.features[1])

    def _keep_mask(self, node: Node, q: TensorType) -> None:
        """A boolean mask [B, 1, S, S], made floating by each call; or ALiBi's, made once."""
        rows, dtype_bytes = TOKENS_OF_BATCH * CONTEXT, DTYPE_BYTES[q.dtype]
        if node.get("alibi"):
            size = q.features[0] * dtype_bytes * rows
            self.shared["attention_mask"] = Kept("attention_mask", "alibi", size)
        else:
            name = f"{node.name}.mask"
            self.kept[name] = Kept(name, node.op, dtype_bytes * rows)

    def _math_attention(self, node: Node) -> None:
        """SDPA's fallback for a query of more heads than the keys: all in fp32, and repeated."""
        q, k, v = (self.graph.types[name] for name in node.inputs[:3])
        heads = q.features[0]
        dtype = promote(q.dtype, "f32")
        for name, type_ in (("q", q), ("k", k), ("v", v)):
            self._keep_new(f"{node.name}.{name}", node.op, dtype, heads * type_.features[1])
        self._keep_scores(node, "probabilities", dtype, heads)

    def _eager_attention(self, node: Node, needs: Sequence[bool]) -> None:
        """softmax(q kᵀ · scale + mask, fp32).to(v.dtype) v, keys and values repeated."""
        q, v = self.graph.types[node.inputs[0]], self.graph.types[node.inputs[2]]
        heads = q.features[0]
        if needs[1]:
            self._keep_values(node.inputs[0])
        if needs[0]:
            self._keep_repeated(node.inputs[1], q)
        if needs[0] or needs[1]:
            if node.get("softcap"):
                self._keep_scores(node, "tanh", q.dtype, heads)
            self._keep_scores(node, "softmax", promote(q.dtype, "f32"), heads)
            self._keep_repeated(node.inputs[2], q)
        if needs[2] and (v.dtype not in ("f32", "f64") or not (needs[0] or needs[1])):
            self._keep_scores(node, "probabilities", v.dtype, heads)

    def _keep_scores(self, node: Node, what: str, dtype: str, heads: int) -> None:
        """A tensor [B, heads, S, S]."""
        name = f"{node.name}.{what}"
        size = heads * DTYPE_BYTES[dtype] * TOKENS_OF_BATCH * CONTEXT
        self.kept[name] = Kept(name, node.op, size)

    def _experts(self, node: Node) -> None:
        """Rows sorted by expert, two grouped products: grouped_mm_experts_forward."""
        self._storages.add(node)
        x, indices, weights, gate_up, down = node.inputs[:5]
        types = self.graph.types
        if not self._needs[x] and not self._needs[weights]:
            return
        self._needs[node.name] = True
        k = types[indices].features[-1]
        width, hidden, dtype = types[down].features[2], types[down].features[1], types[x].dtype
        if self._needs[x]:
            self._keep_new(f"{node.name}.rows_of_x", node.op, "i64", k)
            self._keep_new(f"{node.name}.gate_up", node.op, dtype, k * types[gate_up].features[1])
            self._keep_new(f"{node.name}.activated", node.op, dtype, k * width)
            self._keep_new(f"{node.name}.sorted_weights", node.op, types[weights].dtype, k)
            offsets = Kept(
                f"{node.name}.offsets", node.op, sympy.Integer(4 * types[down].features[0])
            )
            self.kept[offsets.tensor] = offsets
        if self._needs[weights]:
            self._keep_new(f"{node.name}.permutation", node.op, "i64", k)
            self._keep_new(f"{node.name}.down", node.op, dtype, k * hidden)
        self._keep_new(f"{node.name}.inverse", node.op, "i64", k)

    def loss(self) -> None:
        """ForCausalLMLoss: log-probabilities in fp32, the shifted targets and their weight."""
        logits = self.graph.outputs[0]
        if not self._needs[logits]:
            return
        type_ = self.graph.types[logits]
        self._keep_new(
            "log_probabilities", "cross_entropy", promote(type_.dtype, "f32"), type_.features[-1]
        )
        self._keep_new("targets", "cross_entropy", "i64", 1)
        self.kept["total_weight"] = Kept("total_weight", "cross_entropy", sympy.Integer(4))
